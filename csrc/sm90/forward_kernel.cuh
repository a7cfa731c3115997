// Forward pass on Hopper: FlashAttention-3's division of labour (Shah et al. 2024, sections 3.1 and
// 3.2) on TMA and wgmma.
//
//   one block: a producer warpgroup and consumers of 64 query rows each, walking over tiles
//   producer: loads Q, then K and V right to left, as far ahead as there are buffers
//   consumer, for each tile of kBlockN keys:
//       S  = Q Kᵀ            wgmma, both from shared memory    | runs beside
//       O += P V             wgmma, P from registers           | the softmax of S
//       P  = exp2(S - m), l and O brought to the new m
//   O / l, lse, O through shared memory to TMA
//
// The product P V belongs to the tile before that of S: while it runs, the softmax works on S.
#pragma once

#include "core/epilogue.h"
#include "core/finite.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/pipeline.h"
#include "core/scheduler.h"
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
#include "sm90/params.h"

namespace flash_ext::sm90 {

constexpr int kNoTile = -1;  // as the head of a tile: there is none left

// The tile with the number `index`.
template <typename Config>
__device__ __forceinline__ ForwardTile find_tile(const ForwardKernelParams& params, int index) {
  const Shape& shape = params.problem.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const TileCoordinate at =
      last_tile_first_across(index, ceil_div(seqlen_q, Config::kBlockM), shape.heads_q,
                             shape.heads_q * shape.batch, params.heads_together);
  const int first_row = at.tile * Config::kBlockM;
  const Range rows{first_row, min(first_row + Config::kBlockM, seqlen_q)};
  const BandMask mask(shape, params.problem.window);
  const Range touched = mask.template touched_key_tiles<Config::kBlockN>(rows);
  const Range whole = mask.template whole_key_tiles<Config::kBlockN>(rows);
  return {at.head,
          at.head / (shape.heads_q / shape.heads_k),
          static_cast<int>(at.batch),
          first_row,
          touched.begin,
          touched.end,
          whole.begin,
          whole.end};
}

// The number of this block's tile after `index`.
__device__ __forceinline__ int next_tile(const ForwardKernelParams& params, int index) {
  const int blocks = static_cast<int>(gridDim.x);
  return params.counter == nullptr ? index + blocks : atomicAdd(&params.counter->next, 1) + blocks;
}

// The last block to come here leaves the counter as it found it.
__device__ __forceinline__ void finish_tiles(const ForwardKernelParams& params) {
  if (params.counter == nullptr) return;
  if (atomicAdd(&params.counter->finished, 1) != static_cast<int>(gridDim.x) - 1) return;
  params.counter->next = 0;
  params.counter->finished = 0;
}

// Loads the box of a tile, slab by slab.
template <typename Tile>
__device__ __forceinline__ void load_tile(char* target, const MappedTensor& tensor, int row,
                                          int head, int batch, uint32_t full) {
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab)
    ptx::tma_load(ptx::shared_address(target) + slab * Tile::kSlabBytes, &tensor.map,
                  {slab * Tile::kSlabCols, row, head * tensor.head_step, batch * tensor.batch_step},
                  full);
}

// The tile to hand out in the slot at `position`: one that came back suspect, or the tile `next`.
template <typename Config>
__device__ __forceinline__ ForwardTile choose_tile(const ForwardKernelParams& params,
                                                   typename Config::SharedStorage& smem,
                                                   RingPosition position, int& next) {
  const auto take_suspect = [&](RingPosition of, ForwardTile& tile) {
    of.wait_empty(smem.tile_ring);
    ForwardTile& slot = smem.tile[of.stage(smem.tile_ring)];
    if (slot.suspect == 0) return false;
    slot.suspect = 0;
    tile = slot;
    tile.guarded = 1;
    return true;
  };
  ForwardTile tile;
  if (take_suspect(position, tile)) return tile;
  if (next < params.tiles) {
    tile = find_tile<Config>(params, next);
    next = next_tile(params, next);  // long before it is needed
    return tile;
  }
  // The last tile but one is done; the verdict on the last is still out.
  if (take_suspect(position.next(), tile)) return tile;
  return {kNoTile};
}

// The producer's thread: finds tiles and loads Q, K and V in the order in which consumers need
// them.
template <typename Config>
__device__ __forceinline__ void produce(const ForwardKernelParams& params,
                                        typename Config::SharedStorage& smem) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  RingPosition tiles;  // of tiles and of Q
  RingPosition k_ring, v_ring;
  int next = blockIdx.x;
  for (;; tiles = tiles.next()) {
    const ForwardTile tile = choose_tile<Config>(params, smem, tiles, next);
    smem.tile[tiles.stage(smem.tile_ring)] = tile;
    tiles.publish(smem.tile_ring);
    if (tile.head == kNoTile) break;

    const auto load_k = [&](int n) {
      k_ring.wait_empty(smem.k_ring);
      load_tile<KTile>(smem.k[k_ring.stage(smem.k_ring)], params.k, n * Config::kBlockN,
                       tile.kv_head, tile.batch, k_ring.expect(smem.k_ring, KTile::kBytes));
      k_ring = k_ring.next();
    };
    const auto load_v = [&](int n) {
      v_ring.wait_empty(smem.v_ring);
      load_tile<KTile>(smem.v[v_ring.stage(smem.v_ring)], params.v, n * Config::kBlockN,
                       tile.kv_head, tile.batch, v_ring.expect(smem.v_ring, KTile::kBytes));
      v_ring = v_ring.next();
    };
    if (tile.sees_nothing()) {
      tiles.wait_empty(smem.q_ring);
      tiles.publish(smem.q_ring);
      continue;
    }
    int n = tile.touched_end - 1;
    load_k(n);
    tiles.wait_empty(smem.q_ring);
    load_tile<QTile>(smem.q[tiles.stage(smem.q_ring)], params.q, tile.first_row, tile.head,
                     tile.batch, tiles.expect(smem.q_ring, QTile::kBytes));
    for (; n > tile.touched_begin; --n) {
      load_k(n - 1);
      load_v(n);
    }
    load_v(n);
  }
  finish_tiles(params);
}

// The rows of a tile that a warp of a consumer warpgroup owns.
struct WarpRows {
  int consumer_row;  // first row of the warpgroup inside the tile
  int row;  // first row of the warp

  __device__ __forceinline__ explicit WarpRows(int consumer)
      : consumer_row(consumer * kWarpgroupRows),
        row(consumer_row + static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpSize * 16) {}
};

// Named barriers; number 0 is __syncthreads.
enum Barrier { kConsumerBarrier = 1, kWarpgroupBarriers = 2 };

// A field of the tile in shared memory, read where it is needed: no register holds it meanwhile.
__device__ __forceinline__ int read_field(const int& field) {
  return static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&field)));
}

// A consumer's walk over K and V: leaves unnormalised O (64, D) of its warpgroup's rows in `out`.
template <typename Config>
__device__ __forceinline__ void attend(const ForwardKernelParams& params,
                                       typename Config::SharedStorage& smem,
                                       const ForwardTile& tile, const char* q_tile,
                                       RingPosition& ring, int consumer, OnlineSoftmax<1>& softmax,
                                       float (&out)[Config::kHeadDim / 2]) {
  using T = typename Config::Element;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  constexpr int kN = Config::kBlockN / 8;  // 8-key columns of S
  constexpr int kD = Config::kHeadDim / 8;  // 8-column tiles of O
  constexpr int kConsumerThreads = Config::kConsumers * kWarpgroupThreads;
  const WgmmaOperand<QTile, ptx::Major::kK> q(ptx::shared_address(q_tile) +
                                              WarpRows(consumer).consumer_row * QTile::kLineBytes);
  float s[kN * 4];  // S (64, kBlockN)
  uint32_t p[1][kN / 2][4];  // P as A fragments
  auto& scores = reinterpret_cast<float (&)[1][kN][4]>(s);
  auto& result = reinterpret_cast<float (&)[1][kD][4]>(out);

  const auto multiply_qk = [&](int stage) {  // S = Q Kᵀ
    const WgmmaOperand<KTile, ptx::Major::kK> k(ptx::shared_address(smem.k[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step)
      ptx::wgmma<T, Config::kBlockN, ptx::Major::kK, ptx::Major::kK>(s, q.at(step), k.at(step),
                                                                     step > 0);
    ptx::wgmma_commit();
  };
  const auto multiply_pv = [&](int stage, bool accumulate) {  // O += P V
    const WgmmaOperand<KTile, ptx::Major::kMN> v(ptx::shared_address(smem.v[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step)
      ptx::wgmma<T, Config::kHeadDim, ptx::Major::kMN>(out, p[0][step], v.at(step),
                                                       accumulate || step > 0);
    ptx::wgmma_commit();
  };

  const int begin = read_field(tile.touched_begin), end = read_field(tile.touched_end);
  const int whole_begin = read_field(tile.whole_begin), whole_end = read_field(tile.whole_end);
  float rescale[1][2];
  const auto soften = [&](int n) {  // P = exp2(S - m); true where O has to follow a new m
    if (params.score_factor != 1.f) scale(scores, params.score_factor);
    if (n < whole_begin || n >= whole_end) {
      const int lane = threadIdx.x % kWarpSize;
      apply_mask(scores, BandMask(params.problem.shape, params.problem.window),
                 read_field(tile.first_row) + WarpRows(consumer).row + lane / 4,
                 n * Config::kBlockN + lane % 4 * 2);
    }
    const bool moved = softmax.observe(scores, params.units, rescale);
    softmax.exponentiate(scores, params.units);
    return moved;
  };

  // In a guarded walk: brings NaN and infinity of a V tile to the rows that see their keys, and
  // takes them out of it before the product. All consumers meet before it changes, and after.
  const bool guarded = read_field(tile.guarded) != 0;
  const auto guard_v = [&](int n) {
    if (n >= whole_begin && n < whole_end) return;
    ring.wait_full(smem.v_ring);
    const uint32_t v_tile = ptx::shared_address(smem.v[ring.stage(smem.v_ring)]);
    const int lane = threadIdx.x % kWarpSize;
    spread_nonfinite<T, KTile, Config::kBlockN>(
        result, BandMask(params.problem.shape, params.problem.window), v_tile,
        read_field(tile.first_row) + WarpRows(consumer).row + lane / 4, n * Config::kBlockN, lane);
    ptx::barrier_sync<kConsumerThreads>(kConsumerBarrier);
    zero_nonfinite<T, KTile, kConsumerThreads>(v_tile, threadIdx.x - kWarpgroupThreads);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync<kConsumerThreads>(kConsumerBarrier);
  };
  if (guarded) clear(result);

  // K and V of a tile have the same place in their rings.
  int n = end - 1;
  ring.wait_full(smem.k_ring);
  multiply_qk(ring.stage(smem.k_ring));
  ptx::wgmma_wait<0>();
  ptx::pin(s);
  ring.release(smem.k_ring);
  soften(n);
  to_operand<T>(p, scores);

  for (; n > begin; --n) {
    const RingPosition next = ring.next();  // of tile n - 1
    if (guarded) guard_v(n);
    next.wait_full(smem.k_ring);
    multiply_qk(next.stage(smem.k_ring));
    ring.wait_full(smem.v_ring);
    multiply_pv(ring.stage(smem.v_ring), guarded || n < end - 1);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    next.release(smem.k_ring);
    const bool moved = soften(n - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    ring.release(smem.v_ring);
    if (moved) rescale_rows(result, rescale);
    to_operand<T>(p, scores);
    ring = next;
  }

  if (guarded) guard_v(n);
  ring.wait_full(smem.v_ring);
  multiply_pv(ring.stage(smem.v_ring), guarded || n < end - 1);
  ptx::wgmma_wait<0>();
  ptx::pin(out);
  ring.release(smem.v_ring);
  ring = ring.next();
}

// Normalises O (64, D) of a warpgroup and writes lse. True where O may hold what NaN or infinity in
// a masked row of V made of it, 0 * inf.
template <typename Config>
__device__ __forceinline__ bool finish_rows(const ForwardParams& problem, const ForwardTile& tile,
                                            int row, const OnlineSoftmax<1>& softmax,
                                            float (&out)[1][Config::kHeadDim / 8][4]) {
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
  const bool masked = (problem.window.left >= 0 || problem.window.right >= 0) &&
                      (read_field(tile.touched_begin) < read_field(tile.whole_begin) ||
                       read_field(tile.touched_end) > read_field(tile.whole_end));
  const bool suspect = masked && read_field(tile.guarded) == 0 && has_nonfinite(out);
  rescale_rows(out, factor);
  return suspect;
}

// Writes O and lse of a warpgroup's rows. 16-bit O goes by way of the rows of Q that this warpgroup
// has read, `q_tile`, which TMA has read in turn when this returns.
template <typename Config>
__device__ __forceinline__ void write_output(const ForwardKernelParams& params, ForwardTile& tile,
                                             char* q_tile, int consumer,
                                             const OnlineSoftmax<1>& softmax,
                                             float (&out)[Config::kHeadDim / 2]) {
  using T = typename Config::Element;
  using QTile = typename Config::QTile;
  const ForwardParams& problem = params.problem;
  const WarpRows rows(consumer);
  const int lane = threadIdx.x % kWarpSize;
  auto& result = reinterpret_cast<float (&)[1][Config::kHeadDim / 8][4]>(out);
  if (finish_rows<Config>(problem, tile, rows.row, softmax, result)) tile.suspect = 1;
  const int head = read_field(tile.head), batch = read_field(tile.batch);
  const int first_row = read_field(tile.first_row);

  if (problem.out_dtype == DType::kFloat32) {
    char* const matrix = head_matrix(problem.out, batch, head, sizeof(float));
    store_fragments(reinterpret_cast<float*>(matrix), problem.out.seq_stride,
                    static_cast<int>(problem.shape.seqlen_q), problem.shape.head_dim_v, result,
                    first_row + rows.row + lane / 4, lane);
  } else {
    const uint32_t staging = ptx::shared_address(q_tile);
    const int barrier = kWarpgroupBarriers + consumer;
    stage_fragments<T, QTile>(staging, result, rows.row, lane);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync<kWarpgroupThreads>(barrier);
    if (threadIdx.x % kWarpgroupThreads == 0) {
      if (read_field(tile.guarded) != 0) ptx::bulk_wait<0>();  // what the first walk wrote
#pragma unroll
      for (int slab = 0; slab < QTile::kSlabs; ++slab)
        ptx::tma_store(&params.out.map,
                       {slab * QTile::kSlabCols, first_row + rows.consumer_row,
                        head * params.out.head_step, batch * params.out.batch_step},
                       staging + slab * QTile::kSlabBytes + rows.consumer_row * QTile::kLineBytes);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    ptx::barrier_sync<kWarpgroupThreads>(barrier);
  }
}

// The rows of a warp in a tile that sees no key at all: O is 0, lse that of the sink, or -inf.
__device__ __forceinline__ void write_empty_rows(const ForwardParams& problem,
                                                 const ForwardTile& tile, int row) {
  const int lane = threadIdx.x % kWarpSize;
  const int bytes = problem.out_dtype == DType::kFloat32 ? 4 : 2;
  char* const matrix = head_matrix(problem.out, tile.batch, tile.head, bytes);
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
    if (read_field(tile.touched_begin) == read_field(tile.touched_end)) {
      write_empty_rows(params.problem, tile, WarpRows(consumer).row);
    } else {
      char* const q_tile = smem.q[tiles.stage(smem.q_ring)];
      OnlineSoftmax<1> softmax;
      float out[Config::kHeadDim / 2];
      softmax.clear();
      attend<Config>(params, smem, tile, q_tile, kv_ring, consumer, softmax, out);
      write_output<Config>(params, tile, q_tile, consumer, softmax, out);
    }
    __syncwarp();
    tiles.release(smem.q_ring);
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
    smem.tile_ring.init(Config::kConsumerWarps);
    smem.q_ring.init(Config::kConsumerWarps);
    smem.k_ring.init(Config::kConsumerWarps);
    smem.v_ring.init(Config::kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::register_decrease<Config::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) produce<Config>(params, smem);
  } else {
    ptx::register_increase<Config::kConsumerRegisters>();
    consume<Config>(params, smem, warpgroup - 1);
  }
}

}  // namespace flash_ext::sm90
