// Tiles of the Hopper family: TMA, wgmma and warp specialisation, on compute capability 9.0.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/mask.h"
#include "core/pipeline.h"
#include "core/wgmma_layout.h"
#include "sm90/accumulator_tile.h"

namespace flash_ext::sm90 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // query rows of a consumer warpgroup: the M of wgmma

// Named barriers; number 0 is __syncthreads. A consumer's own has its number added.
enum Barrier { kAllConsumers = 1, kOneConsumer = 2, kProbabilities = 4 };

// The key tiles that some query rows have to see.
struct alignas(16) KeyTiles {
  Range touched;  // with a visible key
  Range whole;    // of these, the ones without a masked score

  __device__ __forceinline__ bool is_masked(int n) const {
    return n < whole.begin || n >= whole.end;
  }
  __device__ __forceinline__ bool any_masked() const {
    return touched.begin < whole.begin || touched.end > whole.end;
  }
  __device__ __forceinline__ bool empty() const { return touched.begin == touched.end; }
};

constexpr int kMaxConsumers = 3;

// A tile of query rows of one head.
struct ForwardTile {
  int head, kv_head, batch;
  int first_row;
  KeyTiles keys;                        // of all its rows
  KeyTiles consumer_keys[kMaxConsumers];  // of each consumer's rows; if guarded, again of all

  // Set by consumers: NaN or infinity in a masked row of V may have come into O, or a row's scores
  // lie so far apart that its P was lost. The tile is then walked again, guarded: masked rows of V
  // lose NaN and infinity before the product, and the softmax takes no guess.
  int suspect;
  int guarded;
};

// Forward: a block of one producer warpgroup and kBlockM / 64 consumers owns kBlockM query rows and
// walks over K and V in tiles of kBlockN keys, kStages of each in shared memory. V and O may be
// narrower than Q and K.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_, int kQStages_,
          bool kQInRegisters_, int kHeadDimV_ = kHeadDim_>
struct ForwardConfig {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;
  static constexpr int kQStages = kQStages_;
  static constexpr bool kQInRegisters = kQInRegisters_;  // or read from shared memory by each Q Kᵀ
  static constexpr int kConsumers = kBlockM / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupThreads / kWarpSize;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;

  // Registers a thread. A launch gives all of them the same number; the first warpgroup returns
  // some, and the consumers wait until what they take is there.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  static_assert(kBlockM % kWarpgroupRows == 0 && (kConsumers == 2 || kConsumers == kMaxConsumers),
                "register counts are chosen for two or three consumers");
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (1 + kConsumers) * kLaunchRegisters,
                "consumers would wait for ever");
  static_assert(kBlockN % 16 == 0, "P V takes 16 keys a step");

  using QTile = SlabTile<kBlockM, kHeadDim>;
  using KTile = SlabTile<kBlockN, kHeadDim>;
  using VTile = SlabTile<kBlockN, kHeadDimV>;
  static constexpr int kOutSlabs = VTile::kSlabs;  // of QTile, where a consumer leaves its O
  static_assert(kHeadDimV <= kHeadDim && VTile::kSlabCols == QTile::kSlabCols);

  struct SharedStorage {
    alignas(1024) char q[kQStages][QTile::kBytes];  // a tile of Q becomes the staging buffer of O
    alignas(1024) char k[kStages][KTile::kBytes];
    alignas(1024) char v[kStages][VTile::kBytes];
    ForwardTile tile[2];  // this one and the next
    int staged[kQStages][kConsumers];  // whether O lies in the buffer of Q, to be stored
    Ring<2> tile_ring;
    Ring<kQStages> q_ring;
    Ring<kQStages> out_ring[kConsumers];  // O in the buffers of Q; its `empty` is that of Q
    Ring<kStages> k_ring;
    Ring<kStages> v_ring;
  };
};

// What a block of the backward pass works on.
struct alignas(16) BackwardTile {
  int tile;  // of keys; kNoTile: there is none left
  int first_key;  // of this block
  int kv_head, batch;
  int first_query_head, query_heads;  // that this block walks over
};

// Backward: a block of one producer warpgroup and two consumers takes kBlockN keys and walks over Q
// and dO in tiles of kBlockM query rows, kStages and kDoutStages of them in shared memory. Each
// consumer has 64 of 128 keys; 64 keys both have, and share the work by product.
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_, int kDoutStages_>
struct BackwardConfig {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kStages = kStages_;
  static constexpr int kDoutStages = kDoutStages_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockN = kBlockN_;
  static constexpr bool kByProduct = kBlockN == kWarpgroupRows;
  static_assert(kByProduct || kBlockN == kConsumers * kWarpgroupRows,
                "both consumers have the same 64 keys, or each has its own");
  // Blocks of a cluster that share a tile of keys, kBlockN each: together they add half as much to
  // dQ.
  static constexpr int kBlocks = kByProduct ? 2 : 1;
  static constexpr int kTileKeys = kBlocks * kBlockN;
  static constexpr int kOwners = kBlockN / kWarpgroupRows;  // consumers that write dK, or dV
  static __host__ __device__ constexpr int consumer_row(int consumer) {  // its first key
    return kByProduct ? 0 : consumer * kWarpgroupRows;
  }
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
  static constexpr int kThreads = kWarpgroupThreads + kConsumerThreads;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (1 + kConsumers) * (65536 / kThreads / 8 * 8),
                "consumers would wait for ever");

  // Each consumer computes one half of dQ (kBlockM, D): rows where there are enough for wgmma.
  static constexpr bool kDqByRows = kBlockM == kConsumers * kWarpgroupRows;
  static constexpr int kDqPieces = kConsumers * kBlocks;
  static constexpr int kDqCols = kDqByRows ? kHeadDim : kHeadDim / kDqPieces;
  static_assert(kDqByRows || (kBlockM == kWarpgroupRows && kDqCols % 64 == 0),
                "dQ is cut at whole slabs of K");

  using QTile = SlabTile<kBlockM, kHeadDim>;
  using KTile = SlabTile<kBlockN, kHeadDim>;  // V has the same tile
  using DsTile = SlabTile<kBlockN, kBlockM>;  // dSᵀ: keys are rows
  using DqTile = AccumulatorTile<kBlockM, kHeadDim, kDqCols>;

  // Behind its own K a block has the columns of the other block's that its part of dQ needs.
  using OtherKTile = SlabTile<kBlockN, kHeadDim / kBlocks>;
  static constexpr int kOtherKBytes = kBlocks == 1 ? 0 : OtherKTile::kBytes;

  // A consumer's part of dQ leaves in kDqParts, by way of kDqStages buffers of one part.
  static constexpr int kDqParts = kByProduct ? 4 : 1;
  static constexpr int kDqStages = kByProduct ? 2 : 1;
  static constexpr int kDqPartFloats = DqTile::kPieceFloats / kDqParts;

  static constexpr int kDsStages = kByProduct ? 2 : 3;  // consumers may be a tile apart

  struct SharedStorage {
    alignas(1024) char k[KTile::kBytes + kOtherKBytes];  // in the end dK and dV are staged here
    alignas(1024) char v[KTile::kBytes];
    alignas(1024) char q[kStages][QTile::kBytes];
    alignas(1024) char dout[kDoutStages][QTile::kBytes];
    alignas(1024) char ds[kDsStages][kBlocks][DsTile::kBytes];  // of this block, then the other
    alignas(1024) float dq[kConsumers][kDqStages][kDqPartFloats];
    alignas(16) float lse[kStages][kBlockM];  // in units of log2(e)
    alignas(16) float delta[kDoutStages][kBlockM];
    BackwardTile at[2];  // this one and the next
    uint32_t bad_keys[2][kBlockN / 32];  // bits of the rows of K with NaN or infinity, likewise
    Ring<2> tile_ring;
    int drawn[2];  // numbers of tiles, from the first block of the cluster
    Ring<2> drawn_ring;
    Ring<1> k_ring, v_ring;
    Ring<kStages> q_ring;  // Q and lse
    Ring<kDoutStages> dout_ring;  // dO and delta
    Ring<kDsStages> ds_ring;
    Ring<kDqStages> dq_ring[kConsumers];
  };
};

template <typename T, int kHeadDim>
struct Tiles;

// Head dims with a forward kernel for narrow values besides.
constexpr bool has_narrow_forward(int head_dim) { return head_dim == 192; }

// Head dims with a backward kernel; it serves those below too.
constexpr bool has_backward(int head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

// D 64: three consumers, because exponentials and products take equally long.
template <typename T>
struct Tiles<T, 64> {
  using Forward = ForwardConfig<T, 64, 192, 128, 4, 2, false>;
  using Backward = BackwardConfig<T, 64, 128, 128, 2, 2>;
};

// D 96: likewise, with as many keys as 160 registers hold scores for beside O.
template <typename T>
struct Tiles<T, 96> {
  using Forward = ForwardConfig<T, 96, 192, 96, 4, 2, false>;
};

// D 128: two consumers have registers for Q beside S, O and P.
template <typename T>
struct Tiles<T, 128> {
  using Forward = ForwardConfig<T, 128, 128, 128, 2, 2, true>;
  using Backward = BackwardConfig<T, 128, 64, 128, 2, 2>;
};

// D 192: shared memory has room for one tile of Q, and for more keys where V is as narrow as in
// multi-head latent attention.
template <typename T>
struct Tiles<T, 192> {
  using Forward = ForwardConfig<T, 192, 128, 96, 2, 1, false>;
  using NarrowForward = ForwardConfig<T, 192, 128, 128, 2, 1, false, 128>;
};

// D 256: the same, and in the backward pass one of dO.
template <typename T>
struct Tiles<T, 256> {
  using Forward = ForwardConfig<T, 256, 128, 64, 2, 1, false>;
  using Backward = BackwardConfig<T, 256, 64, 64, 2, 1>;
};

}  // namespace flash_ext::sm90
