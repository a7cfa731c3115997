// Packed sequences: which one a thread block works on, and where it lies.
//
// The sequences lie one behind the other in the rows of a tensor, and only the device knows where:
// grids are laid out for any lengths. A tensor of T rows has T / kBlock + B + 1 slots for tiles of
// kBlock rows, and those of sequence b begin at cu_seqlens[b] / kBlock + b. The next one begins
// behind at least as many slots as b has tiles; where it has fewer, a slot stays empty. Behind the
// last sequence comes another, number B, that uses none of the rows which are left. So each row is
// part of one tile, and what nobody uses is written as zeros.
//
// Offsets and lengths are cut to what lies inside the tensors, whatever cu_seqlens and seqused say.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/scheduler.h"
#include "params.h"

namespace flash_ext {

// What a thread block has to know of its sequence; in shared memory, filled at the start.
struct Sequence {
  int seqlen_q, seqlen_k;  // used
  int first_q, first_k;  // rows before the sequence
  int owned;  // rows along which the tiles run, used or not; 0: the slot is empty
  // What brings (batch * Hq + head) * Shape::seqlen_q + row, the row in tables of all query rows,
  // to the one of the packed table; and the same for turns.
  int64_t row_shift;
  int64_t turn_shift;
};

// Slots for tiles of `block` rows.
__host__ __device__ __forceinline__ int64_t packed_slots(int64_t rows, int block, int64_t batch) {
  return rows / block + batch + 1;
}

// Turns of a head (kTurnRows).
__device__ __forceinline__ int64_t turns_of_head(const Shape& shape, const Packing& packing) {
  if (packing.cu_seqlens_q != nullptr)
    return packed_slots(shape.seqlen_q, kTurnRows, packing.batch);
  return ceil_div(static_cast<int>(shape.seqlen_q), kTurnRows);
}

// Where the sequences lie in q and out, or in k and v.
class PackedRows {
 public:
  static __device__ __forceinline__ PackedRows of_q(const Shape& shape, const Packing& packing) {
    return {packing.cu_seqlens_q, packing.seqused_q, packing.batch, shape.seqlen_q,
            packing.longest_q};
  }
  static __device__ __forceinline__ PackedRows of_k(const Shape& shape, const Packing& packing) {
    return {packing.cu_seqlens_k, packing.seqused_k, packing.batch, shape.seqlen_k,
            packing.longest_k};
  }

  // Of sequence 0 to B.
  __device__ __forceinline__ int first(int sequence) const {
    return clamp(cu_seqlens_[sequence], 0, rows_);
  }
  __device__ __forceinline__ int length(int sequence) const {
    const int begin = first(sequence);
    return sequence == batch_ ? rows_ - begin
                              : clamp(cu_seqlens_[sequence + 1], begin, rows_) - begin;
  }
  __device__ __forceinline__ int used(int sequence) const {
    if (sequence == batch_) return 0;
    const int all = min(length(sequence), longest_);
    return seqused_ == nullptr ? all : clamp(seqused_[sequence], 0, all);
  }

  // The sequence to which a slot belongs: the last one that begins at it or before. By a warp, each
  // step of which leaves a 32nd of the candidates.
  template <int kBlock>
  __device__ __forceinline__ int sequence_at(int slot) const {
    const int lane = threadIdx.x % kWarpSize;
    int begin = 0, end = batch_ + 1;
    while (end - begin > 1) {
      const int step = (end - begin - 1) / kWarpSize + 1;
      const int candidate = begin + lane * step;
      const bool reached = candidate < end && first_slot<kBlock>(candidate) <= slot;
      begin += max(__popc(__ballot_sync(0xffffffffu, reached)) - 1, 0) * step;
      end = min(end, begin + step);
    }
    return begin;
  }
  template <int kBlock>
  __device__ __forceinline__ int first_slot(int sequence) const {
    return first(sequence) / kBlock + sequence;
  }

 private:
  __device__ __forceinline__ PackedRows(const int32_t* cu_seqlens, const int32_t* seqused,
                                        int64_t batch, int64_t rows, int64_t longest)
      : cu_seqlens_(cu_seqlens),
        seqused_(seqused),
        batch_(static_cast<int>(batch)),
        rows_(static_cast<int>(rows)),
        longest_(static_cast<int>(longest)) {}

  static __device__ __forceinline__ int clamp(int x, int least, int most) {
    return min(max(x, least), most);
  }

  const int32_t* cu_seqlens_;
  const int32_t* seqused_;
  int batch_;
  int rows_;
  int longest_;
};

// A slot as a tile of a sequence.
struct PackedTile {
  int batch;
  int tile;
  Sequence sequence;

  // A tile of a dense problem, whose sequences are batch entries with `rows` rows along the tiles.
  static __device__ __forceinline__ PackedTile dense(const Shape& shape, const TileCoordinate& at,
                                                     int64_t rows) {
    return {static_cast<int>(at.batch),
            at.tile,
            {static_cast<int>(shape.seqlen_q), static_cast<int>(shape.seqlen_k), 0, 0,
             static_cast<int>(rows), 0, 0}};
  }
};

// Finds what lies at a slot, tiles of kBlock rows running along queries (kAlongKeys: keys). All
// lanes of a warp have to call it.
template <int kBlock, bool kAlongKeys>
__device__ __forceinline__ PackedTile find_packed_tile(const Shape& shape, const Packing& packing,
                                                       int slot) {
  const PackedRows q = PackedRows::of_q(shape, packing), k = PackedRows::of_k(shape, packing);
  const PackedRows& along = kAlongKeys ? k : q;
  const int batch = along.template sequence_at<kBlock>(slot);
  const int tile = slot - along.template first_slot<kBlock>(batch);
  const int length = along.length(batch);
  const int first_q = q.first(batch);
  const int64_t heads_before = int64_t{batch} * shape.heads_q;
  return {batch,
          tile,
          {q.used(batch), k.used(batch), first_q, k.first(batch),
           tile >= 0 && tile < ceil_div(length, kBlock) ? length : 0,
           first_q - heads_before * shape.seqlen_q,
           q.template first_slot<kTurnRows>(batch) -
               heads_before * packed_slots(shape.seqlen_q, kTurnRows, packing.batch)}};
}

// The sizes of the problem that a thread block works on: those of its sequence.
template <typename Config, typename Params>
__device__ __forceinline__ decltype(auto) shape_of(const Params& params,
                                                   const typename Config::SharedStorage& smem) {
  if constexpr (Config::kPacked) {
    Shape shape = params.shape;
    shape.seqlen_q = smem.sequence.seqlen_q;
    shape.seqlen_k = smem.sequence.seqlen_k;
    return shape;
  } else {
    return (params.shape);
  }
}

// Rows before the sequence in q, out and their gradients, and in k and v.
template <typename Config>
__device__ __forceinline__ int first_row_q(const typename Config::SharedStorage& smem) {
  if constexpr (Config::kPacked) return smem.sequence.first_q;
  return 0;
}
template <typename Config>
__device__ __forceinline__ int first_row_k(const typename Config::SharedStorage& smem) {
  if constexpr (Config::kPacked) return smem.sequence.first_k;
  return 0;
}

// The first row of a query head in tables of all query rows, (B, Hq, Sq) or packed (Hq, Tq). The
// head is counted in the flat order (batch, head).
template <typename Config, typename Params>
__device__ __forceinline__ int64_t first_table_row(const Params& params,
                                                   const typename Config::SharedStorage& smem,
                                                   int64_t head) {
  const int64_t row = head * params.shape.seqlen_q;
  if constexpr (Config::kPacked) return row + smem.sequence.row_shift;
  return row;
}

}  // namespace flash_ext
