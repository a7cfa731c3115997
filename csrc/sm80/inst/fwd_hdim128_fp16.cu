#include "sm80/launch.cuh"

namespace flash_ext::sm80 {

template Instance forward_instance<__half, 128>();

}  // namespace flash_ext::sm80
