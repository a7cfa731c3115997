// cp.async: copies from global to shared memory that bypass registers.
// PTX ISA, "Data movement: asynchronous copy, non-bulk".
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// Copies `bytes` (16 or 0) and fills the rest of the 16 bytes with zeros; with 0 bytes the source
// is not read.
__device__ __forceinline__ void cp_async_16(uint32_t smem_address, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address), "l"(source),
               "r"(bytes)
               : "memory");
}

// The same for one 32-bit word.
__device__ __forceinline__ void cp_async_4(uint32_t smem_address, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address), "l"(source),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_ext::ptx
