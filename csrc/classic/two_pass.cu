// Attention with the online softmax (Milakov & Gimelshein 2018, algorithm 3): the maximum and the
// sum of a row in one pass over it. P is made where it is needed, and only S goes to memory.
//
//   S = scale * Q Kᵀ                                     written, fp32
//   m_i, l_i, brought from m to m' by l exp(m - m')      S read
//   O_i = sum_j exp(S_ij - m_i) / l_i V_j                S read
//
// 12 bytes an element of the table: four of S to write and twice to read.
#include "classic/table.cuh"

namespace flash_ext::classic {
namespace {

__global__ void __launch_bounds__(kRowThreads)
    flash_row_statistics(const __grid_constant__ Params params) {
  const TableRow row(params.shape);
  if (!row.exists) return;
  float top = -INFINITY;  // of this lane's elements so far
  float sum = 0.f;        // of exp(x - top) over them
  row.for_each(params, [&](int, const float4& x) {
    const float new_top = fmaxf(top, max_of(x));
    const float reference = reference_of(new_top);
    const float4 e = exponentials(x, reference);
    sum = sum * exponential(top, reference) + (e.x + e.y + (e.z + e.w));
    top = new_top;
  });
  const float row_top = warp_max(top);
  const float row_sum = warp_sum(sum * exponential(top, reference_of(row_top)));
  if (threadIdx.x % kWarpSize == 0) {
    params.row_max[row.index] = row_top;
    params.row_sum[row.index] = row_sum;
  }
}

// O = P V, P from S: one block kBlockM rows    grid: query tiles x heads
template <typename T>
struct ProductStorage {
  alignas(128) char v[T::KTile::kBytes];
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    flash_softmax_product(const __grid_constant__ Params params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<ProductStorage<T>*>(smem_raw);
  constexpr int kN = T::kBlockN / 8;

  const Shape& shape = params.shape;
  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int cols = static_cast<int>(params.table_cols);
  const int query_tiles = ceil_div(seqlen_q, T::kBlockM);
  const int query_tile = blockIdx.x % query_tiles;
  const Head head(shape, blockIdx.x / query_tiles);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16;
  const int row = query_tile * T::kBlockM + warp_row + lane / 4;

  float reference[2];  // of rows l / 4 (h = 0) and l / 4 + 8 (h = 1)
  float inverse[2];
  const float* table[2];  // their scores, from this lane's first key on
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t index = head.index * seqlen_q + min(row + 8 * h, seqlen_q - 1);
    reference[h] = reference_of(params.row_max[index]);
    inverse[h] = inverse_of(params.row_sum[index]);
    table[h] = params.scores + index * params.table_cols + lane % 4 * 2;
  }
  const auto v_columns =
      lane_offsets<typename T::KTile, RowFirst>(ptx::shared_address(smem.v), lane);

  Accumulator<1, T::kHeadDim / 8> out;  // (16, D)
  clear(out);
  for (int first_key = 0; first_key < cols; first_key += T::kBlockN) {
    load_keys<T>(params, params.v, head, first_key / T::kBlockN, smem.v);
    Accumulator<1, kN> p;  // (16, kBlockN)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float2 x = make_float2(-INFINITY, -INFINITY);
        if (first_key + 8 * n < cols)
          x = *reinterpret_cast<const float2*>(table[h] + first_key + 8 * n);
        p[0][n][2 * h] = exponential(x.x, reference[h]) * inverse[h];
        p[0][n][2 * h + 1] = exponential(x.y, reference[h]) * inverse[h];
      }
    wait_for_loads();
    uint32_t a[1][kN / 2][4];
    to_operand<Bf16>(a, p);
    gemm_registers_columns<Bf16>(out, a, v_columns);
    __syncthreads();  // nobody still reads the tile
  }
  static_assert(T::kBlockN >= T::kBlockM, "O fits where V was");
  write_rows<T>(params, head, query_tile * T::kBlockM, out, smem.v, warp_row, lane);
}

template <int kHeadDim>
struct TwoPass {
  static int32_t launch(const Params& params, void* stream) {
    using T = Tiles<kHeadDim>;
    if (int32_t error = launch_scores<T>(params, stream)) return error;
    static KernelSetup statistics_setup(&flash_row_statistics, 0);
    if (int32_t error = launch_rows(&flash_row_statistics, statistics_setup, params, stream))
      return error;

    constexpr int kSmem = sizeof(ProductStorage<T>);
    const auto kernel = &flash_softmax_product<T>;
    static KernelSetup setup(kernel, kSmem);
    const int64_t blocks = tiles(params.shape.seqlen_q, T::kBlockM) * head_count(params.shape);
    return classic::launch(kernel, setup, blocks, T::kThreads, kSmem, params, stream);
  }
};

}  // namespace

int32_t two_pass(const Params& params, void* stream) {
  return launch_by_head_dim<TwoPass>(params, stream);
}

}  // namespace flash_ext::classic
