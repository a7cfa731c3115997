// Turns: a fixed order for additions that several thread blocks make to the same memory.
#pragma once

#include "core/layout.h"
#include "ptx/ordering.h"

namespace flash_ext {

// One counter that starts at 0. The warp, or thread, whose number comes next waits for it, makes
// its additions and passes the turn on. A warp may only wait for blocks that have started before
// its own.
class Turn {
 public:
  __device__ __forceinline__ Turn(int* counter, int number) : counter_(counter), number_(number) {}

  // By one thread.
  __device__ __forceinline__ void wait_alone() const {
    while (ptx::load_acquire(counter_) != number_) {
    }
  }
  __device__ __forceinline__ void pass_alone() const { ptx::add_release(counter_, 1); }

  // By a warp.
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x % kWarpSize == 0) wait_alone();
    __syncwarp();
  }
  __device__ __forceinline__ void pass() const {
    __syncwarp();  // every lane's additions come before the turn of the next warp
    if (threadIdx.x % kWarpSize == 0) pass_alone();
  }

 private:
  int* counter_;
  int number_;
};

}  // namespace flash_ext
