// The two row-wise kernels around the backward pass.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/epilogue.h"
#include "core/gradient_workspace.h"
#include "core/layout.h"
#include "params.h"
#include "ptx/grid_dependency.h"

namespace flash_ext {

// One lane per 16-byte chunk of a row, so that a row is one coalesced access.
template <typename T, int kHeadDim>
struct RowConfig {
  using Element = T;
  static constexpr int kLanes = kHeadDim / kChunk <= 8 ? 8 : kHeadDim / kChunk <= 16 ? 16 : 32;
  static constexpr int kThreads = 256;
  static constexpr int kBlockRows = kThreads / kLanes;
};

// The row (batch, head, position) of (B, heads, sequence) that this thread works on, and its
// columns.
struct RowCoordinate {
  int64_t index;  // of the row in that order
  int64_t batch;
  int head;
  int64_t position;
  int column;

  template <typename Config>
  static __device__ __forceinline__ RowCoordinate of(int heads, int64_t seqlen) {
    const int64_t index =
        static_cast<int64_t>(blockIdx.x) * Config::kBlockRows + threadIdx.x / Config::kLanes;
    const int64_t head = index / seqlen;
    return {index, head / heads, static_cast<int>(head % heads), index % seqlen,
            static_cast<int>(threadIdx.x) % Config::kLanes * kChunk};
  }
};

struct PrepareParams {
  BackwardParams problem;
  int64_t accum_rows;  // dq_accum is (B, Hq, accum_rows, accum_cols), accum_rows at least Sq
  int32_t accum_cols;
};

// delta = rowsum(dO * O) - dlse, and the dQ accumulator set to zero.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_backward_prepare(const __grid_constant__ PrepareParams prepare) {
  ptx::launch_dependents();
  const BackwardParams& params = prepare.problem;
  using T = typename Config::Element;
  const Shape& shape = params.shape;
  const auto at = RowCoordinate::of<Config>(shape.heads_q, prepare.accum_rows);
  const bool row_counts = at.index < shape.batch * shape.heads_q * prepare.accum_rows;
  const bool row_exists = row_counts && at.position < shape.seqlen_q;

  float sum = 0.f;
  if (row_exists && at.column < shape.head_dim_v) {
    const auto chunk = [&](const View& view) {
      const char* row = head_matrix(view, at.batch, at.head) + at.position * view.seq_stride * 2;
      return *reinterpret_cast<const uint4*>(row + at.column * 2);
    };
    const uint4 out = chunk(params.out), dout = chunk(params.dout);
    const uint32_t o[4] = {out.x, out.y, out.z, out.w};
    const uint32_t g[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Where O is 0 the term is 0, even for an infinite dO: a row without keys adds nothing.
      const float2 a = Element<T>::unpack(o[i]), b = Element<T>::unpack(g[i]);
      if (a.x != 0.f) sum = fmaf(a.x, b.x, sum);
      if (a.y != 0.f) sum = fmaf(a.y, b.y, sum);
    }
  }
#pragma unroll
  for (int distance = Config::kLanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (row_exists && at.column == 0) {
    const int64_t row = (at.batch * shape.heads_q + at.head) * shape.seqlen_q + at.position;
    params.delta[row] = sum - (params.dlse == nullptr ? 0.f : params.dlse[row]);
  }
  if (row_counts && params.dq_accum != nullptr && at.column < prepare.accum_cols) {
    auto* target =
        reinterpret_cast<float4*>(params.dq_accum + at.index * prepare.accum_cols + at.column);
    target[0] = target[1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// A gradient whose additions in fp32 are complete.
struct GradientSums {
  float* workspace;  // (batch, heads, seqlen, cols rounded up to 16); null: written elsewhere
  View gradient;     // (batch, seqlen, heads, cols)
  int64_t batch;
  int64_t seqlen;
  int32_t heads;
  int32_t cols;
  float factor;
};

// gradient = factor * sums, rounded once.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_backward_convert(const __grid_constant__ GradientSums sums) {
  using T = typename Config::Element;
  const auto at = RowCoordinate::of<Config>(sums.heads, sums.seqlen);
  if (at.index >= sums.batch * sums.heads * sums.seqlen || at.column >= sums.cols) return;

  const float* source = sums.workspace + at.index * GradientWorkspace::row_floats(sums.cols);
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto pair =
        *reinterpret_cast<const float2*>(source + GradientWorkspace::position(at.column + 2 * i));
    packed[i] = Element<T>::pack(sums.factor * pair.x, sums.factor * pair.y);
  }
  const View& view = sums.gradient;
  char* row = head_matrix(view, at.batch, at.head) + at.position * view.seq_stride * 2;
  *reinterpret_cast<uint4*>(row + at.column * 2) = {packed[0], packed[1], packed[2], packed[3]};
}

}  // namespace flash_ext
