// mbarrier: barriers in shared memory that count arrivals of threads and bytes of bulk copies.
// PTX ISA, "Parallel synchronization and communication instructions: mbarrier".
//
// A barrier runs through phases 0, 1, 2, ... A phase completes when as many arrivals as init()
// named have come and the bytes that were expected have been written; the next begins at once.
// Waiting names the phase by its parity (phase % 2), so it must not fall behind by two phases. On a
// fresh barrier a wait for parity 1, the phase "before" phase 0, returns at once: this is how the
// producer of a ring passes its first round.
//
// Addresses are 32-bit shared addresses of 8 aligned bytes.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// By one thread; the others may use the barrier after fence_mbarrier_init() of that thread and a
// barrier of the block, or of the cluster if its other blocks use it too.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other blocks of the cluster and to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase also wait for `bytes` more from bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at a barrier of any block of the cluster; the address comes from cluster_address().
// It orders no data between blocks: it says that a buffer has been read, not that one was written.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

// Whether the phase of this parity is complete. The hardware may suspend the thread for a while.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

// What arriving threads of the block and bulk copies wrote before is visible afterwards.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

}  // namespace flash_ext::ptx
