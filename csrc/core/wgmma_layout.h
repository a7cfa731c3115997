// Where wgmma finds and leaves every element: tiles in shared memory and accumulator fragments.
//
// A tile of (rows, columns) 16-bit elements is cut into slabs of 64 columns, each stored whole:
//
//     [slab][row][128 bytes, their 16-byte chunks permuted by an XOR with row % 8]
//
// which is what a TMA load of a box of 64 columns x rows writes. Where 64 does not divide the
// columns (32, 96), slabs of 32 columns waste nothing: [slab][row][64 bytes, XOR with row / 2 % 4].
// The same tile serves as operand in both directions, and no element is ever moved:
//   * rows are M or N and columns K (Q and K in Q K^T):       K-major
//   * rows are K and columns M or N (V in P V, Q in dS^T Q):  MN-major
//
// The accumulator of 64 x kN: warp w of the warpgroup holds rows 16w to 16w + 15, spread over its
// lanes as kN / 8 tiles of mma.m16n8k16 (the diagram of core/layout.h, four registers each).
// Rounded to 16 bits, registers 8j to 8j + 7 are the A fragment of columns 16j to 16j + 15.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "ptx/matrix_descriptor.h"

namespace flash_ext {

template <int kRowsOfTile, int kColsOfTile, int kColsOfSlab = kColsOfTile % 64 == 0 ? 64 : 32>
struct SlabTile {
  static constexpr int kRows = kRowsOfTile;
  static constexpr int kCols = kColsOfTile;
  static constexpr int kSlabCols = kColsOfSlab;
  static_assert(kSlabCols == 64 || kSlabCols == 32, "a row of a slab is one swizzle line");
  static_assert(kRows % 8 == 0, "a slab is a whole number of swizzle atoms of eight lines");
  static constexpr ptx::Swizzle kSwizzle =
      kSlabCols == 64 ? ptx::Swizzle::k128B : ptx::Swizzle::k64B;
  static constexpr int kLineBytes = kSlabCols * 2;
  static constexpr int kAtomBytes = 8 * kLineBytes;  // alignment of tiles and of slabs
  static constexpr int kSlabs = ceil_div(kCols, kSlabCols);
  static constexpr int kSlabBytes = kRows * kLineBytes;
  static constexpr int kBytes = kSlabs * kSlabBytes;

  // Bytes from the tile's start to a chunk of 8 columns.
  static __host__ __device__ constexpr int offset(int row, int chunk) {
    constexpr int kLineChunks = kSlabCols / kChunk;
    const int key = kSlabCols == 64 ? row & 7 : (row >> 1) & 3;
    return chunk / kLineChunks * kSlabBytes + row * kLineBytes +
           ((chunk % kLineChunks) ^ key) * kChunkBytes;
  }
};

// A tile as operand: the descriptors of its k16 steps. The descriptor's first word alone changes,
// by constants when the steps are unrolled.
template <typename Tile, ptx::Major kMajor>
class WgmmaOperand {
 public:
  // `smem_address` is the start of a tile, or of a part of it: from a row on that is a multiple of
  // 8, or from a slab on.
  __device__ __forceinline__ explicit WgmmaOperand(uint32_t smem_address)
      : low_((smem_address & 0x3ffff) >> 4 | ptx::descriptor_leading(kLeadingBytes)) {}

  // K elements 16 step to 16 step + 15.
  __device__ __forceinline__ uint64_t at(int step) const {
    return ptx::descriptor(low_ + (step_bytes(step) >> 4), kHigh);
  }

 private:
  static constexpr int kSlabSteps = Tile::kSlabCols / 16;
  static constexpr uint32_t kLeadingBytes = kMajor == ptx::Major::kK ? 16 : Tile::kSlabBytes;
  static constexpr uint32_t kHigh = ptx::descriptor_high(Tile::kAtomBytes, Tile::kSwizzle);
  static_assert(kLeadingBytes < 1 << 18, "the offset between slabs fits the descriptor");

  static __device__ constexpr uint32_t step_bytes(int step) {
    if constexpr (kMajor == ptx::Major::kK)
      return step / kSlabSteps * Tile::kSlabBytes + step % kSlabSteps * 32;
    else
      return step * 16 * Tile::kLineBytes;
  }

  uint32_t low_;
};

// Where register `i` of an accumulator lies; `thread` is the number in the warpgroup, 0 to 127.
__host__ __device__ constexpr int accumulator_row(int thread, int i) {
  return thread / kWarpSize * 16 + thread % kWarpSize / 4 + i / 2 % 2 * 8;
}

__host__ __device__ constexpr int accumulator_col(int thread, int i) {
  return i / 4 * 8 + thread % 4 * 2 + i % 2;
}

}  // namespace flash_ext
