// 32 rows a warp instead of 16: every fragment of K and V that is read from shared memory serves
// two products, and half as many blocks read K and V from L2.
#include "classic/launch.cuh"
#include "classic/split_rows.cuh"

namespace flash_ext::classic {
namespace {

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_wide_rows(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  attend_rows<T, LazySoftmax, 1>(params, *reinterpret_cast<RowStorage<T, 1>*>(smem_raw));
}

template <int kHeadDim>
struct WideRows {
  static int32_t launch(const Params& params, void* stream) {
    using T = WideTiles<kHeadDim>;
    constexpr int kSmem = sizeof(RowStorage<T, 1>);
    const auto kernel = &flash_wide_rows<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t wide_rows(const Params& params, void* stream) {
  return launch_by_head_dim<WideRows>(params, stream);
}

}  // namespace flash_ext::classic
