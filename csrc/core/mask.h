// Which keys a query sees: a diagonal band, cut at the ends of the sequences.
//
// Query i sits at key position i + Sk - Sq and sees the keys [first_key(i), end_key(i)). Causal is
// a band without keys to the right, a sliding window limits both sides, and full attention limits
// neither. first_key and end_key never decrease with i, so the tiles that a block of rows (or of
// keys) touches, and those it sees whole, are plain ranges.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/layout.h"
#include "params.h"

namespace flash_ext {

struct Range {
  int begin;
  int end;
};

class BandMask {
 public:
  __device__ __forceinline__ BandMask(const Shape& shape, const Window& window)
      : seqlen_q_(static_cast<int>(shape.seqlen_q)),
        seqlen_k_(static_cast<int>(shape.seqlen_k)),
        // A side without limit reaches past both sequences, each of which is below kMaxSeqlen.
        left_(seqlen_k_ - seqlen_q_ - limit(window.left)),
        right_(seqlen_k_ - seqlen_q_ + limit(window.right)) {}

  // Keys that query `row` sees; the range is empty (begin >= end) where it sees none.
  __device__ __forceinline__ int first_key(int row) const { return max(0, row + left_); }
  __device__ __forceinline__ int end_key(int row) const { return min(seqlen_k_, row + right_ + 1); }
  __device__ __forceinline__ bool sees(int row, int key) const {
    return key >= first_key(row) && key < end_key(row);
  }

  // Key tiles of kBlockN that any of the query rows [rows.begin, rows.end) sees ...
  template <int kBlockN>
  __device__ __forceinline__ Range touched_key_tiles(Range rows) const {
    const int begin = first_key(rows.begin) / kBlockN;
    const int end = ceil_div(max(0, end_key(rows.end - 1)), kBlockN);
    return {begin, max(begin, end)};
  }
  // ... and those of which every row sees every key, so that nothing needs masking.
  template <int kBlockN>
  __device__ __forceinline__ Range whole_key_tiles(Range rows) const {
    return {ceil_div(first_key(rows.end - 1), kBlockN), max(0, end_key(rows.begin)) / kBlockN};
  }

  // Whether any row's keys begin behind key 0.
  __device__ __forceinline__ bool limits_left() const { return seqlen_q_ - 1 + left_ > 0; }

  // Whether any of the query rows sees any of the keys.
  __device__ __forceinline__ bool touches(Range rows, Range keys) const {
    return keys.begin < end_key(rows.end - 1) && keys.end > first_key(rows.begin);
  }

  // Query tiles of kBlockM with a row that sees any of the keys [keys.begin, keys.end) ...
  template <int kBlockM>
  __device__ __forceinline__ Range touching_query_tiles(Range keys) const {
    const int first_row = max(0, keys.begin - right_);
    const int end_row = min(seqlen_q_, keys.end - left_);  // first_key(row) <= keys.end - 1
    const int begin = first_row / kBlockM;
    return {begin, max(begin, ceil_div(max(0, end_row), kBlockM))};
  }
  // ... and those of which every row sees every key of the tile.
  template <int kBlockM>
  __device__ __forceinline__ Range whole_query_tiles(Range keys) const {
    if (keys.end > seqlen_k_) return {0, 0};
    const int first_row = max(0, keys.end - 1 - right_);
    const int end_row = keys.begin - left_ + 1;
    return {ceil_div(first_row, kBlockM),
            end_row >= seqlen_q_ ? ceil_div(seqlen_q_, kBlockM) : max(0, end_row) / kBlockM};
  }

 private:
  static __device__ __forceinline__ int limit(int64_t side) {
    constexpr int64_t kNoLimit = 2 * kMaxSeqlen;
    return static_cast<int>(side < 0 || side > kNoLimit ? kNoLimit : side);
  }

  int seqlen_q_;
  int seqlen_k_;
  int left_;   // first visible key relative to the row
  int right_;  // last visible key relative to the row
};

// Sets scores (16 kM, 8 kN) of keys behind a row's last one to -inf. `row` and `key` are the
// coordinates of this lane's first element.
template <int kM, int kN>
__device__ __forceinline__ void mask_ends(float (&scores)[kM][kN][4], const BandMask& mask, int row,
                                          int key) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int end = mask.end_key(row + 16 * m + 8 * h) - key;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e >= end) scores[m][n][2 * h + e] = -INFINITY;
    }
}

// The same of keys before a row's first one.
template <int kM, int kN>
__device__ __forceinline__ void mask_begins(float (&scores)[kM][kN][4], const BandMask& mask,
                                            int row, int key) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = mask.first_key(row + 16 * m + 8 * h) - key;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e < first) scores[m][n][2 * h + e] = -INFINITY;
    }
}

// The same of all keys that a row does not see.
template <int kM, int kN>
__device__ __forceinline__ void apply_mask(float (&scores)[kM][kN][4], const BandMask& mask,
                                           int row, int key) {
  mask_ends(scores, mask, row, key);
  if (mask.limits_left()) mask_begins(scores, mask, row, key);
}

// Zeroes elements (16 kM keys, 8 kN queries) of pairs that do not see each other, whatever they
// hold. `key` and `row` are the coordinates of this lane's first element.
template <int kM, int kN>
__device__ __forceinline__ void zero_masked(float (&acc)[kM][kN][4], const BandMask& mask, int key,
                                            int row) {
  const auto zero = [&acc](int n, int e, auto hidden) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (hidden(16 * m + 8 * h)) acc[m][n][2 * h + e] = 0.f;
  };
  if (mask.end_key(row) - key < 16 * kM) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int end = mask.end_key(row + 8 * n + e) - key;
        zero(n, e, [end](int further) { return further >= end; });
      }
  }
  if (mask.first_key(row + 8 * kN - 7) > key) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int first = mask.first_key(row + 8 * n + e) - key;
        zero(n, e, [first](int further) { return further < first; });
      }
  }
}

}  // namespace flash_ext
