// One tile of query rows of the backward pass: P again, and from it dV, dK and dSᵀ
// (sm80/backward_kernel.cuh tells the whole).
#pragma once

#include "core/bias.h"
#include "core/dropout.h"
#include "core/epilogue.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/packing.h"
#include "core/scheduler.h"
#include "core/score.h"
#include "core/softmax.h"
#include "core/table.h"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/math.h"
#include "ptx/shared.h"
#include "sm80/config.h"

namespace flash_ext::sm80 {

enum class Role { kValues, kKeys, kBoth };  // the gradient a warp accumulates: dV, dK

// Named barriers of pairs of warps: number 0 is __syncthreads.
__device__ __forceinline__ int pair_barrier(int slice) { return 1 + slice; }

// Where this thread block and this warp stand. Cheap enough to find out again where it is needed.
template <typename Config>
struct BackwardPlace {
  TileCoordinate at;  // key tile, key head, batch entry
  int first_key;      // of the block

  __device__ __forceinline__ explicit BackwardPlace(const typename Config::SharedStorage& smem) {
    at = {static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&smem.tile))),
          static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&smem.head))),
          static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&smem.batch)))};
    first_key = at.tile * Config::kBlockN;
  }
};

template <typename Config>
__device__ __forceinline__ int slice_of_warp() {
  return threadIdx.x / kWarpSize % Config::kSlices;
}
template <typename Config>
__device__ __forceinline__ bool in_first_half() {
  return threadIdx.x < Config::kThreads / 2;
}

// Sᵀ = K Qᵀ or dPᵀ = V dOᵀ of this warp's slice of keys: (16 kM keys, 8 kN queries).
template <typename Config, int kM, int kN>
__device__ __forceinline__ void multiply_slice(float (&acc)[kM][kN][4], const char* keys,
                                               const char* queries) {
  using KTile = typename Config::KTile;
  const int lane = threadIdx.x % kWarpSize;
  const int slice_key = slice_of_warp<Config>() * Config::kSliceKeys;
  clear(acc);
  constexpr int kUnroll =
      Config::kFull ? kFullBackwardUnroll<Config::kHeadDim> : kBackwardUnroll<Config::kHeadDim>;
  gemm_rows_rows<typename Config::Element, Config::kHeadDim / 16, kUnroll>(
      acc,
      lane_offsets<KTile, RowFirst>(ptx::shared_address(keys) + slice_key * KTile::kRowBytes, lane),
      lane_offsets<typename Config::QTile, ChunkFirst>(ptx::shared_address(queries), lane));
}

// The same for this warp's slice of keys and a query tile.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void zero_masked_slice(float (&acc)[kM][kN][4],
                                                  const BackwardParams& params,
                                                  const typename Config::SharedStorage& smem,
                                                  int tile) {
  const int lane = threadIdx.x % kWarpSize;
  const int key = BackwardPlace<Config>(smem).first_key +
                  slice_of_warp<Config>() * Config::kSliceKeys + lane / 4;
  zero_masked(acc, BandMask(shape_of<Config>(params, smem), params.window), key,
              tile * Config::kBlockM + lane % 4 * 2);
}

// Whether any query of a tile sees any of this warp's keys. The vote tells the compiler that lanes
// agree: it spares registers.
template <typename Config>
__device__ __forceinline__ bool sees_slice(const BackwardParams& params,
                                           const typename Config::SharedStorage& smem, int tile) {
  const int key =
      BackwardPlace<Config>(smem).first_key + slice_of_warp<Config>() * Config::kSliceKeys;
  const BandMask mask(shape_of<Config>(params, smem), params.window);
  return __any_sync(0xffffffffu,
                    mask.touches({tile * Config::kBlockM, (tile + 1) * Config::kBlockM},
                                 {key, key + Config::kSliceKeys}));
}

// Where this lane's first element of a tile's Sᵀ lies; `head` is in the flat order (batch, head).
template <typename Config>
__device__ __forceinline__ TablePlace table_place(const BackwardParams& params,
                                                  const typename Config::SharedStorage& smem,
                                                  int64_t head, int tile) {
  const BackwardPlace<Config> place(smem);
  const int lane = threadIdx.x % kWarpSize;
  return {place.at.batch, static_cast<int>(head - place.at.batch * params.shape.heads_q),
          tile * Config::kBlockM + lane % 4 * 2,
          place.first_key + slice_of_warp<Config>() * Config::kSliceKeys + lane / 4};
}

// P of a biased score and what it subtracts, both in units of log2(e): 0 where the bias masks,
// never above 1 by rounding, which is coarse for the lowest finite biases.
__device__ __forceinline__ float biased_probability(float score, float subtract) {
  const float exponent = score - subtract;
  return score == -INFINITY ? 0.f : ptx::exp2_approx(exponent > 0.f ? 0.f : exponent);
}

// The gradient of a score: P's sign tells whether it is dropped.
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, float keep_scale) {
  return fabsf(p) * fmaf(dp, __float_as_int(p) < 0 ? 0.f : keep_scale, -delta);
}

// One tile of query rows, the even or odd one of the walk: adds this warp's share to `gradients`
// (16 kM keys, 8 kD), dV and then dK by role, and puts dSᵀ into smem.ds[parity]. `head` is counted
// in the flat order (batch, head).
template <typename Config, Role kRole, int kGradients, int kM, int kD>
__device__ __forceinline__ void add_query_tile(const BackwardParams& params,
                                               typename Config::SharedStorage& smem, int64_t head,
                                               int tile, int parity, bool masked,
                                               float (&gradients)[kGradients][kM][kD][4]) {
  using T = typename Config::Element;
  using QTile = typename Config::QTile;
  constexpr int kN = Config::kBlockM / 8;  // 8-query columns of Sᵀ
  const int lane = threadIdx.x % kWarpSize;
  const int slice = slice_of_warp<Config>();
  const int column = lane % 4 * 2;
  const int stage = parity % Config::kStages;
  const char* const q = smem.q[stage];
  const char* const dout = smem.dout[stage];

  constexpr bool kValues = kRole != Role::kKeys;
  constexpr bool kKeys = kRole != Role::kValues;

  if (masked && !sees_slice<Config>(params, smem, tile)) {  // other warps' keys are seen
    const uint32_t zero[kM][kN / 2][4] = {};
    if constexpr (kKeys)
      stage_operand<typename Config::DsTile>(ptx::shared_address(smem.ds[parity]), zero,
                                             slice * Config::kSliceKeys, lane);
    return;
  }

  Accumulator<kM, kN> s;   // Sᵀ (16 kM keys, 8 kN queries)
  Accumulator<kM, kN> ds;  // dPᵀ, then dSᵀ
  if constexpr (kValues) multiply_slice<Config>(s, smem.k, q);
  if constexpr (kKeys) multiply_slice<Config>(ds, smem.v, dout);

  uint32_t p[kM][kN / 2][4];          // Pᵀ = exp2(Sᵀ - lse) as A fragments
  uint32_t cap_slopes[kM][kN / 2][4];  // the derivative of the soft cap, likewise
  const Modifiers& modifiers = params.modifiers;
  bool hides = false;
  if constexpr (kValues) {
    float units = params.softmax_scale * kLog2E;  // what the scores are still to be multiplied by
    if constexpr (Config::kFull) {
      units = cap_scores<T>(s, cap_slopes, modifiers.softcap, params.softmax_scale);
      units = add_biases<Axes::kKeysDown, Config::kBiasTile>(
          s, units, modifiers, shape_of<Config>(params, smem),
          table_place<Config>(params, smem, head, tile),
          [&] {
            return lane_offsets<typename Config::BiasTile, ChunkFirst, Config::kSliceKeys / 16>(
                bias_tile<Config>(smem, stage), lane, slice * Config::kSliceKeys / 16);
          },
          hides);
    }
    const auto exponentiate = [&](auto probability) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 lse = *reinterpret_cast<const float2*>(&smem.lse[stage][8 * n + column]);
        const float subtract[2] = {softmax_exponent(lse.x), softmax_exponent(lse.y)};
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][n][i] = probability(s[m][n][i], subtract[i % 2]);
      }
    };
    if (hides)  // then units are 1
      exponentiate(biased_probability);
    else
      exponentiate([units](float score, float subtract) {
        return ptx::exp2_approx(fmaf(score, units, -subtract));
      });
    if (masked) zero_masked_slice<Config>(s, params, smem, tile);
    to_operand<T>(p, s);
    if (Config::kFull && modifiers.drop_threshold != 0) {
      const TablePlace at = table_place<Config>(params, smem, head, tile);
      Dropout(modifiers, head, lane).mark_transposed(p, at.row - column, at.key - lane / 4);
    }
  }

  // Two warps meet here: P goes from one to the other, times the derivative of the soft cap. The
  // gradient of the bias comes before the cap: for its sake they go apart.
  const bool capped = Config::kFull && modifiers.softcap > 0.f;
  const bool apart = kRole == Role::kBoth || params.dbias.data != nullptr;
  auto& exchange = smem.p[slice];
  if constexpr (!kKeys) {
    const auto send = [&](uint4(*blocks)[kWarpSize], const uint32_t (&values)[kM][kN / 2][4]) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int k = 0; k < kN / 2; ++k) {
          const auto& value = values[m][k];
          blocks[m * kN / 2 + k][lane] = {value[0], value[1], value[2], value[3]};
        }
    };
    if (capped && !apart) {
      multiply<T>(cap_slopes, p);  // the sign of P tells still what is dropped
      send(exchange, cap_slopes);
    } else {
      send(exchange, p);
      if (capped) send(exchange + Config::kSliceBlocks, cap_slopes);
    }
    if (Config::kFull && lane == 0) smem.hides[slice] = hides;
    ptx::barrier_arrive<2 * kWarpSize>(pair_barrier(slice));
  }
  if constexpr (!kValues) {
    ptx::barrier_sync<2 * kWarpSize>(pair_barrier(slice));
    if constexpr (Config::kFull) hides = smem.hides[slice];
  }

  if constexpr (kKeys) {  // dSᵀ = Pᵀ (dPᵀ - delta)
    const auto differentiate = [&](auto gradient) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(&smem.delta[stage][8 * n + column]);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint2 words;  // rows l / 4 and l / 4 + 8
          if constexpr (kValues)
            words = {p[m][n / 2][n % 2 * 2], p[m][n / 2][n % 2 * 2 + 1]};
          else
            words = reinterpret_cast<const uint2*>(&exchange[m * kN / 2 + n / 2][lane])[n % 2];
          const float2 top = Element<T>::unpack(words.x), bottom = Element<T>::unpack(words.y);
          ds[m][n][0] = gradient(top.x, ds[m][n][0], delta.x);
          ds[m][n][1] = gradient(top.y, ds[m][n][1], delta.y);
          ds[m][n][2] = gradient(bottom.x, ds[m][n][2], delta.x);
          ds[m][n][3] = gradient(bottom.y, ds[m][n][3], delta.y);
        }
      }
    };
    const float keep = modifiers.keep_scale;
    if (Config::kFull && hides)
      differentiate([keep](float p, float dp, float delta) {
        return p == 0.f ? 0.f : score_gradient(p, dp, delta, keep);  // dp may be NaN there
      });
    else if (Config::kFull && modifiers.drop_threshold != 0)
      differentiate(
          [keep](float p, float dp, float delta) { return score_gradient(p, dp, delta, keep); });
    else
      differentiate([](float p, float dp, float delta) { return p * (dp - delta); });
    if (masked) zero_masked_slice<Config>(ds, params, smem, tile);
    if constexpr (Config::kFull) {
      if (params.dbias.data != nullptr) {
        const TablePlace at = table_place<Config>(params, smem, head, tile);
        const Shape& shape = shape_of<Config>(params, smem);
        if (params.dbias_fixed.measures)
          measure(ds, params.dbias_fixed.largest, lane);
        else if (params.dbias_is_sum)
          add_bias_gradient(ds, params.dbias, params.dbias_fixed, shape, at, lane);
        else
          store_bias_gradient(ds, params.dbias, shape, at);
      }
      if (capped && apart) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            uint2 words;
            if constexpr (kValues)
              words = {cap_slopes[m][n / 2][n % 2 * 2], cap_slopes[m][n / 2][n % 2 * 2 + 1]};
            else
              words = reinterpret_cast<const uint2*>(
                  &exchange[Config::kSliceBlocks + m * kN / 2 + n / 2][lane])[n % 2];
            const float2 top = Element<T>::unpack(words.x), bottom = Element<T>::unpack(words.y);
            ds[m][n][0] *= top.x;
            ds[m][n][1] *= top.y;
            ds[m][n][2] *= bottom.x;
            ds[m][n][3] *= bottom.y;
          }
      }
    }
  }

  uint32_t operand[kM][kN / 2][4];
  if constexpr (kKeys) {
    to_operand<T>(operand, ds);
    stage_operand<typename Config::DsTile>(ptx::shared_address(smem.ds[parity]), operand,
                                           slice * Config::kSliceKeys, lane);
  }
  if (Config::kFull && kValues && modifiers.drop_threshold != 0) drop_marked(p);
  if constexpr (kValues)  // dV += Pᵀ dO
    gemm_registers_columns<T>(gradients[0], p,
                              lane_offsets<QTile, RowFirst>(ptx::shared_address(dout), lane));
  if constexpr (kKeys)  // dK += dSᵀ Q
    gemm_registers_columns<T>(gradients[kGradients - 1], operand,
                              lane_offsets<QTile, RowFirst>(ptx::shared_address(q), lane));
}

}  // namespace flash_ext::sm80
