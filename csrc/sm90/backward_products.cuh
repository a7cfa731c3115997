// What a consumer of the Hopper backward does with one tile of queries: its products, and P and dS
// of a lane's scores. Scores are (64 keys, kBlockM queries), 8 kM queries.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/element.h"
#include "core/wgmma_layout.h"
#include "ptx/math.h"
#include "ptx/shared.h"
#include "ptx/wgmma.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/config.h"

namespace flash_ext::sm90 {

// Sᵀ = K Qᵀ or dPᵀ = V dOᵀ: 64 rows of a tile of keys, from `key` on, and a tile of queries.
template <typename Config>
__device__ __forceinline__ void multiply_rows(float (&result)[Config::kBlockM / 2],
                                              const char* keys, int key, const char* queries) {
  using KTile = typename Config::KTile;
  const WgmmaOperand<KTile, ptx::Major::kK> a(ptx::shared_address(keys) + key * KTile::kLineBytes);
  const WgmmaOperand<typename Config::QTile, ptx::Major::kK> b(ptx::shared_address(queries));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step)
    ptx::wgmma<typename Config::Element, Config::kBlockM, ptx::Major::kK, ptx::Major::kK>(
        result, a.at(step), b.at(step), step > 0);
  ptx::wgmma_commit();
}

// dV += Pᵀ dO or dK += dSᵀ Q: (64, D).
template <typename Config>
__device__ __forceinline__ void add_product(float (&result)[Config::kHeadDim / 2],
                                            const uint32_t (&operand)[1][Config::kBlockM / 16][4],
                                            const char* queries, bool accumulate) {
  const WgmmaOperand<typename Config::QTile, ptx::Major::kMN> b(ptx::shared_address(queries));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockM / 16; ++step)
    ptx::wgmma<typename Config::Element, Config::kHeadDim, ptx::Major::kMN>(
        result, operand[0][step], b.at(step), accumulate || step > 0);
  ptx::wgmma_commit();
}

// The number of a consumer's piece of dQ, in AccumulatorTile.
template <typename Config>
__device__ __forceinline__ int dq_piece(int consumer) {
  return block_of_cluster<Config>() * Config::kConsumers + consumer;
}

// dQ = dS K, this consumer's piece: (64, kDqCols), dS of all keys of the block in one of its
// buffers.
template <typename Config>
__device__ __forceinline__ void multiply_dq(float (&dq)[Config::kDqCols / 2],
                                            const typename Config::SharedStorage& smem, int buffer,
                                            int consumer) {
  using KTile = typename Config::KTile;
  using DsTile = typename Config::DsTile;
  constexpr ptx::Major kAcrossK = ptx::Major::kMN;
  const int piece = Config::kDqByRows ? 0 : dq_piece<Config>(consumer);
  const WgmmaOperand<DsTile, kAcrossK> a(ptx::shared_address(smem.ds[buffer][0]) +
                                         (Config::kDqByRows ? consumer : 0) * DsTile::kSlabBytes);
  const WgmmaOperand<KTile, kAcrossK> b(ptx::shared_address(smem.k) +
                                        piece * (Config::kDqCols / 64) * KTile::kSlabBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step)
    ptx::wgmma<typename Config::Element, Config::kDqCols, kAcrossK, kAcrossK>(dq, a.at(step),
                                                                              b.at(step), step > 0);
  if constexpr (Config::kBlocks > 1) {  // dS and K of the other block's keys
    using OtherKTile = typename Config::OtherKTile;
    const WgmmaOperand<DsTile, kAcrossK> other_a(ptx::shared_address(smem.ds[buffer][1]));
    const WgmmaOperand<OtherKTile, kAcrossK> other_b(ptx::shared_address(smem.k) + KTile::kBytes +
                                                     consumer * OtherKTile::kSlabBytes);
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step)
      ptx::wgmma<typename Config::Element, Config::kDqCols, kAcrossK, kAcrossK>(
          dq, other_a.at(step), other_b.at(step), true);
  }
  ptx::wgmma_commit();
}

// lse or delta of this lane's queries; kNow keeps the loads where they stand, before a wait.
template <bool kNow, int kM>
__device__ __forceinline__ void fetch(float2 (&x)[kM], const float* rows) {
#pragma unroll
  for (int n = 0; n < kM; ++n) {
    x[n] = *reinterpret_cast<const float2*>(&rows[8 * n + threadIdx.x % 4 * 2]);
    if (kNow) ptx::pin(reinterpret_cast<float (&)[2]>(x[n]));
  }
}

// Pᵀ = exp2(units Sᵀ - lse); NaN for keys whose bits 0 and 8 of `bad_keys` are set, this lane's
// two.
template <int kM>
__device__ __forceinline__ void exponentiate(float (&scores)[1][kM][4], const float2 (&lse)[kM],
                                             float units, uint32_t bad_keys) {
#pragma unroll
  for (int n = 0; n < kM; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scores[0][n][i] =
          ptx::exp2_approx(fmaf(scores[0][n][i], units, i % 2 == 0 ? -lse[n].x : -lse[n].y));
  if (bad_keys == 0) return;
#pragma unroll
  for (int n = 0; n < kM; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (bad_keys >> i / 2 * 8 & 1) scores[0][n][i] = NAN;
}

// dSᵀ = Pᵀ (dPᵀ - delta), P as the operand it was rounded to.
template <typename T, int kM>
__device__ __forceinline__ void differentiate(float (&gradients)[1][kM][4],
                                              const uint32_t (&p)[1][kM / 2][4],
                                              const float2 (&delta)[kM]) {
#pragma unroll
  for (int n = 0; n < kM; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = Element<T>::unpack(p[0][n / 2][n % 2 * 2 + h]);
      gradients[0][n][2 * h] = pair.x * (gradients[0][n][2 * h] - delta[n].x);
      gradients[0][n][2 * h + 1] = pair.y * (gradients[0][n][2 * h + 1] - delta[n].y);
    }
}

}  // namespace flash_ext::sm90
