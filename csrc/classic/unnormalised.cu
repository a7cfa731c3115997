// FlashAttention 2, third step (Dao 2023, section 3.1): O is accumulated unnormalised, and divided
// by l once, at the end. What remains beside the products of a tile is the factor exp2(m - m').
#include "classic/launch.cuh"
#include "classic/split_rows.cuh"

namespace flash_ext::classic {
namespace {

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_unnormalised(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  attend_rows<T, DeferredSoftmax, 1>(params, *reinterpret_cast<RowStorage<T, 1>*>(smem_raw));
}

template <int kHeadDim>
struct Unnormalised {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    constexpr int kSmem = sizeof(RowStorage<T, 1>);
    const auto kernel = &flash_unnormalised<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t unnormalised(const Params& params, void* stream) {
  return launch_by_head_dim<Unnormalised>(params, stream);
}

}  // namespace flash_ext::classic
