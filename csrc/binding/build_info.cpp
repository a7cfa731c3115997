// The facts that setup.py wrote for this build.
#include "binding/build_info.h"

#include "build_facts.h"

namespace flash_ext::binding {

const BuildInfo kBuildInfo = {FLASH_EXT_VERSION, FLASH_EXT_ARCHS,     FLASH_EXT_NVCC,
                              FLASH_EXT_FLAGS,   FLASH_EXT_HEAD_DIMS, FLASH_EXT_DIGESTS};

}  // namespace flash_ext::binding
