#include "sm90/launch.cuh"

namespace flash_ext::sm90 {

template std::vector<Instance> forward_instances<__half, 96>();
template std::vector<Instance> forward_instances<__nv_bfloat16, 96>();

}  // namespace flash_ext::sm90
