// Launching a kernel on a linear grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "common/device.h"
#include "common/error.h"

namespace flash_ext {

inline int64_t tiles(int64_t length, int block) { return (length + block - 1) / block; }

// Whether a kernel waits for the one ahead of it in the stream, or may start as soon as all blocks
// of that have called launch_dependents(), and itself waits for its results
// (ptx/grid_dependency.h).
enum class Start { kInOrder, kEarly };

template <typename Params>
int32_t launch(void (*kernel)(Params), KernelSetup& setup, int64_t blocks, int threads,
               int smem_bytes, const Params& params, void* stream, Start start = Start::kInOrder) {
  if (blocks == 0) return 0;
  if (blocks > std::numeric_limits<int32_t>::max()) return check(cudaErrorInvalidConfiguration);
  if (int32_t error = setup.prepare()) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = start == Start::kEarly ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, params);
  return check_launch();
}

}  // namespace flash_ext
