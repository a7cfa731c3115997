// Named barriers among some warps of a block. Number 0 is __syncthreads.
// PTX ISA, "Parallel synchronization and communication instructions: bar, barrier".
#pragma once

namespace flash_ext::ptx {

// Tells kThreads threads, those that arrive and those that wait, that this warp has come here. What
// it wrote before is visible to those that wait.
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void barrier_wait(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

}  // namespace flash_ext::ptx
