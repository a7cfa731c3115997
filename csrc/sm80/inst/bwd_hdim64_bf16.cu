#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template Instance backward_instance<__nv_bfloat16, 64>();

}  // namespace flash_ext::sm80
