// Kernels that test synchronisation, registers and stmatrix.
#include "harness.h"
#include "ptx/barrier.h"
#include "ptx/cluster.h"
#include "ptx/elect.h"
#include "ptx/grid_dependency.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"

namespace flash_ext::test {

// A ring of two buffers between two warps: out[32 round + lane] = 100 round + lane.
__global__ void mbarrier_ring(int* out, int rounds) {
  constexpr int kStages = 2;
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ int buffer[kStages][kWarpSize];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), kWarpSize);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), kWarpSize);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const uint32_t phase = round / kStages % 2;
    const uint32_t full_stage = ptx::shared_address(&full[stage]);
    const uint32_t empty_stage = ptx::shared_address(&empty[stage]);
    if (threadIdx.x < kWarpSize) {
      ptx::mbarrier_wait(empty_stage, phase ^ 1);
      buffer[stage][lane] = 100 * round + lane;
      ptx::mbarrier_arrive(full_stage);
    } else {
      ptx::mbarrier_wait(full_stage, phase);
      out[round * kWarpSize + lane] = buffer[stage][lane];
      ptx::mbarrier_arrive(empty_stage);
    }
  }
}

// Two blocks arrive at each other's barrier: out[rounds rank + round] is 1 if the phase was open
// before this block's own arrival, else 0, plus 10 once it has completed.
__global__ void remote_arrive(int* out, int rounds) {
  __shared__ uint64_t storage;
  const uint32_t barrier = ptx::shared_address(&storage);
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 2);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    for (int round = 0; round < rounds; ++round) {
      const bool early = ptx::mbarrier_try_wait(barrier, round % 2);
      ptx::mbarrier_arrive_remote(ptx::cluster_address(barrier, rank));
      ptx::mbarrier_arrive_remote(ptx::cluster_address(barrier, rank ^ 1));
      bounded_wait(barrier, round % 2);
      out[rounds * rank + round] = early + 10 * ptx::mbarrier_try_wait(barrier, round % 2);
    }
  }
  ptx::cluster_sync();
}

// Two warpgroups take turns; log[i] is who had turn i.
__global__ void take_turns(int* log, int turns) {
  constexpr int kGroup = 128;
  constexpr int kFirst = 1, kSecond = 2;
  __shared__ int next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  const auto note = [&](int who) {
    if (threadIdx.x % kGroup == 0) log[next++] = who;
  };
  if (threadIdx.x < kGroup) {
    for (int i = 0; i < turns; ++i) {
      ptx::barrier_sync<kFirst, 2 * kGroup>();
      note(0);
      ptx::barrier_arrive<kSecond, 2 * kGroup>();
    }
    ptx::barrier_sync<kFirst, 2 * kGroup>();
  } else {
    ptx::barrier_arrive<kFirst, 2 * kGroup>();
    for (int i = 0; i < turns; ++i) {
      ptx::barrier_sync<kSecond, 2 * kGroup>();
      note(1);
      ptx::barrier_arrive<kFirst, 2 * kGroup>();
    }
  }
}

// Two warpgroups hold more values than the 168 registers each thread has at the launch.
__global__ void __launch_bounds__(384, 1) move_registers(const float* in, float* out) {
  constexpr int kValues = 192;
  if (threadIdx.x < 128) {
    ptx::register_decrease<24>();
    out[threadIdx.x] = in[threadIdx.x];
  } else {
    ptx::register_increase<240>();
    float values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = in[threadIdx.x + i];
    ptx::pin(values);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum += values[i];
    out[threadIdx.x] = sum;
  }
}

// out[warp] = lanes for which elect_one() holds, as bits
__global__ void elect_lanes(uint32_t* out) {
  const uint32_t lanes = __ballot_sync(0xffffffff, ptx::elect_one());
  if (threadIdx.x % kWarpSize == 0) out[threadIdx.x / kWarpSize] = lanes;
}

// out[tile][row][column] = 64 tile + 8 row + column; the first four tiles plain, the others through
// the transposing store.
__global__ void store_matrices(uint16_t* out) {
  __shared__ alignas(16) uint16_t tiles[8][8][8];
  const int lane = threadIdx.x, major = lane / 4, minor = lane % 4 * 2;
  uint32_t plain[4], transposed[4];
  for (uint32_t t = 0; t < 4; ++t) {
    const uint32_t a = 64 * t + 8 * major + minor;
    const uint32_t b = 64 * (t + 4) + 8 * minor + major;
    plain[t] = a | (a + 1) << 16;
    transposed[t] = b | (b + 8) << 16;
  }
  const uint32_t row = ptx::shared_address(tiles) + lane * kChunkBytes;
  ptx::stmatrix_x4(row, plain);
  ptx::stmatrix_x4_trans(row + 4 * 128, transposed);
  __syncthreads();
  copy_chunks(out, tiles, sizeof(tiles));
}

// A kernel that writes late, and one that may start early.
__global__ void write_late(int* data) {
  ptx::launch_dependents();
  const int64_t start = clock64();
  while (clock64() - start < 200000) {
  }
  data[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x * blockDim.x + threadIdx.x + 1;
}

__global__ void read_after(const int* data, int* out) {
  ptx::wait_for_prerequisites();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = *const_cast<const volatile int*>(data + i);
}

}  // namespace flash_ext::test

using namespace flash_ext::test;

extern "C" {

int test_mbarrier_ring(int* out, int rounds) { return run(mbarrier_ring, {1, 64}, out, rounds); }

int test_remote_arrive(int* out, int rounds) {
  return run(remote_arrive, {2, 32, 0, 2}, out, rounds);
}

int test_take_turns(int* log, int turns) { return run(take_turns, {1, 256}, log, turns); }

int test_move_registers(const float* in, float* out) {
  return run(move_registers, {1, 384}, in, out);
}

int test_elect_lanes(uint32_t* out) { return run(elect_lanes, {1, 128}, out); }

int test_store_matrices(uint16_t* out) { return run(store_matrices, {1, 32}, out); }

int test_grid_dependency(int* data, int* out) {
  if (int error = enqueue(write_late, {8, 64}, data)) return error;
  return run(read_after, {8, 64, 0, 1, true}, static_cast<const int*>(data), out);
}
}
