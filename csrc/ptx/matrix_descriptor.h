// Matrix descriptors: how wgmma finds an operand in shared memory.
// PTX ISA, "Asynchronous warpgroup-level matrix instructions: shared memory matrix layout, strides,
// matrix descriptor format".
//
// wgmma reads M or N (64, or the instruction's N) by K = 16 elements of 16 bits. "K-major" memory
// runs along K, "MN-major" memory along M or N. Counted in chunks of 16 bytes (8 elements), memory
// is made of swizzle atoms: 8 lines of 8 chunks (128-byte swizzle) or of 4 (64-byte swizzle), the
// lines of an atom one after another. Within a line, chunk c lies at place
//     c ^ (address / 128 % 8)   with 128-byte swizzle: XOR of address bits 4-6 with bits 7-9,
//     c ^ (address / 128 % 4)   with  64-byte swizzle: XOR of address bits 4-5 with bits 7-8.
// It is taken of absolute addresses, as by TMA; therefore atoms start at multiples of 1024 or 512
// bytes, and the descriptor's base offset is 0.
//
//     bits  0-13  start address / 16
//     bits 16-29  leading dimension byte offset / 16
//     bits 32-45  stride dimension byte offset / 16
//     bits 49-51  base offset
//     bits 62-63  swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes
//
// What the two offsets mean depends on the major. Lines of 128 bytes as the example:
//
//     K-major: a line is one row of M or N               MN-major: a line is one k
//
//              K: 64 elements                                     MN: 64           next 64
//            +----------------+                                 +--------+ leading +--------+
//     8 rows |      atom      |                             8 k |  atom  |-------->|  atom  |
//            +----------------+                                 +--------+         +--------+
//                    | stride = 8 lines                             | stride = 8 lines
//            +----------------+                                 +--------+
//     next 8 |      atom      |                        next 8 k |  atom  |
//            +----------------+                                 +--------+
//
//     K-major:  the 16 elements of K of one instruction are 32 bytes of each line, so they never
//               leave the atom: the leading offset is not used (1 by convention). The next 16 start
//               32 bytes further in the line, 4 times (64-byte swizzle: twice). The XOR takes the
//               start's bits 7-9, which these steps leave alone.
//     MN-major: 16 elements of K are two atoms, `stride` apart; M or N beyond one line goes on
//               `leading` bytes further. The next 16 start 16 lines further.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

enum class Swizzle : uint32_t { k128B = 1, k64B = 2 };

enum class Major { kK, kMN };

// Bits 16-31: the upper half of the first word, beside the start address.
__host__ __device__ constexpr uint32_t descriptor_leading(uint32_t leading_bytes) {
  return leading_bytes >> 4 << 16;
}

// Bits 32-63: the second word.
__host__ __device__ constexpr uint32_t descriptor_high(uint32_t stride_bytes, Swizzle swizzle) {
  return stride_bytes >> 4 | static_cast<uint32_t>(swizzle) << 30;
}

__host__ __device__ constexpr uint64_t descriptor(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace flash_ext::ptx
