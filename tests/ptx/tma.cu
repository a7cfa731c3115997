// Kernels that test tensor maps, TMA copies and bulk reductions.
#include "common/tensor_map.h"
#include "harness.h"
#include "ptx/bulk.h"
#include "ptx/cache_policy.h"
#include "ptx/cluster.h"
#include "ptx/proxy_fence.h"
#include "ptx/tma.h"

namespace flash_ext::test {

constexpr int kBarrierBytes = 1024;  // dynamic shared memory starts with the barrier
constexpr uint32_t kUntouched = 0xabababab;

enum class Policy : int { kNone, kEvictFirst, kEvictLast };

// The image of shared memory that one box leaves. With `written`, the block first writes the
// tensor's memory itself: element i of `count` becomes i % 2048.
__global__ void load_box(const __grid_constant__ TensorMap map, ptx::TmaBox box, uint8_t* image,
                         int bytes, Policy policy, uint16_t* written, int count) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t barrier = ptx::shared_address(smem);
  const uint32_t target = barrier + kBarrierBytes;
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&map);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  fill_chunks(smem + kBarrierBytes, kUntouched, bytes);
  for (int i = threadIdx.x; i < count; i += blockDim.x) written[i] = i % 2048;
  ptx::fence_proxy_async_shared();
  ptx::fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    if (policy == Policy::kNone)
      ptx::tma_load(target, &map, box, barrier);
    else
      ptx::tma_load(
          target, &map, box, barrier,
          policy == Policy::kEvictFirst ? ptx::evict_first_policy() : ptx::evict_last_policy());
  }
  bounded_wait(barrier, 0);
  copy_chunks(image, smem + kBarrierBytes, bytes);
}

// Each of two blocks loads one box, `bytes` long and `rows` further down than the other's, into
// both blocks: images (block, box).
__global__ void multicast(const __grid_constant__ TensorMap map, ptx::TmaBox box, uint8_t* images,
                          int bytes, int rows) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t barrier = ptx::shared_address(smem);
  const int rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * bytes);
  }
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    box.c1 += rank * rows;
    ptx::tma_load_multicast(barrier + kBarrierBytes + rank * bytes, &map, box, barrier, 0b11);
  }
  bounded_wait(barrier, 0);
  copy_chunks(images + rank * 2 * bytes, smem + kBarrierBytes, 2 * bytes);
  ptx::cluster_sync();
}

// Stores one box from its image; then the image may be written again.
__global__ void store_box(const __grid_constant__ TensorMap map, ptx::TmaBox box,
                          const uint8_t* image, int bytes) {
  extern __shared__ __align__(1024) uint8_t smem[];
  copy_chunks(smem, image, bytes);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store(&map, box, ptx::shared_address(smem));
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
  __syncthreads();
  fill_chunks(smem, kUntouched, bytes);
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}

// target[i] += i + block for every block
__global__ void reduce_add(float* target, int count) {
  extern __shared__ __align__(1024) float values[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = i + blockIdx.x;
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::bulk_reduce_add(target, ptx::shared_address(values), count * sizeof(float));
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

}  // namespace flash_ext::test

using namespace flash_ext;
using namespace flash_ext::test;

namespace {

int box_bytes(const TensorMapShape& shape) {
  return 2 * shape.box[0] * shape.box[1] * shape.box[2] * shape.box[3];
}

ptx::TmaBox at(const int* first) { return {first[0], first[1], first[2], first[3]}; }

}  // namespace

extern "C" {

int test_encode(const void* data, const TensorMapShape* shape) {
  TensorMap map;
  return encode_tensor_map(&map, data, *shape);
}

int test_load_box(void* data, const TensorMapShape* shape, const int* first, uint8_t* image,
                  int policy, int written) {
  TensorMap map;
  if (int error = encode_tensor_map(&map, data, *shape)) return error;
  const int bytes = box_bytes(*shape);
  return run(load_box, {1, 128, kBarrierBytes + bytes}, map, at(first), image, bytes,
             static_cast<Policy>(policy), static_cast<uint16_t*>(data), written);
}

int test_multicast(const void* data, const TensorMapShape* shape, const int* first,
                   uint8_t* images) {
  TensorMap map;
  if (int error = encode_tensor_map(&map, data, *shape)) return error;
  const int bytes = box_bytes(*shape);
  return run(multicast, {2, 128, kBarrierBytes + 2 * bytes, 2}, map, at(first), images, bytes,
             shape->box[1]);
}

int test_store_box(void* data, const TensorMapShape* shape, const int* first,
                   const uint8_t* image) {
  TensorMap map;
  if (int error = encode_tensor_map(&map, data, *shape)) return error;
  const int bytes = box_bytes(*shape);
  return run(store_box, {1, 128, bytes}, map, at(first), image, bytes);
}

int test_reduce_add(float* target, int count, int blocks) {
  return run(reduce_add, {blocks, 128, count * static_cast<int>(sizeof(float))}, target, count);
}
}
