// griddepcontrol: a kernel that starts before the one ahead of it in the stream has ended.
// PTX ISA, "Parallel synchronization and communication instructions: griddepcontrol".
//
// It needs the launch attribute "programmatic stream serialization"; without it, neither does
// anything. Before compute capability 9.0 there is nothing to do.
#pragma once

namespace flash_ext::ptx {

// Once every block has called it or ended, blocks of the next kernel may start where there is room.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernels ahead have ended and what they wrote is visible.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_ext::ptx
