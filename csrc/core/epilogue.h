// From accumulator fragments to global memory.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/layout.h"
#include "params.h"
#include "ptx/shared.h"

namespace flash_ext {

// Row `first_row` of one head's (sequence, dim) matrix; elements are `bytes` wide.
__device__ __forceinline__ char* head_matrix(const View& view, int64_t batch, int head,
                                             int first_row = 0, int bytes = 2) {
  return static_cast<char*>(view.data) +
         (batch * view.batch_stride + head * view.head_stride + first_row * view.seq_stride) *
             bytes;
}

// Zeroes rows of fragments (16 kM, 8 kD) from `end` on, whatever they hold. `row` is this lane's
// first row.
template <int kM, int kD>
__device__ __forceinline__ void zero_rows_from(float (&acc)[kM][kD][4], int row, int end) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int d = 0; d < kD; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (row + 16 * m + 8 * (i / 2) >= end) acc[m][d][i] = 0.f;
}

// Rounds a warp's fragments (16 kM, 8 kD) to 16 bits and puts them into rows
// [tile_row, tile_row + 16 kM) of a shared tile.
template <typename T, typename Tile, int kM, int kD>
__device__ __forceinline__ void stage_fragments(uint32_t smem_tile, const float (&acc)[kM][kD][4],
                                                int tile_row, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        const int row = tile_row + 16 * m + 8 * h + lane / 4;
        ptx::store_shared_u32(smem_tile + Tile::offset(row, d) + lane % 4 * 4,
                              Element<T>::pack(acc[m][d][2 * h], acc[m][d][2 * h + 1]));
      }
}

// The same for fragments already rounded to A operands: (16 kM, 16 kK).
template <typename Tile, int kM, int kK>
__device__ __forceinline__ void stage_operand(uint32_t smem_tile, const uint32_t (&a)[kM][kK][4],
                                              int tile_row, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kK; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile_row + 16 * m + 8 * (i % 2) + lane / 4;
        ptx::store_shared_u32(smem_tile + Tile::offset(row, 2 * k + i / 2) + lane % 4 * 4,
                              a[m][k][i]);
      }
}

// Copies rows [tile_row, tile_row + kRows) of a shared 16-bit tile, which this warp wrote, to the
// rows [first_row, rows) and columns [0, cols) of a matrix.
template <typename Tile, int kRows>
__device__ __forceinline__ void store_staged_rows(char* matrix, int64_t row_stride, int first_row,
                                                  int rows, int cols, uint32_t smem_tile,
                                                  int tile_row, int lane) {
#pragma unroll
  for (int i = 0; i < kRows * Tile::kRowChunks / kWarpSize; ++i) {
    const int index = i * kWarpSize + lane;
    const int row = index / Tile::kRowChunks;
    const int chunk = index % Tile::kRowChunks;
    if (first_row + row < rows && chunk * kChunk < cols) {
      char* target = matrix + (first_row + row) * row_stride * 2 + chunk * kChunkBytes;
      *reinterpret_cast<uint4*>(target) =
          ptx::load_shared_v4(smem_tile + Tile::offset(tile_row + row, chunk));
    }
  }
}

// Writes fp32 fragments straight to a matrix: a quad fills a 32-byte sector. `row` is this lane's
// first row.
template <int kM, int kD>
__device__ __forceinline__ void store_fragments(float* matrix, int64_t row_stride, int rows,
                                                int cols, const float (&acc)[kM][kD][4], int row,
                                                int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 16 * m + 8 * h;
      if (r >= rows) continue;
#pragma unroll
      for (int d = 0; d < kD; ++d)
        if (8 * d < cols)
          *reinterpret_cast<float2*>(matrix + r * row_stride + 8 * d + lane % 4 * 2) =
              make_float2(acc[m][d][2 * h], acc[m][d][2 * h + 1]);
    }
}

}  // namespace flash_ext
