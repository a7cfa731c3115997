// griddepcontrol: a kernel that starts before the one ahead of it in the stream has ended.
// PTX ISA, "Parallel synchronization and communication instructions: griddepcontrol".
//
// It needs the launch attribute "programmatic stream serialization"; without it, neither does
// anything.
#pragma once

namespace flash_ext::ptx {

// Once every block has called it or ended, blocks of the next kernel may start where there is room.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// Waits until the kernels ahead have ended and what they wrote is visible.
__device__ __forceinline__ void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash_ext::ptx
