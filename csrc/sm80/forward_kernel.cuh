// Forward pass: FlashAttention-2 (Dao 2023, algorithm 1) on mma.sync.
//
//   one block: kBlockM query rows of one head          grid: query tiles x heads x batch,
//                                                      packed: slots of query tiles x heads
//   for each tile of kBlockN keys, right to left:
//       S  = Q Kᵀ                                      (tensor cores, K from shared memory)
//       P  = exp2(S - m), O, l brought to the new m    (registers)
//       O += P V                                       (tensor cores, P from registers)
//   O / l, lse
//
// With all features S goes through the soft cap, ALiBi and the bias before the softmax, and P
// through dropout after it (core/score.h, core/dropout.h).
#pragma once

#include "core/bias.h"
#include "core/dropout.h"
#include "core/epilogue.h"
#include "core/finite.h"
#include "core/gemm.h"
#include "core/mask.h"
#include "core/packing.h"
#include "core/scheduler.h"
#include "core/score.h"
#include "core/softmax.h"
#include "core/table.h"
#include "core/tile_copy.h"
#include "params.h"
#include "ptx/registers.h"
#include "sm80/config.h"

namespace flash_ext::sm80 {

// Where this thread block and this lane stand. Cheap enough to find out again where it is needed.
template <typename Config>
struct ForwardPlace {
  TileCoordinate at;  // query tile, query head, batch entry
  int kv_head;
  Range rows;    // query rows of the block, cut at Sq
  int warp_row;  // first row of this warp inside the tile
  int lane_row;  // first row of this lane's fragments

  __device__ __forceinline__ ForwardPlace(const ForwardParams& params,
                                          const typename Config::SharedStorage& smem) {
    const Shape& shape = shape_of<Config>(params, smem);
    const int seqlen_q = static_cast<int>(shape.seqlen_q);
    if constexpr (Config::kPacked)
      at = {static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&smem.tile))),
            static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&smem.head))),
            static_cast<int>(ptx::load_shared_u32(ptx::shared_address(&smem.batch)))};
    else
      at = last_tile_first(ptx::block_index(), ceil_div(seqlen_q, Config::kBlockM), shape.heads_q);
    kv_head = at.head / (shape.heads_q / shape.heads_k);
    const int first_row = at.tile * Config::kBlockM;
    rows = {first_row, min(first_row + Config::kBlockM, seqlen_q)};
    warp_row = threadIdx.x / kWarpSize * Config::kWarpRows;
    lane_row = first_row + warp_row + threadIdx.x % kWarpSize / 4;
  }
};

// Finds this block's sequence and its place in it; false where there is nothing to do.
template <typename Config>
__device__ __forceinline__ bool take_tile(const ForwardParams& params,
                                          typename Config::SharedStorage& smem) {
  if constexpr (Config::kPacked) {
    if (threadIdx.x < kWarpSize) {
      const Shape& shape = params.shape;
      const bool packed = params.packing.cu_seqlens_q != nullptr;
      const int64_t tiles =
          packed ? packed_slots(shape.seqlen_q, Config::kBlockM, params.packing.batch)
                 : ceil_div(static_cast<int>(shape.seqlen_q), Config::kBlockM);
      const TileCoordinate at = last_tile_first(blockIdx.x, static_cast<int>(tiles), shape.heads_q);
      const PackedTile found =
          packed ? find_packed_tile<Config::kBlockM, false>(shape, params.packing, at.tile)
                 : PackedTile::dense(shape, at, shape.seqlen_q);
      if (threadIdx.x == 0) {
        smem.sequence = found.sequence;
        smem.tile = found.tile;
        smem.head = at.head;
        smem.batch = found.batch;
      }
    }
    __syncthreads();
    return smem.sequence.owned > 0;
  }
  return true;
}

// Query rows that the tiles of the sequence cover: beyond those it uses they are zeros.
template <typename Config>
__device__ __forceinline__ int owned_rows(const ForwardParams& params,
                                          const typename Config::SharedStorage& smem) {
  if constexpr (Config::kPacked) return smem.sequence.owned;
  return static_cast<int>(params.shape.seqlen_q);
}

// Whether a bias or a bool mask may hide any key.
template <typename Config>
__device__ __forceinline__ bool has_bias(const ForwardParams& params) {
  return Config::kFull && params.modifiers.bias.data != nullptr;
}

// Brings raw scores (16 kM, 8 kN) of this warp's rows to what the softmax sees, masks aside. `key`
// is that of this lane's first element. Returns what the scores are still to be multiplied by, > 0.
template <typename Config, int kM, int kN>
__device__ __forceinline__ float modify_scores(float (&scores)[kM][kN][4],
                                               const ForwardParams& params,
                                               const typename Config::SharedStorage& smem,
                                               int key) {
  const ForwardPlace<Config> place(params, smem);
  float units = cap_scores(scores, params.modifiers.softcap, params.softmax_scale);
  bool hides;
  units = add_biases<Axes::kQueriesDown, Config::kBiasTile>(
      scores, units, params.modifiers, shape_of<Config>(params, smem),
      {place.at.batch, place.at.head, place.lane_row, key},
      [&] {
        using Tile = typename Config::BiasTile;
        return lane_offsets<Tile, RowFirst>(
            bias_tile<Config>(smem) + place.warp_row * Tile::kRowBytes, threadIdx.x % kWarpSize);
      },
      hides);
  if (units > 0.f) return units;
  scale(scores, units);
  return 1.f;
}

// Enqueues this warp's rows of a tile of the bias, if it is one to lie in shared memory.
template <typename Config>
__device__ __forceinline__ void load_bias(const ForwardParams& params,
                                          const typename Config::SharedStorage& smem, int tile) {
  if (!params.modifiers.bias_in_chunks) return;
  using Tile = typename Config::BiasTile;
  const ForwardPlace<Config> place(params, smem);
  const Shape& shape = shape_of<Config>(params, smem);
  const int row = place.rows.begin + place.warp_row, key = tile * Config::kBlockN;
  load_bias_tile<Tile, Config::kWarpRows, Config::kBlockN, kWarpSize>(
      bias_tile<Config>(smem) + place.warp_row * Tile::kRowBytes, params.modifiers.bias,
      {place.at.batch, place.at.head, row, key}, static_cast<int>(shape.seqlen_q) - row,
      static_cast<int>(shape.seqlen_k) - key, threadIdx.x % kWarpSize);
  ptx::cp_async_commit();
}

// Drops probabilities (16 kM, 8 kN) of this warp's rows; `first_key` is the tile's.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void drop(float (&p)[kM][kN][4], const ForwardParams& params,
                                     const typename Config::SharedStorage& smem, int first_key) {
  if (params.modifiers.drop_threshold == 0) return;
  const ForwardPlace<Config> place(params, smem);
  const int64_t head = place.at.batch * params.shape.heads_q + place.at.head;
  Dropout(params.modifiers, head, threadIdx.x % kWarpSize)
      .drop(p, place.rows.begin + place.warp_row, first_key);
}

// The walk over K and V: leaves unnormalised O (16 kM, 8 kD) of this warp's rows in `out`.
//
// NaN or infinity in a masked row of V would reach O as 0 * inf. A first, unguarded walk takes no
// notice; if its result is not finite, a guarded walk does it again. The return value asks for it,
// and smem.guarded, which costs the main loop no register, tells which of the two this is.
template <typename Config, int kM, int kD>
__device__ __forceinline__ bool attend(const ForwardParams& params,
                                       typename Config::SharedStorage& smem,
                                       OnlineSoftmax<kM>& softmax, float (&out)[kM][kD][4]) {
  using T = typename Config::Element;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using QLoader = TileLoader<QTile, Config::kBlockM, Config::kThreads>;
  using KLoader = TileLoader<KTile, Config::kBlockN, Config::kThreads>;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kN = kBlockN / 8;  // 8-key columns of S

  const Shape& shape = shape_of<Config>(params, smem);
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int seqlen_k = static_cast<int>(shape.seqlen_k);
  const int lane = threadIdx.x % kWarpSize;
  const ForwardPlace<Config> place(params, smem);

  const BandMask mask(shape, params.window);
  const Range touched = mask.template touched_key_tiles<kBlockN>(place.rows);
  const Range whole = mask.template whole_key_tiles<kBlockN>(place.rows);
  const auto whole_tiles = [&] {
    if constexpr (Config::kPacked)  // found out again: cheaper than two registers
      return BandMask(shape_of<Config>(params, smem), params.window)
          .template whole_key_tiles<kBlockN>(ForwardPlace<Config>(params, smem).rows);
    else
      return whole;
  };

  softmax.clear();
  clear(out);
  if (touched.begin == touched.end) return false;
  if (Config::kPacked && place.rows.begin >= place.rows.end) return false;  // rows nobody uses

  int tile = touched.end - 1;
  const int first_k = first_row_k<Config>(smem);
  KLoader k_loader(head_matrix(params.k, place.at.batch, place.kv_head, first_k),
                   params.k.seq_stride, seqlen_k, shape.head_dim, tile);
  KLoader v_loader(head_matrix(params.v, place.at.batch, place.kv_head, first_k),
                   params.v.seq_stride, seqlen_k, shape.head_dim_v, tile);
  const auto load_tile = [&](int tile, int stage) {
    k_loader.load(ptx::shared_address(smem.k[stage]), tile, -1);
    v_loader.load(ptx::shared_address(smem.v[stage]), tile, -1);
    ptx::cp_async_commit();
  };
  QLoader(head_matrix(params.q, place.at.batch, place.at.head, first_row_q<Config>(smem)),
          params.q.seq_stride, seqlen_q, shape.head_dim, place.at.tile)
      .load(ptx::shared_address(smem.q), place.at.tile);
  load_tile(tile, 0);
  if constexpr (Config::kBiasTile) load_bias<Config>(params, smem, tile);
  if constexpr (Config::kPacked && !kKeepsKeys) {  // no other tile is cut
    k_loader.set_rows(kMaxSeqlen);
    v_loader.set_rows(kMaxSeqlen);
  }

  const float softmax_units = params.softmax_scale * kLog2E;
  const auto q_rows = lane_offsets<QTile, RowFirst>(
      ptx::shared_address(smem.q) + place.warp_row * QTile::kRowBytes, lane);

  for (int stage = 0; tile >= touched.begin; --tile, stage ^= 1) {
    const Range seen_whole = whole_tiles();
    const bool masked = tile < seen_whole.begin || tile >= seen_whole.end;
    const uint32_t k_tile = ptx::shared_address(smem.k[stage]);
    const uint32_t v_tile = ptx::shared_address(smem.v[stage]);

    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has landed, and nobody still reads the other stage
    if (tile > touched.begin) load_tile(tile - 1, stage ^ 1);
    if ((masked || has_bias<Config>(params)) && smem.guarded) {
      const ForwardPlace<Config> here(params, smem);
      const Shape& shape = shape_of<Config>(params, smem);
      const BandMask band(shape, params.window);
      if constexpr (Config::kFull) {
        const BiasedMask seen(band, params.modifiers.bias, shape, here.at.batch, here.at.head);
        spread_nonfinite<T, KTile, kBlockN>(out, seen, v_tile, here.lane_row, tile * kBlockN, lane);
      } else {
        spread_nonfinite<T, KTile, kBlockN>(out, band, v_tile, here.lane_row, tile * kBlockN, lane);
      }
      __syncthreads();
      zero_nonfinite<T, KTile, Config::kThreads>(v_tile, threadIdx.x);
      __syncthreads();
    }

    if (Config::kSkips && masked) {  // this warp's rows may see nothing of the tile
      const ForwardPlace<Config> here(params, smem);
      const int first_row = here.rows.begin + here.warp_row;
      const BandMask band(shape_of<Config>(params, smem), params.window);
      // The vote tells the compiler that lanes agree: it spares registers.
      if (!__any_sync(0xffffffffu, band.touches({first_row, first_row + Config::kWarpRows},
                                                {tile * kBlockN, (tile + 1) * kBlockN})))
        continue;
    }

    Accumulator<kM, kN> scores;  // (16 kM, 8 kN)
    clear(scores);
    gemm_rows_rows<T, Config::kHeadDim / 16>(scores, q_rows,
                                             lane_offsets<KTile, ChunkFirst>(k_tile, lane));
    float units =
        params.softmax_scale > 0.f ? softmax_units : 1.f;  // the softmax folds them if > 0
    if constexpr (Config::kFull)
      units = modify_scores<Config>(scores, params, smem, tile * kBlockN + lane % 4 * 2);
    else if (params.softmax_scale <= 0.f)
      scale(scores, softmax_units);
    if (masked) {
      const BandMask band(shape_of<Config>(params, smem), params.window);
      const int row = ForwardPlace<Config>(params, smem).lane_row;
      const int key = tile * kBlockN + lane % 4 * 2;
      if constexpr (Config::kFull) {  // for want of registers
        apply_mask(scores, band, row, key);
      } else {
        const Range seen_whole = whole_tiles();  // most others are cut at one side only
        if (tile >= seen_whole.end) mask_ends(scores, band, row, key);
        if (tile < seen_whole.begin) mask_begins(scores, band, row, key);
      }
    }

    softmax.step(scores, out, units);
    if constexpr (Config::kFull) drop<Config>(scores, params, smem, tile * kBlockN);

    uint32_t p[kM][kN / 2][4];  // (16 kM, 8 kN) as A fragments
    to_operand<T>(p, scores);
    if constexpr (Config::kBiasTile) {
      __syncwarp();  // the warp has read its rows of the bias
      if (tile > touched.begin) load_bias<Config>(params, smem, tile - 1);
    }
    gemm_registers_columns<T>(out, p, lane_offsets<KTile, RowFirst>(v_tile, lane));
  }
  const Range seen_whole = whole_tiles();
  Range walked = touched;
  if constexpr (Config::kFull)  // found out again
    walked = BandMask(shape_of<Config>(params, smem), params.window)
                 .template touched_key_tiles<kBlockN>(ForwardPlace<Config>(params, smem).rows);
  const bool any_masked =
      walked.begin < seen_whole.begin || walked.end > seen_whole.end || has_bias<Config>(params);
  return any_masked && !smem.guarded && __syncthreads_or(has_nonfinite(out));
}

// Normalises and writes O and lse; 16-bit O goes by way of this warp's own rows of the Q tile.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void write_output(const ForwardParams& params,
                                             typename Config::SharedStorage& smem,
                                             const OnlineSoftmax<kM>& softmax,
                                             float (&out)[kM][kD][4]) {
  using T = typename Config::Element;
  using QTile = typename Config::QTile;
  const Shape& shape = shape_of<Config>(params, smem);
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int rows = owned_rows<Config>(params, smem);
  const int lane = threadIdx.x % kWarpSize;
  const ForwardPlace<Config> place(params, smem);

  const float sink = params.sinks == nullptr ? -INFINITY : params.sinks[place.at.head];
  const int64_t lse_begin =
      first_table_row<Config>(params, smem, place.at.batch * shape.heads_q + place.at.head);
  const bool writes_lse = params.lse != nullptr && lane % 4 == 0;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = place.lane_row + 16 * m + 8 * h;
      float row_lse;
      float factor = softmax.finish(m, h, sink, row_lse);
      if constexpr (Config::kFull) factor *= params.modifiers.keep_scale;
      if (Config::kPacked && row >= seqlen_q) row_lse = -INFINITY;
      if (writes_lse && row < rows) params.lse[lse_begin + row] = row_lse;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        out[m][d][2 * h] *= factor;
        out[m][d][2 * h + 1] *= factor;
      }
    }

  if (Config::kPacked) zero_rows_from(out, place.lane_row, seqlen_q);

  const int first_q = first_row_q<Config>(smem);
  if (params.out_dtype == DType::kFloat32) {
    char* matrix = head_matrix(params.out, place.at.batch, place.at.head, first_q, sizeof(float));
    store_fragments(reinterpret_cast<float*>(matrix), params.out.seq_stride, rows, shape.head_dim_v,
                    out, place.lane_row, lane);
  } else {
    const uint32_t staging = ptx::shared_address(smem.q);
    stage_fragments<T, QTile>(staging, out, place.warp_row, lane);
    __syncwarp();
    store_staged_rows<QTile, Config::kWarpRows>(
        head_matrix(params.out, place.at.batch, place.at.head, first_q), params.out.seq_stride,
        place.rows.begin + place.warp_row, rows, shape.head_dim_v, staging, place.warp_row, lane);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);

  constexpr int kM = Config::kWarpRows / 16;  // 16-row fragments of a warp
  constexpr int kD = Config::kHeadDim / 8;    // 8-column tiles of O
  OnlineSoftmax<kM> softmax;
  Accumulator<kM, kD> out;
  if (!take_tile<Config>(params, smem)) return;
  smem.guarded = false;
  while (attend<Config>(params, smem, softmax, out)) smem.guarded = true;
  write_output<Config>(params, smem, softmax, out);
}

}  // namespace flash_ext::sm80
