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

#include <type_traits>

#include "core/epilogue.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/scheduler.h"
#include "core/softmax.h"
#include "core/tile_copy.h"
#include "params.h"
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

// Adds a warp's share of dQ (16 kM, 8 kD) to the fp32 workspace of this head. `row` and `col` are
// the coordinates of this lane's first element.
template <int kM, int kD>
__device__ __forceinline__ void accumulate_dq(float* workspace, int rows, int cols,
                                              const float (&dq)[kM][kD][4], int row, int col) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 16 * m + 8 * h;
      if (r >= rows) continue;
      float* target = workspace + static_cast<int64_t>(r) * cols + col;
#pragma unroll
      for (int d = 0; d < kD; ++d)
        if (col + 8 * d < cols) {
          atomicAdd(target + 8 * d, dq[m][d][2 * h]);
          atomicAdd(target + 8 * d + 1, dq[m][d][2 * h + 1]);
        }
    }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_backward(const __grid_constant__ BackwardParams params) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  using DsTile = typename Config::DsTile;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kThreads = Config::kThreads;
  constexpr int kM = Config::kWarpKeys / 16;  // 16-key fragments of a warp
  constexpr int kN = kBlockM / 8;             // 8-query columns of Sᵀ
  constexpr int kD = Config::kHeadDim / 8;    // 8-column tiles of dK and dV

  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const int thread = threadIdx.x;
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const int warp_key = warp * Config::kWarpKeys;
  const int dq_row = warp / Config::kDqWarpsD * Config::kDqRows;
  const int dq_col = warp % Config::kDqWarpsD * Config::kDqCols;

  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int seqlen_k = static_cast<int>(shape.seqlen_k);
  const int group = shape.heads_q / shape.heads_k;
  const TileCoordinate at =
      first_tile_first(blockIdx.x, ceil_div(seqlen_k, kBlockN), shape.heads_k);
  const int first_key = at.tile * kBlockN;
  const Range keys{first_key, min(first_key + kBlockN, seqlen_k)};
  const BandMask mask(shape, params.window);
  const Range touching = mask.template touching_query_tiles<kBlockM>(keys);

  // Shared memory, as ldmatrix reads it.
  const uint32_t k_tile = ptx::shared_address(smem.k);
  const uint32_t v_tile = ptx::shared_address(smem.v);
  const uint32_t ds_tile = ptx::shared_address(smem.ds);
  const uint32_t warp_bytes = warp_key * KTile::kRowBytes;
  const auto k_rows = lane_offsets<KTile, RowFirst>(k_tile + warp_bytes, lane);
  const auto v_rows = lane_offsets<KTile, RowFirst>(v_tile + warp_bytes, lane);
  const auto k_columns = lane_offsets<KTile, RowFirst>(k_tile, lane, dq_col / kChunk);
  const auto ds_columns = lane_offsets<DsTile, ChunkFirst>(ds_tile, lane, dq_row / kChunk);

  const auto load_tile = [&](int head, int tile, int stage) {
    const TileLoader<QTile, kBlockM, kThreads> q_loader(
        head_matrix(params.q, at.batch, head), params.q.seq_stride, seqlen_q, shape.head_dim);
    const TileLoader<QTile, kBlockM, kThreads> dout_loader(
        head_matrix(params.dout, at.batch, head), params.dout.seq_stride, seqlen_q,
        shape.head_dim_v);
    q_loader.load(ptx::shared_address(smem.q[stage]), tile * kBlockM);
    dout_loader.load(ptx::shared_address(smem.dout[stage]), tile * kBlockM);
    if (thread < kBlockM) {
      const int row = tile * kBlockM + thread;
      const int64_t index = (at.batch * shape.heads_q + head) * shape.seqlen_q + row;
      const int bytes = row < seqlen_q ? sizeof(float) : 0;
      ptx::cp_async_4(ptx::shared_address(&smem.lse[stage][thread]), params.lse + index, bytes);
      ptx::cp_async_4(ptx::shared_address(&smem.delta[stage][thread]), params.delta + index,
                      bytes);
    }
    ptx::cp_async_commit();
  };

  Accumulator<kM, kD> dk, dv;  // (16 kM keys, 8 kD)
  clear(dk);
  clear(dv);
  const float units = params.softmax_scale * kLog2E;

  const auto step = [&](int head, int tile, int stage, auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    constexpr NonFinite kNonFinite = kMasked ? NonFinite::kDrop : NonFinite::kKeep;
    const uint32_t q_tile = ptx::shared_address(smem.q[stage]);
    const uint32_t dout_tile = ptx::shared_address(smem.dout[stage]);
    const int key = first_key + warp_key + lane / 4;
    const int row = tile * kBlockM + lane % 4 * 2;

    Accumulator<kM, kN> p;  // Sᵀ, then Pᵀ (16 kM keys, 8 kN queries)
    clear(p);
    gemm_rows_rows<T, Config::kHeadDim / 16>(p, k_rows,
                                             lane_offsets<QTile, ChunkFirst>(q_tile, lane));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 lse = *reinterpret_cast<float2*>(&smem.lse[stage][8 * n + lane % 4 * 2]);
      lse = {softmax_exponent(lse.x), softmax_exponent(lse.y)};
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p[m][n][i] = ptx::exp2_approx(fmaf(p[m][n][i], units, i % 2 == 0 ? -lse.x : -lse.y));
    }
    if constexpr (kMasked) zero_masked(p, mask, key, row);

    if (params.dv.data != nullptr) {
      uint32_t operand[kM][kN / 2][4];
      to_operand<T>(operand, p);
      gemm_registers_columns<T, NonFinite::kKeep>(dv, operand,
                                                  lane_offsets<QTile, RowFirst>(dout_tile, lane));
    }
    if (params.dk.data == nullptr && params.dq.data == nullptr) return;

    Accumulator<kM, kN> ds;  // dPᵀ, then dSᵀ
    clear(ds);
    gemm_rows_rows<T, Config::kHeadDim / 16>(ds, v_rows,
                                             lane_offsets<QTile, ChunkFirst>(dout_tile, lane));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 delta = *reinterpret_cast<float2*>(&smem.delta[stage][8 * n + lane % 4 * 2]);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - (i % 2 == 0 ? delta.x : delta.y));
    }
    if constexpr (kMasked) zero_masked(ds, mask, key, row);

    uint32_t operand[kM][kN / 2][4];
    to_operand<T>(operand, ds);
    if (params.dq.data != nullptr)
      stage_operand<DsTile>(ds_tile, operand, warp_key, lane);
    if (params.dk.data != nullptr)
      gemm_registers_columns<T, NonFinite::kKeep>(dk, operand,
                                                  lane_offsets<QTile, RowFirst>(q_tile, lane));
    if (params.dq.data == nullptr) return;

    __syncthreads();  // dSᵀ is complete
    Accumulator<Config::kDqRows / 16, Config::kDqCols / 8> dq;
    clear(dq);
    gemm_columns_columns<T, kNonFinite, kBlockN / 16>(dq, ds_columns, k_columns);
    float* workspace = params.dq_accum + (at.batch * shape.heads_q + head) * shape.seqlen_q *
                                             static_cast<int64_t>(shape.head_dim);
    accumulate_dq(workspace, seqlen_q, shape.head_dim, dq,
                  tile * kBlockM + dq_row + lane / 4, dq_col + lane % 4 * 2);
  };

  // K and V stay for the whole block; Q and dO tiles stream past.
  const int tiles = touching.end - touching.begin;
  const int steps = tiles * group;
  if (steps > 0) {
    const TileLoader<KTile, kBlockN, kThreads> k_loader(
        head_matrix(params.k, at.batch, at.head), params.k.seq_stride, seqlen_k, shape.head_dim);
    const TileLoader<KTile, kBlockN, kThreads> v_loader(
        head_matrix(params.v, at.batch, at.head), params.v.seq_stride, seqlen_k,
        shape.head_dim_v);
    k_loader.load(k_tile, first_key);
    v_loader.load(v_tile, first_key);
    load_tile(at.head * group, touching.begin, 0);
  }
  int head = at.head * group;
  int tile = touching.begin;
  for (int i = 0; i < steps; ++i) {
    const int stage = i % Config::kStages;
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has landed, and nobody still reads the other stage or dSᵀ
    const bool last_of_head = tile + 1 == touching.end;
    const int next_head = last_of_head ? head + 1 : head;
    const int next_tile = last_of_head ? touching.begin : tile + 1;
    if (i + 1 < steps) load_tile(next_head, next_tile, (i + 1) % Config::kStages);

    const Range rows{tile * kBlockM, min((tile + 1) * kBlockM, seqlen_q)};
    if (mask.whole(rows, {first_key, first_key + kBlockN}))
      step(head, tile, stage, std::false_type{});
    else
      step(head, tile, stage, std::true_type{});
    head = next_head;
    tile = next_tile;
  }

  // Epilogue: dK and dV by way of this warp's own rows of the K and V tiles.
  __syncthreads();
  const auto store = [&](const View& view, float (&acc)[kM][kD][4], uint32_t staging, int cols) {
    if (view.data == nullptr) return;
    stage_fragments<T, KTile>(staging, acc, warp_key, lane);
    __syncwarp();
    store_staged_rows<KTile, Config::kWarpKeys>(head_matrix(view, at.batch, at.head),
                                                view.seq_stride, first_key + warp_key, seqlen_k,
                                                cols, staging, warp_key, lane);
  };
  scale(dk, params.softmax_scale);
  store(params.dk, dk, k_tile, shape.head_dim);
  store(params.dv, dv, v_tile, shape.head_dim_v);
}

}  // namespace flash_ext::sm80
