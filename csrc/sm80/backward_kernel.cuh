// Backward pass: FlashAttention-2 (Dao 2023, algorithm 2) on mma.sync, transposed.
//
//   one block: kBlockN keys of one key head            grid: key tiles x key heads x batch
//   for each query head of the group, each tile of kBlockM query rows that sees the keys:
//       values warp                                keys warp
//       Sᵀ  = K Qᵀ                                 dPᵀ = V dOᵀ
//       Pᵀ  = exp2(Sᵀ - lse)    -- shared -->      dSᵀ = Pᵀ (dPᵀ - delta)
//       dV += Pᵀ dO                                dK += dSᵀ Q
//       all warps, a tile later: dQ += dS K            (dSᵀ through shared memory, fp32 additions)
//
// Nothing S x S was saved: P comes again from lse. Scores are held transposed because their rows
// are then keys, which a warp owns for the whole loop: Pᵀ and dSᵀ feed dV and dK from registers.
// dK and dV of 32 keys would not fit one warp's registers at D 128; two warps share the work, and
// reading 32 keys per fragment of Q or dO halves the shared-memory traffic that limits this pass.
#pragma once

#include "core/dq_workspace.h"
#include "core/epilogue.h"
#include "core/finite.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/scheduler.h"
#include "core/softmax.h"
#include "core/tile_copy.h"
#include "core/turns.h"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/shared.h"
#include "sm80/config.h"

namespace flash_ext::sm80 {

enum class Role { kValues, kKeys };  // the gradient a warp of a pair accumulates: dV or dK

// Named barriers of the pairs: number 0 is __syncthreads.
__device__ __forceinline__ int pair_barrier(int pair) { return 1 + pair; }

// Where this thread block and this warp stand. Cheap enough to find out again where it is needed.
template <typename Config>
struct BackwardPlace {
  TileCoordinate at;   // key tile, key head, batch entry
  int64_t first_head;  // first query head of the group, in the flat order (batch, head)
  int group;           // query heads of the group
  int first_key;       // of the block

  __device__ __forceinline__ BackwardPlace(const Shape& shape,
                                           const typename Config::SharedStorage& smem) {
    const uint32_t block = ptx::load_shared_u32(ptx::shared_address(&smem.block));
    const int tiles = ceil_div(static_cast<int>(shape.seqlen_k), Config::kBlockN);
    at = smem.ordered ? last_tile_first(block, tiles, shape.heads_k)
                      : first_tile_first(block, tiles, shape.heads_k);
    group = shape.heads_q / shape.heads_k;
    first_head = at.batch * shape.heads_q + at.head * group;
    first_key = at.tile * Config::kBlockN;
  }
};

template <typename Config>
__device__ __forceinline__ int pair_of_warp() {
  return threadIdx.x / kWarpSize % Config::kPairs;
}
template <typename Config>
__device__ __forceinline__ Role role_of_warp() {
  return threadIdx.x / kWarpSize < Config::kPairs ? Role::kValues : Role::kKeys;
}

// Zeroes elements (16 kM keys, 8 kN queries) of pairs that do not see each other, whatever they
// hold. `key` and `row` are the coordinates of this lane's first element.
template <int kM, int kN>
__device__ __forceinline__ void zero_masked(float (&acc)[kM][kN][4], const BandMask& mask, int key,
                                            int row) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int first = mask.first_key(row + 8 * n + e) - key;
      const int end = mask.end_key(row + 8 * n + e) - key;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (16 * m + 8 * h < first || 16 * m + 8 * h >= end) acc[m][n][2 * h + e] = 0.f;
    }
}

// What recomputing P subtracts from an exponent. The lse of a row without keys is -inf: subtracting
// +inf makes its P exactly 0. Rows past the end load as lse 0 with zero Q and dO, and add nothing.
__device__ __forceinline__ float softmax_exponent(float lse) {
  return lse == -INFINITY ? INFINITY : lse * kLog2E;
}

// One tile of query rows, whose Q, dO, lse and delta are in `stage`: adds this warp's share to
// `gradient` (16 kM keys, 8 kD), which is dV or dK by role, and puts dSᵀ into smem.ds[stage].
template <typename Config, Role kRole, int kM, int kD>
__device__ __forceinline__ void add_query_tile(const BackwardParams& params,
                                               typename Config::SharedStorage& smem, int tile,
                                               int stage, bool masked,
                                               float (&gradient)[kM][kD][4]) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  constexpr bool kValues = kRole == Role::kValues;
  constexpr int kN = Config::kBlockM / 8;  // 8-query columns of Sᵀ
  const int lane = threadIdx.x % kWarpSize;
  const int pair = pair_of_warp<Config>();
  const int pair_key = pair * Config::kPairKeys;
  const uint32_t q_tile = ptx::shared_address(smem.q[stage]);
  const uint32_t dout_tile = ptx::shared_address(smem.dout[stage]);

  // Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ  (16 kM keys, 8 kN queries)
  Accumulator<kM, kN> t;
  clear(t);
  gemm_rows_rows<T, Config::kHeadDim / 16, kBackwardUnroll<Config::kHeadDim>>(
      t,
      lane_offsets<KTile, RowFirst>(
          ptx::shared_address(kValues ? smem.k : smem.v) + pair_key * KTile::kRowBytes, lane),
      lane_offsets<QTile, ChunkFirst>(kValues ? q_tile : dout_tile, lane));
  if constexpr (!kValues) ptx::barrier_sync<2 * kWarpSize>(pair_barrier(pair));

  // Pᵀ = exp2(Sᵀ - lse), or dSᵀ = Pᵀ (dPᵀ - delta) with the Pᵀ of the other warp.
  uint4(&exchange)[Config::kPairBlocks][kWarpSize] = smem.p[pair];
  const float units = params.softmax_scale * kLog2E;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int column = 8 * n + lane % 4 * 2;
    const float2 row = *reinterpret_cast<const float2*>(kValues ? &smem.lse[stage][column]
                                                                : &smem.delta[stage][column]);
    const float subtract[2] = {kValues ? softmax_exponent(row.x) : row.x,
                               kValues ? softmax_exponent(row.y) : row.y};
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float2 p[2];  // rows l / 4 and l / 4 + 8
      if constexpr (!kValues) {
        const uint2 words =
            reinterpret_cast<const uint2*>(&exchange[m * kN / 2 + n / 2][lane])[n % 2];
        p[0] = Element<T>::unpack(words.x);
        p[1] = Element<T>::unpack(words.y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        t[m][n][i] = kValues
                         ? ptx::exp2_approx(fmaf(t[m][n][i], units, -subtract[i % 2]))
                         : (i % 2 == 0 ? p[i / 2].x : p[i / 2].y) * (t[m][n][i] - subtract[i % 2]);
    }
  }
  if (masked)
    zero_masked(t, BandMask(params.shape, params.window),
                BackwardPlace<Config>(params.shape, smem).first_key + pair_key + lane / 4,
                tile * Config::kBlockM + lane % 4 * 2);

  uint32_t operand[kM][kN / 2][4];  // (16 kM keys, 8 kN queries) as A fragments
  to_operand<T>(operand, t);
  if constexpr (kValues) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kN / 2; ++k)
        exchange[m * kN / 2 + k][lane] = {operand[m][k][0], operand[m][k][1], operand[m][k][2],
                                          operand[m][k][3]};
    ptx::barrier_arrive<2 * kWarpSize>(pair_barrier(pair));
  } else {
    stage_operand<typename Config::DsTile>(ptx::shared_address(smem.ds[stage]), operand, pair_key,
                                           lane);
  }

  // dV += Pᵀ dO, or dK += dSᵀ Q
  gemm_registers_columns<T>(gradient, operand,
                            lane_offsets<QTile, RowFirst>(kValues ? dout_tile : q_tile, lane));
}

// A tile of query rows of one head, the head counted in the flat order (batch, head). The walk goes
// over `tiles` of each head in turn.
struct QueryTile {
  int64_t head;
  int tile;

  __device__ __forceinline__ QueryTile next(Range tiles) const {
    return tile + 1 == tiles.end ? QueryTile{head + 1, tiles.begin} : QueryTile{head, tile + 1};
  }
  __device__ __forceinline__ QueryTile previous(Range tiles) const {
    return tile == tiles.begin ? QueryTile{head - 1, tiles.end - 1} : QueryTile{head, tile - 1};
  }
};

// The turn of this warp's part of a query tile. Key tiles add to it from the last to the first:
// under a causal mask the last one starts there and makes nobody wait. Blocks start in that order
// too, so that a block only waits for blocks that run.
template <typename Config>
__device__ __forceinline__ Turn dq_turn(const BackwardParams& params,
                                        const typename Config::SharedStorage& smem, QueryTile at) {
  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int first_row = at.tile * Config::kBlockM;
  const Range touched = BandMask(shape, params.window)
                            .template touched_key_tiles<Config::kBlockN>(
                                {first_row, min(first_row + Config::kBlockM, seqlen_q)});
  const int64_t query_tile = at.head * ceil_div(seqlen_q, Config::kBlockM) + at.tile;
  return {params.dq_turns + 1 + query_tile * Config::kWarps + threadIdx.x / kWarpSize,
          touched.end - 1 - BackwardPlace<Config>(shape, smem).at.tile};
}

// Adds dS K of a tile whose dSᵀ is complete to dQ. A query that sees a key with NaN or infinity has
// NaN in its row of dSᵀ; one that does not must not meet it as 0 * inf, so such keys count as zero.
template <typename Config>
__device__ __forceinline__ void add_dq_tile(const BackwardParams& params,
                                            typename Config::SharedStorage& smem, QueryTile at,
                                            int stage) {
  using T = typename Config::Element;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int dq_row = warp / Config::kDqWarpsD * Config::kDqRows;
  const int dq_col = warp % Config::kDqWarpsD * Config::kDqCols;
  const auto ds_columns = lane_offsets<typename Config::DsTile, ChunkFirst, Config::kDqRows / 16>(
      ptx::shared_address(smem.ds[stage]), lane, dq_row / 16);
  const auto k_columns = lane_offsets<typename Config::KTile, RowFirst, Config::kDqCols / 16>(
      ptx::shared_address(smem.k), lane, dq_col / 16);

  Accumulator<Config::kDqRows / 16, Config::kDqCols / 8> dq;
  clear(dq);
  if (smem.k_is_finite)
    gemm_columns_columns<T, NonFinite::kKeep, Config::kBlockN / 16>(dq, ds_columns, k_columns);
  else
    gemm_columns_columns<T, NonFinite::kDrop, Config::kBlockN / 16>(dq, ds_columns, k_columns);
  if (smem.ordered) dq_turn<Config>(params, smem, at).wait();
  DqWorkspace(params.dq_accum, params.shape, at.head)
      .template add<Config::kHeadDim>(dq, at.tile * Config::kBlockM + dq_row, dq_col, lane);
}

// Whether every query of a tile sees every key of the block.
template <typename Config>
__device__ __forceinline__ bool sees_whole(const Shape& shape, const Window& window,
                                           const typename Config::SharedStorage& smem, int tile) {
  const int first_key = BackwardPlace<Config>(shape, smem).first_key;
  const Range whole =
      BandMask(shape, window)
          .template whole_query_tiles<Config::kBlockM>({first_key, first_key + Config::kBlockN});
  return tile >= whole.begin && tile < whole.end;
}

// The walk over the query heads of the group and their tiles: leaves dV or dK (32 keys, 8 kD) of
// this warp's keys in `gradient`.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void accumulate(const BackwardParams& params,
                                           typename Config::SharedStorage& smem,
                                           float (&gradient)[kM][kD][4]) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  using QueryLoader = TileLoader<QTile, kBlockM, Config::kRoleThreads, 2>;

  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int seqlen_k = static_cast<int>(shape.seqlen_k);
  const BackwardPlace<Config> place(shape, smem);
  const Range keys{place.first_key, place.first_key + kBlockN};
  const BandMask mask(shape, params.window);
  const Range touching =
      mask.template touching_query_tiles<kBlockM>({keys.begin, min(keys.end, seqlen_k)});

  clear(gradient);
  if (touching.begin == touching.end) return;

  // K and V stay for the whole block; Q and dO tiles stream past.
  const auto load_keys = [&](char* smem_tile, const View& view, int cols) {
    TileLoader<KTile, kBlockN, Config::kThreads>(head_matrix(view, place.at.batch, place.at.head),
                                                 view.seq_stride, seqlen_k, cols, place.at.tile)
        .load(ptx::shared_address(smem_tile), place.at.tile);
  };
  load_keys(smem.k, params.k, shape.head_dim);
  load_keys(smem.v, params.v, shape.head_dim_v);

  // Values warps load Q and lse, keys warps dO and delta.
  const bool values = role_of_warp<Config>() == Role::kValues;
  const auto loader_of_head = [&](int64_t head) {
    const int64_t batch = head / shape.heads_q;
    const int in_batch = static_cast<int>(head % shape.heads_q);
    return values ? QueryLoader(head_matrix(params.q, batch, in_batch), params.q.seq_stride,
                                seqlen_q, shape.head_dim, touching.begin)
                  : QueryLoader(head_matrix(params.dout, batch, in_batch), params.dout.seq_stride,
                                seqlen_q, shape.head_dim_v, touching.begin);
  };
  QueryLoader loader = loader_of_head(place.first_head);
  const auto load_queries = [&](QueryTile at, int stage) {
    loader.load(ptx::shared_address(values ? smem.q[stage] : smem.dout[stage]), at.tile);
    const int thread = threadIdx.x % Config::kRoleThreads;
    if (thread < kBlockM) {
      const int row = at.tile * kBlockM + thread;
      ptx::cp_async_4(
          ptx::shared_address(values ? &smem.lse[stage][thread] : &smem.delta[stage][thread]),
          (values ? params.lse : params.delta) + at.head * shape.seqlen_q + row,
          row < seqlen_q ? sizeof(float) : 0);
    }
    ptx::cp_async_commit();
  };
  load_queries({place.first_head, touching.begin}, 0);

  smem.k_is_finite = true;
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (meets_nonfinite<T, KTile, Config::kThreads>(ptx::shared_address(smem.k)))
    smem.k_is_finite = false;

  // dQ of a tile waits for the next tile's barrier, which dSᵀ needs anyway. Keys warps, which wait
  // for Pᵀ, add it before their own products, values warps after.
  QueryTile at{place.first_head, touching.begin};
  int stage = 0;
  const int steps = place.group * (touching.end - touching.begin);
  for (int step = 0; step < steps; ++step, stage ^= 1) {
    const QueryTile previous = at.previous(touching), next = at.next(touching);
    const auto add_previous_dq = [&] {
      if (step == 0 || params.dq.data == nullptr) return;
      // The turn before is passed on only now, when its additions are long done.
      if (smem.ordered && step > 1)
        dq_turn<Config>(params, smem, previous.previous(touching)).pass();
      add_dq_tile<Config>(params, smem, previous, stage ^ 1);
    };

    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile and the previous dSᵀ are there, and the other stage is free
    if (step + 1 < steps) {
      if (next.tile == touching.begin) loader = loader_of_head(next.head);
      load_queries(next, stage ^ 1);
    }

    const bool masked = !sees_whole<Config>(shape, params.window, smem, at.tile);
    if (values) {
      add_query_tile<Config, Role::kValues>(params, smem, at.tile, stage, masked, gradient);
      add_previous_dq();
    } else {
      add_previous_dq();
      add_query_tile<Config, Role::kKeys>(params, smem, at.tile, stage, masked, gradient);
    }
    at = next;
  }
  __syncthreads();
  if (params.dq.data != nullptr) {
    const QueryTile last = at.previous(touching);
    if (smem.ordered && steps > 1) dq_turn<Config>(params, smem, last.previous(touching)).pass();
    add_dq_tile<Config>(params, smem, last, stage ^ 1);
    if (smem.ordered) dq_turn<Config>(params, smem, last).pass();
  }
  __syncthreads();  // K and V are read; their tiles may be overwritten
}

// Writes this warp's dV or dK by way of its own rows of the V or K tile.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void write_gradient(const View& view, const Shape& shape,
                                               const typename Config::SharedStorage& smem,
                                               char* tile, int cols,
                                               const float (&gradient)[kM][kD][4]) {
  if (view.data == nullptr) return;
  using KTile = typename Config::KTile;
  const BackwardPlace<Config> place(shape, smem);
  const int lane = threadIdx.x % kWarpSize;
  const int pair_key = pair_of_warp<Config>() * Config::kPairKeys;
  const uint32_t staging = ptx::shared_address(tile);
  stage_fragments<typename Config::Element, KTile>(staging, gradient, pair_key, lane);
  __syncwarp();
  store_staged_rows<KTile, Config::kPairKeys>(
      head_matrix(view, place.at.batch, place.at.head), view.seq_stride, place.first_key + pair_key,
      static_cast<int>(shape.seqlen_k), cols, staging, pair_key, lane);
}

// Numbers blocks: by their index, or, where they wait for each other, by the order of their start.
template <typename SharedStorage>
__device__ __forceinline__ void take_block(int* started, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    smem.ordered = started != nullptr;
    smem.block = smem.ordered ? atomicAdd(started, 1) : blockIdx.x;
  }
  __syncthreads();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    flash_backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const Shape& shape = params.shape;
  take_block(params.dq_turns, smem);

  Accumulator<Config::kPairKeys / 16, Config::kHeadDim / 8> gradient;  // (keys of a pair, D)
  accumulate<Config>(params, smem, gradient);
  if (role_of_warp<Config>() == Role::kValues) {
    write_gradient<Config>(params.dv, shape, smem, smem.v, shape.head_dim_v, gradient);
  } else {
    scale(gradient, params.softmax_scale);
    write_gradient<Config>(params.dk, shape, smem, smem.k, shape.head_dim, gradient);
  }
}

}  // namespace flash_ext::sm80
