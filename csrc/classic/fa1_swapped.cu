// The loops of FlashAttention 1 exchanged: Q outside, K and V inside. O, m and l stay on the chip,
// and K and V are what is loaded again.
//
//   one block a head    grid: heads
//   for each tile of Q:
//       for each tile of K and V: as in fa1
//       O written
#include "classic/launch.cuh"
#include "classic/split_columns.cuh"

namespace flash_ext::classic {
namespace {

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_fa1_swapped(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<ColumnStorage<T>*>(smem_raw);
  const Head head(params.shape, blockIdx.x);
  const int query_tiles = ceil_div(static_cast<int>(params.shape.seqlen_q), T::kBlockM);
  for (int query_tile = 0; query_tile < query_tiles; ++query_tile)
    attend_query_tile<T>(params, smem, head, query_tile);
}

template <int kHeadDim>
struct Fa1Swapped {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    constexpr int kSmem = sizeof(ColumnStorage<T>);
    const auto kernel = &flash_fa1_swapped<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t fa1_swapped(const Params& params, void* stream) {
  return launch_by_head_dim<Fa1Swapped>(params, stream);
}

}  // namespace flash_ext::classic
