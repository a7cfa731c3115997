// Errors of the CUDA runtime as plain numbers; the texts behind error_text().
#include "common/error.h"

#include <cuda_runtime_api.h>

#include "launch.h"

namespace flash_ext {

int32_t check(int32_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

int32_t check_launch() { return cudaGetLastError(); }

bool is_missing_code(int32_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion;
}

const char* error_text(int32_t error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace flash_ext
