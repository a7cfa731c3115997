// Counters of the persistent kernels: one pair for each stream that has asked.
#include "sm90/tile_counters.h"

#include <cuda_runtime.h>

#include <mutex>
#include <unordered_map>

#include "common/error.h"

namespace flash_ext::sm90 {
namespace {

constexpr int kMostStreams = 1024;  // of each device
__device__ TileCounter counters[kMostStreams];

// Streams of one device in the order in which they first asked.
struct DeviceStreams {
  TileCounter* memory = nullptr;
  std::unordered_map<void*, int> slots;
};

}  // namespace

int32_t tile_counter(TileCounter** counter, void* stream) {
  *counter = nullptr;
  const auto handle = static_cast<cudaStream_t>(stream);
  if (handle == cudaStreamPerThread) return 0;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (int32_t error = check(cudaStreamIsCapturing(handle, &capturing))) return error;
  if (capturing != cudaStreamCaptureStatusNone) return 0;
  int device = 0;
  if (int32_t error = check(cudaGetDevice(&device))) return error;

  static std::mutex mutex;
  static std::unordered_map<int, DeviceStreams> devices;
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceStreams& known = devices[device];
  if (known.memory == nullptr) {
    void* address = nullptr;
    if (int32_t error = check(cudaGetSymbolAddress(&address, counters))) return error;
    known.memory = static_cast<TileCounter*>(address);
  }
  const auto slot = known.slots.find(stream);
  if (slot != known.slots.end()) {
    *counter = known.memory + slot->second;
  } else if (known.slots.size() < kMostStreams) {
    const int fresh = static_cast<int>(known.slots.size());
    known.slots.emplace(stream, fresh);
    *counter = known.memory + fresh;
  }
  return 0;
}

}  // namespace flash_ext::sm90
