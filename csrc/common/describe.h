// The row of an instance in the table of kernels, from its configuration.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "launch.h"

namespace flash_ext {

template <typename T>
constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;

// Most columns of V: those of Q and K, unless a configuration says otherwise.
template <typename Config, typename = int>
constexpr int kHeadDimV = Config::kHeadDim;
template <typename Config>
constexpr int kHeadDimV<Config, decltype(Config::kHeadDimV, 0)> = Config::kHeadDimV;

template <typename Config>
constexpr Kernel describe(const char* family, Pass pass, Features features, bool packed,
                          bool whole_dq_tiles) {
  return {family,
          pass,
          kDType<typename Config::Element>,
          features,
          packed,
          Config::kHeadDim,
          kHeadDimV<Config>,
          Config::kBlockM,
          Config::kBlockN,
          Config::kStages,
          Config::kThreads,
          sizeof(typename Config::SharedStorage),
          /*deterministic=*/pass == Pass::kBackward,
          /*splits_groups=*/pass == Pass::kBackward,
          whole_dq_tiles};
}

}  // namespace flash_ext
