// One compiled kernel instance: its row in the table of kernels and the functions that launch it.
// Every family exports `const std::vector<Instance>& instances()`, in order of preference.
#pragma once

#include <cstdint>

#include "launch.h"

namespace flash_ext {

struct Instance {
  Kernel info;
  // A forward row has only `forward`, a backward row only `backward`; the other is null.
  int32_t (*forward)(const ForwardParams& params, void* stream);
  int32_t (*backward)(const BackwardParams& params, void* stream);
};

}  // namespace flash_ext
