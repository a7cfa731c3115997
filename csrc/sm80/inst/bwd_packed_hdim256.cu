#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template std::vector<Instance> packed_backward_instances<__half, 256>();
template std::vector<Instance> packed_backward_instances<__nv_bfloat16, 256>();

}  // namespace flash_ext::sm80
