// What this binary was built from, as text; build_info.cpp alone is compiled anew when that
// changes.
#pragma once

namespace flash_ext::binding {

// Lists are separated by semicolons.
struct BuildInfo {
  const char* version;
  const char* archs;      // "80;90a;80+PTX"
  const char* nvcc;       // "13.0.88"
  const char* flags;      // of the kernels
  const char* head_dims;  // "64;128"
  const char* digests;    // "sm80=0123456789abcdef;binding=..."
};

extern const BuildInfo kBuildInfo;

}  // namespace flash_ext::binding
