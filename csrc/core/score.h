// From raw scores q.k to what the softmax sees, in units of log2(e): soft cap, ALiBi, bias.
//
//   units * q.k   ->   cap * tanh(. / cap)   ->   - slope * |i + Sk - Sq - j|   ->   + bias
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/bias.h"
#include "core/bias_tile.h"
#include "core/element.h"
#include "core/gemm.h"
#include "core/softmax.h"
#include "core/table.h"
#include "params.h"
#include "ptx/math.h"

namespace flash_ext {

// tanh(x / 4) to 6e-7 of its value for |x| < 2: an odd polynomial of least relative error.
__device__ __forceinline__ float tanh_of_small_quarter(float x) {
  const float square = x * x;
  float series = fmaf(square, -2.710107310e-06f, 1.288115600e-04f);
  series = fmaf(series, square, -5.207237322e-03f);
  series = fmaf(series, square, 2.499998659e-01f);
  return x * series;
}

// The same for all x: with r = 1 / (e^2|y| + 1) tanh(y) is 1 - 2 r, which cancels near 0.
__device__ __forceinline__ float tanh_of_quarter(float x) {
  const float r = ptx::reciprocal_approx(ptx::exp2_approx(fabsf(x) * (kLog2E / 2)) + 1.f);
  return fabsf(x) < 2.f ? tanh_of_small_quarter(x) : copysignf(fmaf(-2.f, r, 1.f), x);
}

// Calls `use` with a function that gives tanh of a quarter of each of `x`. A warp whose numbers are
// all small, as scores below half of the soft cap are, spares the slow instructions.
template <int kM, int kN, typename Use>
__device__ __forceinline__ void with_tanh_of_quarter(const float (&x)[kM][kN][4], Use use) {
  uint32_t bits = 0;  // the highest of an exponent is set from 2 on, and for infinity and NaN
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= __float_as_uint(x[m][n][i]);
  if (__any_sync(0xffffffffu, bits & 0x40000000u))
    use([](float y) { return tanh_of_quarter(y); });
  else
    use([](float y) { return tanh_of_small_quarter(y); });
}

// The soft cap. Returns what the scores are still to be multiplied by to be in units of log2(e).
template <int kM, int kN>
__device__ __forceinline__ float cap_scores(float (&scores)[kM][kN][4], float softcap,
                                            float softmax_scale) {
  if (softcap == 0.f) return softmax_scale * kLog2E;
  scale(scores, 4.f * (softmax_scale / softcap));
  with_tanh_of_quarter(scores, [&](auto tanh_of) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (float& x : scores[m][n]) x = tanh_of(x);
  });
  return softcap * kLog2E;
}

// The same, and the derivative of the cap as A fragments in T. It is 0 where the score is NaN: the
// gradient that it multiplies is NaN then, or 0 because the score is masked.
template <typename T, int kM, int kN>
__device__ __forceinline__ float cap_scores(float (&scores)[kM][kN][4],
                                            uint32_t (&slopes)[kM][kN / 2][4], float softcap,
                                            float softmax_scale) {
  if (softcap == 0.f) return softmax_scale * kLog2E;
  scale(scores, 4.f * (softmax_scale / softcap));
  with_tanh_of_quarter(scores, [&](auto tanh_of) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* const pair = &scores[m][n][2 * h];
          float slope[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            pair[e] = tanh_of(pair[e]);
            slope[e] = fmaxf(fmaf(-pair[e], pair[e], 1.f), 0.f);
          }
          slopes[m][n / 2][n % 2 * 2 + h] = Element<T>::pack(slope[0], slope[1]);
        }
  });
  return softcap * kLog2E;
}

// Multiplies P by that derivative, both as A fragments in T; the product takes the latter's place.
template <typename T, int kM, int kK>
__device__ __forceinline__ void multiply(uint32_t (&slopes)[kM][kK][4],
                                         const uint32_t (&p)[kM][kK][4]) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kK; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pair product = __hmul2(reinterpret_cast<const Pair&>(slopes[m][k][i]),
                                     reinterpret_cast<const Pair&>(p[m][k][i]));
        slopes[m][k][i] = reinterpret_cast<const uint32_t&>(product);
      }
}

// ALiBi (Press et al. 2021) and the bias. `units` are what the scores are still to be multiplied
// by, and the return value what they are after that. With kTiled a bias in chunks lies in shared
// memory: `blocks()` tells where. `hides` becomes whether the bias may mask, or be too large for P
// not to exceed 1 by rounding.
template <Axes kAxes, bool kTiled, int kM, int kN, typename Blocks>
__device__ __forceinline__ float add_biases(float (&scores)[kM][kN][4], float units,
                                            const Modifiers& modifiers, const Shape& shape,
                                            const TablePlace& at, Blocks blocks, bool& hides) {
  hides = false;
  if (modifiers.alibi_slopes != nullptr) {
    using Offset = FragmentOffset<kAxes>;
    const float slope =
        modifiers.alibi_slopes[at.batch * modifiers.alibi_batch_stride + at.head] * kLog2E;
    const int position = at.row + static_cast<int>(shape.seqlen_k - shape.seqlen_q);
    const float distance = static_cast<float>(at.key - position);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto further = static_cast<float>(Offset::key(m, n, i) - Offset::row(m, n, i));
          scores[m][n][i] = fmaf(scores[m][n][i], units, -slope * fabsf(distance + further));
        }
    units = 1.f;
  }
  const TableView& bias = modifiers.bias;
  if (bias.data == nullptr) return units;
  if constexpr (kTiled) {
    if (modifiers.bias_in_chunks) {
      const int rows = static_cast<int>(shape.seqlen_q) - at.row;
      if (bias.dtype == DType::kFloat16)
        hides = !add_bias_tile<__half, kAxes>(scores, units, blocks(), rows);
      else
        hides = !add_bias_tile<__nv_bfloat16, kAxes>(scores, units, blocks(), rows);
      return 1.f;
    }
  }
  hides = true;
  scale(scores, units);
  add_bias<kAxes>(scores, bias, modifiers.bias_in_pairs, shape, at);
  return 1.f;
}

}  // namespace flash_ext
