// Copies of tiles from global memory into swizzled shared memory, 16 bytes a time.
#pragma once

#include <cstdint>

#include "ptx/cp_async.h"
#include "core/layout.h"

namespace flash_ext {

// Loads row tiles of one (rows, cols) matrix with kThreads threads. Eight neighbouring threads
// read 128 contiguous bytes of a row. Rows and columns past the end arrive as zeros, so that
// memory nobody owns never enters a product.
template <typename Tile, int kRows, int kThreads>
class TileLoader {
  static constexpr int kGroup = Tile::kRowChunks % 8 == 0 ? 8 : 4;  // threads along a row
  static constexpr int kRowStep = kThreads / kGroup;
  static constexpr int kColSteps = Tile::kRowChunks / kGroup;
  static constexpr int kRowSteps = ceil_div(kRows, kRowStep);

 public:
  // `matrix` is row 0; strides in elements of 2 bytes; `cols` is a multiple of 8.
  __device__ __forceinline__ TileLoader(const void* matrix, int64_t row_stride, int rows, int cols)
      : source_(static_cast<const char*>(matrix) + thread_row() * row_stride * 2 +
                thread_chunk() * kChunkBytes),
        row_bytes_(row_stride * 2),
        rows_(rows),
        cols_(cols) {}

  // Enqueues rows [first_row, first_row + kRows); the caller commits.
  __device__ __forceinline__ void load(uint32_t smem_tile, int first_row) const {
    // Steps down and across keep the swizzle of this thread's first chunk.
    static_assert(kRowStep % 8 == 0 && kGroup == Tile::kPeriod);
    const char* source = source_ + first_row * row_bytes_;
    const uint32_t target = smem_tile + Tile::offset(thread_row(), thread_chunk());
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
      const int row = thread_row() + i * kRowStep;
      if (kRows % kRowStep != 0 && row >= kRows) break;
#pragma unroll
      for (int j = 0; j < kColSteps; ++j) {
        const bool exists =
            first_row + row < rows_ && (thread_chunk() + j * kGroup) * kChunk < cols_;
        ptx::cp_async_16(target + i * kRowStep * Tile::kRowBytes + j * kGroup * kChunkBytes,
                         source + j * kGroup * kChunkBytes, exists ? kChunkBytes : 0);
      }
      source += kRowStep * row_bytes_;
    }
  }

 private:
  static __device__ __forceinline__ int thread_row() { return threadIdx.x / kGroup; }
  static __device__ __forceinline__ int thread_chunk() { return threadIdx.x % kGroup; }

  const char* source_;  // this thread's chunk of row 0
  int64_t row_bytes_;
  int rows_;
  int cols_;
};

}  // namespace flash_ext
