// setmaxnreg: moves registers from one warpgroup of a block to another.
// PTX ISA, "Miscellaneous instructions: setmaxnreg".
//
// All warps of a warpgroup execute it, in a kernel with a register limit (__launch_bounds__ with
// the least number of blocks). Registers per thread, a multiple of 8 from 24 to 256.
#pragma once

namespace flash_ext::ptx {

template <int kRegisters>
__device__ __forceinline__ void register_decrease() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                "a multiple of 8 registers from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until that many are free.
template <int kRegisters>
__device__ __forceinline__ void register_increase() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                "a multiple of 8 registers from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_ext::ptx
