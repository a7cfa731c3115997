// Persistent thread blocks: tiles have numbers, a block begins with the tile of its own number and
// draws the next from a counter, and its roles learn of tiles through shared memory.
#pragma once

#include "ptx/shared.h"
#include "sm90/tile_counters.h"

namespace flash_ext::sm90 {

constexpr int kNoTile = -1;  // in place of a tile: there is none left

// The number of the tile after `index` for one of `blocks` that draw numbers. Without a counter
// there are as many of them as tiles.
__device__ __forceinline__ int next_tile(TileCounter* counter, int index, int blocks) {
  return counter == nullptr ? index + blocks : atomicAdd(&counter->next, 1) + blocks;
}

// The last of `blocks` to come here leaves the counter as it found it.
__device__ __forceinline__ void finish_tiles(TileCounter* counter, int blocks) {
  if (counter == nullptr) return;
  if (atomicAdd(&counter->finished, 1) != blocks - 1) return;
  counter->next = 0;
  counter->finished = 0;
}

// A field of the tile in shared memory, read where it is needed: no register holds it meanwhile.
__device__ __forceinline__ int read_field(const int& field) {
  return static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&field)));
}

}  // namespace flash_ext::sm90
