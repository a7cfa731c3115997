// The host API of the kernels: the table of compiled instances and one function per pass.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_ext {

enum class Pass : int32_t { kForward, kBackward };

// "Lean" kernels serve causal and window masks, sinks, the lse gradient and grouped heads;
// "full" ones also softcap, ALiBi, additive bias and dropout.
enum class Features : int32_t { kLean, kFull };

// One compiled instance and the facts a caller needs to choose it.
struct Kernel {
  const char* family;  // "sm80", ...: the folder it comes from
  Pass pass;
  DType dtype;
  Features features;
  bool packed;       // can serve packed sequences, beside dense ones
  int32_t head_dim;    // serves D up to this ...
  int32_t head_dim_v;  // ... and Dv up to this
  int32_t block_m;   // query rows of a tile
  int32_t block_n;   // key rows of a tile
  int32_t stages;    // K/V (forward) or Q/dO (backward) tiles in flight
  int32_t threads;
  int32_t smem_bytes;  // dynamic shared memory a block asks for
  bool deterministic;  // backward: can serve BackwardParams::dq_turns
  bool splits_groups;  // backward: can serve BackwardParams::splits above 1
  bool whole_dq_tiles;  // backward: BackwardParams::dq_accum is made of whole tiles
};

// Compiled instances in order of preference within a pass.
int32_t kernel_count();
const Kernel& kernel(int32_t index);

// Enqueue one pass on `stream` (a cudaStream_t) of the current device. They neither allocate nor
// synchronise. The result is 0 or a CUDA error code that error_text() explains.
int32_t launch_forward(int32_t kernel, const ForwardParams& params, void* stream);
int32_t launch_backward(int32_t kernel, const BackwardParams& params, void* stream);

const char* error_text(int32_t error);

}  // namespace flash_ext
