// The next tile of K and V is on its way while the present one is worked on.
#include "classic/launch.cuh"
#include "classic/split_rows.cuh"

namespace flash_ext::classic {
namespace {

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_pipelined(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  attend_rows<T, LazySoftmax, 2>(params, *reinterpret_cast<RowStorage<T, 2>*>(smem_raw));
}

template <int kHeadDim>
struct Pipelined {
  static int32_t launch(const Params& params, void* stream) {
    using T = WideTiles<kHeadDim>;
    constexpr int kSmem = sizeof(RowStorage<T, 2>);
    const auto kernel = &flash_pipelined<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t pipelined(const Params& params, void* stream) {
  return launch_by_head_dim<Pipelined>(params, stream);
}

}  // namespace flash_ext::classic
