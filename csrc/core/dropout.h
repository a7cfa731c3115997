// Dropout: which probabilities are dropped is a function of (seed, batch * Hq + head, row, key).
//
// The table of scores is cut into absolute 16x16 blocks (I, J). One call of Philox4x32-7 (Salmon et
// al. 2011) for each lane of a warp, with key = seed and counter = (J, I, batch * Hq + head, lane),
// gives eight 16-bit values: those of the lane's elements of two neighbouring accumulators
// (core/layout.h), queries down. Value e is element e % 4 of accumulator e / 4.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "params.h"

namespace flash_ext {

__device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key) {
  constexpr int kRounds = 7;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.x, b = uint64_t{0xCD9E8D57u} * counter.z;
    counter = {static_cast<uint32_t>(b >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(a)};
    key = {key.x + 0x9E3779B9u, key.y + 0xBB67AE85u};
  }
  return counter;
}

// The random values of one head's table.
class Dropout {
 public:
  // `head` counts batch * Hq + head.
  __device__ __forceinline__ Dropout(const Modifiers& modifiers, int64_t head, int lane)
      : threshold_(modifiers.drop_threshold << 16),
        head_(static_cast<uint32_t>(head)),
        lane_(lane) {
    const auto seed = static_cast<uint64_t>(*modifiers.seed);
    key_ = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  }

  // Calls `use(e, dropped)` for this lane's eight values of a block.
  template <typename Use>
  __device__ __forceinline__ void for_each(int block_row, int block_col, Use use) const {
    const uint4 words =
        philox4x32({static_cast<uint32_t>(block_col), static_cast<uint32_t>(block_row), head_,
                    static_cast<uint32_t>(lane_)},
                   key_);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) use(e, (e % 2 == 0 ? word[e / 2] << 16 : word[e / 2]) < threshold_);
  }

  // Sets dropped probabilities (16 kM queries, 8 kN keys) to 0. `row` and `key` are the first ones
  // of the fragments, multiples of 16.
  template <int kM, int kN>
  __device__ __forceinline__ void drop(float (&p)[kM][kN][4], int row, int key) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; n += 2)
        for_each(row / 16 + m, key / 16 + n / 2, [&](int e, bool dropped) {
          if (dropped) p[m][n + e / 4][e % 4] = 0.f;
        });
  }

  // Gives dropped probabilities (16 kM keys, 8 kN queries) a minus sign. Another lane draws the
  // values of a lane's elements, since these are transposed: of the element (key c, query r) of a
  // block, c = l / 4 + 8 h and r = 2 (l % 4) + j + 8 (n % 2), it is lane 8 (l % 4) + 4 j + l / 8,
  // and the value is e = 4 h + 2 (n % 2) + l / 4 % 2.
  template <int kM, int kN>
  __device__ __forceinline__ void mark_transposed(float (&p)[kM][kN][4], int row, int key) const {
    constexpr int kBlocks = kM * kN / 2;
#pragma unroll
    for (int first = 0; first < kBlocks; first += 4) {  // a word holds the bits of four blocks
      uint32_t drawn = 0;
#pragma unroll
      for (int b = first; b < min(first + 4, kBlocks); ++b)
        for_each(row / 16 + b % (kN / 2), key / 16 + b / (kN / 2), [&](int e, bool dropped) {
          drawn |= static_cast<uint32_t>(dropped) << (8 * (b - first) + e);
        });
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t bits =
            __shfl_sync(0xffffffffu, drawn, 8 * (lane_ % 4) + 4 * j + lane_ / 8) >> lane_ / 4 % 2;
#pragma unroll
        for (int b = first; b < min(first + 4, kBlocks); ++b)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& x = p[b / (kN / 2)][b % (kN / 2) * 2 + half][2 * h + j];
              const int bit = 8 * (b - first) + 4 * h + 2 * half;
              x = __uint_as_float(__float_as_uint(x) ^ (bits << (31 - bit) & 0x80000000u));
            }
      }
    }
  }

 private:
  uint32_t threshold_;  // of a value in the upper half of a word
  uint32_t head_;
  int lane_;
  uint2 key_;
};

// Zeroes 16-bit values with a minus sign.
template <int kM, int kK>
__device__ __forceinline__ void drop_marked(uint32_t (&p)[kM][kK][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kK; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[m][k][i] &= ~((p[m][k][i] >> 15 & 0x00010001u) * 0xffffu);
}

}  // namespace flash_ext
