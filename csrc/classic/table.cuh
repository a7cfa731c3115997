// The score table in memory, as three_pass and two_pass need it: S = scale * Q Kᵀ, and rows of it
// that are read by one warp each.
#pragma once

#include "classic/launch.cuh"
#include "classic/tile.h"

namespace flash_ext::classic {

// S: one block a tile of kBlockM x kBlockN scores    grid: key tiles x query tiles x heads
//
// Masked scores are written, too, as -inf: the table has no shape but a rectangle.
template <typename T>
struct ScoresStorage {
  alignas(128) char q[T::QTile::kBytes];
  alignas(128) char k[T::KTile::kBytes];
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads) flash_scores(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<ScoresStorage<T>*>(smem_raw);
  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int key_tiles = ceil_div(static_cast<int>(shape.seqlen_k), T::kBlockN);
  const int query_tiles = ceil_div(seqlen_q, T::kBlockM);
  const int key_tile = blockIdx.x % key_tiles;
  const int query_tile = blockIdx.x / key_tiles % query_tiles;
  const Head head(shape, blockIdx.x / key_tiles / query_tiles);

  load_queries<T>(params, head, query_tile, smem.q);
  load_keys<T>(params, params.k, head, key_tile, smem.k);
  wait_for_loads();

  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16;
  const int row = query_tile * T::kBlockM + warp_row + lane / 4;
  const int first_key = key_tile * T::kBlockN;
  Accumulator<1, T::kBlockN / 8> scores;  // (16, kBlockN)
  multiply_scores<T>(scores, smem.q, warp_row, smem.k, 0, lane);
  scale(scores, params.softmax_scale);
  mask_ends(scores, BandMask(shape, params.window), row, first_key + lane % 4 * 2);
  store_fragments(params.scores + head.index * seqlen_q * params.table_cols + first_key,
                  params.table_cols, seqlen_q, static_cast<int>(params.table_cols) - first_key,
                  scores, row, lane);
}

template <typename T>
int32_t launch_scores(const Params& params, void* stream) {
  static_assert(T::kBlockM == 16 * T::kWarps, "a warp owns 16 rows");
  constexpr int kSmem = sizeof(ScoresStorage<T>);
  const auto kernel = &flash_scores<T>;
  static KernelSetup setup(kernel, kSmem);
  const Shape& shape = params.shape;
  const int64_t blocks = tiles(shape.seqlen_k, T::kBlockN) * tiles(shape.seqlen_q, T::kBlockM);
  return launch(kernel, setup, blocks * head_count(shape), T::kThreads, kSmem, params, stream);
}

// Kernels over rows of the table: a warp a row, four neighbouring elements a lane.
constexpr int kRowThreads = 256;

struct TableRow {
  int64_t index;  // among the rows of all heads
  bool exists;

  __device__ __forceinline__ explicit TableRow(const Shape& shape)
      : index(static_cast<int64_t>(blockIdx.x) * (kRowThreads / kWarpSize) +
              threadIdx.x / kWarpSize),
        exists(index < shape.batch * shape.heads_q * shape.seqlen_q) {}

  // Calls visit(column, four scores) for this lane's part of the row.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Params& params, Visit visit) const {
    const float* scores = params.scores + index * params.table_cols;
    const int cols = static_cast<int>(params.table_cols);
#pragma unroll 4
    for (int col = threadIdx.x % kWarpSize * 4; col < cols; col += kWarpSize * 4)
      visit(col, *reinterpret_cast<const float4*>(scores + col));
  }
};

inline int32_t launch_rows(void (*kernel)(Params), KernelSetup& setup, const Params& params,
                           void* stream) {
  const int64_t rows = head_count(params.shape) * params.shape.seqlen_q;
  return launch(kernel, setup, tiles(rows, kRowThreads / kWarpSize), kRowThreads, 0, params,
                stream);
}

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 1; step < kWarpSize; step *= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 1; step < kWarpSize; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float max_of(const float4& x) {
  return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
}

// What a row subtracts from its scores before exp: its maximum, or 0 where it sees no key.
__device__ __forceinline__ float reference_of(float row_max) {
  return row_max == -INFINITY ? 0.f : row_max;
}
// exp(x - reference) of natural scores.
__device__ __forceinline__ float exponential(float x, float reference) {
  return ptx::exp2_approx((x - reference) * kLog2E);
}
__device__ __forceinline__ float4 exponentials(const float4& x, float reference) {
  return make_float4(exponential(x.x, reference), exponential(x.y, reference),
                     exponential(x.z, reference), exponential(x.w, reference));
}
__device__ __forceinline__ float inverse_of(float row_sum) {
  return row_sum == 0.f ? 0.f : 1.f / row_sum;
}

}  // namespace flash_ext::classic
