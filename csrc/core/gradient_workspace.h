// An fp32 workspace in which thread blocks add up a gradient: (B, heads, rows, columns rounded up
// to 16). dQ is (B, Hq, Sq, D), packed (Hq, Tq, D), dK (B, Hk, Sk, D) and dV (B, Hk, Sk, Dv).
//
// Rows are where one expects them; inside each block of 16 columns the order is that of the
// accumulator fragments, so that a lane's four values of a row (core/layout.h: columns 2q, 2q+1,
// 2q+8, 2q+9) are neighbours. One vector addition then moves them, and a quad fills 64 bytes.
#pragma once

#include <cstdint>

#include "ptx/reduction.h"

namespace flash_ext {

class GradientWorkspace {
 public:
  static constexpr int kBlockCols = 16;

  static __host__ __device__ constexpr int row_floats(int cols) {
    return (cols + kBlockCols - 1) / kBlockCols * kBlockCols;
  }

  // Place of `column` inside its row.
  static __device__ __forceinline__ int position(int column) {
    const int in_block = column % kBlockCols;
    return column - in_block + in_block % 8 / 2 * 4 + in_block / 8 * 2 + in_block % 2;
  }

  // `rows` rows from `first_row` on, counted through all heads.
  __device__ __forceinline__ GradientWorkspace(float* workspace, int64_t first_row, int rows,
                                               int cols)
      : cols_(row_floats(cols)), rows_(rows), first_(workspace + first_row * cols_) {}

  // Adds a warp's fragments (16 kM, 8 kD) whose first element has the coordinates `row` and `col`,
  // multiples of 16. kHeadDim is the class of the head dim.
  template <int kHeadDim, int kM, int kD>
  __device__ __forceinline__ void add(const float (&acc)[kM][kD][4], int row, int col,
                                      int lane) const {
    row += lane / 4;
    float* target = first_ + static_cast<int64_t>(row) * cols_ + col + lane % 4 * 4;
    if (cols_ == kHeadDim && row + 16 * (kM - 1) + 8 < rows_) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int d = 0; d < kD; d += 2)
            add_block(target + (16 * m + 8 * h) * kHeadDim + 8 * d, acc, m, h, d);
      return;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int d = 0; d < kD; d += 2)
          if (row + 16 * m + 8 * h < rows_ && col + 8 * d < cols_)
            add_block(target + (16 * m + 8 * h) * cols_ + 8 * d, acc, m, h, d);
  }

 private:
  template <int kM, int kD>
  static __device__ __forceinline__ void add_block(float* target, const float (&acc)[kM][kD][4],
                                                   int m, int h, int d) {
    ptx::red_add_v4(target, acc[m][d][2 * h], acc[m][d][2 * h + 1], acc[m][d + 1][2 * h],
                    acc[m][d + 1][2 * h + 1]);
  }

  int cols_;
  int rows_;
  float* first_;
};

}  // namespace flash_ext
