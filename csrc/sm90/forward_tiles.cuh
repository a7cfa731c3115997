// The tiles of the Hopper forward: which query rows of which head, in which order, and the key
// tiles that they and each consumer's rows have to see.
#pragma once

#include <cstdint>

#include "core/mask.h"
#include "core/scheduler.h"
#include "ptx/shared.h"
#include "sm90/config.h"
#include "sm90/params.h"

namespace flash_ext::sm90 {

constexpr int kNoTile = -1;  // as the head of a tile: there is none left

// The tile with the number `index`.
template <typename Config>
__device__ __forceinline__ ForwardTile find_tile(const ForwardKernelParams& params, int index) {
  const Shape& shape = params.problem.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const TileCoordinate at =
      last_tile_first_across(index, ceil_div(seqlen_q, Config::kBlockM), shape.heads_q,
                             shape.heads_q * shape.batch, params.heads_together);
  const int first_row = at.tile * Config::kBlockM;
  const Range rows{first_row, min(first_row + Config::kBlockM, seqlen_q)};
  const BandMask mask(shape, params.problem.window);
  const Range touched = mask.template touched_key_tiles<Config::kBlockN>(rows);
  const Range whole = mask.template whole_key_tiles<Config::kBlockN>(rows);
  return {at.head,
          at.head / (shape.heads_q / shape.heads_k),
          static_cast<int>(at.batch),
          first_row,
          touched.begin,
          touched.end,
          whole.begin,
          whole.end};
}

// The number of this block's tile after `index`.
__device__ __forceinline__ int next_tile(const ForwardKernelParams& params, int index) {
  const int blocks = static_cast<int>(gridDim.x);
  return params.counter == nullptr ? index + blocks : atomicAdd(&params.counter->next, 1) + blocks;
}

// The last block to come here leaves the counter as it found it.
__device__ __forceinline__ void finish_tiles(const ForwardKernelParams& params) {
  if (params.counter == nullptr) return;
  if (atomicAdd(&params.counter->finished, 1) != static_cast<int>(gridDim.x) - 1) return;
  params.counter->next = 0;
  params.counter->finished = 0;
}

// A field of the tile in shared memory, read where it is needed: no register holds it meanwhile.
__device__ __forceinline__ int read_field(const int& field) {
  return static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&field)));
}

// The rows of a tile that a warp of a consumer warpgroup owns.
struct WarpRows {
  int consumer_row;  // first row of the warpgroup inside the tile
  int row;  // first row of the warp

  __device__ __forceinline__ explicit WarpRows(int consumer)
      : consumer_row(consumer * kWarpgroupRows),
        row(consumer_row + static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpSize * 16) {}
};

// The key tiles that the rows of one consumer see, which may be fewer than those of its tile.
struct KeyTiles {
  Range touched;  // with a visible key
  Range whole;  // of these, the ones without a masked score

  __device__ __forceinline__ bool is_masked(int n) const {
    return n < whole.begin || n >= whole.end;
  }
};

// In a guarded walk consumers keep together, for they all take part in changing V.
template <typename Config>
__device__ __forceinline__ KeyTiles find_key_tiles(const ForwardKernelParams& params,
                                                   const ForwardTile& tile, int consumer,
                                                   bool guarded) {
  if (guarded)
    return {{read_field(tile.touched_begin), read_field(tile.touched_end)},
            {read_field(tile.whole_begin), read_field(tile.whole_end)}};
  const Shape& shape = params.problem.shape;
  const int first = read_field(tile.first_row) + WarpRows(consumer).consumer_row;
  const int end = min(first + kWarpgroupRows, static_cast<int>(shape.seqlen_q));
  if (first >= end) return {};
  const BandMask mask(shape, params.problem.window);
  return {mask.template touched_key_tiles<Config::kBlockN>({first, end}),
          mask.template whole_key_tiles<Config::kBlockN>({first, end})};
}

}  // namespace flash_ext::sm90
