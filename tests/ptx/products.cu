// O = round(Q K^T) V by TMA and wgmma, without softmax: tiles, operands and fragments as attention
// uses them.
#include "common/tensor_map.h"
#include "core/element.h"
#include "core/wgmma_layout.h"
#include "harness.h"
#include "ptx/bulk.h"
#include "ptx/proxy_fence.h"
#include "ptx/stmatrix.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"

namespace flash_ext::test {

using ptx::Major;

constexpr int kGroupThreads = 128;
constexpr int kGroups = 2;  // warpgroups, 64 rows of Q each
constexpr int kThreads = kGroups * kGroupThreads;
constexpr int kBlockM = 64 * kGroups;

template <int kD, int kBlockN, int kSlabCols>
struct Config {
  using QTile = SlabTile<kBlockM, kD, kSlabCols>;
  using KVTile = SlabTile<kBlockN, kD, kSlabCols>;

  struct alignas(1024) Storage {
    alignas(1024) uint8_t q[QTile::kBytes];  // O takes its place
    alignas(1024) uint8_t k[KVTile::kBytes];
    alignas(1024) uint8_t v[KVTile::kBytes];
    uint64_t full;
  };
};

struct Maps {
  TensorMap q, k, v, out;  // (B, S, H, D) each
};

// All slabs of one tile: rows from `row` on, of one head of one batch entry.
template <typename Tile>
__device__ void load_tile(uint32_t target, const TensorMap& map, int row, int head, int batch,
                          uint32_t barrier) {
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab)
    ptx::tma_load(target + slab * Tile::kSlabBytes, &map,
                  {slab * Tile::kSlabCols, row, head, batch}, barrier);
}

// One block makes rows m_row to m_row + 127 of O from keys n_row to n_row + kBlockN - 1.
template <typename T, int kD, int kBlockN, int kSlabCols>
__global__ void __launch_bounds__(kThreads, 1)
    products(const __grid_constant__ Maps maps, int m_row, int n_row, int head, int batch) {
  using C = Config<kD, kBlockN, kSlabCols>;
  using QTile = typename C::QTile;
  using KVTile = typename C::KVTile;
  extern __shared__ __align__(1024) uint8_t smem[];
  auto& storage = *reinterpret_cast<typename C::Storage*>(smem);
  const uint32_t q = ptx::shared_address(storage.q);
  const uint32_t k = ptx::shared_address(storage.k);
  const uint32_t v = ptx::shared_address(storage.v);
  const uint32_t full = ptx::shared_address(&storage.full);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, QTile::kBytes + 2 * KVTile::kBytes);
    load_tile<QTile>(q, maps.q, m_row, head, batch, full);
    load_tile<KVTile>(k, maps.k, n_row, head, batch, full);
    load_tile<KVTile>(v, maps.v, n_row, head, batch, full);
  }
  __syncthreads();
  bounded_wait(full, 0);

  const int group = threadIdx.x / kGroupThreads;
  const uint32_t own_rows = q + group * 64 * QTile::kLineBytes;
  const WgmmaOperand<QTile, Major::kK> q_rows(own_rows);  // (64, D)
  const WgmmaOperand<KVTile, Major::kK> k_rows(k);        // (kBlockN, D)
  const WgmmaOperand<KVTile, Major::kMN> v_cols(v);       // (kBlockN, D) as K x N

  float s[kBlockN / 2];  // (64, kBlockN)
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    ptx::wgmma<T, kBlockN, Major::kK, Major::kK>(s, q_rows.at(step), k_rows.at(step), step > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(s);

  uint32_t p[kBlockN / 16][4];  // (64, kBlockN)
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[step][i] = Element<T>::pack(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    ptx::pin(p[step]);
  }

  float o[kD / 2];  // (64, D)
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step)
    ptx::wgmma<T, kD, Major::kMN>(o, p[step], v_cols.at(step), step > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(o);

  // Each warp writes O over its own 16 rows of Q, 16 columns at a time.
  const int warp_row = threadIdx.x % kGroupThreads / kWarpSize * 16;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int block = 0; block < kD / 16; ++block) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = Element<T>::pack(o[8 * block + 2 * i], o[8 * block + 2 * i + 1]);
    ptx::stmatrix_x4(
        own_rows + QTile::offset(warp_row + RowFirst::row(lane), 2 * block + RowFirst::chunk(lane)),
        r);
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int slab = 0; slab < QTile::kSlabs; ++slab)
      ptx::tma_store(&maps.out, {slab * kSlabCols, m_row, head, batch},
                     q + slab * QTile::kSlabBytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

struct Call {
  const void *q, *k, *v;
  void* out;
  const int64_t* sizes;  // B, Sq, Sk, H, D; everything (B, S, H, D) contiguous
  int m_row, n_row, head, batch;
};

template <typename T, int kD, int kBlockN, int kSlabCols>
int run_products(const Call& call) {
  using C = Config<kD, kBlockN, kSlabCols>;
  const int64_t batch = call.sizes[0], heads = call.sizes[3], dim = call.sizes[4];
  Maps maps;
  const auto encode = [&](TensorMap* map, const void* data, int64_t rows, int box_rows) {
    return encode_tensor_map(map, data,
                             {{dim, rows, heads, batch},
                              {1, heads * dim, dim, rows * heads * dim},
                              {kSlabCols, box_rows, 1, 1}});
  };
  if (int error = encode(&maps.q, call.q, call.sizes[1], kBlockM)) return error;
  if (int error = encode(&maps.k, call.k, call.sizes[2], kBlockN)) return error;
  if (int error = encode(&maps.v, call.v, call.sizes[2], kBlockN)) return error;
  if (int error = encode(&maps.out, call.out, call.sizes[1], kBlockM)) return error;
  constexpr int kSmemBytes = sizeof(typename C::Storage);
  return run(products<T, kD, kBlockN, kSlabCols>, {1, kThreads, kSmemBytes}, maps, call.m_row,
             call.n_row, call.head, call.batch);
}

template <typename T>
int run_config(int config, const Call& call) {
  switch (config) {
    case 0:
      return run_products<T, 32, 128, 32>(call);
    case 1:
      return run_products<T, 64, 128, 64>(call);
    case 2:
      return run_products<T, 96, 96, 32>(call);
    case 3:
      return run_products<T, 96, 80, 64>(call);
    case 4:
      return run_products<T, 128, 176, 64>(call);
    case 5:
      return run_products<T, 256, 80, 64>(call);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_ext::test

extern "C" int test_products(int bf16, int config, const void* q, const void* k, const void* v,
                             void* out, const int64_t* sizes, int m_row, int n_row, int head,
                             int batch) {
  const flash_ext::test::Call call{q, k, v, out, sizes, m_row, n_row, head, batch};
  return bf16 ? flash_ext::test::run_config<__nv_bfloat16>(config, call)
              : flash_ext::test::run_config<__half>(config, call);
}
