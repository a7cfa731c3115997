// Which tile of the problem a thread block works on. Grids are linear in x, so that no dimension
// meets the limit of 65,535 on y and z.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_ext {

struct TileCoordinate {
  int tile;       // along the sequence
  int head;       // within the batch entry
  int64_t batch;  // 64-bit, because it multiplies a stride
};

// Tiles of one head are neighbours: together they read the same K and V (or Q and dO) from L2, as
// do the heads of one group. Tiles run from the last to the first: under a causal mask the last
// query tile sees the most keys, and long work should start early.
__device__ __forceinline__ TileCoordinate last_tile_first(int64_t block, int tiles, int heads) {
  const int64_t head = block / tiles;
  const int tile = tiles - 1 - static_cast<int>(block % tiles);
  return {tile, static_cast<int>(head % heads), head / heads};
}

// The same from the first tile to the last: under a causal mask the first keys are seen by the
// most queries.
__device__ __forceinline__ TileCoordinate first_tile_first(int64_t block, int tiles, int heads) {
  const int64_t head = block / tiles;
  return {static_cast<int>(block % tiles), static_cast<int>(head % heads), head / heads};
}

// Tiles from the last to the first, the same tile of `width` heads in turn, then the next `width`
// heads: long work starts early in all of them.
__device__ __forceinline__ TileCoordinate last_tile_first_across(int block, int tiles, int heads,
                                                                 int64_t all_heads, int width) {
  const int set = block / (width * tiles);
  const int in_set = block - set * width * tiles;
  const int first_head = set * width;
  const int set_width = static_cast<int>(min(static_cast<int64_t>(width), all_heads - first_head));
  const int head = first_head + in_set % set_width;
  return {tiles - 1 - in_set / set_width, head % heads, head / heads};
}

// What a thread block of the backward pass walks over: query heads of one key head's group, all of
// them or its share of them.
struct GroupShare {
  int kv_head;
  int first_query_head;
  int query_heads;
};

// The share with the number `index`, of kv heads x splits in a batch entry.
__device__ __forceinline__ GroupShare group_share(const Shape& shape, int splits, int index) {
  const int kv_head = index / splits, share = index % splits;
  const int group = shape.heads_q / shape.heads_k;
  const int heads = group / splits;  // and one more for the first `longer` shares
  const int longer = group % splits;
  return {kv_head, kv_head * group + share * heads + min(share, longer), heads + (share < longer)};
}

}  // namespace flash_ext
