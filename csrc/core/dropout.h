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

// Turns counters into random words. Several at once share the keys of the rounds.
template <int kCount>
__device__ __forceinline__ void philox4x32(uint4 (&counters)[kCount], uint2 key) {
  constexpr int kRounds = 7;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (uint4& counter : counters) {
      const uint64_t a = uint64_t{0xD2511F53u} * counter.x, b = uint64_t{0xCD9E8D57u} * counter.z;
      counter = {static_cast<uint32_t>(b >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(b),
                 static_cast<uint32_t>(a >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(a)};
    }
    key = {key.x + 0x9E3779B9u, key.y + 0xBB67AE85u};
  }
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

  // Sets dropped probabilities (16 kM queries, 8 kN keys) to 0. `row` and `key` are the first ones
  // of the fragments, multiples of 16.
  template <int kM, int kN>
  __device__ __forceinline__ void drop(float (&p)[kM][kN][4], int row, int key) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint4 words[kN / 2];
#pragma unroll
      for (int k = 0; k < kN / 2; ++k) words[k] = counter(row / 16 + m, key / 16 + k);
      philox4x32(words, key_);
#pragma unroll
      for (int k = 0; k < kN / 2; ++k) {
        const uint32_t word[4] = {words[k].x, words[k].y, words[k].z, words[k].w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if ((e % 2 == 0 ? word[e / 2] << 16 : word[e / 2]) < threshold_)
            p[m][2 * k + e / 4][e % 4] = 0.f;
      }
    }
  }

  // Gives dropped probabilities (16 kM keys, 16 kK queries), A fragments of 16 bits, a minus sign.
  // Another lane draws the values of a lane's elements, since these are transposed: of the element
  // (key c, query r) of a block, c = l / 4 + 8 h and r = 2 (l % 4) + j + 8 half, it is lane
  // 8 (l % 4) + 4 j + l / 8, and the value is e = 4 h + 2 half + l / 4 % 2. Words hold one bit for
  // each value of four blocks, even values in the lower half.
  template <int kM, int kK>
  __device__ __forceinline__ void mark_transposed(uint32_t (&p)[kM][kK][4], int row,
                                                  int key) const {
    constexpr int kBlocks = kM * kK, kGroup = kBlocks < 4 ? kBlocks : 4;
    static_assert(kBlocks % kGroup == 0, "whole groups of blocks");
    const uint32_t half_of_lane = lane_ / 4 % 2 == 0 ? 0x5410u : 0x7632u;  // for __byte_perm
#pragma unroll
    for (int first = 0; first < kBlocks; first += kGroup) {
      uint4 words[kGroup];
#pragma unroll
      for (int b = 0; b < kGroup; ++b)
        words[b] = counter(row / 16 + (first + b) % kK, key / 16 + (first + b) / kK);
      philox4x32(words, key_);
      uint32_t drawn = 0;
#pragma unroll
      for (const uint4& four : words)
#pragma unroll
        for (const uint32_t word : {four.x, four.y, four.z, four.w})
          drawn = drawn >> 1 | (dropped_halves(word) & 0x80008000u);
      uint32_t bits[2];  // of queries j = 0 and 1
#pragma unroll
      for (int j = 0; j < 2; ++j)
        bits[j] = __shfl_sync(0xffffffffu, drawn, 8 * (lane_ % 4) + 4 * j + lane_ / 8);
      const uint32_t pairs = __byte_perm(bits[0], bits[1], half_of_lane);
#pragma unroll
      for (int b = first; b < first + kGroup; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // half = i / 2, h = i % 2
          const int shift = 4 * (first + kGroup - 1 - b) + 3 - (2 * (i % 2) + i / 2);
          p[b / kK][b % kK][i] ^= pairs << shift & 0x80008000u;
        }
    }
  }

 private:
  // Of this lane's eight values of a block; value e comes to be in half e % 2 of word e / 2.
  __device__ __forceinline__ uint4 counter(int block_row, int block_col) const {
    return {static_cast<uint32_t>(block_col), static_cast<uint32_t>(block_row), head_,
            static_cast<uint32_t>(lane_)};
  }

  // Sets the highest bits of halves that are below the threshold; the other bits are anything.
  __device__ __forceinline__ uint32_t dropped_halves(uint32_t word) const {
    const uint32_t threshold = threshold_ >> 16;
    // The highest bit: whether the other 15 bits are not below those of the threshold.
    const uint32_t others = (word & 0x7fff7fffu) + (0x8000u - (threshold & 0x7fffu)) * 0x00010001u;
    const uint32_t either = threshold < 0x8000u ? 0xffffffffu : 0;
    return ~((word & others) | (either & (word | others)));
  }

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
