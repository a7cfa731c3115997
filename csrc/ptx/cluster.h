// Clusters: blocks that run together and reach each other's shared memory.
// PTX ISA, "barrier.cluster", "mapa" and "Special registers: %cluster_ctarank".
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// This block's number in its cluster; 0 without one.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the window of the cluster, of what lies at `smem_address` in block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t smem_address, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address), "r"(rank));
  return address;
}

// Writes a word to another block of the cluster; its four bytes count at a barrier of that block.
__device__ __forceinline__ void store_async(uint32_t cluster_target, uint32_t value,
                                            uint32_t cluster_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   cluster_target),
               "r"(value), "r"(cluster_barrier)
               : "memory");
}

// All threads of all blocks arrive once, then wait; what they wrote before arriving is visible
// after the wait. A block whose shared memory others still reach for must not exit.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace flash_ext::ptx
