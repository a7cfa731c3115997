// What host code asks of a device: a scope on it, facts cached per device, and kernel attributes
// set once per device. No CUDA types; functions that can fail return 0 or a CUDA error code.
#pragma once

#include <atomic>
#include <cstdint>

namespace flash_ext {

// Makes a device current until the end of the scope; does nothing when it already is.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  int32_t error() const { return error_; }  // 0, or why the device could not be made current

 private:
  int32_t previous_ = -1;  // device to go back to; -1 is none
  int32_t error_ = 0;
};

// CUDA versions as 1000 * major + 10 * minor.
struct CudaVersions {
  int32_t runtime;  // what the binary was built with
  int32_t driver;   // newest that the installed driver serves; 0 without a driver
};
int32_t cuda_versions(CudaVersions* versions);

// Enqueues zeros on `stream` (a cudaStream_t) of the current device.
int32_t fill_zero(void* data, int64_t bytes, void* stream);

// Streaming multiprocessors of the current device.
int32_t multiprocessor_count(int32_t* count);

// Allows one kernel its dynamic shared memory, once per device. Declared `static` beside the launch
// of the kernel instance:
//   static KernelSetup setup(&kernel<Config>, smem_bytes);
//   if (int32_t error = setup.prepare()) return error;
class KernelSetup {
 public:
  template <class... Args>
  KernelSetup(void (*kernel)(Args...), int32_t smem_bytes)
      : kernel_(reinterpret_cast<const void*>(kernel)), smem_bytes_(smem_bytes) {}

  // For the current device. Threads may race: setting the attribute twice is harmless.
  int32_t prepare();

 private:
  const void* const kernel_;
  const int32_t smem_bytes_;
  std::atomic<uint64_t> prepared_{0};  // bit i: device i is done
};

}  // namespace flash_ext
