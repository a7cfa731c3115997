#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template std::vector<Instance> backward_instances<__half, 64>();
template std::vector<Instance> backward_instances<__nv_bfloat16, 64>();

}  // namespace flash_ext::sm80
