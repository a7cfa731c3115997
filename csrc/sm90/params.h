// What the Hopper kernels take: the problem, its tensor maps, and the order of the tiles.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"
#include "params.h"
#include "sm90/tile_counters.h"

namespace flash_ext::sm90 {

// A tensor as TMA sees it. An axis that was expanded (stride 0) has length 1 in the map, and
// coordinates along it are multiplied by 0.
struct MappedTensor {
  TensorMap map;  // (D, S, H, B), innermost first
  int32_t head_step;
  int32_t batch_step;
};

struct ForwardKernelParams {
  ForwardParams problem;
  MappedTensor q;    // boxes of 64 columns and kBlockM rows
  MappedTensor k;    // ... kBlockN rows
  MappedTensor v;    // ... kBlockN rows
  MappedTensor out;  // ... 64 rows; not used for fp32 results

  // scale * log2(e) where it is positive: the softmax folds it into its exponents. Other scales
  // become a factor of the scores first.
  float units;
  float score_factor;

  int32_t tiles;           // query tiles x query heads x batch
  int32_t heads_together;  // whose tiles are handed out in turn (core/scheduler.h)
  TileCounter* counter;    // null: as many blocks as tiles
};

struct BackwardKernelParams {
  BackwardParams problem;
  MappedTensor q;     // boxes of 64 columns and kBlockM rows
  MappedTensor dout;  // ... kBlockM rows
  MappedTensor k;     // ... kBlockN rows
  MappedTensor v;     // ... kBlockN rows
  MappedTensor dk;    // ... 64 rows; not used where gradients are added up in workspaces
  MappedTensor dv;    // ... 64 rows

  int32_t tiles;         // key tiles x splits x key heads x batch
  TileCounter* counter;  // null: as many blocks as tiles, or tiles in order
};

}  // namespace flash_ext::sm90
