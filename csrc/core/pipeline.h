// Rings of shared-memory buffers between a producer, which fills them, and its consumers.
//
// Each buffer has two mbarriers: `full` completes when the producer has come and the bytes that it
// announced have landed, `empty` when every consumer warp has read them. Both sides walk the ring
// with a position of their own.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "ptx/cluster.h"
#include "ptx/mbarrier.h"
#include "ptx/shared.h"

namespace flash_ext {

// The barriers of a ring of kStages buffers, in shared memory.
template <int kStages>
struct Ring {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // By one thread: how many arrivals fill a buffer, and how many empty it.
  __device__ __forceinline__ void init(int producers, int consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&full[stage]), producers);
      ptx::mbarrier_init(ptx::shared_address(&empty[stage]), consumers);
    }
  }
};

// How many buffers one side has passed. Rings that are walked in step share a position, whatever
// their lengths.
struct RingPosition {
  uint32_t count = 0;

  template <int kStages>
  __device__ __forceinline__ int stage(const Ring<kStages>&) const {
    return static_cast<int>(count % kStages);
  }
  __device__ __forceinline__ RingPosition next() const { return {count + 1}; }

  // Producer: waits for the buffer to be empty. On the first round it is: the phase "before" phase
  // 0 is complete.
  template <int kStages>
  __device__ __forceinline__ void wait_empty(Ring<kStages>& ring) const {
    ptx::mbarrier_wait(ptx::shared_address(&ring.empty[stage(ring)]), (phase<kStages>() ^ 1));
  }
  // Producer: announces `bytes` that TMA will write, and returns the barrier to be told.
  template <int kStages>
  __device__ __forceinline__ uint32_t expect(Ring<kStages>& ring, uint32_t bytes) const {
    const uint32_t full = ptx::shared_address(&ring.full[stage(ring)]);
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    return full;
  }
  // Producer: what it wrote itself is there, a thread or a warp.
  template <int kStages>
  __device__ __forceinline__ void publish(Ring<kStages>& ring) const {
    ptx::mbarrier_arrive(ptx::shared_address(&ring.full[stage(ring)]));
  }
  template <int kStages>
  __device__ __forceinline__ void publish_warp(Ring<kStages>& ring) const {
    __syncwarp();  // what every lane wrote
    if (threadIdx.x % kWarpSize == 0) publish(ring);
  }

  // Consumer: waits for the buffer to be full ...
  template <int kStages>
  __device__ __forceinline__ void wait_full(Ring<kStages>& ring) const {
    ptx::mbarrier_wait(ptx::shared_address(&ring.full[stage(ring)]), phase<kStages>());
  }
  // ... and gives it back, a thread or a warp.
  template <int kStages>
  __device__ __forceinline__ void arrive_empty(Ring<kStages>& ring) const {
    ptx::mbarrier_arrive(ptx::shared_address(&ring.empty[stage(ring)]));
  }
  // The same for the ring of another block of the cluster.
  template <int kStages>
  __device__ __forceinline__ void release_remote(Ring<kStages>& ring, uint32_t rank) const {
    if (threadIdx.x % kWarpSize == 0)
      ptx::mbarrier_arrive_remote(
          ptx::cluster_address(ptx::shared_address(&ring.empty[stage(ring)]), rank));
  }
  template <int kStages>
  __device__ __forceinline__ void release(Ring<kStages>& ring) const {
    __syncwarp();  // every lane has read it
    if (threadIdx.x % kWarpSize == 0) arrive_empty(ring);
  }

 private:
  template <int kStages>
  __device__ __forceinline__ uint32_t phase() const {
    return count / kStages % 2;
  }
};

}  // namespace flash_ext
