// How dQ of the Hopper backward is added up: consumers leave their shares in shared memory, and one
// thread for each of them adds them to the fp32 workspace by bulk reductions. Additions from
// registers would hold the consumers up: a share comes at once, and L2 takes it slowly.
#pragma once

#include <cstdint>

#include "core/pipeline.h"
#include "core/turns.h"
#include "ptx/bulk.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/config.h"

namespace flash_ext::sm90 {

// The turn of one consumer's half of the kTurnRows query rows that hold a tile, in the order of
// sm80/backward_kernel.cuh: key tiles add to them from the last to the first.
template <typename Config>
__device__ __forceinline__ Turn dq_turn(const BackwardParams& params, const BackwardTile& at,
                                        const QueryWalk& walk, int consumer) {
  const int seqlen_q = static_cast<int>(params.shape.seqlen_q);
  const int turn = walk.tile / (kTurnRows / Config::kBlockM);
  const Range touched = BandMask(params.shape, params.window)
                            .template touched_key_tiles<Config::kBlockN>(
                                {turn * kTurnRows, min((turn + 1) * kTurnRows, seqlen_q)});
  const int64_t counter = int64_t{walk.head} * ceil_div(seqlen_q, kTurnRows) + turn;
  return {params.dq_turns + 1 + counter * (Config::kThreads / kWarpSize) + consumer,
          touched.end - 1 - at.tile};
}

// Adds one consumer's half of each dQ of a tile's walk. In order it begins its turn with the first
// query tile of the turn and passes it on after the last, when all is added.
template <typename Config>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Config::SharedStorage& smem, const BackwardTile& at,
                                       RingPosition& ring, int consumer) {
  using DqTile = typename Config::DqTile;
  constexpr int kTurnTiles = kTurnRows / Config::kBlockM;
  const bool wanted = params.dq.data != nullptr;
  const bool ordered = wanted && at.ordered != 0;
  const uint32_t source = ptx::shared_address(smem.dq[consumer]);
  for (auto walk = QueryWalk::of<Config>(params, at); !walk.done();
       walk = walk.next(), ring = ring.next()) {
    ring.wait_full(smem.dq_ring[consumer]);
    const bool begins_turn = walk.tile == walk.tiles.begin || walk.tile % kTurnTiles == 0;
    const bool ends_turn = walk.tile + 1 == walk.tiles.end || (walk.tile + 1) % kTurnTiles == 0;
    if (ordered && begins_turn) dq_turn<Config>(params, at, walk, consumer).wait_alone();
    if (wanted) {
      const int64_t tile = int64_t{walk.head} * DqTile::tiles(params.shape.seqlen_q) + walk.tile;
      ptx::bulk_reduce_add(
          params.dq_accum + tile * DqTile::kFloats + consumer * DqTile::kPieceFloats, source,
          DqTile::kPieceFloats * sizeof(float));
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    ring.arrive_empty(smem.dq_ring[consumer]);
    if (ordered && ends_turn) {
      ptx::bulk_wait<0>();
      dq_turn<Config>(params, at, walk, consumer).pass_alone();
    }
  }
}

// A storer's thread.
template <typename Config>
__device__ __forceinline__ void store_dq(const BackwardParams& params,
                                         typename Config::SharedStorage& smem, int consumer) {
  RingPosition ring;
  for (RingPosition tiles;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
    if (at.tile == kNoTile) return;
    add_dq<Config>(params, smem, at, ring, consumer);
    tiles.arrive_empty(smem.tile_ring);
  }
}

}  // namespace flash_ext::sm90
