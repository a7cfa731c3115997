// NaN and infinity in shared tiles. A masked product is 0 * v, which must be 0 even if v is not
// finite; tensor cores say NaN. These rare cases are found and taken out here.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/layout.h"
#include "core/mask.h"
#include "ptx/shared.h"

namespace flash_ext {

// Whether this thread's part of a shared tile holds NaN or infinity.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ bool meets_nonfinite(uint32_t smem_tile) {
  uint32_t bad = 0;
  for (int byte = threadIdx.x * kChunkBytes; byte < Tile::kBytes; byte += kThreads * kChunkBytes) {
    const uint4 chunk = ptx::load_shared_v4(smem_tile + byte);
    bad |= nonfinite_halves<T>(chunk.x) | nonfinite_halves<T>(chunk.y) |
           nonfinite_halves<T>(chunk.z) | nonfinite_halves<T>(chunk.w);
  }
  return bad != 0;
}

// Sets NaN and infinity in a shared tile to zero. Collective over kThreads threads, of which this
// is number `thread`; they meet before and after.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ void zero_nonfinite(uint32_t smem_tile, int thread) {
  for (int byte = thread * 4; byte < Tile::kBytes; byte += kThreads * 4) {
    const uint32_t pair = ptx::load_shared_u32(smem_tile + byte);
    ptx::store_shared_u32(smem_tile + byte, pair & ~nonfinite_halves<T>(pair));
  }
}

// The same; `found` is told the rows that it was taken out of. Each thread looks through its chunks
// for the largest exponent first, and only then, if ever, at their elements.
template <typename T, typename Tile, int kThreads, typename Found>
__device__ __forceinline__ void take_out_nonfinite(uint32_t smem_tile, int thread,
                                                   const Found& found) {
  constexpr int kStep = kThreads * kChunkBytes;
  static_assert(Tile::kBytes % kStep == 0, "every thread has as many chunks");
  uint32_t largest = 0;
#pragma unroll
  for (int byte = 0; byte < Tile::kBytes; byte += kStep) {
    const uint4 chunk = ptx::load_shared_v4(smem_tile + thread * kChunkBytes + byte);
    for (uint32_t word : {chunk.x, chunk.y, chunk.z, chunk.w})
      largest = __vmaxu2(largest, word & Element<T>::kExponentMask);
  }
  if (nonfinite_halves<T>(largest) == 0) return;
#pragma unroll 1
  for (int byte = thread * kChunkBytes; byte < Tile::kBytes; byte += kStep) {
    const uint4 chunk = ptx::load_shared_v4(smem_tile + byte);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    const int row = byte % Tile::kSlabBytes / Tile::kLineBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bad = nonfinite_halves<T>(words[i]);
      if (bad == 0) continue;
      ptx::store_shared_u32(smem_tile + byte + 4 * i, words[i] & ~bad);
      found(row);
    }
  }
}

// Whether this lane's fragments hold NaN or infinity.
template <int kM, int kN>
__device__ __forceinline__ bool has_nonfinite(const float (&acc)[kM][kN][4]) {
  float zero[4] = {};  // chains that hide each other's latency
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) zero[i] = fmaf(acc[m][n][i], 0.f, zero[i]);
  return (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0.f;
}

// Adds the NaN and infinity of a V tile (keys, dims) to the rows of O (16 kM, 8 kD) that see their
// keys, and to no other. `row` is this lane's first row, `first_key` the tile's first key.
template <typename T, typename Tile, int kKeys, typename Mask, int kM, int kD>
__device__ __forceinline__ void spread_nonfinite(float (&out)[kM][kD][4], const Mask& mask,
                                                 uint32_t v_tile, int row, int first_key,
                                                 int lane) {
#pragma unroll 1
  for (int key = 0; key < kKeys; ++key)
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      const uint32_t pair = ptx::load_shared_u32(v_tile + Tile::offset(key, d) + lane % 4 * 4);
      if (nonfinite_halves<T>(pair) == 0) continue;
      const float2 bad = Element<T>::unpack(pair & nonfinite_halves<T>(pair));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (mask.sees(row + 16 * m + 8 * h, first_key + key)) {
            out[m][d][2 * h] += bad.x;
            out[m][d][2 * h + 1] += bad.y;
          }
    }
}

}  // namespace flash_ext
