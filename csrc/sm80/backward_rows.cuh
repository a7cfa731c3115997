// The two row-wise kernels around the backward pass.
#pragma once

#include <cstdint>

#include "core/dq_workspace.h"
#include "core/element.h"
#include "core/epilogue.h"
#include "core/layout.h"
#include "params.h"

namespace flash_ext::sm80 {

// One lane per 16-byte chunk of a row, so that a row is one coalesced access.
template <typename T, int kHeadDim>
struct RowConfig {
  using Element = T;
  static constexpr int kLanes = kHeadDim / kChunk <= 8 ? 8 : kHeadDim / kChunk <= 16 ? 16 : 32;
  static constexpr int kThreads = 256;
  static constexpr int kBlockRows = kThreads / kLanes;
};

// The row (batch, head, position) of (B, Hq, Sq) that this thread works on, and its columns.
struct RowCoordinate {
  int64_t index;  // row of the (B, Hq, Sq) order
  int64_t batch;
  int head;
  int64_t position;
  int column;

  template <typename Config>
  static __device__ __forceinline__ RowCoordinate of(const Shape& shape) {
    const int64_t index =
        static_cast<int64_t>(blockIdx.x) * Config::kBlockRows + threadIdx.x / Config::kLanes;
    const int64_t head = index / shape.seqlen_q;
    return {index, head / shape.heads_q, static_cast<int>(head % shape.heads_q),
            index % shape.seqlen_q, static_cast<int>(threadIdx.x) % Config::kLanes * kChunk};
  }
};

// delta = rowsum(dO * O) - dlse, and the dQ accumulator set to zero.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_backward_prepare(const __grid_constant__ BackwardParams params) {
  using T = typename Config::Element;
  const Shape& shape = params.shape;
  const auto at = RowCoordinate::of<Config>(shape);
  const bool row_exists = at.index < shape.batch * shape.heads_q * shape.seqlen_q;

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
  if (!row_exists) return;

  if (at.column == 0)
    params.delta[at.index] = sum - (params.dlse == nullptr ? 0.f : params.dlse[at.index]);
  const int row_floats = DqWorkspace::row_floats(shape.head_dim);
  if (params.dq_accum != nullptr && at.column < row_floats) {
    auto* target = reinterpret_cast<float4*>(params.dq_accum + at.index * row_floats + at.column);
    target[0] = target[1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// dQ = scale * accumulator, rounded once.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_backward_convert(const __grid_constant__ BackwardParams params) {
  using T = typename Config::Element;
  const Shape& shape = params.shape;
  const auto at = RowCoordinate::of<Config>(shape);
  if (at.index >= shape.batch * shape.heads_q * shape.seqlen_q || at.column >= shape.head_dim)
    return;

  const float* source = params.dq_accum + at.index * DqWorkspace::row_floats(shape.head_dim);
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto pair =
        *reinterpret_cast<const float2*>(source + DqWorkspace::position(at.column + 2 * i));
    packed[i] = Element<T>::pack(params.softmax_scale * pair.x, params.softmax_scale * pair.y);
  }
  char* row = head_matrix(params.dq, at.batch, at.head) + at.position * params.dq.seq_stride * 2;
  *reinterpret_cast<uint4*>(row + at.column * 2) = {packed[0], packed[1], packed[2], packed[3]};
}

}  // namespace flash_ext::sm80
