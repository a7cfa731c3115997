// Device scope, facts cached per device and kernel attributes set once per device.
#include "common/device.h"

#include <cuda_runtime_api.h>

#include "common/error.h"

namespace flash_ext {
namespace {

// Devices beyond this many work too: their facts are asked for at every call.
constexpr int kCachedDevices = 64;

}  // namespace

DeviceGuard::DeviceGuard(int32_t device) {
  int current = 0;
  error_ = check(cudaGetDevice(&current));
  if (error_ != 0 || current == device) return;
  error_ = check(cudaSetDevice(device));
  if (error_ == 0) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) check(cudaSetDevice(previous_));
}

int32_t cuda_versions(CudaVersions* versions) {
  versions->runtime = CUDART_VERSION;
  return check(cudaDriverGetVersion(&versions->driver));
}

int32_t fill_zero(void* data, int64_t bytes, void* stream) {
  return check(
      cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

int32_t multiprocessor_count(int32_t* count) {
  static std::atomic<int32_t> cache[kCachedDevices];  // 0: not asked for yet
  int device = 0;
  if (int32_t error = check(cudaGetDevice(&device))) return error;
  if (device < kCachedDevices) {
    *count = cache[device].load(std::memory_order_relaxed);
    if (*count != 0) return 0;
  }
  if (int32_t error =
          check(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device))) {
    return error;
  }
  if (device < kCachedDevices) cache[device].store(*count, std::memory_order_relaxed);
  return 0;
}

int32_t KernelSetup::prepare() {
  int device = 0;
  if (int32_t error = check(cudaGetDevice(&device))) return error;
  const uint64_t bit = device < kCachedDevices ? uint64_t{1} << device : 0;
  if ((prepared_.load(std::memory_order_relaxed) & bit) != 0) return 0;

  // Setting the attribute loads the kernel's code. Loading may use calls that a stream capture
  // forbids by default, although they touch no captured stream: allow them for this moment.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (int32_t error = check(cudaThreadExchangeStreamCaptureMode(&mode))) return error;
  const int32_t error = check(
      cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes_));
  if (int32_t restore = check(cudaThreadExchangeStreamCaptureMode(&mode))) return restore;

  if (error == 0) prepared_.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace flash_ext
