// Counters from which the thread blocks of a persistent kernel take their tiles.
#pragma once

#include <cstdint>

namespace flash_ext::sm90 {

// One pair of counters in device memory, zero between kernels: tiles handed out, blocks finished.
// The last block to finish sets both back.
struct TileCounter {
  int32_t next;
  int32_t finished;
};

// The counter of a stream (a cudaStream_t) of the current device, whose kernels follow one another.
// Null where none can be given for sure: while the stream is being captured, for its graph may run
// beside it later; for handles that mean another stream in each thread; when too many streams have
// asked. The kernel then takes one tile a block. Returns 0 or a CUDA error code.
int32_t tile_counter(TileCounter** counter, void* stream);

}  // namespace flash_ext::sm90
