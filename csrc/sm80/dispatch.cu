// Collects the instances of the head dims this build has (FLASH_EXT_HEAD_DIMS, ascending).
#include "sm80/dispatch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

namespace flash_ext::sm80 {

// Defined in inst/, one file per pass and head dim: the images of both types, alike for the most
// part, are compressed together.
template <typename T, int kHeadDim>
std::vector<Instance> forward_instances();
template <typename T, int kHeadDim>
std::vector<Instance> backward_instances();
template <typename T, int kHeadDim>
std::vector<Instance> packed_forward_instances();
template <typename T, int kHeadDim>
std::vector<Instance> packed_backward_instances();
template <typename T, int kHeadDim>
std::vector<Instance> full_forward_instances();
template <typename T, int kHeadDim>
std::vector<Instance> full_backward_instances();

namespace {

template <int... kHeadDims>
std::vector<Instance> collect(std::integer_sequence<int, kHeadDims...>) {
  std::vector<Instance> rows;
  const auto append = [&rows](const std::vector<Instance>& more) {
    rows.insert(rows.end(), more.begin(), more.end());
  };
  ((append(forward_instances<__half, kHeadDims>()),
    append(forward_instances<__nv_bfloat16, kHeadDims>()),
    append(backward_instances<__half, kHeadDims>()),
    append(backward_instances<__nv_bfloat16, kHeadDims>()),
    append(packed_forward_instances<__half, kHeadDims>()),
    append(packed_forward_instances<__nv_bfloat16, kHeadDims>()),
    append(packed_backward_instances<__half, kHeadDims>()),
    append(packed_backward_instances<__nv_bfloat16, kHeadDims>()),
    append(full_forward_instances<__half, kHeadDims>()),
    append(full_forward_instances<__nv_bfloat16, kHeadDims>()),
    append(full_backward_instances<__half, kHeadDims>()),
    append(full_backward_instances<__nv_bfloat16, kHeadDims>())),
   ...);
  return rows;
}

}  // namespace

const std::vector<Instance>& instances() {
  static const std::vector<Instance> rows =
      collect(std::integer_sequence<int, FLASH_EXT_HEAD_DIMS>{});
  return rows;
}

}  // namespace flash_ext::sm80
