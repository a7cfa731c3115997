// Backward pass: FlashAttention-2 (Dao 2023, algorithm 2) on mma.sync, transposed.
//
//   one block: kBlockN keys of one key head            grid: key tiles x key heads x batch
//   for each query head of the group, each tile of kBlockM query rows that sees the keys:
//       Sᵀ  = K Qᵀ,   Pᵀ = exp2(Sᵀ - lse)              (recomputed: nothing S x S was saved)
//       dPᵀ = V dOᵀ,  dSᵀ = Pᵀ (dPᵀ - delta)
//       dV += Pᵀ dO,  dK += dSᵀ Q                      (A operands straight from registers)
//       dQ += dS K                                     (dSᵀ through shared memory, fp32 atomics)
//
// Scores are held transposed because their rows are then keys, which a warp owns for the whole
// loop: Pᵀ and dSᵀ feed dV and dK without leaving registers.
#pragma once

#include "core/dq_workspace.h"
#include "core/epilogue.h"
#include "core/finite.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/scheduler.h"
#include "core/softmax.h"
#include "core/tile_copy.h"
#include "params.h"
#include "ptx/registers.h"
#include "sm80/config.h"

namespace flash_ext::sm80 {

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

// Where this thread block and this warp stand. Cheap enough to find out again where it is needed.
template <typename Config>
struct BackwardPlace {
  TileCoordinate at;   // key tile, key head, batch entry
  int64_t first_head;  // first query head of the group, in the flat order (batch, head)
  int group;           // query heads of the group
  int first_key;       // of the block
  int warp_key;        // first key of this warp inside the tile
  int dq_row, dq_col;  // this warp's part of a dQ tile

  __device__ __forceinline__ explicit BackwardPlace(const Shape& shape) {
    at = first_tile_first(ptx::block_index(),
                          ceil_div(static_cast<int>(shape.seqlen_k), Config::kBlockN),
                          shape.heads_k);
    group = shape.heads_q / shape.heads_k;
    first_head = at.batch * shape.heads_q + at.head * group;
    first_key = at.tile * Config::kBlockN;
    const int warp = threadIdx.x / kWarpSize;
    warp_key = warp * Config::kWarpKeys;
    dq_row = warp / Config::kDqWarpsD * Config::kDqRows;
    dq_col = warp % Config::kDqWarpsD * Config::kDqCols;
  }
};

// One tile of query rows: P and dS again from lse and delta, their shares of dV and dK, and dSᵀ
// into shared memory. `stage` holds Q, dO, lse and delta.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void add_query_tile(const BackwardParams& params,
                                               typename Config::SharedStorage& smem, int tile,
                                               int stage, bool masked, float (&dk)[kM][kD][4],
                                               float (&dv)[kM][kD][4]) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  constexpr int kN = Config::kBlockM / 8;      // 8-query columns of Sᵀ
  constexpr int kK = Config::kHeadDim / 16;
  const int lane = threadIdx.x % kWarpSize;
  const int warp_key = threadIdx.x / kWarpSize * Config::kWarpKeys;
  const uint32_t q_tile = ptx::shared_address(smem.q[stage]);
  const uint32_t dout_tile = ptx::shared_address(smem.dout[stage]);
  const auto warp_rows = [&](char* keys) {
    return lane_offsets<KTile, RowFirst>(
        ptx::shared_address(keys) + warp_key * KTile::kRowBytes, lane);
  };

  Accumulator<kM, kN> p;   // Sᵀ, then Pᵀ (16 kM keys, 8 kN queries)
  Accumulator<kM, kN> ds;  // dPᵀ, then dSᵀ
  clear(p);
  clear(ds);
  gemm_rows_rows<T, kK>(p, warp_rows(smem.k), lane_offsets<QTile, ChunkFirst>(q_tile, lane));
  gemm_rows_rows<T, kK>(ds, warp_rows(smem.v), lane_offsets<QTile, ChunkFirst>(dout_tile, lane));

  const float units = params.softmax_scale * kLog2E;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 lse = *reinterpret_cast<float2*>(&smem.lse[stage][8 * n + lane % 4 * 2]);
    const float2 delta = *reinterpret_cast<float2*>(&smem.delta[stage][8 * n + lane % 4 * 2]);
    const float exponent[2] = {softmax_exponent(lse.x), softmax_exponent(lse.y)};
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[m][n][i] = ptx::exp2_approx(fmaf(p[m][n][i], units, -exponent[i % 2]));
        ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - (i % 2 == 0 ? delta.x : delta.y));
      }
  }
  if (masked) {
    const BandMask mask(params.shape, params.window);
    const BackwardPlace<Config> place(params.shape);
    const int key = place.first_key + warp_key + lane / 4;
    const int row = tile * Config::kBlockM + lane % 4 * 2;
    zero_masked(p, mask, key, row);
    zero_masked(ds, mask, key, row);
  }

  uint32_t operand[kM][kN / 2][4];  // (16 kM keys, 8 kN queries) as A fragments
  if (params.dv.data != nullptr) {
    to_operand<T>(operand, p);
    gemm_registers_columns<T>(dv, operand, lane_offsets<QTile, RowFirst>(dout_tile, lane));
  }
  to_operand<T>(operand, ds);
  if (params.dq.data != nullptr)
    stage_operand<typename Config::DsTile>(ptx::shared_address(smem.ds[stage]), operand, warp_key,
                                           lane);
  if (params.dk.data != nullptr)
    gemm_registers_columns<T>(dk, operand, lane_offsets<QTile, RowFirst>(q_tile, lane));
}

// Adds dS K of a tile whose dSᵀ is complete to dQ. A query that sees a key with NaN or infinity has
// NaN in its row of dSᵀ; one that does not must not meet it as 0 * inf, so such keys count as zero.
template <typename Config>
__device__ __forceinline__ void add_dq_tile(const BackwardParams& params,
                                            typename Config::SharedStorage& smem, int64_t head,
                                            int tile, int stage, bool k_is_finite) {
  using T = typename Config::Element;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int dq_row = warp / Config::kDqWarpsD * Config::kDqRows;
  const int dq_col = warp % Config::kDqWarpsD * Config::kDqCols;
  const auto ds_columns = lane_offsets<typename Config::DsTile, ChunkFirst>(
      ptx::shared_address(smem.ds[stage]), lane, dq_row / kChunk);
  const auto k_columns = lane_offsets<typename Config::KTile, RowFirst>(
      ptx::shared_address(smem.k), lane, dq_col / kChunk);

  Accumulator<Config::kDqRows / 16, Config::kDqCols / 8> dq;
  clear(dq);
  if (k_is_finite)
    gemm_columns_columns<T, NonFinite::kKeep, Config::kBlockN / 16>(dq, ds_columns, k_columns);
  else
    gemm_columns_columns<T, NonFinite::kDrop, Config::kBlockN / 16>(dq, ds_columns, k_columns);
  DqWorkspace(params.dq_accum, params.shape, head)
      .template add<Config::kHeadDim>(dq, tile * Config::kBlockM + dq_row, dq_col, lane);
}

// The walk over the query heads of the group and their tiles: leaves dK and dV (16 kM keys, 8 kD)
// of this warp's keys in registers.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void accumulate(const BackwardParams& params,
                                           typename Config::SharedStorage& smem,
                                           float (&dk)[kM][kD][4], float (&dv)[kM][kD][4]) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  using QLoader = TileLoader<QTile, kBlockM, Config::kThreads>;

  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int seqlen_k = static_cast<int>(shape.seqlen_k);
  const BackwardPlace<Config> place(shape);
  const Range keys{place.first_key, place.first_key + kBlockN};
  const BandMask mask(shape, params.window);
  const Range touching =
      mask.template touching_query_tiles<kBlockM>({keys.begin, min(keys.end, seqlen_k)});
  const Range whole = mask.template whole_query_tiles<kBlockM>(keys);

  clear(dk);
  clear(dv);
  if (touching.begin == touching.end) return;

  // K and V stay for the whole block; Q and dO tiles stream past.
  const auto load_keys = [&](char* smem_tile, const View& view, int cols) {
    TileLoader<KTile, kBlockN, Config::kThreads>(head_matrix(view, place.at.batch, place.at.head),
                                                 view.seq_stride, seqlen_k, cols, place.at.tile)
        .load(ptx::shared_address(smem_tile), place.at.tile);
  };
  load_keys(smem.k, params.k, shape.head_dim);
  load_keys(smem.v, params.v, shape.head_dim_v);

  const auto q_loader_of = [&](const View& view, int64_t head, int cols) {
    return QLoader(head_matrix(view, head / shape.heads_q, static_cast<int>(head % shape.heads_q)),
                   view.seq_stride, seqlen_q, cols, touching.begin);
  };
  QLoader q_loader = q_loader_of(params.q, place.first_head, shape.head_dim);
  QLoader dout_loader = q_loader_of(params.dout, place.first_head, shape.head_dim_v);
  const auto load_queries = [&](int64_t head, int tile, int stage) {
    q_loader.load(ptx::shared_address(smem.q[stage]), tile);
    dout_loader.load(ptx::shared_address(smem.dout[stage]), tile);
    if (threadIdx.x < kBlockM) {
      const int row = tile * kBlockM + threadIdx.x;
      const int64_t index = head * shape.seqlen_q + row;
      const int bytes = row < seqlen_q ? sizeof(float) : 0;
      ptx::cp_async_4(ptx::shared_address(&smem.lse[stage][threadIdx.x]), params.lse + index,
                      bytes);
      ptx::cp_async_4(ptx::shared_address(&smem.delta[stage][threadIdx.x]), params.delta + index,
                      bytes);
    }
    ptx::cp_async_commit();
  };
  load_queries(place.first_head, touching.begin, 0);

  // dQ of a tile waits for the next tile's barrier, which dSᵀ needs anyway.
  bool k_is_finite = true;
  int64_t head = place.first_head;
  int heads_left = place.group;
  int stage = 0;
  for (int tile = touching.begin;; stage ^= 1) {
    const bool last_of_head = tile + 1 == touching.end;
    const bool last = last_of_head && heads_left == 1;
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile and the previous dSᵀ are there, and the other stage is free
    if (last_of_head && !last) {
      q_loader = q_loader_of(params.q, head + 1, shape.head_dim);
      dout_loader = q_loader_of(params.dout, head + 1, shape.head_dim_v);
    }
    if (!last) load_queries(head + last_of_head, last_of_head ? touching.begin : tile + 1, stage ^ 1);

    const bool first_of_head = tile == touching.begin;
    if (first_of_head && heads_left == place.group)
      k_is_finite = is_finite<T, KTile, Config::kThreads>(ptx::shared_address(smem.k));
    else if (params.dq.data != nullptr)
      add_dq_tile<Config>(params, smem, head - first_of_head,
                          first_of_head ? touching.end - 1 : tile - 1, stage ^ 1, k_is_finite);

    const bool masked = tile < whole.begin || tile >= whole.end;
    add_query_tile<Config>(params, smem, tile, stage, masked, dk, dv);

    if (last) break;
    tile = last_of_head ? touching.begin : tile + 1;
    if (last_of_head) {
      ++head;
      --heads_left;
    }
  }
  __syncthreads();
  if (params.dq.data != nullptr)
    add_dq_tile<Config>(params, smem, head, touching.end - 1, stage, k_is_finite);
  __syncthreads();  // K is read; its tile may be overwritten
}

// Writes dK and dV by way of this warp's own rows of the K and V tiles.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void write_gradient(const View& view, const Shape& shape, char* staging,
                                               int cols, const float (&acc)[kM][kD][4]) {
  if (view.data == nullptr) return;
  using KTile = typename Config::KTile;
  const BackwardPlace<Config> place(shape);
  const int lane = threadIdx.x % kWarpSize;
  stage_fragments<typename Config::Element, KTile>(ptx::shared_address(staging), acc,
                                                   place.warp_key, lane);
  __syncwarp();
  store_staged_rows<KTile, Config::kWarpKeys>(
      head_matrix(view, place.at.batch, place.at.head), view.seq_stride,
      place.first_key + place.warp_key, static_cast<int>(shape.seqlen_k), cols,
      ptx::shared_address(staging), place.warp_key, lane);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);

  constexpr int kM = Config::kWarpKeys / 16;  // 16-key fragments of a warp
  constexpr int kD = Config::kHeadDim / 8;    // 8-column tiles of dK and dV
  Accumulator<kM, kD> dk, dv;
  accumulate<Config>(params, smem, dk, dv);
  scale(dk, params.softmax_scale);
  write_gradient<Config>(params.dk, params.shape, smem.k, params.shape.head_dim, dk);
  write_gradient<Config>(params.dv, params.shape, smem.v, params.shape.head_dim_v, dv);
}

}  // namespace flash_ext::sm80
