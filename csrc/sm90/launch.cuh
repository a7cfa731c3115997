// Host side of one Hopper instance: tensor maps, grid, launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "common/backward_rows_launch.cuh"
#include "common/describe.h"
#include "common/device.h"
#include "common/error.h"
#include "common/instance.h"
#include "common/launch.cuh"
#include "sm90/backward_kernel.cuh"
#include "sm90/config.h"
#include "sm90/forward_kernel.cuh"
#include "sm90/params.h"

namespace flash_ext::sm90 {

// Encodes the map of a (B, S, H, D) tensor, read or written in boxes of `box_rows` rows and the
// columns of one slab.
template <typename Tile>
int32_t map_tensor(MappedTensor& mapped, const View& view, const Shape& shape, int64_t rows,
                   int64_t heads, int64_t cols, int box_rows) {
  mapped.head_step = view.head_stride != 0;
  mapped.batch_step = view.batch_stride != 0;
  const TensorMapShape map{
      {cols, rows, mapped.head_step ? heads : 1, mapped.batch_step ? shape.batch : 1},
      {1, view.seq_stride, view.head_stride, view.batch_stride},
      {Tile::kSlabCols, box_rows, 1, 1}};
  return encode_tensor_map(&mapped.map, view.data, map);
}

// Heads whose K and V together stay in half of L2, so that tiles of all of them read it from there.
inline int32_t heads_in_l2(const Shape& shape) {
  constexpr int64_t kBytes = int64_t{32} << 20;
  const int64_t of_one = 2 * shape.seqlen_k * (shape.head_dim + shape.head_dim_v);
  const int64_t group = shape.heads_q / shape.heads_k;
  return static_cast<int32_t>(std::clamp<int64_t>(kBytes / std::max<int64_t>(of_one, 1), 1, 1024) *
                              group);
}

template <typename Config>
int32_t launch_forward(const ForwardParams& problem, void* stream) {
  const Shape& shape = problem.shape;
  const int64_t query_tiles = tiles(shape.seqlen_q, Config::kBlockM) * shape.heads_q * shape.batch;
  if (query_tiles == 0) return 0;
  if (query_tiles > std::numeric_limits<int32_t>::max())
    return check(cudaErrorInvalidConfiguration);

  ForwardKernelParams params;
  params.problem = problem;
  const float units = problem.softmax_scale * kLog2E;
  params.units = units > 0.f ? units : 1.f;
  params.score_factor = units > 0.f ? 1.f : units;
  params.tiles = static_cast<int32_t>(query_tiles);
  const bool uneven = problem.window.left >= 0 || problem.window.right >= 0;
  params.heads_together = uneven ? heads_in_l2(shape) : 1;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  if (int32_t error = map_tensor<QTile>(params.q, problem.q, shape, shape.seqlen_q, shape.heads_q,
                                        shape.head_dim, Config::kBlockM))
    return error;
  if (shape.seqlen_k > 0) {
    if (int32_t error = map_tensor<KTile>(params.k, problem.k, shape, shape.seqlen_k, shape.heads_k,
                                          shape.head_dim, Config::kBlockN))
      return error;
    if (int32_t error = map_tensor<VTile>(params.v, problem.v, shape, shape.seqlen_k, shape.heads_k,
                                          shape.head_dim_v, Config::kBlockN))
      return error;
  }
  if (problem.out_dtype != DType::kFloat32) {
    if (int32_t error = map_tensor<QTile>(params.out, problem.out, shape, shape.seqlen_q,
                                          shape.heads_q, shape.head_dim_v, kWarpgroupRows))
      return error;
  }

  constexpr int kSmem = sizeof(typename Config::SharedStorage);
  const auto kernel = &flash_forward<Config>;
  static KernelSetup setup(kernel, kSmem);
  if (int32_t error = tile_counter(&params.counter, stream)) return error;
  int32_t multiprocessors = 0;
  if (int32_t error = multiprocessor_count(&multiprocessors)) return error;
  const bool persistent = params.counter != nullptr;
  const int64_t blocks = persistent ? std::min<int64_t>(query_tiles, multiprocessors) : query_tiles;
  return launch(kernel, setup, blocks, Config::kThreads, kSmem, params, stream);
}

// Three kernels: delta (and a zeroed dQ workspace), the main pass, and the rounding of what it
// added up: dQ, and with splits dK and dV. The first two of the next ones start early, so nothing
// may come between the three.
template <typename Config>
int32_t launch_backward(const BackwardParams& problem, void* stream) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using Rows = RowConfig<typename Config::Element, Config::kHeadDim>;
  const Shape& shape = problem.shape;
  using DqTile = typename Config::DqTile;
  const PrepareParams prepare{problem, DqTile::tiles(shape.seqlen_q) * Config::kBlockM,
                              Config::kHeadDim};
  const GradientSums dk = key_sums(problem), dv = value_sums(problem);
  for (const GradientSums& sums : {dk, dv})
    if (int32_t error = clear_sums(sums, stream)) return error;
  if (int32_t error = launch_prepare<Rows>(prepare, stream)) return error;

  BackwardKernelParams params;
  params.problem = problem;
  const auto map_queries = [&](MappedTensor& mapped, const View& view, int64_t cols) {
    if (shape.seqlen_q == 0) return 0;  // nothing to load
    return map_tensor<QTile>(mapped, view, shape, shape.seqlen_q, shape.heads_q, cols,
                             Config::kBlockM);
  };
  const auto map_keys = [&](MappedTensor& mapped, const View& view, int64_t cols, int box_rows) {
    if (view.data == nullptr || shape.seqlen_k == 0) return 0;
    return map_tensor<KTile>(mapped, view, shape, shape.seqlen_k, shape.heads_k, cols, box_rows);
  };
  if (int32_t error = map_queries(params.q, problem.q, shape.head_dim)) return error;
  if (int32_t error = map_queries(params.dout, problem.dout, shape.head_dim_v)) return error;
  if (int32_t error = map_keys(params.k, problem.k, shape.head_dim, Config::kBlockN)) return error;
  if (int32_t error = map_keys(params.v, problem.v, shape.head_dim_v, Config::kBlockN))
    return error;
  if (int32_t error = map_keys(params.dk, problem.dk, shape.head_dim, kWarpgroupRows)) return error;
  if (int32_t error = map_keys(params.dv, problem.dv, shape.head_dim_v, kWarpgroupRows))
    return error;

  constexpr int kSmem = sizeof(typename Config::SharedStorage);
  const auto kernel = &flash_backward<Config>;
  static KernelSetup setup(kernel, kSmem);
  const int64_t key_tiles =
      tiles(shape.seqlen_k, Config::kTileKeys) * problem.splits * shape.heads_k * shape.batch;
  if (key_tiles > std::numeric_limits<int32_t>::max()) return check(cudaErrorInvalidConfiguration);
  params.tiles = static_cast<int32_t>(key_tiles);
  params.counter = nullptr;
  const bool ordered = problem.dq_turns != nullptr;
  if (!ordered) {
    if (int32_t error = tile_counter(&params.counter, stream)) return error;
  }
  const Start start = shape.seqlen_q == 0 ? Start::kInOrder : Start::kEarly;  // nothing prepared
  int32_t multiprocessors = 0;
  if (int32_t error = multiprocessor_count(&multiprocessors)) return error;
  const bool persistent = ordered || params.counter != nullptr;
  const int64_t clusters =
      persistent ? std::min<int64_t>(key_tiles, multiprocessors / Config::kBlocks) : key_tiles;
  if (int32_t error = launch(kernel, setup, clusters * Config::kBlocks, Config::kThreads, kSmem,
                             params, stream, start))
    return error;
  if (problem.dq.data != nullptr) {
    const auto round = &flash_backward_round<Config>;
    static KernelSetup round_setup(round, 0);
    if (int32_t error = launch(round, round_setup, RoundDq<Config>::blocks(shape),
                               RoundDq<Config>::kThreads, 0, problem, stream, Start::kEarly))
      return error;
  }
  for (const GradientSums& sums : {dk, dv})
    if (int32_t error = launch_convert<Rows>(sums, stream)) return error;
  return 0;
}

template <typename Config>
Instance forward_instance() {
  constexpr Kernel kRow = describe<Config>("sm90", Pass::kForward, Features::kLean,
                                           /*packed=*/false, /*whole_dq_tiles=*/false);
  return {kRow, &launch_forward<Config>, nullptr};
}

template <typename T, int kHeadDim>
std::vector<Instance> forward_instances() {
  using Rows = Tiles<T, kHeadDim>;
  if constexpr (has_narrow_forward(kHeadDim))
    return {forward_instance<typename Rows::NarrowForward>(),
            forward_instance<typename Rows::Forward>()};
  else
    return {forward_instance<typename Rows::Forward>()};
}

template <typename T, int kHeadDim>
std::vector<Instance> backward_instances() {
  using Config = typename Tiles<T, kHeadDim>::Backward;
  constexpr Kernel kRow = describe<Config>("sm90", Pass::kBackward, Features::kLean,
                                           /*packed=*/false, /*whole_dq_tiles=*/true);
  return {{kRow, nullptr, &launch_backward<Config>}};
}

}  // namespace flash_ext::sm90
