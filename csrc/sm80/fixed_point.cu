// The end of sums in fixed point: from integers to fp32.
#include "sm80/fixed_point.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "common/error.h"
#include "core/fixed_point.h"

namespace flash_ext::sm80 {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 20;

__global__ void __launch_bounds__(kThreads)
    flash_backward_fixed_point_end(float* sums, FixedPoint fixed) {
  const float unit = fixed_point_unit(*fixed.largest, fixed.log_terms);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < fixed.elements; i += step)
    sums[i] += static_cast<float>(fixed.sums[i]) * unit;
}

}  // namespace

int32_t launch_fixed_point_end(const BackwardParams& params, void* stream) {
  const int64_t blocks =
      std::min((params.dbias_fixed.elements + kThreads - 1) / kThreads, kMostBlocks);
  if (blocks == 0) return 0;
  flash_backward_fixed_point_end<<<static_cast<unsigned>(blocks), kThreads, 0,
                                   static_cast<cudaStream_t>(stream)>>>(
      static_cast<float*>(params.dbias.data), params.dbias_fixed);
  return check_launch();
}

}  // namespace flash_ext::sm80
