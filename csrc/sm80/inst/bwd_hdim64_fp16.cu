#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template Instance backward_instance<__half, 64>();

}  // namespace flash_ext::sm80
