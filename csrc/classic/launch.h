// The host API of the classic kernels: the steps of the ladder by name.
#pragma once

#include <cstdint>

#include "classic/forward.h"

namespace flash_ext::classic {

struct Algorithm {
  const char* name;

  // Enqueues the forward pass on `stream` (a cudaStream_t) of the current device; D is 64 or 128.
  // The result is 0 or a CUDA error code.
  int32_t (*launch)(const Params& params, void* stream);

  int32_t block_m;  // query rows of a tile
  int32_t block_n_64;  // keys of a tile, D = 64
  int32_t block_n_128;  // keys of a tile, D = 128

  // Workspaces that it keeps in memory.
  bool scores;
  bool probabilities;
  bool row_statistics;  // row_max and row_sum
  bool accumulator;
};

// In the order of the ladder.
int32_t algorithm_count();
const Algorithm& algorithm(int32_t index);

}  // namespace flash_ext::classic
