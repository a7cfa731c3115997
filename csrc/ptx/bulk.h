// Bulk copies that one thread starts from shared to global memory, and the groups it waits for.
// PTX ISA, "Data movement: asynchronous copy, bulk": cp.async.bulk, cp.reduce.async.bulk,
// cp.async.bulk.commit_group, cp.async.bulk.wait_group.
//
// What other threads wrote to shared memory reaches the copy after their
// fence_proxy_async_shared() and a barrier.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// target[i] += source[i] for `bytes` / 4 floats; everything is a multiple of 16 bytes.
__device__ __forceinline__ void bulk_reduce_add(float* target, uint32_t smem_source,
                                                uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
      "r"(smem_source), "r"(bytes)
      : "memory");
}

// Copies `bytes`, a multiple of 16, to another block of the cluster; they count at a barrier of
// that block. Both addresses come from cluster_address() (ptx/cluster.h).
__device__ __forceinline__ void bulk_send(uint32_t cluster_target, uint32_t smem_source,
                                          uint32_t bytes, uint32_t cluster_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cluster_target),
      "r"(smem_source), "r"(bytes), "r"(cluster_barrier)
      : "memory");
}

// Closes a group of the bulk stores and reductions that this thread has started.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups still read shared memory, which may
// then be written again.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until they are complete: what they wrote is visible to this thread.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_ext::ptx
