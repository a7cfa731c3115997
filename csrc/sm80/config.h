// Tiles of the generic family: mma.sync, cp.async and ldmatrix, on every GPU since Ampere.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/packing.h"
#include "ptx/shared.h"

namespace flash_ext::sm80 {

// Forward: a block of kWarps warps owns kBlockM query rows and walks over K and V in tiles of
// kBlockN keys, kStages of them in shared memory. Each warp owns whole rows, so that the softmax
// never crosses warps.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_,
          bool kFull_ = false, bool kPacked_ = kFull_>
struct ForwardConfig {
  using Element = T;
  static constexpr bool kFull = kFull_;      // serves every modifier
  static constexpr bool kPacked = kPacked_;  // serves packed sequences, beside dense ones
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kWarps_ * kWarpSize;
  static constexpr int kWarpRows = kBlockM / kWarps_;  // query rows of a warp
  // Whether a warp passes over tiles that only other warps see. Elsewhere registers are wanting.
  static constexpr bool kSkips = !kFull && kHeadDim != 128;

  static_assert(kWarpRows % 16 == 0, "a warp owns whole 16-row fragments");
  static_assert(kBlockN % 16 == 0 && kHeadDim % 32 == 0, "ldmatrix.x4 reads 16x16 blocks");
  static_assert(kStages == 2, "the main loop loads one tile ahead");

  using QTile = SmemTile<kBlockM, kHeadDim>;
  using KTile = SmemTile<kBlockN, kHeadDim>;  // V has the same tile

  // A tile of the bias lies behind the rest of shared memory where there is such a bias.
  static constexpr bool kBiasTile = kFull && kHeadDim <= 128;
  using BiasTile = SmemTile<kBlockM, ceil_div(kBlockN, 32) * 32>;
  static constexpr int kBiasBytes = kBiasTile ? BiasTile::kBytes : 0;

  struct SharedStorage {
    alignas(128) char q[QTile::kBytes];  // becomes the staging buffer of O
    alignas(128) char k[kStages][KTile::kBytes];
    alignas(128) char v[kStages][KTile::kBytes];
    Sequence sequence;  // of this block, and where it is in it; where kPacked
    int tile, head, batch;
    bool guarded;  // the walk that masks NaN and infinity out of V
  };
};

// Whether forward kernels of packed sequences keep the number of keys in a register.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kKeepsKeys = false;
#else
constexpr bool kKeepsKeys = true;
#endif

// Steps of the backward products that are unrolled together, first those over D, then those over
// the keys of a block. With all of them ptxas fetches fragments so far ahead that registers spill;
// how far differs by architecture.
template <int kHeadDim>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBackwardUnroll = kHeadDim == 64    ? 2
                                : kHeadDim == 128 ? 1
                                                  : kHeadDim / 16;
#else
constexpr int kBackwardUnroll = kHeadDim == 128 ? 2 : kHeadDim / 16;
#endif
template <int kHeadDim>
constexpr int kFullBackwardUnroll = kHeadDim > 64 ? 2 : kHeadDim / 16;
template <typename Config>
constexpr int kDqUnroll = Config::kHeadDim == 256 ? 1 : Config::kBlockN / 16;

// Backward: a block owns kBlockN keys and walks over Q and dO in tiles of kBlockM query rows. Its
// keys are cut into slices of kSliceKeys. One warp owns a slice and keeps its dV and dK in
// registers, or, where these are too many, a pair of warps does, one for dV and one for dK.
// The next tile of Q and dO is loaded beside the present one where shared memory has two stages.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kSliceKeys_, int kSliceWarps_,
          int kMinBlocks_, int kStages_ = 2, bool kFull_ = false, bool kPacked_ = kFull_>
struct BackwardConfig {
  using Element = T;
  static constexpr bool kFull = kFull_;      // serves every modifier
  static constexpr bool kPacked = kPacked_;  // serves packed sequences, beside dense ones
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;
  static constexpr int kSliceKeys = kSliceKeys_;
  static constexpr int kSliceWarps = kSliceWarps_;
  static constexpr int kMinBlocks = kMinBlocks_;  // that share a multiprocessor: caps registers
  static constexpr int kSlices = kBlockN / kSliceKeys;
  static constexpr int kWarps = kSliceWarps * kSlices;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kLoadThreads = kThreads / 2;  // half the block loads Q, the other half dO
  static constexpr int kGradients =
      2 / kSliceWarps;  // that a warp keeps: dV and dK, or one of them

  // dQ (kBlockM, kHeadDim) is spread over the warps as a grid of kDqWarpsM x kDqWarpsD: 32 rows
  // each, or 16 where the columns cannot be shared.
  static constexpr bool kWideDq =
      kBlockM / 32 <= kWarps && kHeadDim % (kWarps / (kBlockM / 32) * 16) == 0;
  static constexpr int kDqWarpsM = kWideDq ? kBlockM / 32 : kBlockM / 16;
  static constexpr int kDqWarpsD = kWarps / kDqWarpsM;
  static constexpr int kDqRows = kBlockM / kDqWarpsM;
  static constexpr int kDqCols = kHeadDim / kDqWarpsD;

  static_assert(kBlockM % 32 == 0 && kSliceKeys % 16 == 0 && kBlockN % kSliceKeys == 0,
                "tiles are whole fragments");
  static_assert(kSliceWarps == 1 || kSliceWarps == 2, "two gradients, so two warps at most");
  static_assert(kBlockM <= kLoadThreads, "a thread loads lse or delta of one row");
  static_assert(kDqRows % 16 == 0 && kDqCols % 16 == 0, "a warp's share of dQ is 16x16 blocks");

  using KTile = SmemTile<kBlockN, kHeadDim>;  // V has the same tile
  using QTile = SmemTile<kBlockM, kHeadDim>;  // dO has the same tile
  using DsTile = SmemTile<kBlockN, kBlockM>;  // dSᵀ: keys down, queries across

  // Tiles of the bias lie behind the rest of shared memory where there is such a bias.
  static constexpr bool kBiasTile = kFull && kHeadDim >= 64 && kHeadDim <= 128;
  using BiasTile = SmemTile<kBlockM, kBlockN>;
  static constexpr int kBiasBytes = kBiasTile ? kStages * BiasTile::kBytes : 0;

  // 16x16 blocks of Pᵀ of a slice, which a pair of warps exchanges as A fragments, and of the
  // derivative of the soft cap.
  static constexpr int kExchanges = kSliceWarps == 2 ? kSlices : 1;
  static constexpr int kSliceBlocks = kSliceKeys / 16 * (kBlockM / 16);
  static constexpr int kExchangeBlocks = kSliceBlocks * (kFull && kSliceWarps == 2 ? 2 : 1);

  struct SharedStorage {
    alignas(128) char k[KTile::kBytes];  // k and v become the staging buffers of dK and dV
    alignas(128) char v[KTile::kBytes];
    alignas(128) char q[kStages][QTile::kBytes];
    alignas(128) char dout[kStages][QTile::kBytes];
    alignas(128) char ds[2][DsTile::kBytes];  // of this query tile and the one before
    alignas(128) uint4 p[kExchanges][kExchangeBlocks][kWarpSize];
    float lse[kStages][kBlockM];
    float delta[kStages][kBlockM];  // rowsum(dO * O) - dlse
    Sequence sequence;  // where kPacked
    bool k_is_finite;
    bool ordered;  // additions to dQ take turns
    bool hides[kSlices];  // whether the bias may mask, of the present tile
    int tile, head, batch;  // of this block: key tile, key head, batch entry
    int first_query_head, query_heads;  // of this block: first in the batch entry, how many
  };
};

// Address of a tile of the bias.
template <typename Config>
__device__ __forceinline__ uint32_t bias_tile(const typename Config::SharedStorage& smem,
                                              int stage = 0) {
  return ptx::shared_address(&smem) + sizeof(typename Config::SharedStorage) +
         stage * Config::BiasTile::kBytes;
}

// Bytes of shared memory for a call, or, without one, for any.
template <typename Config>
constexpr int smem_bytes(bool biased = true) {
  return sizeof(typename Config::SharedStorage) + (biased ? Config::kBiasBytes : 0);
}

template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
using FullForwardConfig = ForwardConfig<T, kHeadDim, kBlockM, kBlockN, kWarps, 2, true>;
template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kSliceKeys, int kSliceWarps,
          int kMinBlocks, int kStages = 2>
using FullBackwardConfig = BackwardConfig<T, kHeadDim, kBlockM, kBlockN, kSliceKeys, kSliceWarps,
                                          kMinBlocks, kStages, true>;

// A lean config for packed sequences.
template <typename Config>
struct Packed;
template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kWarps, int kStages>
struct Packed<ForwardConfig<T, kHeadDim, kBlockM, kBlockN, kWarps, kStages>> {
  using type = ForwardConfig<T, kHeadDim, kBlockM, kBlockN, kWarps, kStages, false, true>;
};
template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kSliceKeys, int kSliceWarps,
          int kMinBlocks, int kStages>
struct Packed<
    BackwardConfig<T, kHeadDim, kBlockM, kBlockN, kSliceKeys, kSliceWarps, kMinBlocks, kStages>> {
  using type = BackwardConfig<T, kHeadDim, kBlockM, kBlockN, kSliceKeys, kSliceWarps, kMinBlocks,
                              kStages, false, true>;
};

// Tiles of one pass and head dim, in order of preference: the first whose shared memory the device
// has is taken.
template <typename... Configs>
struct TileList {};

// Registers decide the shape: a forward warp of 32 rows holds 32 x D of O and 32 x kBlockN of S, so
// that beyond D 128 it owns 16 rows; a backward warp holds kSliceKeys x D of dK or dV,
// or both, and kSliceKeys x kBlockM of S or dP. Shared memory decides what follows the first tile:
// 163 KiB on 8.0, 99 KiB on 8.6, 8.9 and 12.x. Modifiers take registers too: their tiles are
// smaller.
template <typename T, int kHeadDim>
struct Tiles;

template <typename T>
struct Tiles<T, 32> {
  using Forward = TileList<ForwardConfig<T, 32, 128, 128, 4, 2>>;
  using Backward = TileList<BackwardConfig<T, 32, 64, 128, 32, 1, 2>>;
  using FullForward = TileList<FullForwardConfig<T, 32, 128, 64, 4>>;
  using FullBackward = TileList<FullBackwardConfig<T, 32, 64, 128, 16, 1, 1>>;
};

template <typename T>
struct Tiles<T, 64> {
  using Forward = TileList<ForwardConfig<T, 64, 128, 96, 4, 2>>;
  using Backward = TileList<BackwardConfig<T, 64, 32, 128, 32, 1, 2>>;
  using FullForward = TileList<FullForwardConfig<T, 64, 128, 64, 4>>;
  using FullBackward = TileList<FullBackwardConfig<T, 64, 32, 128, 32, 2, 1>>;
};

template <typename T>
struct Tiles<T, 96> {
  using Forward = TileList<ForwardConfig<T, 96, 128, 64, 4, 2>>;
  using Backward =
      TileList<BackwardConfig<T, 96, 64, 128, 32, 2, 1>, BackwardConfig<T, 96, 64, 64, 32, 2, 2>>;
  using FullForward = TileList<FullForwardConfig<T, 96, 128, 64, 4>>;
  using FullBackward = TileList<FullBackwardConfig<T, 96, 32, 64, 32, 2, 1>>;
};

template <typename T>
struct Tiles<T, 128> {
  using Forward = TileList<ForwardConfig<T, 128, 128, 64, 4, 2>>;
  using Backward =
      TileList<BackwardConfig<T, 128, 64, 128, 32, 2, 1>, BackwardConfig<T, 128, 32, 64, 32, 2, 1>>;
  using FullForward = TileList<FullForwardConfig<T, 128, 128, 48, 4>>;
  using FullBackward = TileList<FullBackwardConfig<T, 128, 32, 128, 32, 2, 1>,
                                FullBackwardConfig<T, 128, 32, 64, 32, 2, 1>>;
};

template <typename T>
struct Tiles<T, 192> {
  using Forward =
      TileList<ForwardConfig<T, 192, 128, 96, 8, 2>, ForwardConfig<T, 192, 128, 64, 8, 2>,
               ForwardConfig<T, 192, 64, 32, 4, 2>>;
  using Backward =
      TileList<BackwardConfig<T, 192, 64, 64, 16, 2, 1>, BackwardConfig<T, 192, 32, 32, 16, 2, 1>>;
  using FullForward =
      TileList<FullForwardConfig<T, 192, 128, 64, 8>, FullForwardConfig<T, 192, 64, 32, 4>>;
  using FullBackward = TileList<FullBackwardConfig<T, 192, 64, 64, 16, 2, 1>,
                                FullBackwardConfig<T, 192, 32, 32, 16, 2, 1>>;
};

template <typename T>
struct Tiles<T, 256> {
  using Forward =
      TileList<ForwardConfig<T, 256, 128, 80, 8, 2>, ForwardConfig<T, 256, 128, 48, 8, 2>,
               ForwardConfig<T, 256, 64, 32, 4, 2>>;
  using Backward =
      TileList<BackwardConfig<T, 256, 64, 64, 16, 2, 1>, BackwardConfig<T, 256, 32, 64, 16, 2, 1>,
               BackwardConfig<T, 256, 32, 32, 16, 2, 1, 1>>;
  using FullForward =
      TileList<FullForwardConfig<T, 256, 128, 48, 8>, FullForwardConfig<T, 256, 64, 32, 4>>;
  using FullBackward = TileList<FullBackwardConfig<T, 256, 64, 64, 16, 2, 1>,
                                FullBackwardConfig<T, 256, 32, 32, 16, 2, 1, 1>>;
};

}  // namespace flash_ext::sm80
