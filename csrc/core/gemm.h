// Warp-level products of 16-bit tiles into fp32 accumulator fragments. Operand names follow
// core/layout.h: "rows" means the k dimension runs along the rows' columns (contiguous), "columns"
// means it runs down the rows, and the load transposes.
#pragma once

#include "core/element.h"
#include "core/layout.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace flash_ext {

// A (16 kM) x (8 kN) accumulator of one warp.
template <int kM, int kN>
using Accumulator = float[kM][kN][4];

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
}

template <int kM, int kN>
__device__ __forceinline__ void scale(float (&acc)[kM][kN][4], float factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] *= factor;
}

// One accumulator block row, rounded to 16 bits: the A fragments of the next product.
// The kN tiles of 8 columns become kN / 2 blocks of 16.
template <typename T, int kM, int kN>
__device__ __forceinline__ void to_operand(uint32_t (&a)[kM][kN / 2][4],
                                           const float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kN / 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &acc[m][2 * k + i / 2][2 * (i % 2)];
        a[m][k][i] = Element<T>::pack(pair[0], pair[1]);
      }
}

// acc (16 kM, 8 kN) += A (16 kM, 16 kK) . B (8 kN, 16 kK)^T, both from rows of shared memory.
// Unrolling fewer than kK steps keeps fragments from being fetched so far ahead that they spill.
template <typename T, int kK, int kUnroll = kK, int kM, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void gemm_rows_rows(float (&acc)[kM][kN][4],
                                               const LaneOffsets<TileA>& a_rows,
                                               const LaneOffsets<TileB>& b_rows) {
#pragma unroll kUnroll
  for (int k = 0; k < kK; ++k) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], a_rows.at(m, k));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_rows.at(n / 2, k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(acc[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// What a product does with NaN and infinity in its B operand: 0 * inf must not reach a result that
// does not depend on them.
enum class NonFinite { kKeep, kDrop };

// acc (16 kM, 8 kN) += A (16 kM, 16 kK) . B (16 kK, 8 kN), A in registers, B from columns of
// shared memory.
template <typename T, int kM, int kN, int kK, typename TileB>
__device__ __forceinline__ void gemm_registers_columns(float (&acc)[kM][kN][4],
                                                       const uint32_t (&a)[kM][kK][4],
                                                       const LaneOffsets<TileB>& b_columns) {
#pragma unroll
  for (int k = 0; k < kK; ++k)
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_columns.at(k, n / 2));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(acc[m][n], a[m][k], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc[m][n + 1], a[m][k], b[2], b[3]);
      }
    }
}

// acc (16 kM, 8 kN) += A (16 kM, 16 kK) . B (16 kK, 8 kN), both from columns of shared memory.
template <typename T, NonFinite kNonFinite, int kK, int kUnroll, int kM, int kN, typename TileA,
          typename TileB>
__device__ __forceinline__ void gemm_columns_columns(float (&acc)[kM][kN][4],
                                                     const LaneOffsets<TileA>& a_columns,
                                                     const LaneOffsets<TileB>& b_columns) {
#pragma unroll kUnroll
  for (int k = 0; k < kK; ++k) {
    uint32_t a[kM][1][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4_trans(a[m][0], a_columns.at(k, m));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_columns.at(k, n / 2));
      if constexpr (kNonFinite == NonFinite::kDrop) {
        for (uint32_t& pair : b) pair &= ~nonfinite_halves<T>(pair);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(acc[m][n], a[m][0], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc[m][n + 1], a[m][0], b[2], b[3]);
      }
    }
  }
}

}  // namespace flash_ext
