// Tensor maps: the descriptions of tensors in global memory from which TMA copies boxes.
#pragma once

#include <cstdint>

namespace flash_ext {

// An encoded map (the driver's CUtensorMap). Kernels take it inside a __grid_constant__ parameter.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

// Four dimensions of a tensor of 16-bit elements, innermost first.
struct TensorMapShape {
  int64_t sizes[4];    // elements, at least 1
  int64_t strides[4];  // elements; strides[0] is 1; those of dimensions of size 1 are not read
  int32_t box[4];      // elements copied at a time, at most 256; box[0] is 64 or 32
};

// Encodes a map whose boxes lie in shared memory in the order of their dimensions, innermost first,
// with the 128-byte swizzle for box[0] = 64 and the 64-byte swizzle for 32; elements beyond the end
// read as zero. Maps are kept for a while, so that encoding one again costs little. `data` and the
// strides are multiples of 16 bytes. Needs no current device. Returns 0 or a CUDA error code:
// cudaErrorInvalidValue for anything the hardware cannot take.
int32_t encode_tensor_map(TensorMap* map, const void* data, const TensorMapShape& shape);

}  // namespace flash_ext
