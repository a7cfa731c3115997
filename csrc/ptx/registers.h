// Special registers. PTX ISA, "Special registers".
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// blockIdx.x, read anew at every call: what a kernel needs only at its beginning and its end is
// cheaper computed twice than kept in registers through the main loop.
__device__ __forceinline__ uint32_t block_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// threadIdx.x, likewise.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace flash_ext::ptx
