// The tiles of the Hopper forward: which query rows of which head, in which order, and the key
// tiles that they and each consumer's rows have to see.
#pragma once

#include <cstdint>

#include "core/mask.h"
#include "core/scheduler.h"
#include "ptx/shared.h"
#include "sm90/config.h"
#include "sm90/params.h"
#include "sm90/persistence.cuh"

namespace flash_ext::sm90 {

// The key tiles that query rows see; none for rows past the end.
template <typename Config>
__device__ __forceinline__ KeyTiles find_key_tiles(const ForwardParams& problem, int first_row,
                                                   int rows) {
  const int end = min(first_row + rows, static_cast<int>(problem.shape.seqlen_q));
  if (first_row >= end) return {};
  const BandMask mask(problem.shape, problem.window);
  return {mask.template touched_key_tiles<Config::kBlockN>({first_row, end}),
          mask.template whole_key_tiles<Config::kBlockN>({first_row, end})};
}

// Makes `tile` the one with the number `index`.
template <typename Config>
__device__ __forceinline__ void find_tile(const ForwardKernelParams& params, int index,
                                          ForwardTile& tile) {
  const Shape& shape = params.problem.shape;
  const int tiles = ceil_div(static_cast<int>(shape.seqlen_q), Config::kBlockM);
  const TileCoordinate at = last_tile_first_across(
      index, tiles, shape.heads_q, shape.heads_q * shape.batch, params.heads_together);
  const int first_row = at.tile * Config::kBlockM;
  tile.head = at.head;
  tile.kv_head = at.head / (shape.heads_q / shape.heads_k);
  tile.batch = static_cast<int>(at.batch);
  tile.first_row = first_row;
  tile.guarded = 0;
  tile.keys = find_key_tiles<Config>(params.problem, first_row, Config::kBlockM);
#pragma unroll
  for (int i = 0; i < Config::kConsumers; ++i)
    tile.consumer_keys[i] =
        find_key_tiles<Config>(params.problem, first_row + i * kWarpgroupRows, kWarpgroupRows);
}

__device__ __forceinline__ KeyTiles read_keys(const KeyTiles& keys) {
  const uint4 words = ptx::load_shared_v4(ptx::shared_address(&keys));
  return {{static_cast<int>(words.x), static_cast<int>(words.y)},
          {static_cast<int>(words.z), static_cast<int>(words.w)}};
}

// The rows of a tile that a warp of a consumer warpgroup owns.
struct WarpRows {
  int consumer_row;  // first row of the warpgroup inside the tile
  int row;  // first row of the warp

  __device__ __forceinline__ explicit WarpRows(int consumer)
      : consumer_row(consumer * kWarpgroupRows),
        row(consumer_row + static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpSize * 16) {}
};

}  // namespace flash_ext::sm90
