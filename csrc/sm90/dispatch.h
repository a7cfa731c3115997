// The Hopper family's table of kernels.
#pragma once

#include <vector>

#include "common/instance.h"

namespace flash_ext::sm90 {

const std::vector<Instance>& instances();

}  // namespace flash_ext::sm90
