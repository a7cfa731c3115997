// Errors of the CUDA runtime as plain numbers: 0 is success, anything else explains itself through
// error_text() of launch.h. No CUDA types, so that every layer can include it.
#pragma once

#include <cstdint>

namespace flash_ext {

// Passes a runtime call's result on. A failure is also taken out of the runtime's memory of the
// last error, so that it is reported once and the next call starts clean.
int32_t check(int32_t error);

// The error of the launch just made by this thread: kernels' launch code ends with it.
int32_t check_launch();

// Whether an error says that the binary holds no code for the device.
bool is_missing_code(int32_t error);

}  // namespace flash_ext
