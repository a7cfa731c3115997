// Tiles of an added 16-bit bias in shared memory, queries down and keys across, whose 16x16 blocks
// are the fragments of scores: as they are for queries down, transposed for keys down.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/bias.h"
#include "core/element.h"
#include "core/layout.h"
#include "core/softmax.h"
#include "core/table.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"

namespace flash_ext {

// Enqueues kRows queries x kCols keys from `at` on, with kThreads threads of which this is number
// `thread`. Of both, `rows` and `keys` are left: what is past the end arrives as zeros. The caller
// commits.
template <typename Tile, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_bias_tile(uint32_t tile, const TableView& bias,
                                               const TablePlace& at, int rows, int keys,
                                               int thread) {
  constexpr int kStep = kThreads / Tile::kRowChunks;  // rows
  static_assert(kThreads % Tile::kRowChunks == 0 && kRows % kStep == 0, "equal shares of threads");
  const int chunk = thread % Tile::kRowChunks;
  const int left = 2 * max(0, min(min(keys, kCols) - chunk * kChunk, kChunk));  // bytes
  const int first = thread / Tile::kRowChunks;
  const char* source = static_cast<const char*>(bias.data) +
                       2 * (table_offset(bias, at) + first * bias.row_stride + chunk * kChunk);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int row = first + i * kStep;
    ptx::cp_async_16(tile + Tile::offset(row, chunk), source, row < rows ? left : 0);
    source += 2 * kStep * bias.row_stride;
  }
}

// Biases up to this leave scores fine enough for P not to exceed 1 by rounding.
constexpr float kPlainBias = 16384.f;

// Brings scores (16 kM, 8 kN) to units of log2(e) and adds the bias, of type T. `rows` are left
// from this lane's first one on; in the backward pass those past the end see nothing, as in
// add_bias. True if nothing is masked and all biases are plain; the warp agrees.
template <typename T, Axes kAxes, typename Tile, int kM, int kN>
__device__ __forceinline__ bool add_bias_tile(float (&scores)[kM][kN][4], float units,
                                              const LaneOffsets<Tile>& blocks, int rows) {
  using Offset = FragmentOffset<kAxes>;
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const auto for_each_block = [&](auto use) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kN / 2; ++k) {
        uint32_t pairs[4];
        if constexpr (kAxes == Axes::kQueriesDown)
          ptx::ldmatrix_x4(pairs, blocks.at(m, k));
        else
          ptx::ldmatrix_x4_trans(pairs, blocks.at(k, m));
        use(m, k, pairs);
      }
  };
  const auto add = [&](auto sum) {
    for_each_block([&](int m, int k, const uint32_t (&pairs)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = Element<T>::unpack(pairs[i]);
        float* const x = &scores[m][2 * k + i / 2][2 * (i % 2)];
        x[0] = sum(x[0] * units, pair.x);
        x[1] = sum(x[1] * units, pair.y);
      }
    });
  };

  uint32_t most = 0;  // largest magnitudes
  for_each_block([&](int, int, const uint32_t (&pairs)[4]) {
#pragma unroll
    for (const uint32_t& pair : pairs) {
      const Pair more = __hmax2(reinterpret_cast<const Pair&>(most),
                                __habs2(reinterpret_cast<const Pair&>(pair)));
      most = reinterpret_cast<const uint32_t&>(more);
    }
  });
  const float2 largest = Element<T>::unpack(most);
  const bool inside = Offset::row(kM - 1, kN - 1, 3) < rows || kAxes == Axes::kQueriesDown;
  if (__all_sync(0xffffffffu, inside && fmaxf(largest.x, largest.y) <= kPlainBias)) {
    add([](float x, float bias) { return fmaf(bias, kLog2E, x); });
    return true;
  }
  add(biased);
  if constexpr (kAxes == Axes::kKeysDown) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (Offset::row(0, n, i) >= rows) {
#pragma unroll
          for (int m = 0; m < kM; ++m) scores[m][n][i] = -INFINITY;
        }
  }
  return false;
}

}  // namespace flash_ext
