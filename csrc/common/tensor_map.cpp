// Tensor maps, encoded by the driver through an entry point that the runtime finds: the binary
// links no driver library, so that it loads on machines without one.
#include "common/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "common/error.h"

namespace flash_ext {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) &&
                  alignof(TensorMap) % alignof(CUtensorMap) == 0,
              "a TensorMap is a CUtensorMap");

constexpr int kRank = 4;
constexpr int kElementBytes = 2;

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, asked for once.
int32_t find_encode(Encode* encode) {
  static std::atomic<void*> cache{nullptr};
  void* entry = cache.load(std::memory_order_relaxed);
  if (entry == nullptr) {
    constexpr unsigned int kVersion = 12000;  // of the function's signature
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (int32_t error = check(cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, kVersion, cudaEnableDefault, &found))) {
      return error;
    }
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) return cudaErrorSymbolNotFound;
    cache.store(entry, std::memory_order_relaxed);
  }
  *encode = reinterpret_cast<Encode>(entry);
  return 0;
}

bool operator==(const TensorMapShape& a, const TensorMapShape& b) {
  return std::equal(a.sizes, a.sizes + kRank, b.sizes) &&
         std::equal(a.strides, a.strides + kRank, b.strides) &&
         std::equal(a.box, a.box + kRank, b.box);
}

int32_t encode(TensorMap* map, const void* data, const TensorMapShape& shape) {
  if (shape.strides[0] != 1 || (shape.box[0] != 64 && shape.box[0] != 32)) {
    return cudaErrorInvalidValue;
  }
  Encode encode_tiled = nullptr;
  if (int32_t error = find_encode(&encode_tiled)) return error;

  cuuint64_t sizes[kRank];
  cuuint64_t stride_bytes[kRank - 1];  // of all dimensions but the innermost
  cuuint32_t box[kRank];
  const cuuint32_t element_strides[kRank] = {1, 1, 1, 1};
  for (int i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(shape.sizes[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    if (i == 0) continue;
    // A dimension of size 1 may have any stride, also one that no map takes.
    const int64_t bytes = shape.sizes[i] == 1 ? 16 : shape.strides[i] * kElementBytes;
    stride_bytes[i - 1] = static_cast<cuuint64_t>(bytes);
  }
  // The driver's error codes are the runtime's. The type of the elements matters to arithmetic
  // alone, and copies do none.
  return encode_tiled(reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank,
                      const_cast<void*>(data), sizes, stride_bytes, box, element_strides,
                      CU_TENSOR_MAP_INTERLEAVE_NONE,
                      shape.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// The latest maps of a thread, each in the place that its address and box name: a training loop
// meets the same tensors again and again.
struct CachedMap {
  const void* data = nullptr;
  TensorMapShape shape;
  TensorMap map;
};
constexpr int kCachedMaps = 256;

}  // namespace

int32_t encode_tensor_map(TensorMap* map, const void* data, const TensorMapShape& shape) {
  static thread_local std::array<CachedMap, kCachedMaps> cache;
  const uint64_t key =
      (reinterpret_cast<uintptr_t>(data) >> 8) + static_cast<uint64_t>(shape.box[1]);
  CachedMap& entry = cache[(key * 0x9E3779B97F4A7C15u) >> 56];  // 2^64 / golden ratio
  if (entry.data != data || data == nullptr || !(entry.shape == shape)) {
    if (int32_t error = encode(&entry.map, data, shape)) {
      entry.data = nullptr;
      return error;
    }
    entry.data = data;
    entry.shape = shape;
  }
  *map = entry.map;
  return 0;
}

}  // namespace flash_ext
