// FlashAttention 1 (Dao et al. 2022, algorithm 1): tiles, and no table in memory.
//
//   one block a head    grid: heads
//   for each tile of K and V:                loaded once
//       for each tile of Q:                  loaded, with its O, m and l, in every round
//           S, P~, and O, m, l brought to what they are with these keys
//           O, m, l written back
//
// O is fp32 between two rounds. A tile of Q is written as bf16 when no later key concerns it.
#include "classic/launch.cuh"
#include "classic/split_columns.cuh"
#include "ptx/registers.h"

namespace flash_ext::classic {
namespace {

// The first of these rows among the rows of all heads.
__device__ __forceinline__ int64_t first_row_of(const Shape& shape, Range rows) {
  return ptx::block_index() * shape.seqlen_q + rows.begin;
}

// O, m and l of a query tile as the last round left them. Past the L1 cache: what one round wrote,
// the next one finds in L2.
template <typename T>
__device__ __forceinline__ void read_round(const Params& params, Range rows, RowState& state,
                                           OutputShare<T>& out) {
  const int64_t first_row = first_row_of(params.shape, rows);
  const int row = threadIdx.x;
  if (row < rows.end - rows.begin)
    state = {__ldcg(params.row_max + first_row + row), __ldcg(params.row_sum + first_row + row)};
  out.for_each([&](int row, int col, float4& o) {
    if (rows.begin + row >= rows.end) return;
    const float* source = params.accumulator + (first_row + row) * T::kHeadDim + col;
    o = __ldcg(reinterpret_cast<const float4*>(source));
  });
}

template <typename T>
__device__ __forceinline__ void write_round(const Params& params, Range rows, const RowState& state,
                                            OutputShare<T>& out) {
  const int64_t first_row = first_row_of(params.shape, rows);
  const int row = threadIdx.x;
  if (row < rows.end - rows.begin) {
    params.row_max[first_row + row] = state.max;
    params.row_sum[first_row + row] = state.sum;
  }
  out.for_each([&](int row, int col, const float4& o) {
    if (rows.begin + row >= rows.end) return;
    float* target = params.accumulator + (first_row + row) * T::kHeadDim + col;
    *reinterpret_cast<float4*>(target) = o;
  });
}

// Blocks whose registers fit a multiprocessor; 0 sets no such bound. So all registers stay out of
// memory.
template <typename T>
constexpr int kBlocks = T::kHeadDim == 64 ? 2 : 0;

template <typename T>
__global__ void __launch_bounds__(T::kThreads, kBlocks<T>)
    flash_fa1(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<ColumnStorage<T>*>(smem_raw);
  const Shape& shape = params.shape;
  const int key_tiles = ceil_div(static_cast<int>(shape.seqlen_k), T::kBlockN);
  const int query_tiles = ceil_div(static_cast<int>(shape.seqlen_q), T::kBlockM);

  for (int key_tile = 0; key_tile < key_tiles; ++key_tile) {
    const Head head(shape, ptx::block_index());
    load_keys<T>(params, params.k, head, key_tile, smem.k);
    load_keys<T>(params, params.v, head, key_tile, smem.v);
    for (int query_tile = 0; query_tile < query_tiles; ++query_tile) {
      const Range rows = query_rows<T>(shape, query_tile);
      // The first round is for every tile: it begins O, m and l.
      const BandMask mask(shape, params.window);
      const int rounds = max(1, mask.template touched_key_tiles<T::kBlockN>(rows).end);
      if (key_tile >= rounds) continue;
      load_queries<T>(params, Head(shape, ptx::block_index()), query_tile, smem.q);
      wait_for_loads();

      RowState state;
      OutputShare<T> out;
      if (key_tile > 0) read_round<T>(params, rows, state, out);
      attend_tile<T>(params, smem, rows, key_tile, state, out);
      if (key_tile + 1 < rounds)
        write_round<T>(params, rows, state, out);
      else
        write_share<T>(params, Head(shape, ptx::block_index()), rows, out);
    }
  }
}

template <int kHeadDim>
struct Fa1 {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    constexpr int kSmem = sizeof(ColumnStorage<T>);
    const auto kernel = &flash_fa1<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t fa1(const Params& params, void* stream) { return launch_by_head_dim<Fa1>(params, stream); }

}  // namespace flash_ext::classic
