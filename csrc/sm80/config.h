// Tiles of the generic family: mma.sync, cp.async and ldmatrix, on every GPU since Ampere.
#pragma once

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

// Backward: a block owns kBlockN keys, with dK and dV in registers, and walks over Q and dO in
// tiles of kBlockM query rows. Each warp owns whole keys, so that Pᵀ and dSᵀ stay in registers;
// only dS crosses warps, on its way to dQ.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_>
struct BackwardConfig {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = 2;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpKeys = kBlockN / kWarps;

  // dQ (kBlockM, kHeadDim) is spread over the warps as a grid of kDqWarpsM x kDqWarpsD.
  static constexpr int kDqWarpsM = kWarps >= 8 ? kWarps / 4 : 2;
  static constexpr int kDqWarpsD = kWarps / kDqWarpsM;
  static constexpr int kDqRows = kBlockM / kDqWarpsM;
  static constexpr int kDqCols = kHeadDim / kDqWarpsD;

  static_assert(kWarpKeys % 16 == 0, "a warp owns whole 16-key fragments");
  static_assert(kDqRows % 16 == 0 && kDqCols % 16 == 0, "a warp's share of dQ is 16x16 blocks");

  using KTile = SmemTile<kBlockN, kHeadDim>;   // V has the same tile
  using QTile = SmemTile<kBlockM, kHeadDim>;   // dO has the same tile
  using DsTile = SmemTile<kBlockN, kBlockM>;   // dSᵀ: keys down, queries across

  struct SharedStorage {
    alignas(128) char k[KTile::kBytes];  // k and v become the staging buffers of dK and dV
    alignas(128) char v[KTile::kBytes];
    alignas(128) char q[kStages][QTile::kBytes];
    alignas(128) char dout[kStages][QTile::kBytes];
    alignas(128) char ds[kStages][DsTile::kBytes];
    float lse[kStages][kBlockM];
    float delta[kStages][kBlockM];  // rowsum(dO * O) - dlse
  };
};

// The tile of each head dim. Registers decide: at D 128 a forward warp holds 32 rows of O (128
// registers a lane) and of S (64); a backward warp 16 keys of dK and dV (128) and of S and dP (64).
template <typename T, int kHeadDim>
struct Tiles;

template <typename T>
struct Tiles<T, 64> {
  using Forward = ForwardConfig<T, 64, 128, 96, 4, 2>;
  using Backward = BackwardConfig<T, 64, 64, 128, 8>;
};

template <typename T>
struct Tiles<T, 128> {
  using Forward = ForwardConfig<T, 128, 128, 64, 4, 2>;
  using Backward = BackwardConfig<T, 128, 32, 128, 8>;
};

}  // namespace flash_ext::sm80
