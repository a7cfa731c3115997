// fence.proxy.async: order between ordinary memory accesses and those of bulk copies and wgmma.
// PTX ISA, "Memory consistency model: proxies" and "membar, fence".
#pragma once

namespace flash_ext::ptx {

// By every thread that wrote shared memory, before the barrier after which wgmma or a bulk copy
// reads it. Memory that was only read needs no fence before a bulk copy overwrites it.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory that this kernel writes and bulk copies read.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash_ext::ptx
