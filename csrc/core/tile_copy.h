// Copies of tiles from global memory into swizzled shared memory, 16 bytes a time.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "ptx/cp_async.h"

namespace flash_ext {

// Streams tiles of kRows rows of one (rows, cols) matrix with kThreads threads: the whole block, or
// one of kParts equal parts of it. Eight neighbouring threads read 128 contiguous bytes of a row.
// Rows and columns past the end arrive as zeros, so that memory nobody owns never enters a product.
template <typename Tile, int kRows, int kThreads, int kParts = 1>
class TileLoader {
  static constexpr int kGroup = Tile::kPeriod;  // threads along a row
  static constexpr int kRowStep = kThreads / kGroup;
  static constexpr int kColSteps = Tile::kRowChunks / kGroup;
  static constexpr int kRowSteps = ceil_div(kRows, kRowStep);
  // Steps down and across keep the swizzle of a thread's first chunk.
  static_assert(kRowStep % 8 == 0, "threads step over whole swizzle periods");

 public:
  // `matrix` is row 0; strides in elements of 2 bytes; `cols` is a multiple of 8. `tile` is the
  // number of the first tile to load.
  __device__ __forceinline__ TileLoader(const void* matrix, int64_t row_stride, int rows, int cols,
                                        int tile)
      : source_(static_cast<const char*>(matrix) + thread_chunk() * kChunkBytes +
                (static_cast<int64_t>(tile) * kRows + thread_row()) * row_stride * 2),
        row_bytes_(row_stride * 2),
        rows_(rows),
        cols_(cols) {}

  // Changes how many rows there are.
  __device__ __forceinline__ void set_rows(int rows) { rows_ = rows; }

  // Enqueues the present tile, whose number is `tile`, and goes on to the next, `direction` +1, or
  // the previous, -1. The caller commits.
  __device__ __forceinline__ void load(uint32_t smem_tile, int tile, int direction = 1) {
    const int rows_left = rows_ - tile * kRows;
    if (rows_left >= kRows && cols_ == Tile::kRowChunks * kChunk)
      copy<true>(smem_tile, rows_left);
    else
      copy<false>(smem_tile, rows_left);
    source_ += direction * (kRows * row_bytes_);
  }

 private:
  template <bool kWhole>
  __device__ __forceinline__ void copy(uint32_t smem_tile, int rows_left) const {
    const char* source = source_;
    const uint32_t target = smem_tile + Tile::offset(thread_row(), thread_chunk());
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
      const int row = thread_row() + i * kRowStep;
      if (kRows % kRowStep != 0 && row >= kRows) break;
#pragma unroll
      for (int j = 0; j < kColSteps; ++j) {
        const bool exists =
            kWhole || (row < rows_left && (thread_chunk() + j * kGroup) * kChunk < cols_);
        ptx::cp_async_16(target + i * kRowStep * Tile::kRowBytes + j * kGroup * kChunkBytes,
                         source + j * kGroup * kChunkBytes, exists ? kChunkBytes : 0);
      }
      source += kRowStep * row_bytes_;
    }
  }

  static __device__ __forceinline__ int thread_row() {
    return (kParts == 1 ? threadIdx.x : threadIdx.x % kThreads) / kGroup;
  }
  static __device__ __forceinline__ int thread_chunk() { return threadIdx.x % kGroup; }

  const char* source_;  // this thread's first chunk of the present tile
  int64_t row_bytes_;
  int rows_;
  int cols_;
};

}  // namespace flash_ext
