#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template std::vector<Instance> forward_instances<__half, 32>();
template std::vector<Instance> forward_instances<__nv_bfloat16, 32>();

}  // namespace flash_ext::sm80
