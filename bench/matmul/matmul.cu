// C = A Bᵀ on mma.sync, from the pieces that the attention kernels are made of: what this way of
// multiplying gives when nothing stands between two products.
//
//   one block: a kBlockM x kBlockN tile of C, a warp kWarpM x kWarpN of it
//   for each tile of kBlockK columns of A and B:         (cp.async, kStages tiles in shared memory)
//       for each 16 columns: fetch the next fragments, multiply these        (ldmatrix, mma.sync)
//
// Compiled for one tile: -DBLOCK_M=128 -DBLOCK_N=256 -DBLOCK_K=64 -DSTAGES=3.
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "core/epilogue.h"
#include "core/gemm.h"
#include "core/layout.h"
#include "core/tile_copy.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/shared.h"

namespace flash_ext::bench {

using T = __nv_bfloat16;

struct Operands {
  const T* a;  // (M, K)
  const T* b;  // (N, K)
  T* c;  // (M, N)
  int M, N, K;
};

template <int kBlockM_, int kBlockN_, int kBlockK_, int kStages_>
struct Config {
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = kBlockK_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpM = 64;  // 64 x 64: a warp reads 8 ldmatrix.x4 for 32 mma
  static constexpr int kWarpN = 64;
  static constexpr int kWarpsM = kBlockM / kWarpM;
  static constexpr int kWarpsN = kBlockN / kWarpN;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpSize;
  static constexpr int kMinBlocks = kThreads <= 128 ? 2 : 1;  // 8 warps on a multiprocessor
  static constexpr int kSteps = kBlockK / 16;
  static_assert(kSteps % 2 == 0, "the two sets of fragments keep their turn from tile to tile");

  using ATile = SmemTile<kBlockM, kBlockK>;
  using BTile = SmemTile<kBlockN, kBlockK>;
  using CTile = SmemTile<kWarpM, kWarpN>;  // of one warp

  struct Stage {
    alignas(128) char a[ATile::kBytes];
    alignas(128) char b[BTile::kBytes];
  };
  union SharedStorage {
    Stage stages[kStages];
    char c[kWarpsM * kWarpsN][CTile::kBytes];
  };
};

// Fragments of 16 columns of a warp's rows of A and B.
template <typename Config>
struct Fragments {
  uint32_t a[Config::kWarpM / 16][4];
  uint32_t b[Config::kWarpN / 16][4];

  __device__ __forceinline__ void fetch(const LaneOffsets<typename Config::ATile>& a_rows,
                                        const LaneOffsets<typename Config::BTile>& b_rows,
                                        int step) {
#pragma unroll
    for (int m = 0; m < Config::kWarpM / 16; ++m) ptx::ldmatrix_x4(a[m], a_rows.at(m, step));
#pragma unroll
    for (int n = 0; n < Config::kWarpN / 16; ++n) ptx::ldmatrix_x4(b[n], b_rows.at(n, step));
  }

  template <int kM, int kN>
  __device__ __forceinline__ void multiply(float (&acc)[kM][kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
        ptx::mma_m16n8k16<T>(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
};

// Tiles of C in bands of 16 rows of tiles: blocks that run at the same time cover a region about as
// high as wide, so that they find most of A and B in L2.
template <typename Config>
__device__ __forceinline__ int2 first_row_and_column(int block, int M, int N) {
  constexpr int kBand = 16;
  const int tiles_m = M / Config::kBlockM;
  const int tiles_n = N / Config::kBlockN;
  const int band = block / (kBand * tiles_n);
  const int rows = min(kBand, tiles_m - band * kBand);
  const int at = block % (kBand * tiles_n);
  return {(band * kBand + at % rows) * Config::kBlockM, at / rows * Config::kBlockN};
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    matmul_mma_sync(const Operands operands) {
  using ATile = typename Config::ATile;
  using BTile = typename Config::BTile;
  using CTile = typename Config::CTile;
  using Stage = typename Config::Stage;
  constexpr int kStages = Config::kStages;
  constexpr int kSteps = Config::kSteps;
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);

  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = warp / Config::kWarpsN * Config::kWarpM;
  const int warp_col = warp % Config::kWarpsN * Config::kWarpN;
  const int2 first = first_row_and_column<Config>(blockIdx.x, operands.M, operands.N);
  const T* a = operands.a + int64_t{first.x} * operands.K;
  const T* b = operands.b + int64_t{first.y} * operands.K;
  const int tiles = operands.K / Config::kBlockK;
  const uint32_t stages = ptx::shared_address(smem.stages);
  const auto next = [stages](uint32_t stage) {
    constexpr uint32_t kBytes = sizeof(Stage);
    return stage == stages + (kStages - 1) * kBytes ? stages : stage + kBytes;
  };

  uint32_t load_stage = stages;
  const auto load_tile = [&](int tile) {
    if (tile < tiles) {
      TileLoader<ATile, Config::kBlockM, Config::kThreads>(a + tile * Config::kBlockK, operands.K,
                                                           Config::kBlockM, Config::kBlockK, 0)
          .load(load_stage + offsetof(Stage, a), 0);
      TileLoader<BTile, Config::kBlockN, Config::kThreads>(b + tile * Config::kBlockK, operands.K,
                                                           Config::kBlockN, Config::kBlockK, 0)
          .load(load_stage + offsetof(Stage, b), 0);
    }
    ptx::cp_async_commit();  // an empty group behind the end, so that the count below holds
    load_stage = next(load_stage);
  };
  for (int tile = 0; tile < kStages - 1; ++tile) load_tile(tile);

  uint32_t read_stage = stages;
  Fragments<Config> fragments[2];
  const auto fetch = [&](int step) {
    const uint32_t a_rows = read_stage + offsetof(Stage, a) + warp_row * ATile::kRowBytes;
    const uint32_t b_rows = read_stage + offsetof(Stage, b) + warp_col * BTile::kRowBytes;
    fragments[step % 2].fetch(lane_offsets<ATile, RowFirst>(a_rows, lane),
                              lane_offsets<BTile, ChunkFirst>(b_rows, lane), step);
  };
  ptx::cp_async_wait<kStages - 2>();
  __syncthreads();
  fetch(0);

  Accumulator<Config::kWarpM / 16, Config::kWarpN / 8> acc;  // (kWarpM, kWarpN)
  clear(acc);
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();  // the next tile has landed, and nobody still reads this one
        read_stage = next(read_stage);
      }
      fetch((step + 1) % kSteps);  // behind the last tile: of an old stage, for nobody
      if (step == 0) load_tile(tile + kStages - 1);
      fragments[step % 2].multiply(acc);
    }
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // nobody still reads the stages
  const uint32_t staging = ptx::shared_address(smem.c[warp]);
  stage_fragments<T, CTile>(staging, acc, 0, lane);
  __syncwarp();
  char* const columns = reinterpret_cast<char*>(operands.c + first.y + warp_col);
  store_staged_rows<CTile, Config::kWarpM>(columns, operands.N, first.x + warp_row, operands.M,
                                           Config::kWarpN, staging, 0, lane);
}

}  // namespace flash_ext::bench

// C (M, N) = A (M, K) . B (N, K)^T, all bf16 and contiguous; M, N and K are multiples of the
// tile's. Returns a cudaError_t.
extern "C" int matmul(const void* a, const void* b, void* c, int M, int N, int K, void* stream) {
  using namespace flash_ext::bench;
  using Tile = Config<BLOCK_M, BLOCK_N, BLOCK_K, STAGES>;
  constexpr int kSmem = sizeof(Tile::SharedStorage);
  const auto kernel = &matmul_mma_sync<Tile>;
  static const cudaError_t prepared =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (prepared != cudaSuccess) return prepared;
  const Operands operands{
      static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(c), M, N, K};
  const int blocks = M / Tile::kBlockM * (N / Tile::kBlockN);
  kernel<<<blocks, Tile::kThreads, kSmem, static_cast<cudaStream_t>(stream)>>>(operands);
  return cudaGetLastError();
}

extern "C" const char* error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
