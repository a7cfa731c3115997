// Collects the instances of the head dims this build has (FLASH_EXT_HEAD_DIMS, ascending).
#include "sm90/dispatch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "sm90/config.h"

namespace flash_ext::sm90 {

// Defined in inst/, one file per pass and head dim, for both types.
template <typename T, int kHeadDim>
std::vector<Instance> forward_instances();
template <typename T, int kHeadDim>
std::vector<Instance> backward_instances();

namespace {

template <typename T, int kHeadDim>
std::vector<Instance> instances_of() {
  std::vector<Instance> rows = forward_instances<T, kHeadDim>();
  if constexpr (has_backward(kHeadDim))
    for (const Instance& row : backward_instances<T, kHeadDim>()) rows.push_back(row);
  return rows;
}

template <int... kHeadDims>
std::vector<Instance> collect(std::integer_sequence<int, kHeadDims...>) {
  std::vector<Instance> rows;
  const auto append = [&rows](const std::vector<Instance>& more) {
    rows.insert(rows.end(), more.begin(), more.end());
  };
  ((append(instances_of<__half, kHeadDims>()), append(instances_of<__nv_bfloat16, kHeadDims>())),
   ...);
  return rows;
}

}  // namespace

const std::vector<Instance>& instances() {
  static const std::vector<Instance> rows =
      collect(std::integer_sequence<int, FLASH_EXT_HEAD_DIMS>{});
  return rows;
}

}  // namespace flash_ext::sm90
