// How dQ of the Hopper backward is added up: consumers leave their shares in shared memory, and one
// thread for each of them adds them to the fp32 workspace by bulk reductions. Additions from
// registers would hold the consumers up: a share comes at once, and L2 takes it slowly.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/epilogue.h"
#include "core/pipeline.h"
#include "core/turns.h"
#include "ptx/bulk.h"
#include "ptx/grid_dependency.h"
#include "sm90/backward_products.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/config.h"

namespace flash_ext::sm90 {

// Leaves one part of a consumer's half of a tile's dQ to its storer, in the order of the
// accumulator's registers.
template <typename Config>
__device__ __forceinline__ void stage_dq(typename Config::SharedStorage& smem, RingPosition tile,
                                         int consumer, int part,
                                         const float (&dq)[Config::kDqCols / 2]) {
  constexpr int kValues = Config::kDqCols / 2 / Config::kDqParts;  // of a lane
  auto& ring = smem.dq_ring[consumer];
  const RingPosition parts{tile.count * Config::kDqParts + part};
  parts.wait_empty(ring);
  const uint32_t target = ptx::shared_address(smem.dq[consumer][parts.stage(ring)]) +
                          threadIdx.x % kWarpgroupThreads * 16;
#pragma unroll
  for (int i = 0; i < kValues / 4; ++i)
    ptx::store_shared_v4(target + i * kWarpgroupThreads * 16, &dq[part * kValues + 4 * i]);
  ptx::fence_proxy_async_shared();
  parts.publish_warp(ring);
}

// The turn of one piece of the kTurnRows query rows that hold a tile: key tiles add to them from
// the first to the last.
template <typename Config>
__device__ __forceinline__ Turn dq_turn(const BackwardParams& params, const BackwardTile& at,
                                        const QueryWalk& walk, int piece) {
  const int seqlen_q = static_cast<int>(params.shape.seqlen_q);
  const int turn = walk.tile / (kTurnRows / Config::kBlockM);
  const Range touched = BandMask(params.shape, params.window)
                            .template touched_key_tiles<Config::kTileKeys>(
                                {turn * kTurnRows, min((turn + 1) * kTurnRows, seqlen_q)});
  const int64_t counter = int64_t{walk.head} * ceil_div(seqlen_q, kTurnRows) + turn;
  return {params.dq_turns + 1 + counter * (Config::kThreads / kWarpSize) + piece,
          at.tile - touched.begin};
}

// Adds one consumer's half of each dQ of a tile's walk, part by part. In order it begins its turn
// with the first query tile of the turn and passes it on after the last, when all is added.
template <typename Config>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Config::SharedStorage& smem, const BackwardTile& at,
                                       RingPosition& parts, int consumer) {
  using DqTile = typename Config::DqTile;
  constexpr int kTurnTiles = kTurnRows / Config::kBlockM;
  const bool wanted = params.dq.data != nullptr;
  const bool ordered = wanted && params.dq_turns != nullptr;
  auto& ring = smem.dq_ring[consumer];
  const int piece = dq_piece<Config>(consumer);
  for (auto walk = QueryWalk::of<Config>(params, at); !walk.done(); walk = walk.next()) {
    const bool begins_turn = walk.tile + 1 == walk.tiles.end || (walk.tile + 1) % kTurnTiles == 0;
    const bool ends_turn = walk.tile == walk.tiles.begin || walk.tile % kTurnTiles == 0;
    if (ordered && begins_turn) dq_turn<Config>(params, at, walk, piece).wait_alone();
    const int64_t tile = int64_t{walk.head} * DqTile::tiles(params.shape.seqlen_q) + walk.tile;
    float* const target = params.dq_accum + tile * DqTile::kFloats + piece * DqTile::kPieceFloats;
#pragma unroll 1
    for (int part = 0; part < Config::kDqParts; ++part, parts = parts.next()) {
      parts.wait_full(ring);
      if (wanted) {
        ptx::bulk_reduce_add(target + part * Config::kDqPartFloats,
                             ptx::shared_address(smem.dq[consumer][parts.stage(ring)]),
                             Config::kDqPartFloats * sizeof(float));
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      parts.arrive_empty(ring);
    }
    if (ordered && ends_turn) {
      ptx::bulk_wait<0>();
      dq_turn<Config>(params, at, walk, piece).pass_alone();
    }
  }
}

// A storer's thread.
template <typename Config>
__device__ __forceinline__ void store_dq(const BackwardParams& params,
                                         typename Config::SharedStorage& smem, int consumer) {
  ptx::wait_for_prerequisites();  // it clears the workspace
  RingPosition parts;
  for (RingPosition tiles;; tiles = tiles.next()) {
    tiles.wait_full(smem.tile_ring);
    const BackwardTile& at = smem.at[tiles.stage(smem.tile_ring)];
    if (at.tile == kNoTile) return;
    add_dq<Config>(params, smem, at, parts, consumer);
    tiles.arrive_empty(smem.tile_ring);
  }
}

// Lane c of a quad gets x[c] of its four lanes, in their order.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i | bit], bit);
      (upper ? x[i] : x[i | bit]) = got;
    }
  }
}

// dQ = scale * sums, rounded once. A warp takes 16 rows and 32 columns of a piece: lanes read what
// one lane of the accumulator held, and write eight columns of two rows.
template <typename Config>
struct RoundDq {
  using DqTile = typename Config::DqTile;
  static constexpr int kThreads = 256;
  static constexpr int kWarpCols = 32;
  static constexpr int kWarpFloats = 16 * kWarpCols;
  static constexpr int kPieceWarps = DqTile::kPieceFloats / kWarpFloats;
  static constexpr int kTileWarps = DqTile::kFloats / kWarpFloats;

  static int64_t blocks(const Shape& shape) {
    const int64_t heads = shape.batch * shape.heads_q;
    return (heads * DqTile::tiles(shape.seqlen_q) * kTileWarps * kWarpSize + kThreads - 1) /
           kThreads;
  }
};

template <typename Config>
__global__ void __launch_bounds__(RoundDq<Config>::kThreads)
    flash_backward_round(const __grid_constant__ BackwardParams params) {
  ptx::wait_for_prerequisites();
  using T = typename Config::Element;
  using DqTile = typename Config::DqTile;
  using Round = RoundDq<Config>;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warp = (int64_t{blockIdx.x} * Round::kThreads + threadIdx.x) / kWarpSize;
  const int64_t tile = warp / Round::kTileWarps;
  const int in_tile = static_cast<int>(warp % Round::kTileWarps);
  const int piece = in_tile / Round::kPieceWarps, in_piece = in_tile % Round::kPieceWarps;
  const int64_t tiles = DqTile::tiles(params.shape.seqlen_q);  // of a head
  const int64_t head = tile / tiles;
  if (head >= params.shape.batch * params.shape.heads_q) return;

  const auto* const sums = reinterpret_cast<const float4*>(
      params.dq_accum + tile * DqTile::kFloats + piece * DqTile::kPieceFloats);
  uint32_t top[4], bottom[4];  // of rows lane / 4 and lane / 4 + 8
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 x = sums[(in_piece / 4 * 4 + i) * 128 + in_piece % 4 * kWarpSize + lane];
    const float scale = params.softmax_scale;
    top[i] = Element<T>::pack(scale * x.x, scale * x.y);
    bottom[i] = Element<T>::pack(scale * x.z, scale * x.w);
  }
  transpose_in_quad(top);
  transpose_in_quad(bottom);

  const int col = (Config::kDqByRows ? 0 : piece * Config::kDqCols) +
                  in_piece / 4 * Round::kWarpCols + lane % 4 * kChunk;
  if (col >= params.shape.head_dim) return;
  const int64_t row = tile % tiles * Config::kBlockM +
                      (Config::kDqByRows ? piece * DqTile::kPieceRows : 0) + in_piece % 4 * 16 +
                      lane / 4;
  const int64_t row_bytes = params.dq.seq_stride * 2;
  char* const target = head_matrix(params.dq, head / params.shape.heads_q,
                                   static_cast<int>(head % params.shape.heads_q)) +
                       row * row_bytes + col * 2;
  if (row < params.shape.seqlen_q)
    *reinterpret_cast<uint4*>(target) = {top[0], top[1], top[2], top[3]};
  if (row + 8 < params.shape.seqlen_q)
    *reinterpret_cast<uint4*>(target + 8 * row_bytes) = {bottom[0], bottom[1], bottom[2],
                                                         bottom[3]};
}

}  // namespace flash_ext::sm90
