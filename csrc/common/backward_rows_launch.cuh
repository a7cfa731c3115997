// Host side of the row-wise kernels around the backward pass (core/backward_rows.cuh).
#pragma once

#include <cuda_runtime.h>

#include "common/device.h"
#include "common/launch.cuh"
#include "core/backward_rows.cuh"
#include "params.h"

namespace flash_ext {

// delta, and the dQ workspace set to zero.
template <typename Rows>
int32_t launch_prepare(const PrepareParams& params, void* stream) {
  const auto kernel = &flash_backward_prepare<Rows>;
  static KernelSetup setup(kernel, 0);
  const Shape& shape = params.problem.shape;
  const int64_t rows = shape.batch * shape.heads_q * params.accum_rows;
  return launch(kernel, setup, tiles(rows, Rows::kBlockRows), Rows::kThreads, 0, params, stream);
}

inline GradientSums key_sums(const BackwardParams& params) {
  const Shape& shape = params.shape;
  return {params.dk_accum, params.dk,      shape.batch, shape.seqlen_k,
          shape.heads_k,   shape.head_dim, 1.f};
}

inline GradientSums value_sums(const BackwardParams& params) {
  const Shape& shape = params.shape;
  return {params.dv_accum, params.dv,        shape.batch, shape.seqlen_k,
          shape.heads_k,   shape.head_dim_v, 1.f};
}

// Sets the workspace of a gradient to zero.
inline int32_t clear_sums(const GradientSums& sums, void* stream) {
  if (sums.workspace == nullptr) return 0;
  const int64_t rows = sums.batch * sums.heads * sums.seqlen;
  const int64_t row_bytes = GradientWorkspace::row_floats(sums.cols) * sizeof(float);
  return fill_zero(sums.workspace, rows * row_bytes, stream);
}

// Rounds the sums of a gradient to it.
template <typename Rows>
int32_t launch_convert(const GradientSums& sums, void* stream) {
  if (sums.workspace == nullptr) return 0;
  const auto kernel = &flash_backward_convert<Rows>;
  static KernelSetup setup(kernel, 0);
  const int64_t rows = sums.batch * sums.heads * sums.seqlen;
  return launch(kernel, setup, tiles(rows, Rows::kBlockRows), Rows::kThreads, 0, sums, stream);
}

}  // namespace flash_ext
