// Online softmax over the rows a warp owns (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023,
// algorithm 1).
//
// For each row we keep a running reference m and sum l over the keys seen so far, with
//     O = sum_j exp2(x_j - m) v_j,   l = sum_j exp2(x_j - m),   x = score * scale * log2(e).
// A new tile with a larger maximum m' multiplies O and l by exp2(m - m') and takes m' as its
// reference. Any m gives the same quotient, so m may lag behind the true maximum. One division at
// the very end gives softmax(x) V, and lse = (m + log2 l) / log2(e).
//
// A careful step looks for the maximum of a tile before its exponentials:
//     observe, exponentiate
// A guessing step takes the present m, which nearly always does after a row's first tile, and sees
// from the sums whether it was right:
//     exponentiate; if it does not fit: settle
// Exponentials then wait for no maximum, and there are no maxima to compute.
#pragma once

#include <cmath>

#include "core/layout.h"
#include "ptx/math.h"

namespace flash_ext {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Every lane of a quad shares its two rows of a 16-row block (core/layout.h).
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Multiplies the rows of a fragment array (16 kM, 8 kD) by their factors.
template <int kM, int kD>
__device__ __forceinline__ void rescale_rows(float (&out)[kM][kD][4],
                                             const float (&factor)[kM][2]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out[m][d][2 * h] *= factor[m][h];
        out[m][d][2 * h + 1] *= factor[m][h];
      }
}

// kM blocks of 16 rows; this lane works for rows l / 4 (h = 0) and l / 4 + 8 (h = 1) of each.
template <int kM>
class OnlineSoftmax {
 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        reference_[m][h] = -INFINITY;
        sum_[m][h] = 0.f;
      }
  }

  // Takes a tile of scores (16 kM, 8 kN), -inf where masked, and turns it into exp2(x - m);
  // `out` (16 kM, 8 kD) is brought to the new reference if there is one. `units` > 0 are the
  // exponent units of a score, scale * log2(e): they fold into the FFMA before exp2.
  template <int kN, int kD>
  __device__ __forceinline__ void step(float (&scores)[kM][kN][4], float (&out)[kM][kD][4],
                                       float units) {
    float top[kM][2];
    if (exceeds(scores, units, top)) {
      raise(top);
      rescale_rows(out, top);
    }
    exponentiate(scores, units);
  }

  // Brings m and l to a tile of scores. True if the warp has new references: then O has to be
  // multiplied by `rescale`.
  template <int kN>
  __device__ __forceinline__ bool observe(const float (&scores)[kM][kN][4], float units,
                                          float (&rescale)[kM][2]) {
    if (!exceeds(scores, units, rescale)) return false;
    raise(rescale);
    return true;
  }

  // P = exp2(x - m), and l grows by it. True if m fits this lane's rows: they have one, and P is
  // small enough for it to stay.
  template <int kN>
  __device__ __forceinline__ bool exponentiate(float (&scores)[kM][kN][4], float units) {
    bool fits = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // A row without a reference, whose scores so far are all -inf, subtracts 0.
        const bool fresh = reference_[m][h] == -INFINITY;
        const float reference = fresh ? 0.f : reference_[m][h];
        float sum[2] = {0.f, 0.f};  // two chains of additions hide each other's latency
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float (&p)[4] = scores[m][n];
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i)
            p[i] = ptx::exp2_approx(fmaf(p[i], units, -reference));
          sum[n % 2] += p[2 * h] + p[2 * h + 1];
        }
        sum[0] += sum[1];
        sum_[m][h] += sum[0];
        fits = fits && !fresh && !(sum[0] > kMostSum);  // NaN stays NaN whatever the reference
      }
    return fits;
  }

  // After exponentials that did not fit: moves m to the largest P of each row, and brings P and l
  // to it; O has to be multiplied by `rescale`. True if it is too late, because P has left the
  // range of fp32. `sees(m, h)` tells whether a row sees any key of the tile.
  template <int kN, typename Sees>
  __device__ __forceinline__ bool settle(float (&p)[kM][kN][4], float (&rescale)[kM][2],
                                         const Sees& sees) {
    bool lost = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
          largest = fmaxf(largest, fmaxf(p[m][n][2 * h], p[m][n][2 * h + 1]));
        largest = quad_max(largest);
        const bool fresh = reference_[m][h] == -INFINITY;
        lost = lost || largest == INFINITY || (fresh && largest == 0.f && sees(m, h));
        const bool moves = largest > 0.f && (fresh || largest > 1.f);
        // A power of two changes no digit of P, l and O.
        const int exponent = moves ? min((__float_as_int(largest) >> 23) - 127, 126) : 0;
        const float factor = __int_as_float((127 - exponent) << 23);
        if (moves)
          reference_[m][h] = (fresh ? 0.f : reference_[m][h]) + static_cast<float>(exponent);
        sum_[m][h] *= factor;
        rescale[m][h] = factor;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          p[m][n][2 * h] *= factor;
          p[m][n][2 * h + 1] *= factor;
        }
      }
    return lost;
  }

  // Ends the row (m, h): the factor that normalises its output, and its natural-log lse. A sink
  // adds exp(sink) to the denominator; pass -inf for none. Collective over the quad.
  __device__ __forceinline__ float finish(int m, int h, float sink, float& lse) const {
    const float sum = quad_sum(sum_[m][h]);
    const float sink_exponent = sink * kLog2E;
    const float top = fmaxf(reference_[m][h], sink_exponent);
    if (top == -INFINITY) {
      lse = sum - INFINITY;  // no key and no sink: -inf; only NaN scores: NaN
      return 0.f;
    }
    const float shrink = ptx::exp2_approx(reference_[m][h] - top);
    const float total = fmaf(sum, shrink, ptx::exp2_approx(sink_exponent - top));
    lse = fmaf(top, kLn2, logf(total));
    return shrink / total;
  }

  // An exponent may exceed the reference by this much (a factor of 256 in P, O and l alike) before
  // the reference follows: then O is almost never rescaled after the first tiles.
  static constexpr float kSlack = 8.f;
  // Where exponents are not looked at: what the P of a tile that one lane holds of a row may add up
  // to. Each is then within the range of fp16.
  static constexpr float kMostSum = 8192.f;

  // Whether a row of the warp needs a new reference; `top` are the tile's largest exponents,
  // rounded up.
  template <int kN>
  __device__ __forceinline__ bool exceeds(const float (&scores)[kM][kN][4], float units,
                                          float (&top)[kM][2]) const {
    bool keep = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = scores[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < kN; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
        top[m][h] = __fmul_ru(quad_max(largest), units);
        keep = keep && top[m][h] <= reference_[m][h] + kSlack;
      }
    return !__all_sync(0xffffffffu, keep);
  }

  // Raises the references to `top`, which becomes what O has to be multiplied by.
  __device__ __forceinline__ void raise(float (&top)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float reference = fmaxf(reference_[m][h], top[m][h]);
        top[m][h] = reference_[m][h] == -INFINITY ? 1.f  // nothing seen yet, O and l are 0
                                                  : ptx::exp2_approx(reference_[m][h] - reference);
        reference_[m][h] = reference;
        sum_[m][h] *= top[m][h];
      }
  }

  float reference_[kM][2];  // m; -inf before the first visible key
  float sum_[kM][2];        // this lane's share of l, over its own columns
};

// What recomputing P subtracts from an exponent. The lse of a row without keys is -inf: subtracting
// +inf makes its P exactly 0. Rows past the end load as lse 0 with zero Q and dO, and add nothing.
__device__ __forceinline__ float softmax_exponent(float lse) {
  return lse == -INFINITY ? INFINITY : lse * kLog2E;
}

}  // namespace flash_ext
