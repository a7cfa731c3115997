// One tile of Q against one of K and V with the columns of S split over the warps, as in
// FlashAttention 1 (Dao et al. 2022, algorithm 1): each warp multiplies all rows of Q by keys of
// its own. What the rows need of all warps, their maximum, sum and product with V, goes through
// shared memory.
//
//   m~, l~      maximum of the tile's scores, sum of P~ = exp2(S - m~)
//   m' = max(m, m~),   l' = exp2(m - m') l + exp2(m~ - m') l~
//   O' = (exp2(m - m') l O + exp2(m~ - m') P~ V) / l'
//
// Exponents are in units of log2(e).
#pragma once

#include "classic/tile.h"

namespace flash_ext::classic {

constexpr int kSliceCols = 32;  // columns of P V that are exchanged at a time

template <typename T>
struct ColumnStorage {
  alignas(128) char q[T::QTile::kBytes];
  alignas(128) char k[T::KTile::kBytes];
  alignas(128) char v[T::KTile::kBytes];
  float product[T::kWarps][T::kBlockM][kSliceCols + 8];  // 8 more: stores without bank conflicts
  float top[T::kWarps][T::kBlockM];  // maxima of the warps' columns
  float sum[T::kWarps][T::kBlockM];  // sums of their exponentials
  float keep[T::kBlockM];  // factor of O
  float add[T::kBlockM];   // factor of P~ V
};

// m and l of row threadIdx.x, held by the first kBlockM threads.
struct RowState {
  float max = -INFINITY;
  float sum = 0.f;
};

// A thread's share of O (kBlockM, D): of each slice of 32 columns, four columns of every 16th row.
template <typename T>
struct OutputShare {
  static constexpr int kSlices = T::kHeadDim / kSliceCols;
  static constexpr int kRowStep = T::kThreads * 4 / kSliceCols;
  static constexpr int kRows = T::kBlockM / kRowStep;

  float4 values[kSlices][kRows] = {};

  static __device__ __forceinline__ int row(int i) {
    return threadIdx.x / (kSliceCols / 4) + i * kRowStep;
  }
  static __device__ __forceinline__ int col() { return threadIdx.x % (kSliceCols / 4) * 4; }

  // Calls visit(row of the tile, column, values) for each of its vectors.
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < kRows; ++i) visit(row(i), slice * kSliceCols + col(), values[slice][i]);
  }
};

// Row statistics of the tile from those of the warps, and what they make of m and l.
template <typename T>
__device__ __forceinline__ void update_row(ColumnStorage<T>& smem, RowState& state) {
  const int row = threadIdx.x;
  float tile_max = smem.top[0][row];
  float tile_sum = smem.sum[0][row];
#pragma unroll
  for (int warp = 1; warp < T::kWarps; ++warp) {
    tile_max = fmaxf(tile_max, smem.top[warp][row]);
    tile_sum += smem.sum[warp][row];
  }
  const float new_max = fmaxf(state.max, tile_max);
  // A sum of 0 has seen no key: its maximum is -inf.
  const float keep = state.sum == 0.f ? 0.f : state.sum * ptx::exp2_approx(state.max - new_max);
  const float add = tile_sum == 0.f ? 0.f : ptx::exp2_approx(tile_max - new_max);
  state = {new_max, keep + add * tile_sum};
  const float inverse = state.sum == 0.f ? 0.f : 1.f / state.sum;
  smem.keep[row] = keep * inverse;
  smem.add[row] = add * inverse;
}

// The tiles lie in shared memory; all threads have met after they landed, and meet at the end.
template <typename T>
__device__ __forceinline__ void attend_tile(const Params& params, ColumnStorage<T>& smem,
                                            Range rows, int key_tile, RowState& state,
                                            OutputShare<T>& out) {
  constexpr int kWarpKeys = T::kBlockN / T::kWarps;
  constexpr int kM = T::kBlockM / 16;
  constexpr int kN = kWarpKeys / 8;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  Accumulator<kM, kN> scores;  // (kBlockM, kWarpKeys)
  multiply_scores<T>(scores, smem.q, 0, smem.k, warp * kWarpKeys, lane);
  scale(scores, params.softmax_scale * kLog2E);
  const BandMask mask(params.shape, params.window);
  if (key_tile >= mask.template whole_key_tiles<T::kBlockN>(rows).end)
    mask_ends(scores, mask, rows.begin + lane / 4,
              key_tile * T::kBlockN + warp * kWarpKeys + lane % 4 * 2);

#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n)
        top = fmaxf(top, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
      top = quad_max(top);
      if (lane % 4 == 0) smem.top[warp][16 * m + 8 * h + lane / 4] = top;
    }
  __syncthreads();

#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * m + 8 * h + lane / 4;
      float top = smem.top[0][row];
#pragma unroll
      for (int other = 1; other < T::kWarps; ++other) top = fmaxf(top, smem.top[other][row]);
      const float reference = top == -INFINITY ? 0.f : top;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          scores[m][n][i] = ptx::exp2_approx(scores[m][n][i] - reference);
          sum += scores[m][n][i];
        }
      sum = quad_sum(sum);
      if (lane % 4 == 0) smem.sum[warp][row] = sum;
    }
  __syncthreads();
  if (threadIdx.x < T::kBlockM) update_row<T>(smem, state);

  uint32_t p[kM][kN / 2][4];  // (kBlockM, kWarpKeys) as A fragments
  to_operand<Bf16>(p, scores);
  const uint32_t v = ptx::shared_address(smem.v) + warp * kWarpKeys * T::KTile::kRowBytes;
#pragma unroll
  for (int slice = 0; slice < OutputShare<T>::kSlices; ++slice) {
    Accumulator<kM, kSliceCols / 8> product;  // (kBlockM, kSliceCols), of this warp's keys
    clear(product);
    gemm_registers_columns<Bf16>(
        product, p, lane_offsets<typename T::KTile, RowFirst>(v, lane, slice * (kSliceCols / 16)));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < kSliceCols / 8; ++n) {
          float* target = &smem.product[warp][16 * m + 8 * h + lane / 4][8 * n + lane % 4 * 2];
          *reinterpret_cast<float2*>(target) =
              make_float2(product[m][n][2 * h], product[m][n][2 * h + 1]);
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OutputShare<T>::kRows; ++i) {
      const int row = OutputShare<T>::row(i);
      const float keep = smem.keep[row];
      const float add = smem.add[row];
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int other = 0; other < T::kWarps; ++other) {
        const float* source = &smem.product[other][row][OutputShare<T>::col()];
        const float4 part = *reinterpret_cast<const float4*>(source);
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
      float4& o = out.values[slice][i];
      o = make_float4(keep * o.x + add * sum.x, keep * o.y + add * sum.y, keep * o.z + add * sum.z,
                      keep * o.w + add * sum.w);
    }
    __syncthreads();  // nobody still reads the products
  }
}

// Rounds a finished share of O and writes it.
template <typename T>
__device__ __forceinline__ void write_share(const Params& params, const Head& head, Range rows,
                                            OutputShare<T>& out) {
  char* matrix = head_matrix(params.out, head.batch, head.query_head);
  out.for_each([&](int row, int col, const float4& o) {
    if (rows.begin + row >= rows.end) return;
    char* target = matrix + ((rows.begin + row) * params.out.seq_stride + col) * 2;
    *reinterpret_cast<uint2*>(target) =
        make_uint2(Element<Bf16>::pack(o.x, o.y), Element<Bf16>::pack(o.z, o.w));
  });
}

// A whole row of tiles: O of one query tile, which stays in registers until it is finished.
template <typename T>
__device__ __forceinline__ void attend_query_tile(const Params& params, ColumnStorage<T>& smem,
                                                  const Head& head, int query_tile) {
  const Range rows = query_rows<T>(params.shape, query_tile);
  const BandMask mask(params.shape, params.window);
  const int key_tiles = mask.template touched_key_tiles<T::kBlockN>(rows).end;
  RowState state;
  OutputShare<T> out;
  if (key_tiles > 0) load_queries<T>(params, head, query_tile, smem.q);
  for (int key_tile = 0; key_tile < key_tiles; ++key_tile) {
    load_keys<T>(params, params.k, head, key_tile, smem.k);
    load_keys<T>(params, params.v, head, key_tile, smem.v);
    wait_for_loads();
    attend_tile<T>(params, smem, rows, key_tile, state, out);
  }
  write_share<T>(params, head, rows, out);
}

}  // namespace flash_ext::classic
