// The 16-bit element types: conversion and the test for NaN and infinity, two at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/math.h"

namespace flash_ext {

template <typename T>
struct Element;

template <>
struct Element<__half> {
  static constexpr uint32_t kExponentMask = 0x7c007c00;  // both halves all ones: NaN or infinity

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_f16x2(low, high);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
};

template <>
struct Element<__nv_bfloat16> {
  static constexpr uint32_t kExponentMask = 0x7f807f80;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_bf16x2(low, high);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
};

// 0xffff in each half of `pair` that is NaN or infinite.
template <typename T>
__device__ __forceinline__ uint32_t nonfinite_halves(uint32_t pair) {
  constexpr uint32_t kMask = Element<T>::kExponentMask;
  return __vcmpeq2(pair & kMask, kMask);
}

}  // namespace flash_ext
