// What the classic kernels share: tiles, the head that a block works for, loads and the write of O.
#pragma once

#include <cuda_bf16.h>

#include "classic/forward.h"
#include "core/epilogue.h"
#include "core/gemm.h"
#include "core/layout.h"
#include "core/mask.h"
#include "core/softmax.h"
#include "core/tile_copy.h"
#include "ptx/cp_async.h"
#include "ptx/shared.h"

namespace flash_ext::classic {

using Bf16 = __nv_bfloat16;

// FlashAttention 1 takes B_c = M / 4d keys and B_r = min(M / 4d, d) rows: Q, K, V and O tiles of
// B_c rows fill a memory of M elements. With M = 32,768 that is 128 keys at D 64 and 64 at D 128,
// and 64 rows at both.
constexpr int kMemoryElements = 32768;

template <int kHeadDim_, int kBlockM_ = 64, int kBlockN_ = kMemoryElements / 4 / kHeadDim_>
struct Tiles {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;  // B_r
  static constexpr int kBlockN = kBlockN_;  // B_c
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;

  using QTile = SmemTile<kBlockM, kHeadDim>;
  using KTile = SmemTile<kBlockN, kHeadDim>;  // V has the same tile
};

// Twice the rows, and as many keys as registers then leave room for.
template <int kHeadDim>
using WideTiles = Tiles<kHeadDim, 128, kHeadDim == 64 ? 96 : 48>;

// One query head of one batch entry.
struct Head {
  int64_t index;  // among all heads of all batch entries
  int64_t batch;
  int query_head;
  int key_head;

  __device__ __forceinline__ Head(const Shape& shape, uint32_t index_)
      : index(index_),
        batch(index_ / static_cast<uint32_t>(shape.heads_q)),
        query_head(index_ % static_cast<uint32_t>(shape.heads_q)),
        key_head(query_head / (shape.heads_q / shape.heads_k)) {}
};

// Query rows of a tile, cut at the end of the sequence.
template <typename T>
__device__ __forceinline__ Range query_rows(const Shape& shape, int tile) {
  const int first_row = tile * T::kBlockM;
  return {first_row, min(first_row + T::kBlockM, static_cast<int>(shape.seqlen_q))};
}

// Enqueue one tile; the caller commits and waits.
template <typename T>
__device__ __forceinline__ void load_queries(const Params& params, const Head& head, int tile,
                                             const char* smem_q) {
  const int rows = static_cast<int>(params.shape.seqlen_q);
  const char* matrix = head_matrix(params.q, head.batch, head.query_head);
  TileLoader<typename T::QTile, T::kBlockM, T::kThreads>(matrix, params.q.seq_stride, rows,
                                                         T::kHeadDim, tile)
      .load(ptx::shared_address(smem_q), tile);
}

// `keys` is k or v.
template <typename T>
__device__ __forceinline__ void load_keys(const Params& params, const View& keys, const Head& head,
                                          int tile, const char* smem_k) {
  const int rows = static_cast<int>(params.shape.seqlen_k);
  const char* matrix = head_matrix(keys, head.batch, head.key_head);
  TileLoader<typename T::KTile, T::kBlockN, T::kThreads>(matrix, keys.seq_stride, rows, T::kHeadDim,
                                                         tile)
      .load(ptx::shared_address(smem_k), tile);
}

// Waits for everything that was enqueued, by all threads.
__device__ __forceinline__ void wait_for_loads() {
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
}

// S (16 kM, 8 kN) = Q Kᵀ, of Q rows from `q_row` and keys from `k_row` on.
template <typename T, int kM, int kN>
__device__ __forceinline__ void multiply_scores(float (&scores)[kM][kN][4], const char* smem_q,
                                                int q_row, const char* smem_k, int k_row,
                                                int lane) {
  using QTile = typename T::QTile;
  using KTile = typename T::KTile;
  constexpr int kSteps = T::kHeadDim / 16;
  constexpr int kUnroll = kM == 1   ? kSteps
                          : kM == 2 ? 4
                                    : 2;  // with more fragments ahead registers spill
  const uint32_t q = ptx::shared_address(smem_q) + q_row * QTile::kRowBytes;
  const uint32_t k = ptx::shared_address(smem_k) + k_row * KTile::kRowBytes;
  clear(scores);
  gemm_rows_rows<Bf16, kSteps, kUnroll>(scores, lane_offsets<QTile, RowFirst>(q, lane),
                                        lane_offsets<KTile, ChunkFirst>(k, lane));
}

// Rounds O (16 kM, D) of this warp's rows and writes it by way of a shared tile that nobody reads
// any more; `warp_row` is the warp's first row in it.
template <typename T, int kM, int kD>
__device__ __forceinline__ void write_rows(const Params& params, const Head& head, int first_row,
                                           const float (&out)[kM][kD][4], const char* smem_tile,
                                           int warp_row, int lane) {
  using Staging = SmemTile<16 * kM, T::kHeadDim>;
  const uint32_t staging = ptx::shared_address(smem_tile) + warp_row * Staging::kRowBytes;
  stage_fragments<Bf16, Staging>(staging, out, 0, lane);
  __syncwarp();
  store_staged_rows<Staging, 16 * kM>(
      head_matrix(params.out, head.batch, head.query_head), params.out.seq_stride,
      first_row + warp_row, static_cast<int>(params.shape.seqlen_q), T::kHeadDim, staging, 0, lane);
}

}  // namespace flash_ext::classic
