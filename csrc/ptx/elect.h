// elect.sync: one lane of a warp, chosen by the hardware.
// PTX ISA, "Parallel synchronization and communication instructions: elect.sync".
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// True in one lane of a converged warp. Unlike a test of the lane number, it tells the compiler
// that one thread is left, so that instructions with uniform operands need no loop over lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace flash_ext::ptx
