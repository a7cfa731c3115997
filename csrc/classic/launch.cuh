// Host side of a classic kernel: grid, shared memory, launch.
#pragma once

#include <cuda_runtime.h>

#include <limits>

#include "classic/forward.h"
#include "common/device.h"
#include "common/error.h"

namespace flash_ext::classic {

inline int64_t tiles(int64_t length, int block) { return (length + block - 1) / block; }

inline int64_t head_count(const Shape& shape) { return shape.batch * shape.heads_q; }

// Launches `kernel` on a linear grid. `setup` is its own.
inline int32_t launch(void (*kernel)(Params), KernelSetup& setup, int64_t blocks, int threads,
                      int smem_bytes, const Params& params, void* stream) {
  if (blocks > std::numeric_limits<int32_t>::max()) return check(cudaErrorInvalidConfiguration);
  if (int32_t error = setup.prepare()) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, static_cast<cudaStream_t>(stream)>>>(
      params);
  return check_launch();
}

// Calls the instance of the head dim.
template <template <int> class Pass>
int32_t launch_by_head_dim(const Params& params, void* stream) {
  return params.shape.head_dim == 64 ? Pass<64>::launch(params, stream)
                                     : Pass<128>::launch(params, stream);
}

}  // namespace flash_ext::classic
