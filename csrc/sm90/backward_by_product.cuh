// The Hopper backward where dK and dV of 64 keys fill the registers of a warpgroup each (D 256):
// both consumers of a block have the same 64 keys and share the work by product, as the generic
// family does (sm80/backward_kernel.cuh), instead of by keys (backward_kernel.cuh, which tells the
// rest). Two blocks of a cluster share a tile of 128 keys: each sends the other its dS, and adds up
// half the columns of dQ for all 128. Alone they would add twice as much to dQ, and L2 would take
// longer for that than all products.
//
//   for each tile of queries:
//       values                                  keys
//       Sᵀ  = K Qᵀ                              dPᵀ = V dOᵀ
//       Pᵀ  = exp2(Sᵀ - lse)    -- shared -->   dSᵀ = Pᵀ (dPᵀ - delta)   -- to both of both blocks
//       dQ  = dS K of the tile before, a quarter of the columns each     | 128 keys
//       dV += Pᵀ dO                             dK += dSᵀ Q              | beside it dQ to storers
//
// The scores of the next tile begin when all this is done: shared memory has no room to move dQ
// while products of 64 columns read both operands from it. What one consumer computes or waits for,
// the products of the other cover.
#pragma once

#include <cstdint>

#include "core/gemm.h"
#include "core/mask.h"
#include "core/pipeline.h"
#include "core/softmax.h"
#include "ptx/barrier.h"
#include "ptx/bulk.h"
#include "ptx/cluster.h"
#include "ptx/proxy_fence.h"
#include "ptx/wgmma.h"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_keys.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/config.h"
#include "sm90/params.h"
#include "sm90/persistence.cuh"
#include "sm90/tile_io.cuh"

namespace flash_ext::sm90 {

enum class Role { kValues, kKeys };  // the gradient a consumer accumulates: dV or dK

template <bool kFirst, typename A, typename B>
__device__ __forceinline__ auto& pick(A& a, B& b) {
  if constexpr (kFirst)
    return a;
  else
    return b;
}

// Where a lane puts and finds its Pᵀ of a tile, k-block by k-block 32 places apart: in the rows of
// dSᵀ that its warp, of the keys' consumer, writes over them.
template <typename Config>
__device__ __forceinline__ uint4* exchange_place(typename Config::SharedStorage& smem, int buffer) {
  using DsTile = typename Config::DsTile;
  static_assert(DsTile::kSlabs == 1, "a warp's rows are one piece of memory, as large as its Pᵀ");
  const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize;
  return reinterpret_cast<uint4*>(smem.ds[buffer][0] + warp * 16 * DsTile::kLineBytes) +
         threadIdx.x % kWarpSize;
}

// Sends a warp's 16 rows of dSᵀ to the other block, and announces what comes from there.
template <typename Config>
__device__ __forceinline__ void send_ds(typename Config::SharedStorage& smem, RingPosition tile,
                                        int row) {
  using DsTile = typename Config::DsTile;
  const int stage = tile.stage(smem.ds_ring);
  const uint32_t other = block_of_cluster<Config>() ^ 1;
  const int begin = row * DsTile::kLineBytes;
  ptx::bulk_send(ptx::cluster_address(ptx::shared_address(smem.ds[stage][1]) + begin, other),
                 ptx::shared_address(smem.ds[stage][0]) + begin, 16 * DsTile::kLineBytes,
                 ptx::cluster_address(ptx::shared_address(&smem.ds_ring.full[stage]), other));
  tile.expect(smem.ds_ring, 16 * DsTile::kLineBytes);
}

// Gives dS back to the warps of both blocks that write it.
template <typename Config>
__device__ __forceinline__ void release_ds(typename Config::SharedStorage& smem,
                                           RingPosition tile) {
  tile.release(smem.ds_ring);
  tile.release_remote(smem.ds_ring, block_of_cluster<Config>() ^ 1);
}

// A consumer's walk: leaves dV or dK / scale (64, D). While the last product runs it calls
// `write_dv`.
template <typename Config, Role kRole, typename WriteDv>
__device__ __forceinline__ void accumulate_product(const BackwardParams& params,
                                                   typename Config::SharedStorage& smem,
                                                   RingPosition tiles, RingPosition& ring,
                                                   QueryWalk walk,
                                                   float (&gradient)[Config::kHeadDim / 2],
                                                   const WriteDv& write_dv) {
  using T = typename Config::Element;
  constexpr bool kValues = kRole == Role::kValues;
  constexpr int kConsumer = kValues ? 0 : 1;
  constexpr int kM = Config::kBlockM / 8;  // 8-query columns of Sᵀ
  const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x % kWarpgroupThreads / kWarpSize * 16;
  auto& score_ring = pick<kValues>(smem.q_ring, smem.dout_ring);
  auto& gradient_ring = pick<kValues>(smem.dout_ring, smem.q_ring);

  float s[4 * kM];  // Sᵀ (64 keys, kBlockM), then Pᵀ; or dPᵀ, then dSᵀ
  float dq[Config::kDqCols / 2];  // (64, kDqCols)
  uint32_t operand[1][kM / 2][4];  // Pᵀ or dSᵀ
  float2 subtract[kM];  // lse or delta of this lane's queries
  auto& scores = reinterpret_cast<float (&)[1][kM][4]>(s);

  const auto zero_unseen = [&] {  // with all it needs computed anew: registers are short
    const int first_key = read_field(at.first_key);
    const BandMask mask(params.shape, params.window);
    const Range whole =
        mask.template whole_query_tiles<Config::kBlockM>({first_key, first_key + Config::kBlockN});
    if (walk.tile < whole.begin || walk.tile >= whole.end)
      zero_masked(scores, mask, first_key + warp_row + lane / 4,
                  walk.tile * Config::kBlockM + lane % 4 * 2);
  };
  const auto multiply_scores = [&] {
    ring.wait_full(score_ring);
    uint32_t zero[1] = {0};
    ptx::pin(zero);  // not known to the compiler, so that no registers keep the steps' descriptors
    multiply_rows<Config>(s, (kValues ? smem.k : smem.v) + zero[0], 0,
                          pick<kValues>(smem.q, smem.dout)[ring.stage(score_ring)] + zero[0]);
  };
  const auto leave_dq = [&](RingPosition tile) {
#pragma unroll
    for (int part = 0; part < Config::kDqParts; ++part)
      stage_dq<Config>(smem, tile, kConsumer, part, dq);
  };

  const uint32_t bad_keys = take_out_bad_keys<Config>(smem, tiles, warp_row);
  if constexpr (!kValues) tiles.wait_full(smem.v_ring);
  multiply_scores();
  for (bool first = true;; first = false) {
    const RingPosition before{ring.count - 1};
    const int buffer = ring.stage(smem.ds_ring);  // of P, then dS
    fetch<true>(subtract, pick<kValues>(smem.lse, smem.delta)[ring.stage(score_ring)]);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if (!first) before.wait_full(smem.ds_ring);  // so P is never announced twice before it is met
    uint4* const exchange = exchange_place<Config>(smem, buffer);
    if constexpr (kValues) {
      exponentiate(scores, subtract, params.softmax_scale * kLog2E, bad_keys);
      zero_unseen();
      to_operand<T>(operand, scores);
      ring.wait_empty(smem.ds_ring);
#pragma unroll
      for (int k = 0; k < kM / 2; ++k)
        exchange[k * kWarpSize] = {operand[0][k][0], operand[0][k][1], operand[0][k][2],
                                   operand[0][k][3]};
      __syncwarp();
      ptx::barrier_arrive<kProbabilities, Config::kConsumerThreads>();
    } else {
      uint32_t p[1][kM / 2][4];
      ptx::barrier_sync<kProbabilities, Config::kConsumerThreads>();
#pragma unroll
      for (int k = 0; k < kM / 2; ++k) {
        const uint4 x = exchange[k * kWarpSize];
        p[0][k][0] = x.x;
        p[0][k][1] = x.y;
        p[0][k][2] = x.z;
        p[0][k][3] = x.w;
      }
      differentiate<T>(scores, p, subtract);
      zero_unseen();
      to_operand<T>(operand, scores);
      __syncwarp();  // every lane has its P
      stage_rows<typename Config::DsTile>(smem.ds[buffer][0], operand[0], warp_row);
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) send_ds<Config>(smem, ring, warp_row);
    }
    ring.release(score_ring);
    multiply_dq<Config>(dq, smem, first ? 0 : before.stage(smem.ds_ring), kConsumer);
    ring.wait_full(gradient_ring);
    add_product<Config>(gradient, operand,
                        pick<kValues>(smem.dout, smem.q)[ring.stage(gradient_ring)], !first);
    ptx::wgmma_wait<1>();
    ptx::pin(dq);
    if (!first) {
      release_ds<Config>(smem, before);
      leave_dq(before);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(gradient);
    ring.release(gradient_ring);
    walk = walk.next();
    ring = ring.next();
    if (walk.done()) break;
    multiply_scores();
  }
  const RingPosition last{ring.count - 1};
  last.wait_full(smem.ds_ring);
  multiply_dq<Config>(dq, smem, last.stage(smem.ds_ring), kConsumer);
  write_dv();
  ptx::wgmma_wait<0>();
  ptx::pin(dq);
  release_ds<Config>(smem, last);
  leave_dq(last);
}

// A consumer warpgroup.
template <typename Config, Role kRole>
__device__ __forceinline__ void consume_product(const BackwardKernelParams& params,
                                                typename Config::SharedStorage& smem) {
  const BackwardParams& problem = params.problem;
  RingPosition ring;  // of Q and dO
  for (RingPosition tiles;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
    if (at.tile == kNoTile) return;

    float gradient[Config::kHeadDim / 2];  // (64, D)
    const QueryWalk walk = QueryWalk::of<Config>(problem, at);
    const auto give_back = [&](Ring<1>& keys) {  // when the gradient has left it
      if (threadIdx.x % kWarpgroupThreads != 0) return;
      ptx::bulk_wait_read<0>();
      tiles.arrive_empty(keys);
    };
    const auto write_dv = [&] {  // dS of all tiles is there, so V is read
      if constexpr (kRole == Role::kValues)
        write_gradient<Config>(problem.dv, params.dv, problem.dv_accum, problem.shape.head_dim_v,
                               problem, at, smem.v, 0, gradient);
    };
    tiles.wait_full(smem.k_ring);
    if (walk.done()) {
      tiles.wait_full(smem.v_ring);
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) gradient[i] = 0.f;
      write_dv();
    } else {
      accumulate_product<Config, kRole>(problem, smem, tiles, ring, walk, gradient, write_dv);
    }
    ptx::barrier_sync<kAllConsumers, Config::kConsumerThreads>();  // both have read K
    if constexpr (kRole == Role::kValues) {
      give_back(smem.v_ring);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) gradient[i] *= problem.softmax_scale;
      write_gradient<Config>(problem.dk, params.dk, problem.dk_accum, problem.shape.head_dim,
                             problem, at, smem.k, 1, gradient);
      give_back(smem.k_ring);
    }
    tiles.release(smem.tile_ring);
  }
}

}  // namespace flash_ext::sm90
