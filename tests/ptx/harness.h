// What the test kernels share: images of shared memory, waits that end, launches that report.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/error.h"
#include "core/layout.h"
#include "launch.h"
#include "ptx/mbarrier.h"
#include "ptx/shared.h"

namespace flash_ext::test {

constexpr int kTimedOut = -1;

__device__ int timed_out;

// As mbarrier_wait, but a phase that never completes fails the test instead of hanging it.
__device__ inline void bounded_wait(uint32_t barrier, uint32_t parity) {
  constexpr int64_t kMostClocks = int64_t{1} << 30;
  const int64_t start = clock64();
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
    if (clock64() - start > kMostClocks) {
      timed_out = 1;
      return;
    }
  }
}

// All threads of a block copy whole 16-byte chunks; either pointer may be to shared memory.
__device__ inline void copy_chunks(void* target, const void* source, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    static_cast<uint4*>(target)[i] = static_cast<const uint4*>(source)[i];
}

__device__ inline void fill_chunks(void* target, uint32_t word, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    static_cast<uint4*>(target)[i] = make_uint4(word, word, word, word);
}

struct Grid {
  int blocks;
  int threads;
  int smem_bytes = 0;
  int cluster = 1;
  bool dependent = false;  // may start before the kernel ahead of it has ended
};

template <class... Args>
int enqueue(void (*kernel)(Args...), Grid grid, Args... args) {
  if (int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       grid.smem_bytes)) {
    return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = grid.dependent;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.smem_bytes;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Waits for everything; 0, a CUDA error code or kTimedOut.
inline int finish() {
  if (int error = cudaDeviceSynchronize()) return error;
  int flag = 0;
  if (int error = cudaMemcpyFromSymbol(&flag, timed_out, sizeof(flag))) return error;
  const int zero = 0;
  if (int error = cudaMemcpyToSymbol(timed_out, &zero, sizeof(zero))) return error;
  return flag ? kTimedOut : 0;
}

template <class... Args>
int run(void (*kernel)(Args...), Grid grid, Args... args) {
  if (int error = enqueue(kernel, grid, args...)) return error;
  return finish();
}

}  // namespace flash_ext::test

extern "C" const char* explain(int error) {
  if (error == flash_ext::test::kTimedOut) return "a wait for an mbarrier timed out";
  return flash_ext::error_text(error);
}
