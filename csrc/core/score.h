// From raw scores q.k to what the softmax sees, in units of log2(e): soft cap, ALiBi, bias.
//
//   units * q.k   ->   cap * tanh(. / cap)   ->   - slope * |i + Sk - Sq - j|   ->   + bias
#pragma once

#include <cmath>
#include <cstdint>

#include "core/bias.h"
#include "core/element.h"
#include "core/gemm.h"
#include "core/softmax.h"
#include "core/table.h"
#include "params.h"
#include "ptx/math.h"

namespace flash_ext {

// tanh to 4e-7 of its value: with r = 1 / (e^2|x| + 1) it is 1 - 2 r, and near 0, where that
// cancels, its series.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  const float square = x * x;
  float series = fmaf(square, -17.f / 315, 2.f / 15);
  series = fmaf(series, square, -1.f / 3);
  series = fmaf(series * square, x, x);
  const float r = ptx::reciprocal_approx(ptx::exp2_approx(fabsf(x) * (2 * kLog2E)) + 1.f);
  return square < 0.0625f ? series : copysignf(fmaf(-2.f, r, 1.f), x);
}

// What a raw score is multiplied by: before the soft cap, or, without one, to be in units of
// log2(e).
__device__ __forceinline__ float score_factor(float softcap, float softmax_scale) {
  return softcap > 0.f ? softmax_scale / softcap : softmax_scale * kLog2E;
}

// Soft cap, or the scale alone.
template <int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kM][kN][4], float softcap,
                                           float softmax_scale) {
  scale(scores, score_factor(softcap, softmax_scale));
  if (softcap == 0.f) return;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (float& x : scores[m][n]) x = softcap * kLog2E * tanh_by_exp2(x);
}

// The same, and the derivative of the cap as A fragments in T. It is 0 where the score is NaN: the
// gradient that it multiplies is NaN then, or 0 because the score is masked.
template <typename T, int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kM][kN][4],
                                           uint32_t (&slopes)[kM][kN / 2][4], float softcap,
                                           float softmax_scale) {
  scale(scores, score_factor(softcap, softmax_scale));
  if (softcap == 0.f) return;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const pair = &scores[m][n][2 * h];
        const float low = tanh_by_exp2(pair[0]), high = tanh_by_exp2(pair[1]);
        pair[0] = softcap * kLog2E * low;
        pair[1] = softcap * kLog2E * high;
        slopes[m][n / 2][n % 2 * 2 + h] =
            Element<T>::pack(fmaxf(fmaf(-low, low, 1.f), 0.f), fmaxf(fmaf(-high, high, 1.f), 0.f));
      }
}

// ALiBi (Press et al. 2021) and the bias.
template <Axes kAxes, int kM, int kN>
__device__ __forceinline__ void add_biases(float (&scores)[kM][kN][4], const Modifiers& modifiers,
                                           const Shape& shape, const TablePlace& at) {
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
          scores[m][n][i] = fmaf(-slope, fabsf(distance + further), scores[m][n][i]);
        }
  }
  if (modifiers.bias.data != nullptr)
    add_bias<kAxes>(scores, modifiers.bias, modifiers.bias_in_pairs, shape, at);
}

}  // namespace flash_ext
