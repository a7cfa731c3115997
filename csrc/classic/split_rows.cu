// FlashAttention 2, second step: rows split over the warps instead of columns. Nothing is exchanged
// between warps; O is normalised after every tile, as before.
#include "classic/launch.cuh"
#include "classic/split_rows.cuh"

namespace flash_ext::classic {
namespace {

// O is normalised after every tile: P and what O had are divided by the sum so far.
template <int kM>
struct NormalisedSoftmax {
  float max[kM][2];
  float sum[kM][2];

  __device__ __forceinline__ NormalisedSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[m][h] = -INFINITY;
        sum[m][h] = 0.f;
      }
  }

  // As DeferredSoftmax::step.
  template <int kN, int kD>
  __device__ __forceinline__ void step(float (&scores)[kM][kN][4], float (&out)[kM][kD][4],
                                       float units) {
    scale(scores, units);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float new_max = fmaxf(max[m][h], largest(scores, m, h));
        const float rescale = new_max == -INFINITY ? 1.f : ptx::exp2_approx(max[m][h] - new_max);
        const float keep = rescale * sum[m][h];
        sum[m][h] = keep + quad_sum(exponentiate(scores, m, h, new_max));
        max[m][h] = new_max;
        const float inverse = sum[m][h] == 0.f ? 0.f : 1.f / sum[m][h];
        scale_row(scores, m, h, inverse);
        scale_row(out, m, h, keep * inverse);
      }
  }

  template <int kD>
  __device__ __forceinline__ void finish(float (&)[kM][kD][4]) {}
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_split_rows(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  attend_rows<T, NormalisedSoftmax, 1>(params, *reinterpret_cast<RowStorage<T, 1>*>(smem_raw));
}

template <int kHeadDim>
struct SplitRows {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    constexpr int kSmem = sizeof(RowStorage<T, 1>);
    const auto kernel = &flash_split_rows<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t split_rows(const Params& params, void* stream) {
  return launch_by_head_dim<SplitRows>(params, stream);
}

}  // namespace flash_ext::classic
