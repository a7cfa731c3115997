#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template Instance backward_instance<__half, 128>();

}  // namespace flash_ext::sm80
