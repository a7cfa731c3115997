// TMA: one thread copies a box of a four-dimensional tensor between global and shared memory.
// PTX ISA, "Data movement: asynchronous copy, tensor": cp.async.bulk.tensor, prefetch.tensormap.
//
// The map (common/tensor_map.h) holds address, sizes, strides, box and swizzle; it lies in a
// __grid_constant__ parameter. Coordinates are those of the box's first element, innermost first.
// Elements beyond the tensor's end arrive as zeros and are not written back, but a load always
// completes with the bytes of its whole box.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// Coordinates of a box's first element.
struct TmaBox {
  int32_t c0, c1, c2, c3;
};

// Fetches the map itself; to be called once, early.
__device__ __forceinline__ void tma_prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads into this block; the bytes count at `barrier` (ptx/mbarrier.h).
__device__ __forceinline__ void tma_load(uint32_t smem_target, const void* map, TmaBox box,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem_target),
      "l"(map), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3), "r"(barrier)
      : "memory");
}

// The same with a policy for L2 (ptx/cache_policy.h).
__device__ __forceinline__ void tma_load(uint32_t smem_target, const void* map, TmaBox box,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem_target),
      "l"(map), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3), "r"(barrier), "l"(policy)
      : "memory");
}

// Loads into every block of the cluster whose bit is set in `blocks`, at the same place of its
// shared memory; the bytes count at the barrier at the same place of each of them.
__device__ __forceinline__ void tma_load_multicast(uint32_t smem_target, const void* map,
                                                   TmaBox box, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem_target),
      "l"(map), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3), "r"(barrier), "h"(blocks)
      : "memory");
}

// Stores from this block; ptx/bulk.h commits and waits.
__device__ __forceinline__ void tma_store(const void* map, TmaBox box, uint32_t smem_source) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
      "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3), "r"(smem_source)
      : "memory");
}

}  // namespace flash_ext::ptx
