// The workspace of dQ: fp32 sums in the order of wgmma accumulators.
#pragma once

#include <cstdint>

namespace flash_ext::sm90 {

// A tile of dQ in the order of wgmma accumulators, so that thread blocks add whole pieces of it
// with bulk copies: (B, Hq, tiles, pieces, kPieceCols / 8, 128 threads, 4). A piece is the
// accumulator of one warpgroup (core/wgmma_layout.h): 64 rows and kPieceCols columns.
template <int kRows_, int kCols_, int kPieceCols>
struct AccumulatorTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kPieceRows = 64;
  static constexpr int kFloats = kRows * kCols;
  static constexpr int kPieceFloats = kPieceRows * kPieceCols;

  static __host__ __device__ constexpr int64_t tiles(int64_t rows) {
    return (rows + kRows - 1) / kRows;
  }
};

}  // namespace flash_ext::sm90
