// The table of compiled kernels: the families' own tables one after another, in order of
// preference.
#include <cstdint>
#include <vector>

#include "common/instance.h"
#include "launch.h"
#include "sm80/dispatch.h"
#if FLASH_EXT_WITH_SM90
#include "sm90/dispatch.h"
#endif

namespace flash_ext {
namespace {

const std::vector<Instance>& table() {
  static const std::vector<Instance> rows = [] {
    std::vector<Instance> all;
    const auto append = [&all](const std::vector<Instance>& family) {
      all.insert(all.end(), family.begin(), family.end());
    };
#if FLASH_EXT_WITH_SM90
    append(sm90::instances());
#endif
    append(sm80::instances());
    return all;
  }();
  return rows;
}

}  // namespace

int32_t kernel_count() { return static_cast<int32_t>(table().size()); }

const Kernel& kernel(int32_t index) { return table()[index].info; }

int32_t launch_forward(int32_t kernel, const ForwardParams& params, void* stream) {
  return table()[kernel].forward(params, stream);
}

int32_t launch_backward(int32_t kernel, const BackwardParams& params, void* stream) {
  return table()[kernel].backward(params, stream);
}

}  // namespace flash_ext
