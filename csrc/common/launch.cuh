// Launching a kernel on a linear grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "common/device.h"
#include "common/error.h"

namespace flash_ext {

inline int64_t tiles(int64_t length, int block) { return (length + block - 1) / block; }

template <typename Params>
int32_t launch(void (*kernel)(Params), KernelSetup& setup, int64_t blocks, int threads,
               int smem_bytes, const Params& params, void* stream) {
  if (blocks == 0) return 0;
  if (blocks > std::numeric_limits<int32_t>::max()) return check(cudaErrorInvalidConfiguration);
  if (int32_t error = setup.prepare()) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, static_cast<cudaStream_t>(stream)>>>(
      params);
  return check_launch();
}

}  // namespace flash_ext
