// Any m gives the same O / l, so it may lag behind the maximum: O is rescaled only when it must be.
#include "classic/launch.cuh"
#include "classic/split_rows.cuh"

namespace flash_ext::classic {
namespace {

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_lazy_rescale(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  attend_rows<T, LazySoftmax, 1>(params, *reinterpret_cast<RowStorage<T, 1>*>(smem_raw));
}

template <int kHeadDim>
struct LazyRescale {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    constexpr int kSmem = sizeof(RowStorage<T, 1>);
    const auto kernel = &flash_lazy_rescale<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t lazy_rescale(const Params& params, void* stream) {
  return launch_by_head_dim<LazyRescale>(params, stream);
}

}  // namespace flash_ext::classic
