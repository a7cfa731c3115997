// The row of an instance in the table of kernels, from its configuration.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "launch.h"

namespace flash_ext {

template <typename T>
constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;

template <typename Config>
constexpr Kernel describe(const char* family, Pass pass, Features features, bool packed,
                          bool whole_dq_tiles) {
  return {family,
          pass,
          kDType<typename Config::Element>,
          features,
          packed,
          Config::kHeadDim,
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
