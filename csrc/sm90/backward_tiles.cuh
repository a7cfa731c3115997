// The work of a thread block of the Hopper backward: which keys of which head, and the walk over
// the query tiles that see them.
#pragma once

#include "core/mask.h"
#include "core/pipeline.h"
#include "core/scheduler.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/shared.h"
#include "sm90/config.h"
#include "sm90/params.h"
#include "sm90/persistence.cuh"

namespace flash_ext::sm90 {

// This block's number among those that share tiles of keys.
template <typename Config>
__device__ __forceinline__ int block_of_cluster() {
  if constexpr (Config::kBlocks == 1)
    return 0;
  else
    return static_cast<int>(ptx::cluster_rank());
}

// The query tiles a block walks over: `tiles` of each of its heads, counted in the flat order
// (batch, head). From the last to the first: under a causal mask all blocks of a head see the last
// one, so that in order each finds the additions before its own done.
struct QueryWalk {
  int head;
  int tile;
  int end_head;
  Range tiles;

  template <typename Config>
  static __device__ __forceinline__ QueryWalk of(const BackwardParams& params,
                                                 const BackwardTile& at) {
    const int first_key = at.tile * Config::kTileKeys;
    const int end_key = min(first_key + Config::kTileKeys, static_cast<int>(params.shape.seqlen_k));
    const Range tiles = BandMask(params.shape, params.window)
                            .template touching_query_tiles<Config::kBlockM>({first_key, end_key});
    const int head = at.batch * params.shape.heads_q + at.first_query_head;
    const bool empty = tiles.begin == tiles.end;
    return {head, tiles.end - 1, empty ? head : head + at.query_heads, tiles};
  }

  __device__ __forceinline__ bool done() const { return head == end_head; }
  __device__ __forceinline__ QueryWalk next() const {
    QueryWalk walk = *this;
    if (walk.tile-- == tiles.begin) {
      walk.tile = tiles.end - 1;
      ++walk.head;
    }
    return walk;
  }
};

// Where additions keep an order, tiles are handed out across as many heads as have about this many:
// then neighbours in the order rarely wait for each other, and what they read still fits L2.
constexpr int kOrderedTiles = 512;

// The tile with the number `index`.
template <typename Config>
__device__ __forceinline__ BackwardTile find_tile(const BackwardKernelParams& params, int index) {
  if (index >= params.tiles) return {kNoTile, 0, 0, 0, 0, 0};
  const Shape& shape = params.problem.shape;
  const int tiles = ceil_div(static_cast<int>(shape.seqlen_k), Config::kTileKeys);
  const int shares = shape.heads_k * params.problem.splits;  // of all groups
  const bool ordered = params.problem.dq_turns != nullptr;
  const TileCoordinate at = ordered
                                ? last_tile_first_across(index, tiles, shares, shares * shape.batch,
                                                         max(1, kOrderedTiles / tiles))
                                : first_tile_first(index, tiles, shares);
  const GroupShare share = group_share(shape, params.problem.splits, at.head);
  const int tile = ordered ? tiles - 1 - at.tile : at.tile;  // the first are the longest walks
  return {tile,
          tile * Config::kTileKeys + block_of_cluster<Config>() * Config::kBlockN,
          share.kv_head,
          static_cast<int>(at.batch),
          share.first_query_head,
          share.query_heads};
}

// The number of the tile at `position`, which follows `index`. In order all numbers are drawn, so
// that blocks only wait for tiles that were begun before. In a cluster the first block draws, and
// sends the other what it drew.
template <typename Config>
__device__ __forceinline__ int draw_tile(const BackwardKernelParams& params,
                                         typename Config::SharedStorage& smem,
                                         RingPosition position, int index) {
  const int stage = position.stage(smem.drawn_ring);
  const uint32_t drawn = ptx::shared_address(&smem.drawn[stage]);
  if (block_of_cluster<Config>() != 0) {
    position.expect(smem.drawn_ring, sizeof(int));
    position.wait_full(smem.drawn_ring);
    const int number = static_cast<int>(ptx::load_shared_u32(drawn));
    ptx::mbarrier_arrive_remote(
        ptx::cluster_address(ptx::shared_address(&smem.drawn_ring.empty[stage]), 0));
    return number;
  }
  int* const turns = params.problem.dq_turns;
  if (turns != nullptr)
    index = atomicAdd(turns, 1);
  else if (position.count == 0)
    index = blockIdx.x / Config::kBlocks;
  else
    index = next_tile(params.counter, index, gridDim.x / Config::kBlocks);
  if constexpr (Config::kBlocks > 1) {
    position.wait_empty(smem.drawn_ring);
    ptx::store_async(ptx::cluster_address(drawn, 1), index,
                     ptx::cluster_address(ptx::shared_address(&smem.drawn_ring.full[stage]), 1));
  }
  return index;
}

}  // namespace flash_ext::sm90
