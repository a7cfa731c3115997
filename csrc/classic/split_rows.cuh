// One query tile with its rows split over the warps, as in FlashAttention 2 (Dao 2023, section
// 3.3): each warp multiplies rows of its own by all keys, so that maxima, sums and O are its own
// too, and warps meet for loads only. A `Softmax` keeps m and l and turns scores into P.
#pragma once

#include "classic/tile.h"
#include "core/softmax.h"

namespace flash_ext::classic {

// Where a block stands. Last tiles first: under a causal mask they see the most keys.
template <typename T>
struct QueryPlace {
  int tile;
  Head head;
  Range rows;
  int key_tiles;    // that any of the rows sees
  int whole_tiles;  // of these, those that need no mask

  __device__ __forceinline__ explicit QueryPlace(const Params& params)
      : tile(tile_count(params) - 1 - static_cast<int>(blockIdx.x % tile_count(params))),
        head(params.shape, blockIdx.x / tile_count(params)),
        rows(query_rows<T>(params.shape, tile)) {
    const BandMask mask(params.shape, params.window);
    key_tiles = mask.template touched_key_tiles<T::kBlockN>(rows).end;
    whole_tiles = mask.template whole_key_tiles<T::kBlockN>(rows).end;
  }

  static __device__ __forceinline__ int tile_count(const Params& params) {
    return ceil_div(static_cast<int>(params.shape.seqlen_q), T::kBlockM);
  }
};

template <typename T, int kStages>
struct RowStorage {
  alignas(128) char q[T::QTile::kBytes];
  alignas(128) char k[kStages][T::KTile::kBytes];
  alignas(128) char v[kStages][T::KTile::kBytes];
  QueryPlace<T> place;  // here and not in registers, which O and S fill
};

// The largest score of row (m, h) of a tile, for all lanes of its quad.
template <int kM, int kN>
__device__ __forceinline__ float largest(const float (&scores)[kM][kN][4], int m, int h) {
  float top = -INFINITY;
#pragma unroll
  for (int n = 0; n < kN; ++n)
    top = fmaxf(top, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
  return quad_max(top);
}

// Turns row (m, h) into exp2(x - max); this lane's share of their sum. A row that sees no key
// subtracts 0 from its -inf.
template <int kM, int kN>
__device__ __forceinline__ float exponentiate(float (&scores)[kM][kN][4], int m, int h, float max) {
  const float reference = max == -INFINITY ? 0.f : max;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 2 * h; i < 2 * h + 2; ++i) {
      scores[m][n][i] = ptx::exp2_approx(scores[m][n][i] - reference);
      sum += scores[m][n][i];
    }
  return sum;
}

template <int kM, int kN>
__device__ __forceinline__ void scale_row(float (&fragments)[kM][kN][4], int m, int h,
                                          float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    fragments[m][n][2 * h] *= factor;
    fragments[m][n][2 * h + 1] *= factor;
  }
}

// O stays unnormalised and is divided by l once, at the end.
template <int kM>
struct DeferredSoftmax {
  float max[kM][2];
  float sum[kM][2];  // of this lane's columns

  __device__ __forceinline__ DeferredSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[m][h] = -INFINITY;
        sum[m][h] = 0.f;
      }
  }

  // Turns a tile of raw scores (16 kM, 8 kN) into P and brings O (16 kM, 8 kD), m and l to it.
  // `units` are the exponent units of a score, scale * log2(e).
  template <int kN, int kD>
  __device__ __forceinline__ void step(float (&scores)[kM][kN][4], float (&out)[kM][kD][4],
                                       float units) {
    scale(scores, units);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float new_max = fmaxf(max[m][h], largest(scores, m, h));
        // With nothing seen O and l are 0, and any finite factor does.
        const float keep = new_max == -INFINITY ? 1.f : ptx::exp2_approx(max[m][h] - new_max);
        sum[m][h] = keep * sum[m][h] + exponentiate(scores, m, h, new_max);
        max[m][h] = new_max;
        scale_row(out, m, h, keep);
      }
  }

  template <int kD>
  __device__ __forceinline__ void finish(float (&out)[kM][kD][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = quad_sum(sum[m][h]);
        scale_row(out, m, h, total == 0.f ? 0.f : 1.f / total);
      }
  }
};

// The same with the softmax of the fast kernels (core/softmax.h): m follows the true maximum only
// when that is 2^8 ahead, so that O is hardly ever rescaled, and the scale is part of the exponent.
template <int kM>
struct LazySoftmax {
  OnlineSoftmax<kM> state;

  __device__ __forceinline__ LazySoftmax() { state.clear(); }

  template <int kN, int kD>
  __device__ __forceinline__ void step(float (&scores)[kM][kN][4], float (&out)[kM][kD][4],
                                       float units) {
    state.step(scores, out, units);
  }

  template <int kD>
  __device__ __forceinline__ void finish(float (&out)[kM][kD][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float lse;
        scale_row(out, m, h, state.finish(m, h, -INFINITY, lse));
      }
  }
};

// O of one query tile. With two stages the next tile of K and V is loaded beside the present one.
template <typename T, template <int> class Softmax, int kStages>
__device__ __forceinline__ void attend_rows(const Params& params, RowStorage<T, kStages>& smem) {
  constexpr int kWarpRows = T::kBlockM / T::kWarps;
  constexpr int kM = kWarpRows / 16;
  using KTile = typename T::KTile;
  static_assert(kWarpRows % 16 == 0, "a warp owns whole fragments");
  static_assert(kStages == 1 || kStages == 2, "at most one tile is loaded ahead");

  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * kWarpRows;
  if (threadIdx.x == 0) smem.place = QueryPlace<T>(params);
  __syncthreads();

  const auto load_tile = [&](int tile) {
    const Head& head = smem.place.head;
    load_keys<T>(params, params.k, head, tile, smem.k[tile % kStages]);
    load_keys<T>(params, params.v, head, tile, smem.v[tile % kStages]);
  };
  Softmax<kM> softmax;
  Accumulator<kM, T::kHeadDim / 8> out;  // (kWarpRows, D)
  clear(out);
  int key_tile = smem.place.key_tiles - 1;  // the last first, so that masks come first
  if (key_tile >= 0) {
    load_queries<T>(params, smem.place.head, smem.place.tile, smem.q);
    if (kStages == 2) load_tile(key_tile);
  }
  for (; key_tile >= 0; --key_tile) {
    const int stage = key_tile % kStages;
    if (kStages == 1) load_tile(key_tile);
    wait_for_loads();  // and nobody still reads the other stage
    if (kStages == 2 && key_tile > 0) load_tile(key_tile - 1);

    Accumulator<kM, T::kBlockN / 8> scores;  // (kWarpRows, kBlockN)
    multiply_scores<T>(scores, smem.q, warp_row, smem.k[stage], 0, lane);
    if (key_tile >= smem.place.whole_tiles)
      mask_ends(scores, BandMask(params.shape, params.window),
                smem.place.rows.begin + warp_row + lane / 4, key_tile * T::kBlockN + lane % 4 * 2);
    softmax.step(scores, out, params.softmax_scale * kLog2E);

    uint32_t p[kM][T::kBlockN / 16][4];  // (kWarpRows, kBlockN) as A fragments
    to_operand<Bf16>(p, scores);
    gemm_registers_columns<Bf16>(
        out, p, lane_offsets<KTile, RowFirst>(ptx::shared_address(smem.v[stage]), lane));
    if (kStages == 1) __syncthreads();  // nobody still reads the tile
  }
  softmax.finish(out);
  __syncwarp();  // every lane has read the rows of Q that become those of O
  write_rows<T>(params, smem.place.head, smem.place.rows.begin, out, smem.q, warp_row, lane);
}

}  // namespace flash_ext::classic
