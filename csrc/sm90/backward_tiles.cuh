// The work of a thread block of the Hopper backward: which keys of which head, and the walk over
// the query tiles that see them.
#pragma once

#include "core/mask.h"
#include "core/scheduler.h"
#include "params.h"
#include "sm90/config.h"
#include "sm90/params.h"
#include "sm90/persistence.cuh"

namespace flash_ext::sm90 {

// The query tiles a block walks over: `tiles` of each of its heads, counted in the flat order
// (batch, head).
struct QueryWalk {
  int head;
  int tile;
  int end_head;
  Range tiles;

  template <typename Config>
  static __device__ __forceinline__ QueryWalk of(const BackwardParams& params,
                                                 const BackwardTile& at) {
    const int first_key = at.tile * Config::kBlockN;
    const int end_key = min(first_key + Config::kBlockN, static_cast<int>(params.shape.seqlen_k));
    const Range tiles = BandMask(params.shape, params.window)
                            .template touching_query_tiles<Config::kBlockM>({first_key, end_key});
    const int head = at.batch * params.shape.heads_q + at.first_query_head;
    const bool empty = tiles.begin == tiles.end;
    return {head, tiles.begin, empty ? head : head + at.query_heads, tiles};
  }

  __device__ __forceinline__ bool done() const { return head == end_head; }
  __device__ __forceinline__ QueryWalk next() const {
    QueryWalk walk = *this;
    if (++walk.tile == tiles.end) {
      walk.tile = tiles.begin;
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
  if (index >= params.tiles) return {kNoTile, 0, 0, 0, 0};
  const Shape& shape = params.problem.shape;
  const int tiles = ceil_div(static_cast<int>(shape.seqlen_k), Config::kBlockN);
  const int shares = shape.heads_k * params.problem.splits;  // of all groups
  const bool ordered = params.problem.dq_turns != nullptr;
  const TileCoordinate at = ordered
                                ? last_tile_first_across(index, tiles, shares, shares * shape.batch,
                                                         max(1, kOrderedTiles / tiles))
                                : first_tile_first(index, tiles, shares);
  const GroupShare share = group_share(shape, params.problem.splits, at.head);
  return {at.tile, share.kv_head, static_cast<int>(at.batch), share.first_query_head,
          share.query_heads};
}

// The numbers of this block's first tile and of the one after `index`. In order blocks draw all
// numbers, so that they only wait for tiles that were begun before.
__device__ __forceinline__ int first_tile(const BackwardKernelParams& params) {
  int* const turns = params.problem.dq_turns;
  return turns != nullptr ? atomicAdd(turns, 1) : static_cast<int>(blockIdx.x);
}
__device__ __forceinline__ int tile_after(const BackwardKernelParams& params, int index) {
  int* const turns = params.problem.dq_turns;
  return turns != nullptr ? atomicAdd(turns, 1) : next_tile(params.counter, index);
}

}  // namespace flash_ext::sm90
