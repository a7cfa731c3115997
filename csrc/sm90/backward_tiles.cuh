// The work of a thread block of the Hopper backward: which keys of which head, and the walk over
// the query tiles that see them.
#pragma once

#include "core/mask.h"
#include "core/scheduler.h"
#include "params.h"
#include "sm90/config.h"

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

// Thread blocks that take turns are handed out across as many heads as hold about this many.
constexpr int kOrderedBlocks = 512;

// This block's keys and its share of the group: by the block's index, or, where blocks wait for
// each other, by the order of their start.
template <typename Config>
__device__ __forceinline__ BackwardTile find_tile(const BackwardParams& params) {
  const Shape& shape = params.shape;
  const int tiles = ceil_div(static_cast<int>(shape.seqlen_k), Config::kBlockN);
  const int shares = shape.heads_k * params.splits;  // of all groups
  const bool ordered = params.dq_turns != nullptr;
  const TileCoordinate at =
      ordered ? last_tile_first_across(atomicAdd(params.dq_turns, 1), tiles, shares,
                                       shares * shape.batch, max(1, kOrderedBlocks / tiles))
              : first_tile_first(blockIdx.x, tiles, shares);
  const GroupShare share = group_share(shape, params.splits, at.head);
  return {at.tile,           share.kv_head, static_cast<int>(at.batch), share.first_query_head,
          share.query_heads, ordered};
}

}  // namespace flash_ext::sm90
