// Backward pass: FlashAttention-2 (Dao 2023, algorithm 2) on mma.sync, transposed.
//
//   one block: kBlockN keys of one key head        grid: key tiles x splits x key heads x batch,
//                                                  packed: slots of key tiles x key heads
//   for each query head of the group, each tile of kBlockM query rows that sees the keys:
//       values                                     keys
//       Sᵀ  = K Qᵀ                                 dPᵀ = V dOᵀ
//       Pᵀ  = exp2(Sᵀ - lse)         -->           dSᵀ = Pᵀ (dPᵀ - delta)
//       dV += Pᵀ dO                                dK += dSᵀ Q
//       all warps, a tile later: dQ += dS K            (dSᵀ through shared memory, fp32 additions)
//
// Nothing S x S was saved: P comes again from lse. Scores are held transposed because their rows
// are then keys, which a warp owns for the whole loop: Pᵀ and dSᵀ feed dV and dK from registers.
// Each fragment of Q or dO should serve 32 keys, for reading them from shared memory limits this
// pass. Up to D 64 a warp has the registers for dV and dK of 32 keys and plays both roles; beyond,
// two warps share a slice of keys, one for each role, and Pᵀ goes through shared memory.
//
// Where blocks are too few for the GPU, `splits` of them share the query heads of a group: each
// walks over its own and adds dK and dV to fp32 workspaces.
//
// With all features scores are modified as in the forward pass. Dropped elements of Pᵀ carry a
// minus sign: they count for dSᵀ and not for dV. The gradient of the bias is dSᵀ before the
// derivative of the soft cap.
#pragma once

#include "core/epilogue.h"
#include "core/finite.h"
#include "core/gemm.h"
#include "core/gradient_workspace.h"
#include "core/mask.h"
#include "core/packing.h"
#include "core/scheduler.h"
#include "core/tile_copy.h"
#include "core/turns.h"
#include "params.h"
#include "sm80/backward_tile.cuh"
#include "sm80/config.h"

namespace flash_ext::sm80 {

// A tile of query rows of one head, the head counted in the flat order (batch, head), in 32 bits
// for want of registers. The walk goes over `tiles` of each head in turn.
struct QueryTile {
  int head;
  int tile;

  __device__ __forceinline__ QueryTile next(Range tiles) const {
    return tile + 1 == tiles.end ? QueryTile{head + 1, tiles.begin} : QueryTile{head, tile + 1};
  }
  __device__ __forceinline__ QueryTile previous(Range tiles) const {
    return tile == tiles.begin ? QueryTile{head - 1, tiles.end - 1} : QueryTile{head, tile - 1};
  }
};

// The turn of this warp's part of the kTurnRows query rows that hold a tile. Key tiles add to them
// from the last to the first: under a causal mask the last one starts there and makes nobody wait.
// Blocks start in that order too, so that a block only waits for blocks that run.
template <typename Config>
__device__ __forceinline__ Turn dq_turn(const BackwardParams& params,
                                        const typename Config::SharedStorage& smem, QueryTile at) {
  constexpr int kTurnTiles = kTurnRows / Config::kBlockM;
  const Shape& shape = shape_of<Config>(params, smem);
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int turn = at.tile / kTurnTiles;
  const Range touched = BandMask(shape, params.window)
                            .template touched_key_tiles<Config::kBlockN>(
                                {turn * kTurnRows, min((turn + 1) * kTurnRows, seqlen_q)});
  int64_t counter;
  if constexpr (Config::kPacked)
    counter =
        at.head * turns_of_head(params.shape, params.packing) + smem.sequence.turn_shift + turn;
  else
    counter = at.head * ceil_div(seqlen_q, kTurnRows) + turn;
  return {params.dq_turns + 1 + counter * Config::kWarps + threadIdx.x / kWarpSize,
          touched.end - 1 - BackwardPlace<Config>(smem).at.tile};
}

// Adds dS K of a tile whose dSᵀ is complete to dQ, if it begins a turn then not before that. A
// query that sees a key with NaN or infinity has NaN in its row of dSᵀ; one that does not must not
// meet it as 0 * inf, so such keys count as zero.
template <typename Config>
__device__ __forceinline__ void add_dq_tile(const BackwardParams& params,
                                            typename Config::SharedStorage& smem, QueryTile at,
                                            int parity, bool begins_turn) {
  using T = typename Config::Element;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int dq_row = warp / Config::kDqWarpsD * Config::kDqRows;
  const int dq_col = warp % Config::kDqWarpsD * Config::kDqCols;
  const auto ds_columns = lane_offsets<typename Config::DsTile, ChunkFirst, Config::kDqRows / 16>(
      ptx::shared_address(smem.ds[parity]), lane, dq_row / 16);
  const auto k_columns = lane_offsets<typename Config::KTile, RowFirst, Config::kDqCols / 16>(
      ptx::shared_address(smem.k), lane, dq_col / 16);

  Accumulator<Config::kDqRows / 16, Config::kDqCols / 8> dq;
  clear(dq);
  if (smem.k_is_finite)
    gemm_columns_columns<T, NonFinite::kKeep, Config::kBlockN / 16, kDqUnroll<Config>>(
        dq, ds_columns, k_columns);
  else
    gemm_columns_columns<T, NonFinite::kDrop, Config::kBlockN / 16, kDqUnroll<Config>>(
        dq, ds_columns, k_columns);
  if (begins_turn) dq_turn<Config>(params, smem, at).wait();
  GradientWorkspace(params.dq_accum, first_table_row<Config>(params, smem, at.head),
                    static_cast<int>(shape_of<Config>(params, smem).seqlen_q),
                    params.shape.head_dim)
      .template add<Config::kHeadDim>(dq, at.tile * Config::kBlockM + dq_row, dq_col, lane);
}

// Whether every query of a tile sees every key of the block.
template <typename Config>
__device__ __forceinline__ bool sees_whole(const Shape& shape, const Window& window,
                                           const typename Config::SharedStorage& smem, int tile) {
  const int first_key = BackwardPlace<Config>(smem).first_key;
  const Range whole =
      BandMask(shape, window)
          .template whole_query_tiles<Config::kBlockM>({first_key, first_key + Config::kBlockN});
  return tile >= whole.begin && tile < whole.end;
}

// Enqueues a tile of the bias, if it is one to lie in shared memory.
template <typename Config>
__device__ __forceinline__ void load_bias(const BackwardParams& params,
                                          const typename Config::SharedStorage& smem, QueryTile at,
                                          int stage) {
  if (!params.modifiers.bias_in_chunks) return;
  const Shape& shape = shape_of<Config>(params, smem);
  const BackwardPlace<Config> place(smem);
  const TablePlace first{place.at.batch,
                         static_cast<int>(at.head - place.at.batch * params.shape.heads_q),
                         at.tile * Config::kBlockM, place.first_key};
  load_bias_tile<typename Config::BiasTile, Config::kBlockM, Config::kBlockN, Config::kThreads>(
      bias_tile<Config>(smem, stage), params.modifiers.bias, first,
      static_cast<int>(shape.seqlen_q) - first.row, static_cast<int>(shape.seqlen_k) - first.key,
      threadIdx.x);
}

// The walk over the query heads of the block and their tiles: leaves dV and dK (kSliceKeys, 8 kD)
// of this warp's keys, or the one of its role, in `gradients`.
template <typename Config, int kGradients, int kM, int kD>
__device__ __forceinline__ void accumulate(const BackwardParams& params,
                                           typename Config::SharedStorage& smem,
                                           float (&gradients)[kGradients][kM][kD][4]) {
  using T = typename Config::Element;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  using QueryLoader = TileLoader<QTile, kBlockM, Config::kLoadThreads, 2>;

  const Shape& shape = shape_of<Config>(params, smem);
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int seqlen_k = static_cast<int>(shape.seqlen_k);
  const BackwardPlace<Config> place(smem);
  // First of the block's query heads, in the flat order (batch, head).
  const int first_head = static_cast<int>(place.at.batch * shape.heads_q + smem.first_query_head);
  const Range keys{place.first_key, place.first_key + kBlockN};
  const BandMask mask(shape, params.window);
  const Range touching =
      mask.template touching_query_tiles<kBlockM>({keys.begin, min(keys.end, seqlen_k)});

#pragma unroll
  for (auto& gradient : gradients) clear(gradient);
  if (touching.begin == touching.end) return;
  if (Config::kPacked && keys.begin >= seqlen_k) return;  // keys nobody uses

  // K and V stay for the whole block; Q and dO tiles stream past.
  const auto load_keys = [&](char* smem_tile, const View& view, int cols) {
    TileLoader<KTile, kBlockN, Config::kThreads>(
        head_matrix(view, place.at.batch, place.at.head, first_row_k<Config>(smem)),
        view.seq_stride, seqlen_k, cols, place.at.tile)
        .load(ptx::shared_address(smem_tile), place.at.tile);
  };
  load_keys(smem.k, params.k, shape.head_dim);
  load_keys(smem.v, params.v, shape.head_dim_v);

  // One half of the block, the values warps of pairs, loads Q and lse, the other dO and delta.
  const bool first_half = in_first_half<Config>();
  const auto loader_of_head = [&](int64_t head) {
    const int64_t batch = head / shape.heads_q;
    const int in_batch = static_cast<int>(head % shape.heads_q);
    const int first_q = first_row_q<Config>(smem);
    return first_half
               ? QueryLoader(head_matrix(params.q, batch, in_batch, first_q), params.q.seq_stride,
                             seqlen_q, shape.head_dim, touching.begin)
               : QueryLoader(head_matrix(params.dout, batch, in_batch, first_q),
                             params.dout.seq_stride, seqlen_q, shape.head_dim_v, touching.begin);
  };
  QueryLoader loader = loader_of_head(first_head);
  const auto load_queries = [&](QueryTile at, int stage) {
    loader.load(ptx::shared_address(first_half ? smem.q[stage] : smem.dout[stage]), at.tile);
    const int thread = threadIdx.x % Config::kLoadThreads;
    if (thread < kBlockM) {
      const int row = at.tile * kBlockM + thread;
      ptx::cp_async_4(
          ptx::shared_address(first_half ? &smem.lse[stage][thread] : &smem.delta[stage][thread]),
          (first_half ? params.lse : params.delta) +
              first_table_row<Config>(params, smem, at.head) + row,
          row < seqlen_q ? sizeof(float) : 0);
    }
    if constexpr (Config::kBiasTile) load_bias<Config>(params, smem, at, stage);
    ptx::cp_async_commit();
  };
  load_queries({first_head, touching.begin}, 0);

  ptx::cp_async_wait<0>();
  __syncthreads();
  if (meets_nonfinite<T, KTile, Config::kThreads>(ptx::shared_address(smem.k)))
    smem.k_is_finite = false;

  // dQ of a tile waits for the next tile's barrier, which dSᵀ needs anyway.
  QueryTile at{first_head, touching.begin};
  int parity = 0;
  const int steps = smem.query_heads * (touching.end - touching.begin);
  const auto load_next = [&](QueryTile next) {
    if (next.tile == touching.begin) loader = loader_of_head(next.head);
    load_queries(next, (parity ^ 1) % Config::kStages);
  };
  const auto add_previous_dq = [&](int step) {
    if (step == 0 || params.dq.data == nullptr) return;
    const QueryTile previous = at.previous(touching);
    const bool begins_turn = smem.ordered && (previous.tile == touching.begin ||
                                              previous.tile % (kTurnRows / kBlockM) == 0);
    // The turn before is passed on only now, when its additions are long done.
    if (begins_turn && step > 1) dq_turn<Config>(params, smem, previous.previous(touching)).pass();
    add_dq_tile<Config>(params, smem, previous, parity ^ 1, begins_turn);
  };
  for (int step = 0; step < steps; ++step, parity ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile and the previous dSᵀ are there, and the other stage is free
    const QueryTile next = at.next(touching);
    const bool masked =
        !sees_whole<Config>(shape_of<Config>(params, smem), params.window, smem, at.tile);
    if (Config::kStages == 2 && step + 1 < steps) load_next(next);

    if constexpr (Config::kSliceWarps == 1) {
      add_previous_dq(step);
      add_query_tile<Config, Role::kBoth>(params, smem, at.head, at.tile, parity, masked,
                                          gradients);
    } else if (first_half) {
      add_query_tile<Config, Role::kValues>(params, smem, at.head, at.tile, parity, masked,
                                            gradients);
      add_previous_dq(step);
    } else {  // waits for Pᵀ: dQ first
      add_previous_dq(step);
      add_query_tile<Config, Role::kKeys>(params, smem, at.head, at.tile, parity, masked,
                                          gradients);
    }
    if (Config::kStages == 1 && step + 1 < steps) {
      __syncthreads();  // the only stage is read
      load_next(next);
    }
    at = next;
  }
  __syncthreads();
  add_previous_dq(steps);
  if (smem.ordered && params.dq.data != nullptr)
    dq_turn<Config>(params, smem, at.previous(touching)).pass();
  __syncthreads();  // K and V are read; their tiles may be overwritten
}

// Adds this warp's dV or dK to a workspace, or, without one, writes it by way of its own rows of
// the V or K tile.
template <typename Config, int kM, int kD>
__device__ __forceinline__ void write_gradient(const View& view, float* workspace,
                                               const BackwardParams& params,
                                               const typename Config::SharedStorage& smem,
                                               char* tile, int cols, float (&gradient)[kM][kD][4]) {
  if (view.data == nullptr) return;
  using KTile = typename Config::KTile;
  const BackwardPlace<Config> place(smem);
  const int lane = threadIdx.x % kWarpSize;
  const int slice_key = slice_of_warp<Config>() * Config::kSliceKeys;
  const int64_t seqlen_k = params.shape.seqlen_k;
  if (workspace != nullptr) {  // never of packed sequences
    const int64_t head = place.at.batch * params.shape.heads_k + place.at.head;
    GradientWorkspace(workspace, head * seqlen_k, static_cast<int>(seqlen_k), cols)
        .template add<Config::kHeadDim>(gradient, place.first_key + slice_key, 0, lane);
    return;
  }
  int keys = static_cast<int>(seqlen_k);  // that are written
  if constexpr (Config::kPacked) {
    keys = smem.sequence.owned;
    zero_rows_from(gradient, place.first_key + slice_key + lane / 4, smem.sequence.seqlen_k);
  }
  const uint32_t staging = ptx::shared_address(tile);
  stage_fragments<typename Config::Element, KTile>(staging, gradient, slice_key, lane);
  __syncwarp();
  store_staged_rows<KTile, Config::kSliceKeys>(
      head_matrix(view, place.at.batch, place.at.head, first_row_k<Config>(smem)), view.seq_stride,
      place.first_key + slice_key, keys, cols, staging, slice_key, lane);
}

// Thread blocks that take turns are handed out across as many heads as hold about this many: then
// neighbours in their order rarely wait for each other, and what they read still fits L2.
constexpr int kOrderedBlocks = 512;

// Finds this block's tile and its share of the group: by the block's index, or, where blocks wait
// for each other, by the order of their start. False where there is nothing to do.
template <typename Config>
__device__ __forceinline__ bool take_tile(const BackwardParams& params,
                                          typename Config::SharedStorage& smem) {
  constexpr int kFinders = Config::kPacked ? kWarpSize : 1;  // threads
  if (threadIdx.x < kFinders) {
    const Shape& shape = params.shape;
    const bool packed = Config::kPacked && params.packing.cu_seqlens_k != nullptr;
    const int tiles =
        packed
            ? static_cast<int>(packed_slots(shape.seqlen_k, Config::kBlockN, params.packing.batch))
            : ceil_div(static_cast<int>(shape.seqlen_k), Config::kBlockN);
    const bool ordered = params.dq_turns != nullptr;
    const int shares = shape.heads_k * params.splits;  // of all groups
    int started = 0;  // blocks before this one
    if (ordered && threadIdx.x == 0) started = atomicAdd(params.dq_turns, 1);
    if (Config::kPacked) started = __shfl_sync(0xffffffffu, started, 0);
    const TileCoordinate at =
        ordered ? last_tile_first_across(started, tiles, shares, shares * shape.batch,
                                         max(1, kOrderedBlocks / tiles))
                : first_tile_first(blockIdx.x, tiles, shares);
    PackedTile found = PackedTile::dense(shape, at, shape.seqlen_k);
    if constexpr (Config::kPacked) {
      if (packed) found = find_packed_tile<Config::kBlockN, true>(shape, params.packing, at.tile);
    }
    if (threadIdx.x == 0) {
      const GroupShare share = group_share(shape, params.splits, at.head);
      smem.k_is_finite = true;
      smem.ordered = ordered;
      if (Config::kPacked) smem.sequence = found.sequence;
      smem.tile = found.tile;
      smem.head = share.kv_head;
      smem.batch = found.batch;
      smem.first_query_head = share.first_query_head;
      smem.query_heads = share.query_heads;
    }
  }
  __syncthreads();
  return !Config::kPacked || smem.sequence.owned > 0;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    flash_backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const Shape& shape = params.shape;
  if (!take_tile<Config>(params, smem)) return;

  // dV and dK (keys of a slice, D), or one of them
  Accumulator<Config::kSliceKeys / 16, Config::kHeadDim / 8> gradients[Config::kGradients];
  accumulate<Config>(params, smem, gradients);
  if (Config::kFull) {
    if (Config::kSliceWarps == 1 || in_first_half<Config>())
      scale(gradients[0], params.modifiers.keep_scale);
  }
  if (Config::kSliceWarps == 1 || in_first_half<Config>())
    write_gradient<Config>(params.dv, params.dv_accum, params, smem, smem.v, shape.head_dim_v,
                           gradients[0]);
  if (Config::kSliceWarps == 1 || !in_first_half<Config>()) {
    auto& dk = gradients[Config::kGradients - 1];
    scale(dk, params.softmax_scale);
    write_gradient<Config>(params.dk, params.dk_accum, params, smem, smem.k, shape.head_dim, dk);
  }
}

}  // namespace flash_ext::sm80
