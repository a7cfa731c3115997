// The additive bias and the bool mask, and the bias's gradient.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "core/fixed_point.h"
#include "core/mask.h"
#include "core/softmax.h"
#include "core/table.h"
#include "params.h"

namespace flash_ext {

// Calls `use` with an element of the type that `dtype` names. A bool is a byte.
template <typename Use>
__device__ __forceinline__ void with_bias_type(DType dtype, Use use) {
  if (dtype == DType::kFloat16)
    use(__half{});
  else if (dtype == DType::kBFloat16)
    use(__nv_bfloat16{});
  else if (dtype == DType::kFloat32)
    use(float{});
  else
    use(uint8_t{});
}

// An element as what is added to a score; -inf masks.
__device__ __forceinline__ float bias_value(float x) { return x; }
__device__ __forceinline__ float bias_value(__half x) { return __half2float(x); }
__device__ __forceinline__ float bias_value(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float bias_value(uint8_t sees) { return sees ? 0.f : -INFINITY; }

template <typename T>
struct alignas(2 * sizeof(T)) BiasPair {
  T first, second;
};

// A smaller bias is the score itself. So -inf masks whatever the score is, NaN included, and the
// lowest finite numbers, which callers mask with, stay finite in units of log2(e).
constexpr float kLeastBias = -2.3e38f;

// A score in units of log2(e) with a bias in natural units.
__device__ __forceinline__ float biased(float score, float bias) {
  return bias < kLeastBias ? bias : fmaf(bias, kLog2E, score);
}

// Adds the bias to scores in units of log2(e). Rows past the end see nothing: a key that a bias
// hides from all others must not meet them.
template <Axes kAxes, int kM, int kN>
__device__ __forceinline__ void add_bias(float (&scores)[kM][kN][4], const TableView& bias,
                                         bool in_pairs, const Shape& shape, const TablePlace& at) {
  const int rows = static_cast<int>(shape.seqlen_q) - at.row;  // that are left
  const int keys = static_cast<int>(shape.seqlen_k) - at.key;
  with_bias_type(bias.dtype, [&](auto element) {
    using T = decltype(element);
    using Offset = FragmentOffset<kAxes>;
    const T* const first = static_cast<const T*>(bias.data) + table_offset(bias, at);
    // Away from the edges a row of fragments is fetched whole before any of it is used: one
    // latency for all of them.
    const bool inside =
        Offset::row(kM - 1, kN - 1, 3) < rows && Offset::key(kM - 1, kN - 1, 3) < keys;
    if (kAxes == Axes::kQueriesDown && in_pairs && inside) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const T* const of_row = first + Offset::row(m, 0, 2 * h) * bias.row_stride;
          BiasPair<T> pairs[kN];
#pragma unroll
          for (int n = 0; n < kN; ++n)
            pairs[n] = *reinterpret_cast<const BiasPair<T>*>(of_row + 8 * n);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            float (&x)[4] = scores[m][n];
            x[2 * h] = biased(x[2 * h], bias_value(pairs[n].first));
            x[2 * h + 1] = biased(x[2 * h + 1], bias_value(pairs[n].second));
          }
        }
      return;
    }
    if constexpr (kAxes == Axes::kKeysDown && sizeof(T) <= 2) {
      if (inside) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          T values[kM][4];
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              values[m][i] = first[Offset::row(m, n, i) * bias.row_stride +
                                   Offset::key(m, n, i) * bias.key_stride];
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              scores[m][n][i] = biased(scores[m][n][i], bias_value(values[m][i]));
        }
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const int row = Offset::row(m, n, i), key = Offset::key(m, n, i);
          float& x = scores[m][n][i];
          const T* const source = first + row * bias.row_stride + key * bias.key_stride;
          if (row >= rows)
            x = -INFINITY;
          else if (key < keys)
            x = biased(x, bias_value(*source));
        }
  });
}

// Which keys the queries of a head see: the band, less what a bias masks.
class BiasedMask {
 public:
  __device__ __forceinline__ BiasedMask(const BandMask& band, const TableView& bias,
                                        const Shape& shape, int64_t batch, int head)
      : band_(band), bias_(bias), shape_(shape), batch_(batch), head_(head) {}

  __device__ __forceinline__ bool sees(int row, int key) const {
    if (row >= shape_.seqlen_q || !band_.sees(row, key)) return false;
    return bias_.data == nullptr || !hides(table_offset(bias_, {batch_, head_, row, key}));
  }

 private:
  // Tells -inf, or false, by its bits: less code than one way for each type.
  __device__ __forceinline__ bool hides(int64_t offset) const {
    if (bias_.dtype == DType::kBool) return static_cast<const uint8_t*>(bias_.data)[offset] == 0;
    if (bias_.dtype == DType::kFloat32)
      return static_cast<const uint32_t*>(bias_.data)[offset] == 0xff800000u;
    return static_cast<const uint16_t*>(bias_.data)[offset] ==
           (bias_.dtype == DType::kFloat16 ? 0xfc00u : 0xff80u);
  }

  const BandMask& band_;
  const TableView& bias_;
  const Shape& shape_;
  int64_t batch_;
  int head_;
};

__device__ __forceinline__ void store_bias(float* target, float x) { *target = x; }
__device__ __forceinline__ void store_bias(__half* target, float x) { *target = __float2half(x); }
__device__ __forceinline__ void store_bias(__nv_bfloat16* target, float x) {
  *target = __float2bfloat16(x);
}
__device__ __forceinline__ void store_bias(uint8_t*, float) {}  // a mask has no gradient

// Writes the gradient of scores, keys down (16 kM) and queries across (8 kN), to that of an
// unbroadcast bias.
template <int kM, int kN>
__device__ __forceinline__ void store_bias_gradient(const float (&dscores)[kM][kN][4],
                                                    const TableView& dbias, const Shape& shape,
                                                    const TablePlace& at) {
  using Offset = FragmentOffset<Axes::kKeysDown>;
  const int rows = static_cast<int>(shape.seqlen_q) - at.row;
  const int keys = static_cast<int>(shape.seqlen_k) - at.key;
  with_bias_type(dbias.dtype, [&](auto element) {
    using T = decltype(element);
    T* const first = static_cast<T*>(dbias.data) + table_offset(dbias, at);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = Offset::row(m, n, i), key = Offset::key(m, n, i);
          if (row < rows && key < keys)
            store_bias(first + row * dbias.row_stride + key * dbias.key_stride, dscores[m][n][i]);
        }
  });
}

// Adds it up where the bias is broadcast: over rows or keys first within the warp, in fp32.
template <int kM, int kN>
__device__ __forceinline__ void add_bias_gradient(const float (&dscores)[kM][kN][4],
                                                  const TableView& dbias, const FixedPoint& fixed,
                                                  const Shape& shape, const TablePlace& at,
                                                  int lane) {
  using Offset = FragmentOffset<Axes::kKeysDown>;
  const int rows = static_cast<int>(shape.seqlen_q) - at.row;
  const int keys = static_cast<int>(shape.seqlen_k) - at.key;
  const Sums sums(static_cast<float*>(dbias.data), fixed);
  const int64_t first = table_offset(dbias, at);
  if (dbias.row_stride == 0) {
    float total = 0.f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.f;  // over the queries of the tile
#pragma unroll
        for (int n = 0; n < kN; ++n) sum += dscores[m][n][2 * h] + dscores[m][n][2 * h + 1];
        sum = quad_sum(sum);
        total += sum;
        const int key = Offset::key(m, 0, 2 * h);
        if (dbias.key_stride != 0 && lane % 4 == 0 && key < keys)
          sums.add(first + key * dbias.key_stride, sum);
      }
    if (dbias.key_stride != 0) return;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      total += __shfl_xor_sync(0xffffffffu, total, distance);
    if (lane == 0) sums.add(first, total);
    return;
  }
  if (dbias.key_stride == 0) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = 0.f;  // over the keys of the warp
#pragma unroll
        for (int m = 0; m < kM; ++m) sum += dscores[m][n][e] + dscores[m][n][2 + e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const int row = Offset::row(0, n, e);
        if (lane < 4 && row < rows) sums.add(first + row * dbias.row_stride, sum);
      }
    return;
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Offset::row(m, n, i), key = Offset::key(m, n, i);
        if (row < rows && key < keys)
          sums.add(first + row * dbias.row_stride + key * dbias.key_stride, dscores[m][n][i]);
      }
}

}  // namespace flash_ext
