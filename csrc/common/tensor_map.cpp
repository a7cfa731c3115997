// Tensor maps, encoded by the driver through an entry point that the runtime finds: the binary
// links no driver library, so that it loads on machines without one.
#include "common/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

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

}  // namespace

int32_t encode_tensor_map(TensorMap* map, const void* data, const TensorMapShape& shape) {
  if (shape.strides[0] != 1 || (shape.box[0] != 64 && shape.box[0] != 32)) {
    return cudaErrorInvalidValue;
  }
  Encode encode = nullptr;
  if (int32_t error = find_encode(&encode)) return error;

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
  return encode(reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank,
                const_cast<void*>(data), sizes, stride_bytes, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                shape.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace flash_ext
