// Collects the instances of the head dims this build has (FLASH_EXT_HEAD_DIMS, ascending).
#include "sm80/dispatch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

namespace flash_ext::sm80 {

// Defined in inst/, one file per pass, head dim and type.
template <typename T, int kHeadDim>
Instance forward_instance();
template <typename T, int kHeadDim>
Instance backward_instance();

namespace {

template <int... kHeadDims>
std::vector<Instance> collect(std::integer_sequence<int, kHeadDims...>) {
  std::vector<Instance> rows;
  (rows.insert(rows.end(),
               {forward_instance<__half, kHeadDims>(), forward_instance<__nv_bfloat16, kHeadDims>(),
                backward_instance<__half, kHeadDims>(),
                backward_instance<__nv_bfloat16, kHeadDims>()}),
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
