#include "sm90/launch.cuh"

namespace flash_ext::sm90 {

template std::vector<Instance> backward_instances<__half, 256>();
template std::vector<Instance> backward_instances<__nv_bfloat16, 256>();

}  // namespace flash_ext::sm90
