// The Python module flash_ext._C: the table of kernels, the facts of the build, and the passes.
#include <pybind11/pybind11.h>

#include <utility>

#include "binding/build_info.h"
#include "binding/direct.h"
#include "binding/passes.h"
#include "launch.h"

namespace flash_ext::binding {
namespace {

py::list kernels() {
  py::list rows;
  for (int32_t i = 0; i < kernel_count(); ++i) {
    const Kernel& row = kernel(i);
    py::dict entry;
    entry["index"] = i;
    entry["family"] = row.family;
    entry["pass"] = pass_name(row.pass);
    entry["dtype"] = dtype_name(row.dtype);
    entry["head_dim"] = row.head_dim;
    entry["head_dim_v"] = row.head_dim_v;
    entry["features"] = features_name(row.features);
    entry["packed"] = row.packed;
    entry["block_m"] = row.block_m;
    entry["block_n"] = row.block_n;
    entry["threads"] = row.threads;
    entry["stages"] = row.stages;
    entry["smem_bytes"] = row.smem_bytes;
    entry["deterministic"] = row.deterministic;
    entry["splits_groups"] = row.splits_groups;
    entry["whole_dq_tiles"] = row.whole_dq_tiles;
    rows.append(std::move(entry));
  }
  return rows;
}

py::dict build_info() {
  const auto split = [](const char* text) { return py::str(text).attr("split")(";"); };
  py::list head_dims;
  for (py::handle dim : split(kBuildInfo.head_dims)) head_dims.append(py::int_(py::str(dim)));
  py::dict digests;
  for (py::handle entry : split(kBuildInfo.digests)) {
    const py::tuple parts = entry.attr("partition")("=");
    digests[parts[0]] = parts[2];
  }
  py::dict info;
  info["version"] = kBuildInfo.version;
  info["archs"] = split(kBuildInfo.archs);
  info["nvcc"] = kBuildInfo.nvcc;
  info["flags"] = kBuildInfo.flags;
  info["head_dims"] = head_dims;
  info["digests"] = digests;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels of flash_ext. Private: flash_ext.attention is the interface.";
  py::options options;
  options.disable_function_signatures();
  module.def("kernels", &kernels,
             "kernels() -> list[dict]: compiled kernels in order of preference within a pass.");
  module.def("build_info", &build_info,
             "build_info() -> dict: version, archs, nvcc, flags, head_dims, digests.");
  module.def(
      "forward", &forward,
      "forward(kernel, q, k, v, out, lse, sinks, softmax_scale, window_left, window_right, "
      "bhsd, modifiers, packing, /) -> None: writes out and lse. modifiers: None, or "
      "(softcap, alibi_slopes, attn_bias, drop_threshold, seed) with None for absent tensors. "
      "packing: None, or (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), likewise, for "
      "sequences that lie one behind the other in one batch entry.");
  module.def("direct_forward", &direct_forward,
             "direct_forward(questions, choose, /) -> function: the forward pass with as little "
             "host time as can be, see flash_ext/direct.py.");
  module.def("backward", &backward,
             "backward(kernel, dout, dlse, q, k, v, out, lse, delta, dq_accum, dq, dk, dv, "
             "softmax_scale, window_left, window_right, bhsd, dq_turns, splits, dk_accum, "
             "dv_accum, modifiers, dbias, dbias_fixed, packing, /) -> None: writes the workspaces "
             "and the gradients that are not None; dbias has to be zero, and so has dbias_fixed, "
             "with which the sums in dbias have the same bits whenever they are made.");
}

}  // namespace flash_ext::binding
