// Coordinates in the table of scores, (B, Hq, Sq, Sk).
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_ext {

// Fragments (16 kM, 8 kN) of the table: forward holds queries down and keys across, backward the
// transpose.
enum class Axes { kQueriesDown, kKeysDown };

// Where the first element of a lane's fragments lies.
struct TablePlace {
  int64_t batch;
  int head;  // query head within the batch entry
  int row;
  int key;
};

// How far element i of fragment (m, n) is from the lane's first one (core/layout.h).
template <Axes kAxes>
struct FragmentOffset {
  static __device__ __forceinline__ constexpr int row(int m, int n, int i) {
    return kAxes == Axes::kQueriesDown ? 16 * m + 8 * (i / 2) : 8 * n + i % 2;
  }
  static __device__ __forceinline__ constexpr int key(int m, int n, int i) {
    return kAxes == Axes::kQueriesDown ? 8 * n + i % 2 : 16 * m + 8 * (i / 2);
  }
};

// Elements from the start of a tensor to a place in the table.
__device__ __forceinline__ int64_t table_offset(const TableView& view, const TablePlace& at) {
  return at.batch * view.batch_stride + at.head * view.head_stride + at.row * view.row_stride +
         at.key * view.key_stride;
}

}  // namespace flash_ext
