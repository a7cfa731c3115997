// Forward pass: FlashAttention-2 (Dao 2023, algorithm 1) on mma.sync.
//
//   one block: kBlockM query rows of one head          grid: query tiles x heads x batch
//   for each tile of kBlockN keys, right to left:
//       S  = Q Kᵀ                                      (tensor cores, K from shared memory)
//       P  = exp2(S - m), O, l brought to the new m    (registers)
//       O += P V                                       (tensor cores, P from registers)
//   O / l, lse
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

template <bool kMasked>
using Masked = std::bool_constant<kMasked>;

// Sets scores (16 kM, 8 kN) of keys a row does not see to -inf. `row` and `key` are the
// coordinates of this lane's first element.
template <int kM, int kN>
__device__ __forceinline__ void apply_mask(float (&scores)[kM][kN][4], const BandMask& mask,
                                           int row, int key) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = mask.first_key(row + 16 * m + 8 * h) - key;
      const int end = mask.end_key(row + 16 * m + 8 * h) - key;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e < first || 8 * n + e >= end) scores[m][n][2 * h + e] = -INFINITY;
    }
}

// Adds NaN and infinity of V to the rows that see them, and to no other: what 0 * inf in a masked
// product must not do. Rare, so a plain walk over the tile. `row` and `key` as above, except that
// `key` is the tile's first key.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void spread_nonfinite(float (&out)[kM][kD][4], const BandMask& mask,
                                              uint32_t v_tile, int row, int key, int lane) {
  using T = typename Config::Element;
#pragma unroll 1
  for (int j = 0; j < Config::kBlockN; ++j)
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      const uint32_t pair =
          ptx::load_shared_u32(v_tile + Config::KTile::offset(j, d) + lane % 4 * 4);
      const float2 bad = Element<T>::unpack(pair & nonfinite_halves<T>(pair));
      if (nonfinite_halves<T>(pair) == 0) continue;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (mask.sees(row + 16 * m + 8 * h, key + j)) {
            out[m][d][2 * h] += bad.x;
            out[m][d][2 * h + 1] += bad.y;
          }
    }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_forward(const __grid_constant__ ForwardParams params) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kM = Config::kWarpRows / 16;  // 16-row fragments of a warp
  constexpr int kN = kBlockN / 8;             // 8-key columns of S
  constexpr int kD = Config::kHeadDim / 8;    // 8-column tiles of O

  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * Config::kWarpRows;

  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int seqlen_k = static_cast<int>(shape.seqlen_k);
  const TileCoordinate at =
      last_tile_first(blockIdx.x, ceil_div(seqlen_q, kBlockM), shape.heads_q);
  const int kv_head = at.head / (shape.heads_q / shape.heads_k);
  const int first_row = at.tile * kBlockM;
  const Range rows{first_row, min(first_row + kBlockM, seqlen_q)};

  // Global memory: (sequence, dim) matrices of this head.
  const TileLoader<QTile, kBlockM, Config::kThreads> q_loader(
      head_matrix(params.q, at.batch, at.head), params.q.seq_stride, seqlen_q, shape.head_dim);
  const TileLoader<KTile, kBlockN, Config::kThreads> k_loader(
      head_matrix(params.k, at.batch, kv_head), params.k.seq_stride, seqlen_k, shape.head_dim);
  const TileLoader<KTile, kBlockN, Config::kThreads> v_loader(
      head_matrix(params.v, at.batch, kv_head), params.v.seq_stride, seqlen_k, shape.head_dim_v);

  const BandMask mask(shape, params.window);
  const Range touched = mask.template touched_key_tiles<kBlockN>(rows);
  const Range whole = mask.template whole_key_tiles<kBlockN>(rows);

  // Shared memory, as ldmatrix reads it.
  const auto q_rows = lane_offsets<QTile, RowFirst>(
      ptx::shared_address(smem.q) + warp_row * QTile::kRowBytes, lane);

  const auto load_tile = [&](int tile) {
    const int stage = tile % Config::kStages;
    k_loader.load(ptx::shared_address(smem.k[stage]), tile * kBlockN);
    v_loader.load(ptx::shared_address(smem.v[stage]), tile * kBlockN);
    ptx::cp_async_commit();
  };

  const float units = params.softmax_scale * kLog2E;
  OnlineSoftmax<kM> softmax;
  Accumulator<kM, kD> out;  // (16 kM, 8 kD) of this warp's rows, unnormalised
  clear(out);

  const int lane_row = first_row + warp_row + lane / 4;
  const auto step = [&](int tile, auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has landed, and nobody still reads the other stage
    if (tile > touched.begin) load_tile(tile - 1);

    const int stage = tile % Config::kStages;
    const uint32_t v_tile = ptx::shared_address(smem.v[stage]);
    const auto k_rows = lane_offsets<KTile, ChunkFirst>(ptx::shared_address(smem.k[stage]), lane);
    const auto v_columns = lane_offsets<KTile, RowFirst>(v_tile, lane);

    Accumulator<kM, kN> scores;  // (16 kM, 8 kN)
    clear(scores);
    gemm_rows_rows<T, Config::kHeadDim / 16>(scores, q_rows, k_rows);
    if (params.softmax_scale <= 0.f) scale(scores, units);  // the softmax folds positive units only
    const BandMask mask(shape, params.window);
    if constexpr (kMasked) apply_mask(scores, mask, lane_row, tile * kBlockN + lane % 4 * 2);

    softmax.step(scores, out, params.softmax_scale > 0.f ? units : 1.f);

    uint32_t p[kM][kN / 2][4];  // (16 kM, 8 kN) as A fragments
    to_operand<T>(p, scores);
    if constexpr (kMasked) {
      if (gemm_registers_columns<T, NonFinite::kDrop>(out, p, v_columns))
        spread_nonfinite<Config>(out, mask, v_tile, lane_row, tile * kBlockN, lane);
    } else {
      gemm_registers_columns<T, NonFinite::kKeep>(out, p, v_columns);
    }
  };

  if (touched.begin < touched.end) {
    q_loader.load(ptx::shared_address(smem.q), first_row);
    load_tile(touched.end - 1);
  }
  for (int tile = touched.end - 1; tile >= touched.begin; --tile) {
    if (tile >= whole.begin && tile < whole.end)
      step(tile, Masked<false>{});
    else
      step(tile, Masked<true>{});
  }

  // Epilogue: normalise, write lse, and write O by way of this warp's own rows of the Q tile.
  const float sink = params.sinks == nullptr ? -INFINITY : params.sinks[at.head];
  float* lse = params.lse + (at.batch * shape.heads_q + at.head) * shape.seqlen_q;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_row + 16 * m + 8 * h;
      float row_lse;
      const float factor = softmax.finish(m, h, sink, row_lse);
      if (lane % 4 == 0 && row < seqlen_q) lse[row] = row_lse;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out[m][d][2 * h] *= factor;
        out[m][d][2 * h + 1] *= factor;
      }
    }

  if (params.out_dtype == DType::kFloat32) {
    char* matrix = head_matrix(params.out, at.batch, at.head, sizeof(float));
    store_fragments(reinterpret_cast<float*>(matrix), params.out.seq_stride, seqlen_q,
                    shape.head_dim_v, out, lane_row, lane);
  } else {
    const uint32_t staging = ptx::shared_address(smem.q);
    stage_fragments<T, QTile>(staging, out, warp_row, lane);
    __syncwarp();
    store_staged_rows<QTile, Config::kWarpRows>(
        head_matrix(params.out, at.batch, at.head), params.out.seq_stride, first_row + warp_row,
        seqlen_q, shape.head_dim_v, staging, warp_row, lane);
  }
}

}  // namespace flash_ext::sm80
