// Standard attention with a safe softmax: the table goes to memory and comes back at every step.
//
//   S = scale * Q Kᵀ             written, fp32
//   m_i = max_j S_ij             S read
//   l_i = sum_j exp(S_ij - m_i)  S read
//   P_ij = exp(S_ij - m_i) / l_i S read, P written, bf16
//   O = P V                      P read
//
// 20 bytes an element of the table: four of S to write and three times to read, two of P to write
// and to read.
#include "classic/table.cuh"

namespace flash_ext::classic {
namespace {

__global__ void __launch_bounds__(kRowThreads)
    flash_row_max(const __grid_constant__ Params params) {
  const TableRow row(params.shape);
  if (!row.exists) return;
  float top = -INFINITY;
  row.for_each(params, [&](int, const float4& x) { top = fmaxf(top, max_of(x)); });
  top = warp_max(top);
  if (threadIdx.x % kWarpSize == 0) params.row_max[row.index] = top;
}

__global__ void __launch_bounds__(kRowThreads)
    flash_row_sum(const __grid_constant__ Params params) {
  const TableRow row(params.shape);
  if (!row.exists) return;
  const float reference = reference_of(params.row_max[row.index]);
  float sum = 0.f;
  row.for_each(params, [&](int, const float4& x) {
    const float4 e = exponentials(x, reference);
    sum += e.x + e.y + (e.z + e.w);
  });
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) params.row_sum[row.index] = sum;
}

__global__ void __launch_bounds__(kRowThreads)
    flash_normalise(const __grid_constant__ Params params) {
  const TableRow row(params.shape);
  if (!row.exists) return;
  const float reference = reference_of(params.row_max[row.index]);
  const float inverse = inverse_of(params.row_sum[row.index]);
  char* p = static_cast<char*>(params.probabilities) + row.index * params.table_cols * 2;
  row.for_each(params, [&](int col, const float4& x) {
    const float4 e = exponentials(x, reference);
    *reinterpret_cast<uint2*>(p + col * 2) =
        make_uint2(Element<Bf16>::pack(e.x * inverse, e.y * inverse),
                   Element<Bf16>::pack(e.z * inverse, e.w * inverse));
  });
}

// O = P V: one block kBlockM rows    grid: query tiles x heads
template <typename T>
struct ProductStorage {
  using PTile = SmemTile<T::kBlockM, T::kBlockN>;
  alignas(128) char p[PTile::kBytes];
  alignas(128) char v[T::KTile::kBytes];
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_product(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<ProductStorage<T>*>(smem_raw);
  using PTile = typename ProductStorage<T>::PTile;
  using KTile = typename T::KTile;
  constexpr int kSteps = T::kBlockN / 16;  // of the product, over the keys of a tile

  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int cols = static_cast<int>(params.table_cols);
  const int query_tiles = ceil_div(seqlen_q, T::kBlockM);
  const int query_tile = blockIdx.x % query_tiles;
  const Head head(shape, blockIdx.x / query_tiles);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16;

  const char* table = static_cast<const char*>(params.probabilities) +
                      head.index * seqlen_q * params.table_cols * 2;
  const auto p_rows = lane_offsets<PTile, RowFirst>(
      ptx::shared_address(smem.p) + warp_row * PTile::kRowBytes, lane);
  const auto v_columns = lane_offsets<KTile, RowFirst>(ptx::shared_address(smem.v), lane);

  Accumulator<1, T::kHeadDim / 8> out;  // (16, D)
  clear(out);
  for (int first_key = 0; first_key < cols; first_key += T::kBlockN) {
    TileLoader<PTile, T::kBlockM, T::kThreads>(table + first_key * 2, params.table_cols, seqlen_q,
                                               min(T::kBlockN, cols - first_key), query_tile)
        .load(ptx::shared_address(smem.p), query_tile);
    load_keys<T>(params, params.v, head, first_key / T::kBlockN, smem.v);
    wait_for_loads();
    uint32_t p[1][kSteps][4];  // (16, kBlockN) as A fragments
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ptx::ldmatrix_x4(p[0][k], p_rows.at(0, k));
    gemm_registers_columns<Bf16>(out, p, v_columns);
    __syncthreads();  // nobody still reads the tiles
  }
  write_rows<T>(params, head, query_tile * T::kBlockM, out, smem.v, warp_row, lane);
}

template <int kHeadDim>
struct ThreePass {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    if (int32_t error = launch_scores<T>(params, stream)) return error;
    static KernelSetup max_setup(&flash_row_max, 0);
    if (int32_t error = launch_rows(&flash_row_max, max_setup, params, stream)) return error;
    static KernelSetup sum_setup(&flash_row_sum, 0);
    if (int32_t error = launch_rows(&flash_row_sum, sum_setup, params, stream)) return error;
    static KernelSetup normalise_setup(&flash_normalise, 0);
    if (int32_t error = launch_rows(&flash_normalise, normalise_setup, params, stream))
      return error;

    constexpr int kSmem = sizeof(ProductStorage<T>);
    const auto kernel = &flash_product<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t three_pass(const Params& params, void* stream) {
  return launch_by_head_dim<ThreePass>(params, stream);
}

}  // namespace flash_ext::classic
