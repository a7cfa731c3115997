// Loads and additions that order the memory accesses around them, across thread blocks.
// PTX ISA, "Memory consistency model", "ld" and "red" with .acquire and .release.
#pragma once

namespace flash_ext::ptx {

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace flash_ext::ptx
