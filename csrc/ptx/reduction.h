// red: additions to global memory that return nothing.
// PTX ISA, "Parallel synchronization and communication instructions: red".
#pragma once

namespace flash_ext::ptx {

// Adds four floats to 16-byte aligned memory: one vector instruction since sm_90.
__device__ __forceinline__ void red_add_v4(float* target, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
#else
  atomicAdd(target, x);
  atomicAdd(target + 1, y);
  atomicAdd(target + 2, z);
  atomicAdd(target + 3, w);
#endif
}

}  // namespace flash_ext::ptx
