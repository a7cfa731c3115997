// The end of sums in fixed point.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_ext::sm80 {

// Adds the integer sums of a bias gradient to it.
int32_t launch_fixed_point_end(const BackwardParams& params, void* stream);

}  // namespace flash_ext::sm80
