// Tiles of the generic family: mma.sync, cp.async and ldmatrix, on every GPU since Ampere.
#pragma once

#include <cstdint>

#include "core/layout.h"

namespace flash_ext::sm80 {

// Forward: a block of kWarps warps owns kBlockM query rows and walks over K and V in tiles of
// kBlockN keys, kStages of them in shared memory. Each warp owns whole rows, so that the softmax
// never crosses warps.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_>
struct ForwardConfig {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kWarps_ * kWarpSize;
  static constexpr int kWarpRows = kBlockM / kWarps_;  // query rows of a warp

  static_assert(kWarpRows % 16 == 0, "a warp owns whole 16-row fragments");
  static_assert(kBlockN % 16 == 0 && kHeadDim % 32 == 0, "ldmatrix.x4 reads 16x16 blocks");
  static_assert(kStages == 2, "the main loop loads one tile ahead");

  using QTile = SmemTile<kBlockM, kHeadDim>;
  using KTile = SmemTile<kBlockN, kHeadDim>;  // V has the same tile

  struct SharedStorage {
    alignas(128) char q[QTile::kBytes];  // becomes the staging buffer of O
    alignas(128) char k[kStages][KTile::kBytes];
    alignas(128) char v[kStages][KTile::kBytes];
    bool guarded;  // the walk that masks NaN and infinity out of V
  };
};

// Steps of the first products of the backward pass that are unrolled together. At D 128 ptxas would
// fetch fragments so far ahead that registers spill; how far differs by architecture.
template <int kHeadDim>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBackwardUnroll = kHeadDim == 128 ? 1 : kHeadDim / 16;
#else
constexpr int kBackwardUnroll = kHeadDim == 128 ? 2 : kHeadDim / 16;
#endif

// Backward: a block owns kBlockN keys and walks over Q and dO in tiles of kBlockM query rows. Warps
// work in pairs that own kPairKeys keys: one warp keeps dV in registers, the other dK.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kPairKeys_, int kMinBlocks_>
struct BackwardConfig {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = 2;
  static constexpr int kPairKeys = kPairKeys_;
  static constexpr int kMinBlocks = kMinBlocks_;  // that share a multiprocessor: caps registers
  static constexpr int kPairs = kBlockN / kPairKeys;
  static constexpr int kWarps = 2 * kPairs;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRoleThreads = kThreads / 2;

  // dQ (kBlockM, kHeadDim) is spread over the warps as a grid of kDqWarpsM x kDqWarpsD: 32 rows
  // each, or 16 where the columns cannot be shared.
  static constexpr bool kWideDq =
      kBlockM / 32 <= kWarps && kHeadDim % (kWarps / (kBlockM / 32) * 16) == 0;
  static constexpr int kDqWarpsM = kWideDq ? kBlockM / 32 : kBlockM / 16;
  static constexpr int kDqWarpsD = kWarps / kDqWarpsM;
  static constexpr int kDqRows = kBlockM / kDqWarpsM;
  static constexpr int kDqCols = kHeadDim / kDqWarpsD;

  static_assert(kBlockM % 32 == 0 && kPairKeys % 16 == 0 && kBlockN % kPairKeys == 0,
                "tiles are whole fragments");
  static_assert(kBlockM <= kRoleThreads, "a thread loads lse or delta of one row");
  static_assert(kDqRows % 16 == 0 && kDqCols % 16 == 0, "a warp's share of dQ is 16x16 blocks");

  using KTile = SmemTile<kBlockN, kHeadDim>;  // V has the same tile
  using QTile = SmemTile<kBlockM, kHeadDim>;  // dO has the same tile
  using DsTile = SmemTile<kBlockN, kBlockM>;  // dSᵀ: keys down, queries across

  // 16x16 blocks of Pᵀ of a pair, which its warps exchange as A fragments.
  static constexpr int kPairBlocks = kPairKeys / 16 * (kBlockM / 16);

  struct SharedStorage {
    alignas(128) char k[KTile::kBytes];  // k and v become the staging buffers of dK and dV
    alignas(128) char v[KTile::kBytes];
    alignas(128) char q[kStages][QTile::kBytes];
    alignas(128) char dout[kStages][QTile::kBytes];
    alignas(128) char ds[2][DsTile::kBytes];  // of this query tile and the one before
    alignas(128) uint4 p[kPairs][kPairBlocks][kWarpSize];
    float lse[kStages][kBlockM];
    float delta[kStages][kBlockM];  // rowsum(dO * O) - dlse
    bool k_is_finite;
    bool ordered;    // additions to dQ take turns
    uint32_t block;  // number of this block: key tiles x key heads x batch
  };
};

// Tiles of one pass and head dim, in order of preference: the first whose shared memory the device
// has is taken.
template <typename... Configs>
struct TileList {};

// Registers decide the shape: a forward warp of 32 rows holds 32 x D of O and 32 x kBlockN of S, so
// that beyond D 128 it owns 16 rows; a backward warp holds kPairKeys x D of dK or dV and
// kPairKeys x kBlockM of S or dP. Shared memory decides what follows the first tile: 163 KiB on
// 8.0, 99 KiB on 8.6, 8.9 and 12.x.
template <typename T, int kHeadDim>
struct Tiles;

template <typename T>
struct Tiles<T, 32> {
  using Forward = TileList<ForwardConfig<T, 32, 128, 128, 4, 2>>;
  using Backward = TileList<BackwardConfig<T, 32, 64, 64, 32, 3>>;
};

template <typename T>
struct Tiles<T, 64> {
  using Forward = TileList<ForwardConfig<T, 64, 128, 96, 4, 2>>;
  using Backward = TileList<BackwardConfig<T, 64, 32, 64, 32, 3>>;
};

template <typename T>
struct Tiles<T, 96> {
  using Forward = TileList<ForwardConfig<T, 96, 128, 64, 4, 2>>;
  using Backward = TileList<BackwardConfig<T, 96, 64, 64, 32, 2>>;
};

template <typename T>
struct Tiles<T, 128> {
  using Forward = TileList<ForwardConfig<T, 128, 128, 64, 4, 2>>;
  using Backward =
      TileList<BackwardConfig<T, 128, 64, 128, 32, 1>, BackwardConfig<T, 128, 32, 64, 32, 1>>;
};

template <typename T>
struct Tiles<T, 192> {
  using Forward =
      TileList<ForwardConfig<T, 192, 128, 64, 8, 2>, ForwardConfig<T, 192, 64, 32, 4, 2>>;
  using Backward =
      TileList<BackwardConfig<T, 192, 64, 64, 16, 1>, BackwardConfig<T, 192, 32, 32, 16, 1>>;
};

template <typename T>
struct Tiles<T, 256> {
  using Forward =
      TileList<ForwardConfig<T, 256, 128, 64, 8, 2>, ForwardConfig<T, 256, 128, 32, 8, 2>,
               ForwardConfig<T, 256, 64, 32, 4, 2>>;
  using Backward = TileList<BackwardConfig<T, 256, 32, 64, 16, 1>>;
};

}  // namespace flash_ext::sm80
