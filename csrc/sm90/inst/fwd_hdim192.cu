#include "sm90/launch.cuh"

namespace flash_ext::sm90 {

template std::vector<Instance> forward_instances<__half, 192>();
template std::vector<Instance> forward_instances<__nv_bfloat16, 192>();

}  // namespace flash_ext::sm90
