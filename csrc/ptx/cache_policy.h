// Cache policies: how long L2 should keep what a copy reads.
// PTX ISA, "Data movement: createpolicy" and "Cache eviction priority hints".
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// For data that one block reads once.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// For data that many blocks read again.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace flash_ext::ptx
