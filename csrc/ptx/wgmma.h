// wgmma: the four warps of a warpgroup multiply 64 x 16 by 16 x N 16-bit values into fp32
// registers. PTX ISA, "Asynchronous warpgroup-level matrix instructions": wgmma.mma_async,
// wgmma.fence, wgmma.commit_group, wgmma.wait_group. Fragments: core/wgmma_layout.h; descriptors:
// ptx/matrix_descriptor.h.
//
// A product is asynchronous: between its wgmma and the wait for its group, registers of the
// accumulator and of A must not be touched, nor shared memory be written. ptxas gives up
// and serialises all products of a kernel when it sees them touched (warnings C7510 to C7519):
//   wgmma_fence(); wgmma...; wgmma...; wgmma_commit(); ...; wgmma_wait<0>(); pin(accumulator);
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/matrix_descriptor.h"

namespace flash_ext::ptx {

// Before the first product, and again when ordinary instructions have written registers of the
// accumulator or of A since.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of the products issued so far.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  static_assert(kPending >= 0 && kPending <= 7, "0 to 7 groups may stay in flight");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers across this line: before a wgmma_fence, of what
// the products will take, and after a wgmma_wait, of what they have made.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (float& x : registers) asm volatile("" : "+f"(x)::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (uint32_t& x : registers) asm volatile("" : "+r"(x)::"memory");
}

namespace detail {

template <typename T, int kN>
struct Wgmma;

// An instruction names its kN / 2 accumulators one by one, so the lists are made here: a list of kN
// columns is the list of kN - 16 and eight numbers more, each put into F. Number 0 is left out,
// because nothing separates it from a predecessor.
// clang-format off
#define FLASH_EXT_LIST_16(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
#define FLASH_EXT_LIST_32(F) FLASH_EXT_LIST_16(F) \
  F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15)
#define FLASH_EXT_LIST_48(F) FLASH_EXT_LIST_32(F) \
  F(16) F(17) F(18) F(19) F(20) F(21) F(22) F(23)
#define FLASH_EXT_LIST_64(F) FLASH_EXT_LIST_48(F) \
  F(24) F(25) F(26) F(27) F(28) F(29) F(30) F(31)
#define FLASH_EXT_LIST_80(F) FLASH_EXT_LIST_64(F) \
  F(32) F(33) F(34) F(35) F(36) F(37) F(38) F(39)
#define FLASH_EXT_LIST_96(F) FLASH_EXT_LIST_80(F) \
  F(40) F(41) F(42) F(43) F(44) F(45) F(46) F(47)
#define FLASH_EXT_LIST_112(F) FLASH_EXT_LIST_96(F) \
  F(48) F(49) F(50) F(51) F(52) F(53) F(54) F(55)
#define FLASH_EXT_LIST_128(F) FLASH_EXT_LIST_112(F) \
  F(56) F(57) F(58) F(59) F(60) F(61) F(62) F(63)
#define FLASH_EXT_LIST_144(F) FLASH_EXT_LIST_128(F) \
  F(64) F(65) F(66) F(67) F(68) F(69) F(70) F(71)
#define FLASH_EXT_LIST_160(F) FLASH_EXT_LIST_144(F) \
  F(72) F(73) F(74) F(75) F(76) F(77) F(78) F(79)
#define FLASH_EXT_LIST_176(F) FLASH_EXT_LIST_160(F) \
  F(80) F(81) F(82) F(83) F(84) F(85) F(86) F(87)
#define FLASH_EXT_LIST_192(F) FLASH_EXT_LIST_176(F) \
  F(88) F(89) F(90) F(91) F(92) F(93) F(94) F(95)
#define FLASH_EXT_LIST_208(F) FLASH_EXT_LIST_192(F) \
  F(96) F(97) F(98) F(99) F(100) F(101) F(102) F(103)
#define FLASH_EXT_LIST_224(F) FLASH_EXT_LIST_208(F) \
  F(104) F(105) F(106) F(107) F(108) F(109) F(110) F(111)
#define FLASH_EXT_LIST_240(F) FLASH_EXT_LIST_224(F) \
  F(112) F(113) F(114) F(115) F(116) F(117) F(118) F(119)
#define FLASH_EXT_LIST_256(F) FLASH_EXT_LIST_240(F) \
  F(120) F(121) F(122) F(123) F(124) F(125) F(126) F(127)

#define FLASH_EXT_NAME(i) ", %" #i
#define FLASH_EXT_REGISTER(i) , "+f"(d[i])

// O0 to O6 number the operands after the accumulators.
#define FLASH_EXT_WGMMA(T, TYPE, N, O0, O1, O2, O3, O4, O5, O6)                            \
  template <>                                                                              \
  struct Wgmma<T, N> {                                                                     \
    template <int kTransA, int kTransB>                                                    \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,   \
                                              int32_t accumulate) {                        \
      asm volatile(                                                                        \
          "{\n"                                                                            \
          ".reg .pred p;\n"                                                                \
          "setp.ne.b32 p, %" #O2 ", 0;\n"                                                  \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " "              \
          "{%0" FLASH_EXT_LIST_##N(FLASH_EXT_NAME) "}, "                                   \
          "%" #O0 ", %" #O1 ", p, 1, 1, %" #O3 ", %" #O4 ";\n"                             \
          "}"                                                                              \
          : "+f"(d[0]) FLASH_EXT_LIST_##N(FLASH_EXT_REGISTER)                              \
          : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                  \
    }                                                                                      \
    template <int kTransB>                                                                 \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4],   \
                                              uint64_t b, int32_t accumulate) {            \
      asm volatile(                                                                        \
          "{\n"                                                                            \
          ".reg .pred p;\n"                                                                \
          "setp.ne.b32 p, %" #O5 ", 0;\n"                                                  \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " "              \
          "{%0" FLASH_EXT_LIST_##N(FLASH_EXT_NAME) "}, "                                   \
          "{%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 ", p, 1, 1, %" #O6 ";\n"       \
          "}"                                                                              \
          : "+f"(d[0]) FLASH_EXT_LIST_##N(FLASH_EXT_REGISTER)                              \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),           \
            "n"(kTransB));                                                                 \
    }                                                                                      \
  };

#define FLASH_EXT_WGMMA_TYPES(N, ...)               \
  FLASH_EXT_WGMMA(__half, "f16", N, __VA_ARGS__)    \
  FLASH_EXT_WGMMA(__nv_bfloat16, "bf16", N, __VA_ARGS__)

FLASH_EXT_WGMMA_TYPES(32, 16, 17, 18, 19, 20, 21, 22)
FLASH_EXT_WGMMA_TYPES(48, 24, 25, 26, 27, 28, 29, 30)
FLASH_EXT_WGMMA_TYPES(64, 32, 33, 34, 35, 36, 37, 38)
FLASH_EXT_WGMMA_TYPES(80, 40, 41, 42, 43, 44, 45, 46)
FLASH_EXT_WGMMA_TYPES(96, 48, 49, 50, 51, 52, 53, 54)
FLASH_EXT_WGMMA_TYPES(128, 64, 65, 66, 67, 68, 69, 70)
FLASH_EXT_WGMMA_TYPES(160, 80, 81, 82, 83, 84, 85, 86)
FLASH_EXT_WGMMA_TYPES(176, 88, 89, 90, 91, 92, 93, 94)
FLASH_EXT_WGMMA_TYPES(192, 96, 97, 98, 99, 100, 101, 102)
FLASH_EXT_WGMMA_TYPES(256, 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_EXT_WGMMA_TYPES
#undef FLASH_EXT_WGMMA
#undef FLASH_EXT_REGISTER
#undef FLASH_EXT_NAME
// clang-format on

}  // namespace detail

// d (64, kN) = A (64, 16) . B (16, kN) + (accumulate ? d : 0); kN of the list above, T __half or
// __nv_bfloat16. Each thread holds d in the order of core/wgmma_layout.h. A and B in shared memory:
template <typename T, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  detail::Wgmma<T, kN>::template ss<kMajorA == Major::kMN, kMajorB == Major::kMN>(d, a, b,
                                                                                  accumulate);
}

// The same with A in registers, in the order of mma.m16n8k16 with 16 rows for each warp.
template <typename T, int kN, Major kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  detail::Wgmma<T, kN>::template rs<kMajorB == Major::kMN>(d, a, b, accumulate);
}

}  // namespace flash_ext::ptx
