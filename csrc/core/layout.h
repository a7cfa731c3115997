// Where every element lives: tensor-core fragments and swizzled shared-memory tiles.
//
// THE diagram. mma.m16n8k16 spreads a 16x8 fp32 accumulator over a warp so that lane l holds
//
//              column 2q   2q+1                 q = l % 4   (the four lanes of a "quad"
//     row r  :   c[0]      c[1]                 r = l / 4    share their two rows)
//     row r+8:   c[2]      c[3]
//
// and reads A (16x16, 16-bit pairs) and B (16x8) as
//
//     a[0] = (r,   2q..2q+1)   a[2] = (r,   8+2q..)        b0 = (k = 2q..2q+1,   n = r)
//     a[1] = (r+8, 2q..2q+1)   a[3] = (r+8, 8+2q..)        b1 = (k = 8+2q..,     n = r)
//
// Two neighbouring accumulator tiles, packed to 16 bits, are therefore exactly one A fragment:
// scores become the operand of the next product without leaving registers.
#pragma once

#include <cstdint>

namespace flash_ext {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kWarpSize = 32;
constexpr int kChunk = 8;  // 16-bit elements in 16 bytes, the unit of copies and of ldmatrix
constexpr int kChunkBytes = 16;

// A kRows x kCols tile of 16-bit elements, row-major, whose 16-byte chunks are permuted inside
// each row by an XOR with the row, so that the eight rows one ldmatrix tile reads lie in eight
// different bank groups.
template <int kRows, int kCols>
struct SmemTile {
  static_assert(kCols % 32 == 0, "a row is a whole number of 64-byte swizzle groups");
  static constexpr int kRowChunks = kCols / kChunk;
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kBytes = kRows * kRowBytes;
  // Rows of a multiple of 128 bytes start in the same bank: permute 8 chunks by row % 8.
  // Other rows (a multiple of 64 bytes) alternate between two halves: permute 4 by row / 2 % 4.
  static constexpr int kPeriod = kRowChunks % 8 == 0 ? 8 : 4;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    const int key = kPeriod == 8 ? row & 7 : (row >> 1) & 3;
    return row * kRowBytes + (chunk ^ key) * kChunkBytes;
  }
};

// The shared addresses from which one lane feeds ldmatrix.x4, for every 16x16 block of a tile.
// Blocks 16 rows apart share their swizzle, the XOR repeats every kPeriod chunks, and within a
// period stepping by two chunks is itself an XOR: one register a lane and immediates address all
// blocks of all tiles of the same shape.
template <typename Tile>
struct LaneOffsets {
  static constexpr int kPhases = Tile::kPeriod / 2;  // a block is two chunks wide
  uint32_t tile;  // address of the first row
  uint32_t lane;  // this lane's offset in block (0, 0)
  int first_col;  // block column that counts as 0

  __device__ __forceinline__ uint32_t at(int block_row, int block_col) const {
    const int col = first_col + block_col;
    return (lane ^ col % kPhases * 2 * kChunkBytes) + tile + block_row * 16 * Tile::kRowBytes +
           col / kPhases * Tile::kPeriod * kChunkBytes;
  }
};

// Which row and chunk of a 16x16 block a lane names for ldmatrix.x4. Two patterns serve every
// operand; `trans` below says whether the load transposes.
//   row-first  : tiles (0,0) (8,0) (0,8) (8,8)  -> A from rows; B from columns with trans
//   chunk-first: tiles (0,0) (0,8) (8,0) (8,8)  -> B from rows; A from columns with trans
struct RowFirst {
  static __device__ __forceinline__ int row(int lane) { return lane % 16; }
  static __device__ __forceinline__ int chunk(int lane) { return lane / 16; }
};
struct ChunkFirst {
  static __device__ __forceinline__ int row(int lane) { return lane % 8 + lane / 16 * 8; }
  static __device__ __forceinline__ int chunk(int lane) { return lane / 8 % 2; }
};

// `base` is the address of a row that is a multiple of 16, in a tile aligned to 128 bytes. A caller
// that reads kCols block columns, from a multiple of kCols on, may say so: where a swizzle period
// holds a whole number of such groups, the start costs no arithmetic later.
template <typename Tile, typename Pattern, int kCols = 1>
__device__ __forceinline__ LaneOffsets<Tile> lane_offsets(uint32_t base, int lane,
                                                          int first_col = 0) {
  constexpr int kPhases = LaneOffsets<Tile>::kPhases;
  const uint32_t offset = Tile::offset(Pattern::row(lane), Pattern::chunk(lane));
  if constexpr (kPhases % kCols != 0) {
    return {base, offset, first_col};
  } else {
    return {base + first_col / kPhases * Tile::kPeriod * kChunkBytes,
            offset ^ first_col % kPhases * 2 * kChunkBytes, 0};
  }
}

}  // namespace flash_ext
