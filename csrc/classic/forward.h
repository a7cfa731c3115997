// The seam between the binding and the classic kernels: plain structs, no Python, no CUDA types.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_ext::classic {

// Rows of the tables are padded to this many elements, so that they begin at multiples of 16 bytes.
constexpr int kTableAlignment = 8;

// One forward pass: bf16, D = Dv. The workspaces are null unless the algorithm keeps them.
struct Params {
  Shape shape;
  Window window;  // full or causal
  float softmax_scale;  // above 0

  View q;  // (B, Sq, Hq, D)
  View k;  // (B, Sk, Hk, D)
  View v;  // (B, Sk, Hk, D)
  View out;  // (B, Sq, Hq, D)

  int64_t table_cols;  // Sk rounded up to kTableAlignment
  float* scores;  // (B, Hq, Sq, table_cols): scale * q.k, -inf where masked and in the padding
  void* probabilities;  // (B, Hq, Sq, table_cols), bf16
  float* row_max;  // (B, Hq, Sq)
  float* row_sum;  // (B, Hq, Sq)
  float* accumulator;  // (B, Hq, Sq, D): O between two rounds
};

}  // namespace flash_ext::classic
