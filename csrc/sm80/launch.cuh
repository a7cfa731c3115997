// Host side of one instance: grid, shared memory, launch.
#pragma once

#include <cuda_runtime.h>

#include <limits>
#include <type_traits>
#include <vector>

#include "common/device.h"
#include "common/error.h"
#include "common/instance.h"
#include "sm80/backward_kernel.cuh"
#include "sm80/backward_rows.cuh"
#include "sm80/config.h"
#include "sm80/forward_kernel.cuh"

namespace flash_ext::sm80 {

inline int64_t tiles(int64_t length, int block) { return (length + block - 1) / block; }

// Launches `kernel` on a linear grid.
template <typename Params>
int32_t launch(void (*kernel)(Params), KernelSetup& setup, int64_t blocks, int threads,
               int smem_bytes, const Params& params, void* stream) {
  if (blocks == 0) return 0;
  if (blocks > std::numeric_limits<int32_t>::max()) return check(cudaErrorInvalidConfiguration);
  if (int32_t error = setup.prepare()) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, static_cast<cudaStream_t>(stream)>>>(
      params);
  return check_launch();
}

template <typename Config>
int32_t launch_forward(const ForwardParams& params, void* stream) {
  constexpr int kSmem = sizeof(typename Config::SharedStorage);
  const auto kernel = &flash_forward<Config>;
  static KernelSetup setup(kernel, kSmem);
  const Shape& shape = params.shape;
  const int64_t blocks = tiles(shape.seqlen_q, Config::kBlockM) * shape.heads_q * shape.batch;
  return launch(kernel, setup, blocks, Config::kThreads, kSmem, params, stream);
}

// Three kernels: delta (and a zeroed dQ accumulator), the main pass, and dQ's conversion.
template <typename Config>
int32_t launch_backward(const BackwardParams& params, void* stream) {
  constexpr int kSmem = sizeof(typename Config::SharedStorage);
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads_q * shape.seqlen_q;

  using Rows = RowConfig<typename Config::Element, Config::kHeadDim>;
  const auto prepare = &flash_backward_prepare<Rows>;
  static KernelSetup prepare_setup(prepare, 0);
  if (int32_t error = launch(prepare, prepare_setup, tiles(rows, Rows::kBlockRows), Rows::kThreads,
                             0, params, stream))
    return error;

  const auto kernel = &flash_backward<Config>;
  static KernelSetup setup(kernel, kSmem);
  const int64_t blocks = tiles(shape.seqlen_k, Config::kBlockN) * shape.heads_k * shape.batch;
  if (int32_t error = launch(kernel, setup, blocks, Config::kThreads, kSmem, params, stream))
    return error;

  if (params.dq.data == nullptr) return 0;
  const auto convert = &flash_backward_convert<Rows>;
  static KernelSetup convert_setup(convert, 0);
  return launch(convert, convert_setup, tiles(rows, Rows::kBlockRows), Rows::kThreads, 0, params,
                stream);
}

template <typename T>
constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;

// The rows of the table of kernels for one pass, head dim and type.
template <typename Config>
constexpr Kernel describe(Pass pass) {
  return {"sm80",
          pass,
          kDType<typename Config::Element>,
          Features::kLean,
          Config::kHeadDim,
          Config::kBlockM,
          Config::kBlockN,
          Config::kStages,
          Config::kThreads,
          sizeof(typename Config::SharedStorage),
          /*deterministic=*/pass == Pass::kBackward};
}

template <typename... Configs>
std::vector<Instance> forward_rows(TileList<Configs...>) {
  return {{describe<Configs>(Pass::kForward), &launch_forward<Configs>, nullptr}...};
}

template <typename... Configs>
std::vector<Instance> backward_rows(TileList<Configs...>) {
  return {{describe<Configs>(Pass::kBackward), nullptr, &launch_backward<Configs>}...};
}

template <typename T, int kHeadDim>
std::vector<Instance> forward_instances() {
  return forward_rows(typename Tiles<T, kHeadDim>::Forward{});
}

template <typename T, int kHeadDim>
std::vector<Instance> backward_instances() {
  return backward_rows(typename Tiles<T, kHeadDim>::Backward{});
}

}  // namespace flash_ext::sm80
