// Forward pass on Hopper: FlashAttention-3's division of labour (Shah et al. 2024, sections 3.1 and
// 3.2) on TMA and wgmma.
//
//   one block: consumer warpgroups of 64 query rows each and warps that serve them, walking over
//   tiles of query rows
//   producer: loads Q, then K and V right to left, as far ahead as there are buffers
//   consumer, for each tile of kBlockN keys:
//       S  = Q Kᵀ            wgmma, both from shared memory    | runs beside
//       O += P V             wgmma, P from registers           | the softmax of S
//       P  = exp2(S - m), l and O brought to the new m
//   O / l, lse
//   storer: sends O from shared memory, so that its consumer can go on to the next tile
//
// The product P V belongs to the tile before that of S: while it runs, the softmax works on S.
#pragma once

#include "core/epilogue.h"
#include "core/finite.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/pipeline.h"
#include "core/softmax.h"
#include "core/wgmma_layout.h"
#include "ptx/barrier.h"
#include "ptx/bulk.h"
#include "ptx/elect.h"
#include "ptx/proxy_fence.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "sm90/config.h"
#include "sm90/forward_tiles.cuh"
#include "sm90/params.h"
#include "sm90/tile_io.cuh"

namespace flash_ext::sm90 {

// Fills the slot at `position` with a tile that came back suspect, or the tile `next`, or none.
template <typename Config>
__device__ __forceinline__ void choose_tile(const ForwardKernelParams& params,
                                            typename Config::SharedStorage& smem,
                                            RingPosition position, int next) {
  ForwardTile& tile = smem.tile[position.stage(smem.tile_ring)];
  const auto take_suspect = [&](RingPosition of) {
    of.wait_empty(smem.tile_ring);
    ForwardTile& slot = smem.tile[of.stage(smem.tile_ring)];
    if (slot.suspect == 0) return false;
    slot.suspect = 0;
    tile = slot;
    tile.guarded = 1;  // the consumers keep together, for they all take part in changing V
    for (KeyTiles& keys : tile.consumer_keys) keys = tile.keys;
    return true;
  };
  if (take_suspect(position)) return;
  if (next < params.tiles) return find_tile<Config>(params, next, tile);
  // The last tile but one is done; the verdict on the last is still out.
  if (!take_suspect(position.next())) tile.head = kNoTile;
}

// The producer's thread: finds tiles and loads Q, K and V in the order in which consumers need
// them.
template <typename Config>
__device__ __forceinline__ void produce(const ForwardKernelParams& params,
                                        typename Config::SharedStorage& smem) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  RingPosition tiles;  // of tiles and of Q
  RingPosition k_ring, v_ring;
  int next = blockIdx.x;
  for (;; tiles = tiles.next()) {
    choose_tile<Config>(params, smem, tiles, next);
    tiles.publish(smem.tile_ring);
    const ForwardTile& tile = smem.tile[tiles.stage(smem.tile_ring)];
    if (tile.head == kNoTile) break;
    const int kv_head = tile.kv_head, batch = tile.batch;
    const Range touched = tile.keys.touched;

    const auto load_k = [&](int n) {
      k_ring.wait_empty(smem.k_ring);
      load_tile<KTile>(smem.k[k_ring.stage(smem.k_ring)], params.k, n * Config::kBlockN, kv_head,
                       batch, k_ring.expect(smem.k_ring, KTile::kBytes));
      k_ring = k_ring.next();
    };
    const auto load_v = [&](int n) {
      v_ring.wait_empty(smem.v_ring);
      load_tile<VTile>(smem.v[v_ring.stage(smem.v_ring)], params.v, n * Config::kBlockN, kv_head,
                       batch, v_ring.expect(smem.v_ring, VTile::kBytes));
      v_ring = v_ring.next();
    };
    if (touched.begin == touched.end) {
      tiles.wait_empty(smem.q_ring);
      tiles.publish(smem.q_ring);
    } else {
      int n = touched.end - 1;
      load_k(n);
      tiles.wait_empty(smem.q_ring);
      load_tile<QTile>(smem.q[tiles.stage(smem.q_ring)], params.q, tile.first_row, tile.head, batch,
                       tiles.expect(smem.q_ring, QTile::kBytes));
      for (; n > touched.begin; --n) {
        load_k(n - 1);
        load_v(n);
      }
      load_v(n);
    }
    // Not earlier: a tile that was taken early may have to wait while other blocks are idle. The
    // consumers still have what is in the rings.
    if (tile.guarded == 0) next = next_tile(params.counter, next, gridDim.x);
  }
  finish_tiles(params.counter, gridDim.x);
}

// Gives `count` tiles of K and V back as they come.
template <typename Config>
__device__ __forceinline__ void pass_over(typename Config::SharedStorage& smem, RingPosition& ring,
                                          int count) {
#pragma unroll 1
  for (; count > 0; --count, ring = ring.next()) {
    ring.wait_full(smem.k_ring);
    ring.release(smem.k_ring);
    ring.wait_full(smem.v_ring);
    ring.release(smem.v_ring);
  }
}

// A consumer's walk over K and V: leaves unnormalised O (64, D) of its warpgroup's rows in `out`.
template <typename Config>
__device__ __forceinline__ void attend(const ForwardKernelParams& params,
                                       typename Config::SharedStorage& smem, ForwardTile& tile,
                                       const KeyTiles& keys, const char* q_tile, RingPosition& ring,
                                       int consumer, OnlineSoftmax<1>& softmax,
                                       float (&out)[Config::kHeadDimV / 2]) {
  using T = typename Config::Element;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  constexpr int kN = Config::kBlockN / 8;  // 8-key columns of S
  constexpr int kD = Config::kHeadDimV / 8;  // 8-column tiles of O
  constexpr int kConsumerThreads = Config::kConsumers * kWarpgroupThreads;
  const WgmmaOperand<QTile, ptx::Major::kK> q(ptx::shared_address(q_tile) +
                                              WarpRows(consumer).consumer_row * QTile::kLineBytes);
  uint32_t q_fragments[Config::kQInRegisters ? Config::kHeadDim / 16 : 1][4];
  if constexpr (Config::kQInRegisters)
    load_rows<QTile>(q_fragments, q_tile, WarpRows(consumer).row);
  float s[kN * 4];  // S (64, kBlockN)
  uint32_t p[1][kN / 2][4];  // P as A fragments
  auto& scores = reinterpret_cast<float (&)[1][kN][4]>(s);
  auto& result = reinterpret_cast<float (&)[1][kD][4]>(out);

  const auto multiply_qk = [&](int stage) {  // S = Q Kᵀ
    const WgmmaOperand<KTile, ptx::Major::kK> k(ptx::shared_address(smem.k[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step)
      if constexpr (Config::kQInRegisters)
        ptx::wgmma<T, Config::kBlockN, ptx::Major::kK>(s, q_fragments[step], k.at(step), step > 0);
      else
        ptx::wgmma<T, Config::kBlockN, ptx::Major::kK, ptx::Major::kK>(s, q.at(step), k.at(step),
                                                                       step > 0);
    ptx::wgmma_commit();
  };
  const auto multiply_pv = [&](int stage, bool accumulate) {  // O += P V
    const WgmmaOperand<VTile, ptx::Major::kMN> v(ptx::shared_address(smem.v[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step)
      ptx::wgmma<T, Config::kHeadDimV, ptx::Major::kMN>(out, p[0][step], v.at(step),
                                                        accumulate || step > 0);
    ptx::wgmma_commit();
  };

  const bool guarded = read_field(tile.guarded) != 0;
  float rescale[1][2];
  // P = exp2(S - m); true where O has to follow a new m. A careful one looks for the maximum of S
  // first. The others guess that the present m will do; where they lose P, the tile is suspect.
  const auto soften = [&](int n, bool careful) {
    const int lane = threadIdx.x % kWarpSize;
    const int row = read_field(tile.first_row) + WarpRows(consumer).row + lane / 4;
    const BandMask mask(params.problem.shape, params.problem.window);
    if (params.score_factor != 1.f) scale(scores, params.score_factor);
    if (keys.is_masked(n)) apply_mask(scores, mask, row, n * Config::kBlockN + lane % 4 * 2);
    const bool moved = careful && softmax.observe(scores, params.units, rescale);
    const bool fits = softmax.exponentiate(scores, params.units);
    if (careful || __all_sync(0xffffffffu, fits)) return moved;
    const auto sees = [&](int, int h) {
      const int first = max(mask.first_key(row + 8 * h), n * Config::kBlockN);
      return first < min(mask.end_key(row + 8 * h), (n + 1) * Config::kBlockN);
    };
    if (softmax.settle(scores, rescale, sees)) tile.suspect = 1;
    return true;
  };

  // In a guarded walk: brings NaN and infinity of a V tile to the rows that see their keys, and
  // takes them out of it before the product. All consumers meet before it changes, and after.
  const auto guard_v = [&](int n) {
    if (!keys.is_masked(n)) return;
    ring.wait_full(smem.v_ring);
    const uint32_t v_tile = ptx::shared_address(smem.v[ring.stage(smem.v_ring)]);
    const int lane = threadIdx.x % kWarpSize;
    spread_nonfinite<T, VTile, Config::kBlockN>(
        result, BandMask(params.problem.shape, params.problem.window), v_tile,
        read_field(tile.first_row) + WarpRows(consumer).row + lane / 4, n * Config::kBlockN, lane);
    ptx::barrier_sync<kConsumerThreads>(kAllConsumers);
    zero_nonfinite<T, VTile, kConsumerThreads>(v_tile, threadIdx.x - kWarpgroupThreads);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync<kConsumerThreads>(kAllConsumers);
  };
  if (guarded) clear(result);

  // K and V of a tile have the same place in their rings. Other warpgroups may see more tiles.
  pass_over<Config>(smem, ring, read_field(tile.keys.touched.end) - keys.touched.end);
  int n = keys.touched.end - 1;
  ring.wait_full(smem.k_ring);
  multiply_qk(ring.stage(smem.k_ring));
  ptx::wgmma_wait<0>();
  ptx::pin(s);
  ring.release(smem.k_ring);
  soften(n, true);
  to_operand<T>(p, scores);

  for (; n > keys.touched.begin; --n) {
    const RingPosition next = ring.next();  // of tile n - 1
    if (guarded) guard_v(n);
    next.wait_full(smem.k_ring);
    multiply_qk(next.stage(smem.k_ring));
    ring.wait_full(smem.v_ring);
    multiply_pv(ring.stage(smem.v_ring), guarded || n < keys.touched.end - 1);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    next.release(smem.k_ring);
    const bool moved = soften(n - 1, guarded);
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    ring.release(smem.v_ring);
    if (moved) rescale_rows(result, rescale);
    to_operand<T>(p, scores);
    ring = next;
  }

  if (guarded) guard_v(n);
  ring.wait_full(smem.v_ring);
  multiply_pv(ring.stage(smem.v_ring), guarded || n < keys.touched.end - 1);
  ptx::wgmma_wait<0>();
  ptx::pin(out);
  ring.release(smem.v_ring);
  ring = ring.next();
  pass_over<Config>(smem, ring, keys.touched.begin - read_field(tile.keys.touched.begin));
}

// Normalises O (64, D) of a warpgroup and writes lse. True where O may hold what NaN or infinity in
// a masked row of V made of it, 0 * inf.
template <typename Config>
__device__ __forceinline__ bool finish_rows(const ForwardParams& problem, const ForwardTile& tile,
                                            const KeyTiles& keys, int row,
                                            const OnlineSoftmax<1>& softmax,
                                            float (&out)[1][Config::kHeadDimV / 8][4]) {
  const int lane = threadIdx.x % kWarpSize;
  const int head = read_field(tile.head), batch = read_field(tile.batch);
  const int first_row = read_field(tile.first_row) + row + lane / 4;
  const float sink = problem.sinks == nullptr ? -INFINITY : problem.sinks[head];
  float factor[1][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t position = first_row + 8 * h;
    float lse;
    factor[0][h] = softmax.finish(0, h, sink, lse);
    if (problem.lse != nullptr && lane % 4 == 0 && position < problem.shape.seqlen_q)
      problem.lse[(int64_t{batch} * problem.shape.heads_q + head) * problem.shape.seqlen_q +
                  position] = lse;
  }
  // Rows of V beyond the end are zeros: only the window masks rows that are there.
  const bool masked = (problem.window.left >= 0 || problem.window.right >= 0) && keys.any_masked();
  const bool suspect = masked && read_field(tile.guarded) == 0 && has_nonfinite(out);
  rescale_rows(out, factor);
  return suspect;
}

// Writes lse, and O: 16-bit O to the rows of Q that this warpgroup has read, `q_tile`, from where
// the storer sends it; fp32 O straight to its place.
template <typename Config>
__device__ __forceinline__ void write_output(const ForwardKernelParams& params, ForwardTile& tile,
                                             const KeyTiles& keys, char* q_tile, int consumer,
                                             const OnlineSoftmax<1>& softmax,
                                             float (&out)[Config::kHeadDimV / 2]) {
  const ForwardParams& problem = params.problem;
  const int row = WarpRows(consumer).row;
  const int lane = threadIdx.x % kWarpSize;
  auto& result = reinterpret_cast<float (&)[1][Config::kHeadDimV / 8][4]>(out);
  if (finish_rows<Config>(problem, tile, keys, row, softmax, result)) tile.suspect = 1;

  if (problem.out_dtype == DType::kFloat32) {
    char* const matrix =
        head_matrix(problem.out, read_field(tile.batch), read_field(tile.head), 0, sizeof(float));
    store_fragments(reinterpret_cast<float*>(matrix), problem.out.seq_stride,
                    static_cast<int>(problem.shape.seqlen_q), problem.shape.head_dim_v, result,
                    read_field(tile.first_row) + row + lane / 4, lane);
  } else {
    uint32_t rounded[1][Config::kHeadDimV / 16][4];
    to_operand<typename Config::Element>(rounded, result);
    stage_rows<typename Config::QTile>(q_tile, rounded[0], row);
    ptx::fence_proxy_async_shared();
  }
}

// A storer's thread: sends the staged O of one consumer, and gives its part of Q's buffer back.
template <typename Config>
__device__ __forceinline__ void store(const ForwardKernelParams& params,
                                      typename Config::SharedStorage& smem, int consumer) {
  using QTile = typename Config::QTile;
  const int consumer_row = consumer * kWarpgroupRows;
  for (RingPosition tiles;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    const ForwardTile& tile = smem.tile[tiles.stage(smem.tile_ring)];
    if (tile.head == kNoTile) return;
    tiles.wait_full(smem.out_ring[consumer]);
    const int stage = tiles.stage(smem.q_ring);
    if (smem.staged[stage][consumer] != 0) {
      if (tile.guarded != 0) ptx::bulk_wait<0>();  // what the first walk wrote
      const uint32_t staging = ptx::shared_address(smem.q[stage]);
#pragma unroll
      for (int slab = 0; slab < Config::kOutSlabs; ++slab)
        ptx::tma_store(&params.out.map,
                       {slab * QTile::kSlabCols, tile.first_row + consumer_row,
                        tile.head * params.out.head_step, tile.batch * params.out.batch_step},
                       staging + slab * QTile::kSlabBytes + consumer_row * QTile::kLineBytes);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    tiles.arrive_empty(smem.q_ring);
    tiles.arrive_empty(smem.tile_ring);
  }
}

// The rows of a warp in a tile that sees no key at all: O is 0, lse that of the sink, or -inf.
__device__ __forceinline__ void write_empty_rows(const ForwardParams& problem,
                                                 const ForwardTile& tile, int row) {
  const int lane = threadIdx.x % kWarpSize;
  const int bytes = problem.out_dtype == DType::kFloat32 ? 4 : 2;
  char* const matrix = head_matrix(problem.out, tile.batch, tile.head, 0, bytes);
  const int row_words = problem.shape.head_dim_v * bytes / 4;
  for (int i = 0; i < 16; ++i) {
    const int64_t position = tile.first_row + row + i;
    if (position >= problem.shape.seqlen_q) return;
    auto* const words =
        reinterpret_cast<uint32_t*>(matrix + position * problem.out.seq_stride * bytes);
    for (int word = lane; word < row_words; word += kWarpSize) words[word] = 0;
    if (problem.lse != nullptr && lane == 0)
      problem
          .lse[(int64_t{tile.batch} * problem.shape.heads_q + tile.head) * problem.shape.seqlen_q +
               position] = problem.sinks == nullptr ? -INFINITY : problem.sinks[tile.head];
  }
}

// A consumer warpgroup: number `consumer` of the block.
template <typename Config>
__device__ __forceinline__ void consume(const ForwardKernelParams& params,
                                        typename Config::SharedStorage& smem, int consumer) {
  RingPosition tiles;  // of tiles and of Q
  RingPosition kv_ring;
  for (;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    ForwardTile& tile = smem.tile[tiles.stage(smem.tile_ring)];
    if (read_field(tile.head) == kNoTile) return;

    tiles.wait_full(smem.q_ring);
    const KeyTiles keys = read_keys(tile.consumer_keys[consumer]);
    if (keys.empty()) {
      pass_over<Config>(smem, kv_ring,
                        read_field(tile.keys.touched.end) - read_field(tile.keys.touched.begin));
      write_empty_rows(params.problem, tile, WarpRows(consumer).row);
    } else {
      char* const q_tile = smem.q[tiles.stage(smem.q_ring)];
      OnlineSoftmax<1> softmax;
      float out[Config::kHeadDimV / 2];
      softmax.clear();
      attend<Config>(params, smem, tile, keys, q_tile, kv_ring, consumer, softmax, out);
      write_output<Config>(params, tile, keys, q_tile, consumer, softmax, out);
    }
    if (threadIdx.x % kWarpgroupThreads == 0)
      smem.staged[tiles.stage(smem.q_ring)][consumer] =
          !keys.empty() && params.problem.out_dtype != DType::kFloat32;
    tiles.publish_warp(smem.out_ring[consumer]);
    tiles.release(smem.tile_ring);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_forward(const __grid_constant__ ForwardKernelParams params) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);
  const int warpgroup = warp * kWarpSize / kWarpgroupThreads;

  if (threadIdx.x == 0) {
    for (ForwardTile& tile : smem.tile) tile.suspect = 0;
    smem.tile_ring.init(1, Config::kConsumerWarps + Config::kConsumers);
    smem.q_ring.init(1, Config::kConsumers);
    smem.k_ring.init(1, Config::kConsumerWarps);
    smem.v_ring.init(1, Config::kConsumerWarps);
    for (auto& ring : smem.out_ring) ring.init(Config::kConsumerWarps / Config::kConsumers, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::register_decrease<Config::kProducerRegisters>();
    if (ptx::elect_one()) {
      if (warp == 0)
        produce<Config>(params, smem);
      else if (warp <= Config::kConsumers)
        store<Config>(params, smem, warp - 1);
    }
  } else {
    ptx::register_increase<Config::kConsumerRegisters>();
    consume<Config>(params, smem, warpgroup - 1);
  }
}

}  // namespace flash_ext::sm90
