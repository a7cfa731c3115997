// Sums whose bits do not depend on the order of additions: integers, multiples of a power of two.
//
// The power is the smallest with which the largest addition, made as often as there are terms,
// stays below 2^62. An addition then is rounded by 2^(log_terms - 62) of the largest one at most:
// where 2^20 scores share an element, that is 18 bits finer than fp32. The power is never below
// 2^-126. Integers hold neither NaN nor infinity. Those are added in fp32, where their order does
// not matter either.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/layout.h"
#include "params.h"

namespace flash_ext {

// The biased exponent of what additions are multiplied by.
__device__ __forceinline__ int fixed_point_exponent(uint32_t largest, int log_terms) {
  // largest < 2^(its biased exponent - 126), and 315 = 62 + 126 + 127
  return min(max(315 - log_terms - static_cast<int>(largest >> 23), 1), 253);
}
__device__ __forceinline__ float fixed_point_scale(uint32_t largest, int log_terms) {
  return __int_as_float(fixed_point_exponent(largest, log_terms) << 23);
}
// What a sum is multiplied by: the reciprocal.
__device__ __forceinline__ float fixed_point_unit(uint32_t largest, int log_terms) {
  return __int_as_float((254 - fixed_point_exponent(largest, log_terms)) << 23);
}

// Keeps the largest finite magnitude of a warp's fragments.
template <int kM, int kN>
__device__ __forceinline__ void measure(const float (&terms)[kM][kN][4], uint32_t* largest,
                                        int lane) {
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t found = 0;  // bits of a float that is not negative are in the order of their values
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t magnitude = __float_as_uint(fabsf(terms[m][n][i]));
        if (magnitude < kInfinity) found = max(found, magnitude);
      }
  found = __reduce_max_sync(0xffffffffu, found);
  if (lane == 0 && found > __ldcg(largest)) atomicMax(largest, found);
}

// Memory in which thread blocks add up numbers, in fp32 or in fixed point.
class Sums {
 public:
  __device__ __forceinline__ Sums(float* sums, const FixedPoint& fixed)
      : sums_(sums),
        fixed_(reinterpret_cast<unsigned long long*>(fixed.sums)),
        scale_(fixed.sums == nullptr ? 1.f : fixed_point_scale(*fixed.largest, fixed.log_terms)) {}

  __device__ __forceinline__ void add(int64_t offset, float x) const {
    if (fixed_ != nullptr && fabsf(x) < INFINITY)
      atomicAdd(fixed_ + offset, static_cast<unsigned long long>(__float2ll_rn(x * scale_)));
    else
      atomicAdd(sums_ + offset, x);
  }

 private:
  float* sums_;
  unsigned long long* fixed_;
  float scale_;
};

}  // namespace flash_ext
