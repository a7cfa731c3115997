// stmatrix: four 8x8 tiles of 16-bit values from mma fragments into shared memory.
// PTX ISA, "Warp-level matrix store instruction: stmatrix".
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// Lane 8t + r names the address of row r of tile t; each register r[t] holds, in lane l, the
// elements (row l / 4, columns 2 (l % 4) and + 1) of tile t.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem_address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// The same with every tile transposed: lane l holds (rows 2 (l % 4) and + 1, column l / 4).
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem_address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace flash_ext::ptx
