// Backward pass on Hopper: FlashAttention-2's algorithm 2 (Dao 2023) transposed, with the division
// of labour of FlashAttention-3 (Shah et al. 2024) on TMA and wgmma.
//
//   one block: takes tile after tile of 128 keys of one key head, 64 for each of two consumer
//   warpgroups, and with each walks over the query heads of the group and their tiles of kBlockM
//   query rows that see the keys
//   producer: loads K and V once for each walk, then Q and dO, and beside them lse and delta
//   storers: add dQ to an fp32 workspace, by bulk reductions from shared memory
//   consumer, for each tile of queries:
//       Sᵀ  = K Qᵀ          wgmma, both from shared memory
//       dPᵀ = V dOᵀ         wgmma, both from shared memory     | beside it Pᵀ = exp2(Sᵀ - lse)
//       dV += Pᵀ dO         wgmma, Pᵀ from registers           | beside it dSᵀ = Pᵀ (dPᵀ - delta)
//       dK += dSᵀ Q         wgmma, dSᵀ from registers          | beside it dQ to its storer
//       of the tile before: dQ = dS K, wgmma, dS of both consumers from shared memory
//
// Scores are held transposed because their rows are then keys, which a consumer owns for the whole
// walk: Pᵀ and dSᵀ are operands of dV and dK where they stand. Only dQ needs all keys of the block:
// each consumer computes half of it.
// backward_by_product.cuh has the consumers of D 256.
#pragma once

#include "core/gemm.h"
#include "core/mask.h"
#include "core/pipeline.h"
#include "core/softmax.h"
#include "ptx/barrier.h"
#include "ptx/elect.h"
#include "ptx/grid_dependency.h"
#include "ptx/proxy_fence.h"
#include "ptx/setmaxnreg.h"
#include "ptx/wgmma.h"
#include "sm90/backward_by_product.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_keys.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/config.h"
#include "sm90/params.h"
#include "sm90/tile_io.cuh"

namespace flash_ext::sm90 {

// The producer's thread that finds tiles and loads them, in the order in which consumers need them.
template <typename Config>
__device__ __forceinline__ void produce_tiles(const BackwardKernelParams& params,
                                              typename Config::SharedStorage& smem) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  RingPosition tiles;  // of K and V too
  RingPosition ring;  // of Q and dO
  int index = 0;
  for (;; tiles = tiles.next()) {
    tiles.wait_empty(smem.tile_ring);
    index = draw_tile<Config>(params, smem, tiles, index);
    BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
    at = find_tile<Config>(params, index);
    tiles.publish(smem.tile_ring);
    if (at.tile == kNoTile) break;

    const auto load_v = [&] {
      tiles.wait_empty(smem.v_ring);
      load_tile<KTile>(smem.v, params.v, at.first_key, at.kv_head, at.batch,
                       tiles.expect(smem.v_ring, KTile::kBytes));
    };
    tiles.wait_empty(smem.k_ring);
    const uint32_t k_full = tiles.expect(smem.k_ring, KTile::kBytes + Config::kOtherKBytes);
    load_tile<KTile>(smem.k, params.k, at.first_key, at.kv_head, at.batch, k_full);
    if constexpr (Config::kBlocks > 1) {
      const int block = block_of_cluster<Config>();
      load_tile<typename Config::OtherKTile>(
          smem.k + KTile::kBytes, params.k, at.first_key + (1 - 2 * block) * Config::kBlockN,
          at.kv_head, at.batch, k_full, block * Config::OtherKTile::kCols);
    }
    bool first = true;
    for (auto walk = QueryWalk::of<Config>(params.problem, at); !walk.done();
         walk = walk.next(), ring = ring.next(), first = false) {
      const int row = walk.tile * Config::kBlockM;
      const int head = walk.head - at.batch * params.problem.shape.heads_q;
      ring.wait_empty(smem.q_ring);
      load_tile<QTile>(smem.q[ring.stage(smem.q_ring)], params.q, row, head, at.batch,
                       ring.expect(smem.q_ring, QTile::kBytes));
      ring.wait_empty(smem.dout_ring);
      load_tile<QTile>(smem.dout[ring.stage(smem.dout_ring)], params.dout, row, head, at.batch,
                       ring.expect(smem.dout_ring, QTile::kBytes));
      if (first) load_v();  // the last to be there for: dV of the tile before leaves through it
    }
    if (first) load_v();  // no query sees the keys
  }
  if (block_of_cluster<Config>() == 0) finish_tiles(params.counter, gridDim.x / Config::kBlocks);
}

// Writes one number for each query row, kRows for each lane of a warp.
template <int kRows>
__device__ __forceinline__ void put_rows(float* target, const float (&values)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) target[i * kWarpSize + threadIdx.x % kWarpSize] = values[i];
}

// The producer's warp that loads lse and delta: rows past the end have P = 0.
template <typename Config>
__device__ __forceinline__ void produce_rows(const BackwardParams& params,
                                             typename Config::SharedStorage& smem) {
  constexpr int kRows = Config::kBlockM / kWarpSize;  // of a lane
  const int lane = threadIdx.x % kWarpSize;
  ptx::wait_for_prerequisites();  // delta comes from the kernel ahead
  RingPosition ring;
  for (RingPosition tiles;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
    if (at.tile == kNoTile) return;
    for (auto walk = QueryWalk::of<Config>(params, at); !walk.done();
         walk = walk.next(), ring = ring.next()) {
      float lse[kRows], delta[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = walk.tile * Config::kBlockM + i * kWarpSize + lane;
        const int64_t index = walk.head * params.shape.seqlen_q + row;
        const bool exists = row < params.shape.seqlen_q;
        lse[i] = exists ? softmax_exponent(params.lse[index]) : INFINITY;
        delta[i] = exists ? params.delta[index] : 0.f;
      }
      ring.wait_empty(smem.q_ring);
      put_rows(smem.lse[ring.stage(smem.q_ring)], lse);
      ring.publish_warp(smem.q_ring);
      ring.wait_empty(smem.dout_ring);
      put_rows(smem.delta[ring.stage(smem.dout_ring)], delta);
      ring.publish_warp(smem.dout_ring);
    }
    tiles.release(smem.tile_ring);
  }
}

// A consumer's walk: leaves dK / scale and dV (64, D) of its keys. While the last product runs it
// calls `write_dv`.
template <typename Config, typename WriteDv>
__device__ __forceinline__ void accumulate(const BackwardParams& params,
                                           typename Config::SharedStorage& smem, RingPosition tiles,
                                           RingPosition& ring, QueryWalk walk, int consumer,
                                           float (&dk)[Config::kHeadDim / 2],
                                           float (&dv)[Config::kHeadDim / 2],
                                           const WriteDv& write_dv) {
  using T = typename Config::Element;
  using DsTile = typename Config::DsTile;
  constexpr int kM = Config::kBlockM / 8;  // 8-query columns of Sᵀ
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x % kWarpgroupThreads / kWarpSize * 16;
  const int consumer_row = consumer * kWarpgroupRows;
  const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
  const int first_key = at.first_key + consumer_row;  // of this consumer

  float s[4 * kM];  // Sᵀ (64 keys, kBlockM), then Pᵀ
  float ds[4 * kM];  // dPᵀ, then dSᵀ
  float dq[Config::kDqCols / 2];  // (64, kDqCols)
  uint32_t p_operand[1][kM / 2][4], ds_operand[1][kM / 2][4];
  auto& scores = reinterpret_cast<float (&)[1][kM][4]>(s);
  auto& gradients = reinterpret_cast<float (&)[1][kM][4]>(ds);

  const BandMask mask(params.shape, params.window);
  const Range whole =
      mask.template whole_query_tiles<Config::kBlockM>({first_key, first_key + kWarpgroupRows});
  const float units = params.softmax_scale * kLog2E;
  uint32_t bad_keys = 0;  // bits 0 and 8 for this lane's keys
  const auto zero_unseen = [&](float (&x)[1][kM][4], int tile) {
    if (tile < whole.begin || tile >= whole.end)
      zero_masked(x, mask, first_key + warp_row + lane / 4, tile * Config::kBlockM + lane % 4 * 2);
  };
  constexpr bool kFetchAhead = kM <= 8;  // while products run, where registers allow it
  float2 lse[kM], delta[kM];  // of this lane's queries

  bad_keys = take_out_bad_keys<Config>(smem, tiles, consumer_row + warp_row);
  tiles.wait_full(smem.v_ring);

  ring.wait_full(smem.q_ring);
  multiply_rows<Config>(s, smem.k, consumer_row, smem.q[ring.stage(smem.q_ring)]);
  for (bool first = true;; first = false) {
    const int stage = ring.stage(smem.q_ring);
    const RingPosition before{ring.count - 1};
    ring.wait_full(smem.dout_ring);
    multiply_rows<Config>(ds, smem.v, consumer_row, smem.dout[stage]);
    if (kFetchAhead) fetch<true>(lse, smem.lse[stage]);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if (!kFetchAhead) fetch<false>(lse, smem.lse[stage]);
    exponentiate(scores, lse, units, bad_keys);
    zero_unseen(scores, walk.tile);
    to_operand<T>(p_operand, scores);
    add_product<Config>(dv, p_operand, smem.dout[stage], !first);
    if (kFetchAhead) fetch<true>(delta, smem.delta[stage]);
    ptx::wgmma_wait<1>();
    ptx::pin(ds);
    if (!kFetchAhead) fetch<false>(delta, smem.delta[stage]);
    differentiate<T>(gradients, p_operand, delta);
    zero_unseen(gradients, walk.tile);
    to_operand<T>(ds_operand, gradients);
    ring.wait_empty(smem.ds_ring);
    stage_rows<DsTile>(smem.ds[ring.stage(smem.ds_ring)][0], ds_operand[0],
                       consumer_row + warp_row);
    ptx::fence_proxy_async_shared();
    ring.publish_warp(smem.ds_ring);
    // The first tile has none before it. It multiplies all the same, and nobody looks at the
    // result: ptxas would serialise all products for a branch around one.
    if (!first) before.wait_full(smem.ds_ring);
    multiply_dq<Config>(dq, smem, first ? 0 : before.stage(smem.ds_ring), consumer);
    add_product<Config>(dk, ds_operand, smem.q[stage], !first);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    ptx::pin(dq);
    ring.release(smem.dout_ring);
    if (!first) {
      before.release(smem.ds_ring);
      stage_dq<Config>(smem, before, consumer, 0, dq);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    ring.release(smem.q_ring);
    walk = walk.next();
    ring = ring.next();
    if (walk.done()) break;
    ring.wait_full(smem.q_ring);
    multiply_rows<Config>(s, smem.k, consumer_row, smem.q[ring.stage(smem.q_ring)]);
  }
  const RingPosition last{ring.count - 1};
  last.wait_full(smem.ds_ring);
  multiply_dq<Config>(dq, smem, last.stage(smem.ds_ring), consumer);
  write_dv();
  ptx::wgmma_wait<0>();
  ptx::pin(dq);
  last.release(smem.ds_ring);
  stage_dq<Config>(smem, last, consumer, 0, dq);
}

// A consumer warpgroup: number `consumer` of the block.
template <typename Config>
__device__ __forceinline__ void consume(const BackwardKernelParams& params,
                                        typename Config::SharedStorage& smem, int consumer) {
  const BackwardParams& problem = params.problem;
  RingPosition ring;  // of Q and dO
  for (RingPosition tiles;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
    if (at.tile == kNoTile) break;

    float dk[Config::kHeadDim / 2], dv[Config::kHeadDim / 2];  // (64, D)
    const QueryWalk walk = QueryWalk::of<Config>(problem, at);
    const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
    const auto write_dv = [&] {  // its own rows of V are read
      write_gradient<Config>(problem.dv, params.dv, problem.dv_accum, problem.shape.head_dim_v,
                             problem, at, smem.v, consumer, dv);
    };
    tiles.wait_full(smem.k_ring);
    if (first_thread) ptx::bulk_wait_read<0>();  // dK of the tile before, for the next barrier
    if (walk.done()) {
      tiles.wait_full(smem.v_ring);
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
      write_dv();
    } else {
      accumulate<Config>(problem, smem, tiles, ring, walk, consumer, dk, dv, write_dv);
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] *= problem.softmax_scale;
    }
    // Both have read K, which is loaded anew while dK leaves through the buffers of dS.
    ptx::barrier_sync<kAllConsumers, Config::kConsumerThreads>();
    if (first_thread) tiles.arrive_empty(smem.k_ring);
    static_assert(sizeof(smem.ds) >= Config::KTile::kBytes, "dK fits in dS");
    write_gradient<Config>(problem.dk, params.dk, problem.dk_accum, problem.shape.head_dim, problem,
                           at, smem.ds[0][0], consumer, dk);
    if (first_thread) {
      ptx::bulk_wait_read<1>();
      tiles.arrive_empty(smem.v_ring);
    }
    tiles.release(smem.tile_ring);
  }
  ptx::bulk_wait_read<0>();
}

template <typename Config>
__global__ void __cluster_dims__(Config::kBlocks, 1, 1) __launch_bounds__(Config::kThreads, 1)
    flash_backward(const __grid_constant__ BackwardKernelParams params) {
  ptx::launch_dependents();
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);
  const int warpgroup = warp * kWarpSize / kWarpgroupThreads;

  if (threadIdx.x == 0) {
    for (auto& marks : smem.bad_keys)
      for (uint32_t& bits : marks) bits = 0;
    smem.tile_ring.init(1, Config::kConsumerWarps + 1 + Config::kConsumers);
    smem.k_ring.init(1, Config::kOwners);
    smem.v_ring.init(1, Config::kOwners);
    smem.q_ring.init(2, Config::kConsumerWarps);
    smem.dout_ring.init(2, Config::kConsumerWarps);
    for (auto& ring : smem.dq_ring) ring.init(kWarpgroupThreads / kWarpSize, 1);
    smem.ds_ring.init(Config::kOwners * kWarpgroupThreads / kWarpSize,
                      Config::kBlocks * Config::kConsumerWarps);
    smem.drawn_ring.init(1, 1);
    ptx::fence_mbarrier_init();
  }
  if constexpr (Config::kBlocks > 1)
    ptx::cluster_sync();
  else
    __syncthreads();

  if (warpgroup == 0) {
    ptx::register_decrease<Config::kProducerRegisters>();
    if (warp == 1) {
      produce_rows<Config>(params.problem, smem);
    } else if (ptx::elect_one()) {
      if (warp == 0)
        produce_tiles<Config>(params, smem);
      else
        store_dq<Config>(params.problem, smem, warp - 2);
    }
  } else {
    ptx::register_increase<Config::kConsumerRegisters>();
    if constexpr (!Config::kByProduct)
      consume<Config>(params, smem, warpgroup - 1);
    else if (warpgroup == 1)
      consume_product<Config, Role::kValues>(params, smem);
    else
      consume_product<Config, Role::kKeys>(params, smem);
  }
  if constexpr (Config::kBlocks > 1) {  // the other block may still reach for the barriers of this
    __syncwarp();
    ptx::cluster_sync();
  }
}

}  // namespace flash_ext::sm90
