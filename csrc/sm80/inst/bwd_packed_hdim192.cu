#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template std::vector<Instance> packed_backward_instances<__half, 192>();
template std::vector<Instance> packed_backward_instances<__nv_bfloat16, 192>();

}  // namespace flash_ext::sm80
