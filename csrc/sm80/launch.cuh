// Host side of one instance: grid, shared memory, launch.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/backward_rows_launch.cuh"
#include "common/describe.h"
#include "common/device.h"
#include "common/instance.h"
#include "common/launch.cuh"
#include "sm80/backward_kernel.cuh"
#include "sm80/config.h"
#include "sm80/fixed_point.h"
#include "sm80/forward_kernel.cuh"

namespace flash_ext::sm80 {

// Tiles of `block` rows of one head, in all batch entries or, packed, sequences.
inline int64_t tiles_of_head(const Shape& shape, const Packing& packing, int64_t rows, int block) {
  return packing.cu_seqlens_q == nullptr ? tiles(rows, block) * shape.batch
                                         : packed_slots(rows, block, packing.batch);
}

template <typename Config>
int32_t launch_forward(const ForwardParams& params, void* stream) {
  const auto kernel = &flash_forward<Config>;
  static KernelSetup setup(kernel, smem_bytes<Config>());
  const Shape& shape = params.shape;
  const int64_t blocks =
      tiles_of_head(shape, params.packing, shape.seqlen_q, Config::kBlockM) * shape.heads_q;
  return launch(kernel, setup, blocks, Config::kThreads,
                smem_bytes<Config>(params.modifiers.bias_in_chunks), params, stream);
}

// The run of the main pass that finds the largest addition to a bias gradient, and nothing else.
inline BackwardParams measuring(BackwardParams params) {
  params.dbias_fixed.measures = true;
  params.dq_turns = nullptr;
  for (View* gradient : {&params.dq, &params.dk, &params.dv}) gradient->data = nullptr;
  return params;
}

inline GradientSums query_sums(const BackwardParams& params) {
  const Shape& shape = params.shape;
  return {params.dq_accum, params.dq,      shape.batch,         shape.seqlen_q,
          shape.heads_q,   shape.head_dim, params.softmax_scale};
}

// Three kernels: delta (and a zeroed dQ workspace), the main pass, and the conversion of what it
// added up: dQ, and with splits dK and dV. Where a bias gradient is summed in fixed point, the main
// pass runs twice.
template <typename Config>
int32_t launch_backward(const BackwardParams& params, void* stream) {
  const Shape& shape = params.shape;

  using Rows = RowConfig<typename Config::Element, Config::kHeadDim>;
  const PrepareParams prepare{params, shape.seqlen_q,
                              GradientWorkspace::row_floats(shape.head_dim)};
  if (int32_t error = launch_prepare<Rows>(prepare, stream)) return error;
  const GradientSums dq = query_sums(params), dk = key_sums(params), dv = value_sums(params);
  for (const GradientSums& sums : {dk, dv})
    if (int32_t error = clear_sums(sums, stream)) return error;

  const auto kernel = &flash_backward<Config>;
  static KernelSetup setup(kernel, smem_bytes<Config>());
  const int64_t blocks = tiles_of_head(shape, params.packing, shape.seqlen_k, Config::kBlockN) *
                         params.splits * shape.heads_k;
  const auto launch_main = [&](const BackwardParams& asked) {
    return launch(kernel, setup, blocks, Config::kThreads,
                  smem_bytes<Config>(asked.modifiers.bias_in_chunks), asked, stream);
  };
  const bool fixed = Config::kFull && params.dbias_fixed.sums != nullptr;
  if (fixed)
    if (int32_t error = launch_main(measuring(params))) return error;
  if (int32_t error = launch_main(params)) return error;
  if (fixed)
    if (int32_t error = launch_fixed_point_end(params, stream)) return error;

  for (const GradientSums& sums : {dq, dk, dv})
    if (int32_t error = launch_convert<Rows>(sums, stream)) return error;
  return 0;
}

template <typename Config>
constexpr Kernel row(Pass pass) {
  Kernel kernel = describe<Config>("sm80", pass, Config::kFull ? Features::kFull : Features::kLean,
                                   Config::kPacked, /*whole_dq_tiles=*/false);
  kernel.smem_bytes = smem_bytes<Config>();
  return kernel;
}

template <typename... Configs>
std::vector<Instance> forward_rows(TileList<Configs...>) {
  return {{row<Configs>(Pass::kForward), &launch_forward<Configs>, nullptr}...};
}

template <typename... Configs>
std::vector<Instance> backward_rows(TileList<Configs...>) {
  return {{row<Configs>(Pass::kBackward), nullptr, &launch_backward<Configs>}...};
}

template <typename T, int kHeadDim>
std::vector<Instance> forward_instances() {
  return forward_rows(typename Tiles<T, kHeadDim>::Forward{});
}

template <typename T, int kHeadDim>
std::vector<Instance> backward_instances() {
  return backward_rows(typename Tiles<T, kHeadDim>::Backward{});
}

// Of the first tile alone: where shared memory is too small for it, kernels with all features
// serve.
template <typename Config, typename... Others>
TileList<typename Packed<Config>::type> packed(TileList<Config, Others...>) {
  return {};
}

template <typename T, int kHeadDim>
std::vector<Instance> packed_forward_instances() {
  return forward_rows(packed(typename Tiles<T, kHeadDim>::Forward{}));
}

template <typename T, int kHeadDim>
std::vector<Instance> packed_backward_instances() {
  return backward_rows(packed(typename Tiles<T, kHeadDim>::Backward{}));
}

template <typename T, int kHeadDim>
std::vector<Instance> full_forward_instances() {
  return forward_rows(typename Tiles<T, kHeadDim>::FullForward{});
}

template <typename T, int kHeadDim>
std::vector<Instance> full_backward_instances() {
  return backward_rows(typename Tiles<T, kHeadDim>::FullBackward{});
}

}  // namespace flash_ext::sm80
