// What a consumer of the Hopper backward does with its tile of keys before and after the walk over
// the queries: K loses NaN and infinity, and in the end dK and dV leave the registers.
#pragma once

#include <cstdint>

#include "core/finite.h"
#include "core/gemm.h"
#include "core/gradient_workspace.h"
#include "core/pipeline.h"
#include "ptx/barrier.h"
#include "ptx/bulk.h"
#include "ptx/proxy_fence.h"
#include "ptx/registers.h"
#include "ptx/tma.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/config.h"
#include "sm90/params.h"
#include "sm90/tile_io.cuh"

namespace flash_ext::sm90 {

// Sets NaN and infinity in K to zero. Returns bits 0 and 8 for this lane's two keys that had some;
// `row` is the first of its warp's 16 keys. All consumers come here.
template <typename Config>
__device__ __forceinline__ uint32_t take_out_bad_keys(typename Config::SharedStorage& smem,
                                                      RingPosition tiles, int row) {
  uint32_t (&marks)[Config::kBlockN / 32] = smem.bad_keys[tiles.count % 2];
  const int thread = threadIdx.x - kWarpgroupThreads;
  take_out_nonfinite<typename Config::Element, typename Config::KTile, Config::kConsumerThreads>(
      ptx::shared_address(smem.k), thread,
      [&](int bad_row) { atomicOr(&marks[bad_row / 32], 1u << bad_row % 32); });
  if constexpr (Config::kBlocks > 1)  // the other block marks those
    take_out_nonfinite<typename Config::Element, typename Config::OtherKTile,
                       Config::kConsumerThreads>(
        ptx::shared_address(smem.k) + Config::KTile::kBytes, thread, [](int) {});
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync<kAllConsumers, Config::kConsumerThreads>();
  const uint32_t bad_keys = marks[row / 32] >> (row % 32 + threadIdx.x % kWarpSize / 4) & 0x101;
  if (thread == 0) {
    for (uint32_t& bits : smem.bad_keys[(tiles.count + 1) % 2]) bits = 0;
  }
  return bad_keys;
}

// Adds a gradient (64, D) of this consumer's keys to a workspace, or, without one, sends it off by
// way of its rows of `tile`, as one group of bulk copies of its first thread.
template <typename Config>
__device__ __forceinline__ void write_gradient(const View& view, const MappedTensor& tensor,
                                               float* workspace, int cols,
                                               const BackwardParams& params, const BackwardTile& at,
                                               char* tile, int consumer,
                                               float (&gradient)[Config::kHeadDim / 2]) {
  using KTile = typename Config::KTile;
  const int thread = static_cast<int>(ptx::thread_index()) % kWarpgroupThreads;
  const int lane = thread % kWarpSize;
  const int consumer_row = Config::consumer_row(consumer);
  const int row = consumer_row + thread / kWarpSize * 16;
  const auto& fragments = reinterpret_cast<const float (&)[1][Config::kHeadDim / 8][4]>(gradient);
  const int first_key = at.first_key;
  const bool staged = view.data != nullptr && workspace == nullptr;
  if (workspace != nullptr) {
    const int64_t head = int64_t{at.batch} * params.shape.heads_k + at.kv_head;
    const int seqlen_k = static_cast<int>(params.shape.seqlen_k);
    GradientWorkspace(workspace, head * seqlen_k, seqlen_k, cols)
        .template add<Config::kHeadDim>(fragments, first_key + row, 0, lane);
  } else if (staged) {
    uint32_t rounded[1][Config::kHeadDim / 16][4];
    to_operand<typename Config::Element>(rounded, fragments);
    stage_rows<KTile>(tile, rounded[0], row);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync<kWarpgroupThreads>(kOneConsumer + consumer);
  }
  if (thread != 0) return;
  if (staged) {
#pragma unroll
    for (int slab = 0; slab < KTile::kSlabs; ++slab)
      ptx::tma_store(
          &tensor.map,
          {slab * KTile::kSlabCols, first_key + consumer_row, at.kv_head * tensor.head_step,
           at.batch * tensor.batch_step},
          ptx::shared_address(tile) + slab * KTile::kSlabBytes + consumer_row * KTile::kLineBytes);
  }
  ptx::bulk_commit();
}

}  // namespace flash_ext::sm90
