// FlashAttention 2 (Dao 2023, section 3.2), first step: query tiles of a head have nothing to tell
// each other, so each one gets a block of its own, and few heads fill the GPU, too.
//
//   one block a query tile    grid: query tiles x heads
//   for each tile of K and V: as in fa1
//   O written
#include "classic/launch.cuh"
#include "classic/split_columns.cuh"

namespace flash_ext::classic {
namespace {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 2)
    flash_sequence_parallel(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<ColumnStorage<T>*>(smem_raw);
  const int query_tiles = ceil_div(static_cast<int>(params.shape.seqlen_q), T::kBlockM);
  const int query_tile = query_tiles - 1 - static_cast<int>(blockIdx.x % query_tiles);
  attend_query_tile<T>(params, smem, Head(params.shape, blockIdx.x / query_tiles), query_tile);
}

template <int kHeadDim>
struct SequenceParallel {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    constexpr int kSmem = sizeof(ColumnStorage<T>);
    const auto kernel = &flash_sequence_parallel<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t sequence_parallel(const Params& params, void* stream) {
  return launch_by_head_dim<SequenceParallel>(params, stream);
}

}  // namespace flash_ext::classic
