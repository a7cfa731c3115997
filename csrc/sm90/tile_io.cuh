// Tiles on their way between global memory, shared memory and registers.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "ptx/ldmatrix.h"
#include "ptx/shared.h"
#include "ptx/stmatrix.h"
#include "ptx/tma.h"
#include "sm90/params.h"

namespace flash_ext::sm90 {

// Loads the box of a tile, slab by slab, from a column on.
template <typename Tile>
__device__ __forceinline__ void load_tile(char* target, const MappedTensor& tensor, int row,
                                          int head, int batch, uint32_t full, int col = 0) {
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab)
    ptx::tma_load(
        ptx::shared_address(target) + slab * Tile::kSlabBytes, &tensor.map,
        {col + slab * Tile::kSlabCols, row, head * tensor.head_step, batch * tensor.batch_step},
        full);
}

// Where a lane reads or writes its part of a 16 x 16 block of this warp's rows of a tile.
template <typename Tile>
__device__ __forceinline__ uint32_t block_address(const char* tile, int row, int block) {
  const int lane = threadIdx.x % kWarpSize;
  return ptx::shared_address(tile) +
         Tile::offset(row + RowFirst::row(lane), 2 * block + RowFirst::chunk(lane));
}

// Reads 16 rows of Q, from `row` on, as A fragments.
template <typename Tile, int kBlocks>
__device__ __forceinline__ void load_rows(uint32_t (&fragments)[kBlocks][4], const char* tile,
                                          int row) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    ptx::ldmatrix_x4(fragments[block], block_address<Tile>(tile, row, block));
}

// Writes 16 rows of O in their place.
template <typename Tile, int kBlocks>
__device__ __forceinline__ void stage_rows(char* tile, const uint32_t (&fragments)[kBlocks][4],
                                           int row) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    ptx::stmatrix_x4(block_address<Tile>(tile, row, block), fragments[block]);
}

}  // namespace flash_ext::sm90
