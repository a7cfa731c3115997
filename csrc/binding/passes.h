// The two passes of the binding: check what a launch must be able to rely on, fill the params
// structs and launch on torch's current stream. Nothing here allocates or synchronises, and the GIL
// is kept: a launch is shorter than giving the GIL up and taking it back under contention.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

#include "binding/build_info.h"
#include "binding/modifiers.h"
#include "binding/packing.h"
#include "binding/tensor.h"
#include "common/device.h"
#include "common/error.h"
#include "launch.h"
#include "params.h"

namespace flash_ext::binding {

inline const char* pass_name(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

inline const char* features_name(Features features) {
  return features == Features::kLean ? "lean" : "full";
}

// "forward kernel 3 (sm80, bfloat16, head_dim 128, lean, 128x64)"
inline std::string kernel_text(int32_t index) {
  const Kernel& row = kernel(index);
  return std::string(pass_name(row.pass)) + " kernel " + std::to_string(index) + " (" + row.family +
         ", " + dtype_name(row.dtype) + ", head_dim " + std::to_string(row.head_dim) + ", " +
         features_name(row.features) + (row.packed ? ", packed, " : ", ") +
         std::to_string(row.block_m) + "x" + std::to_string(row.block_n) + ")";
}

inline std::string shape_text(const Shape& shape) {
  return "B=" + std::to_string(shape.batch) + " Sq=" + std::to_string(shape.seqlen_q) +
         " Sk=" + std::to_string(shape.seqlen_k) + " Hq=" + std::to_string(shape.heads_q) +
         " Hk=" + std::to_string(shape.heads_k) + " D=" + std::to_string(shape.head_dim) +
         " Dv=" + std::to_string(shape.head_dim_v);
}

inline const Kernel& find_kernel(int32_t index, Pass pass) {
  if (index < 0 || index >= kernel_count() || kernel(index).pass != pass) {
    fail<py::value_error>("kernel", std::to_string(index),
                          std::string("the index of a ") + pass_name(pass) + " row of kernels()");
  }
  return kernel(index);
}

// Where batch, sequence and head lie among the axes of q, k, v, out and their gradients.
struct Axes {
  bool bhsd;  // (B, H, S, D) instead of (B, S, H, D)
  int seq() const { return bhsd ? 2 : 1; }
  int head() const { return bhsd ? 1 : 2; }

  void expect(const Tensor& tensor, int64_t batch, int64_t seq, int64_t heads, int64_t dim) const {
    if (bhsd) {
      expect_shape(tensor, {batch, heads, seq, dim});
    } else {
      expect_shape(tensor, {batch, seq, heads, dim});
    }
  }

  View view(const Tensor& tensor) const {
    const auto stride = [&tensor](int axis) {
      return tensor.shape[axis] > 1 ? tensor.strides[axis] : int64_t{0};
    };
    return {tensor.data, stride(0), stride(seq()), stride(head())};
  }
};

// Sizes of the problem as q, k and v tell them, checked against each other and the kernel.
inline Shape read_shape(const Kernel& row, Axes axes, const Tensor& q, const Tensor& k,
                        const Tensor& v) {
  for (const Tensor* tensor : {&q, &k, &v}) expect_rank(*tensor, 4);
  const int64_t batch = q.shape[0];
  const int64_t seqlen_k = k.shape[axes.seq()];
  const int64_t heads_q = q.shape[axes.head()];
  const int64_t heads_k = k.shape[axes.head()];
  axes.expect(k, batch, seqlen_k, heads_k, q.shape[3]);
  axes.expect(v, batch, seqlen_k, heads_k, v.shape[3]);

  if (heads_q > std::numeric_limits<int32_t>::max() ||
      (heads_q != 0 && (heads_k == 0 || heads_q % heads_k != 0))) {
    fail<py::value_error>("q", std::to_string(heads_q) + " and " + std::to_string(heads_k),
                          "a number of heads that is a multiple of k's");
  }
  for (const auto& [tensor, most] : {std::pair{&q, row.head_dim}, std::pair{&v, row.head_dim_v}}) {
    const int64_t dim = tensor->shape[3];
    if (dim <= 0 || dim % 8 != 0 || dim > most) {
      fail<py::value_error>(tensor->name, std::to_string(dim),
                            "a head dim that is a multiple of 8 up to " + std::to_string(most));
    }
  }
  return {batch,
          q.shape[axes.seq()],
          seqlen_k,
          static_cast<int32_t>(heads_q),
          static_cast<int32_t>(heads_k),
          static_cast<int32_t>(q.shape[3]),
          static_cast<int32_t>(v.shape[3])};
}

// A 16-bit or out tensor that the kernels read or write in place.
inline View read_view(Axes axes, const Tensor& tensor, DType dtype, const Tensor& q) {
  expect_dtype(tensor, dtype);
  expect_device(tensor, q);
  expect_aligned_rows(tensor);
  return axes.view(tensor);
}

inline Window read_window(int64_t left, int64_t right) {
  if (left < -1) fail<py::value_error>("window_left", std::to_string(left), "-1 or more");
  if (right < -1) fail<py::value_error>("window_right", std::to_string(right), "-1 or more");
  return {left, right};
}

// The driver's floor, checked before the first launch of the process.
inline void require_driver() {
  [[maybe_unused]] static const bool good = [] {
    CudaVersions versions{};
    if (int32_t error = cuda_versions(&versions)) {
      throw std::runtime_error(std::string("the CUDA driver cannot be asked for its version: ") +
                               error_text(error));
    }
    const int32_t build = versions.runtime / 1000;
    if (versions.driver / 1000 < build) {
      const char* floor = build == 12 ? " (525 or newer)" : build == 13 ? " (580 or newer)" : "";
      const std::string found = versions.driver == 0
                                    ? "none is installed"
                                    : "the installed one serves CUDA " +
                                          std::to_string(versions.driver / 1000) + "." +
                                          std::to_string(versions.driver % 1000 / 10);
      throw std::runtime_error(
          "this build of flash_ext needs an NVIDIA driver for CUDA " + std::to_string(build) +
          floor + ", " + found +
          ": update the driver, or rebuild flash_ext with an nvcc that it serves (FLASH_EXT_NVCC)");
    }
    return true;
  }();
}

// Runs `enqueue(stream)` on the tensor's device and torch's current stream of it.
template <class Enqueue>
void launch(int32_t index, const Shape& shape, int32_t device, Enqueue enqueue) {
  require_driver();
  int32_t error = 0;
  {
    const DeviceGuard guard(device);
    error = guard.error();
    if (error == 0) error = enqueue(current_stream(device));
  }
  if (error == 0) return;
  std::string message = kernel_text(index) + " failed on cuda:" + std::to_string(device) + " for " +
                        shape_text(shape) + ": " + error_text(error);
  if (is_missing_code(error)) {
    message += std::string("; this build holds code for ") + kBuildInfo.archs +
               ": rebuild with FLASH_EXT_CUDA_ARCHS naming the device's architecture (for example "
               "FLASH_EXT_CUDA_ARCHS=86 for compute capability 8.6)";
  }
  throw std::runtime_error(message);
}

// A forward pass that may be launched.
struct ForwardCall {
  int32_t kernel;
  int32_t device;
  ForwardParams params;
};

// A call with every argument checked.
inline ForwardCall prepare_forward(int32_t index, py::handle q_object, py::handle k_object,
                                   py::handle v_object, py::handle out_object,
                                   py::handle lse_object, py::handle sinks_object,
                                   double softmax_scale, int64_t window_left, int64_t window_right,
                                   bool bhsd, py::handle modifiers, py::handle packing) {
  const Kernel& row = find_kernel(index, Pass::kForward);
  const Axes axes{bhsd};
  const Tensor q = read_tensor("q", q_object);
  const Tensor k = read_tensor("k", k_object);
  const Tensor v = read_tensor("v", v_object);
  const Tensor out = read_tensor("out", out_object);
  const Shape shape = read_shape(row, axes, q, k, v);
  axes.expect(out, shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v);

  ForwardParams params{};
  params.shape = shape;
  params.packing = read_packing(row, packing, bhsd, shape, q);
  params.window = read_window(window_left, window_right);
  params.dtype = row.dtype;
  params.out_dtype = out.dtype == DType::kFloat32 ? DType::kFloat32 : row.dtype;
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.q = read_view(axes, q, row.dtype, q);
  params.k = read_view(axes, k, row.dtype, q);
  params.v = read_view(axes, v, row.dtype, q);
  params.out = read_view(axes, out, params.out_dtype, q);
  params.lse =
      read_floats("lse", lse_object, {shape.batch, shape.heads_q, shape.seqlen_q}, q).floats();
  if (!sinks_object.is_none()) {
    params.sinks = read_floats("sinks", sinks_object, {shape.heads_q}, q).floats();
  }
  params.modifiers = read_modifiers(row, modifiers, table_of(shape, params.packing), q);
  limit_to_bias(params.packing, modifiers);
  return {index, q.device, params};
}

inline void run(const ForwardCall& call) {
  const Shape& shape = call.params.shape;
  // Without query rows there is nothing to do; without keys there still are rows to write.
  if (shape.batch == 0 || shape.seqlen_q == 0 || shape.heads_q == 0) return;
  launch(call.kernel, shape, call.device,
         [&](void* stream) { return launch_forward(call.kernel, call.params, stream); });
}

inline void forward(int32_t index, py::handle q, py::handle k, py::handle v, py::handle out,
                    py::handle lse, py::handle sinks, double softmax_scale, int64_t window_left,
                    int64_t window_right, bool bhsd, py::handle modifiers, py::handle packing) {
  run(prepare_forward(index, q, k, v, out, lse, sinks, softmax_scale, window_left, window_right,
                      bhsd, modifiers, packing));
}

// A gradient to write, or a null view where nobody asked for it.
struct Gradient {
  View view;
  int64_t bytes;
};
inline Gradient read_gradient(const char* name, py::handle object, Axes axes, DType dtype,
                              const Tensor& input, const Tensor& q) {
  if (object.is_none()) return {};
  const Tensor tensor = read_tensor(name, object);
  expect_shape(tensor, {input.shape[0], input.shape[1], input.shape[2], input.shape[3]});
  expect_contiguous(tensor);
  const int64_t elements = input.shape[0] * input.shape[1] * input.shape[2] * input.shape[3];
  return {read_view(axes, tensor, dtype, q), elements * dtype_bytes(dtype)};
}

// The fp32 workspace of a gradient that thread blocks add up: (B, heads, rows, cols rounded up to
// 16).
inline float* read_workspace(const char* name, py::handle object, int64_t batch, int64_t heads,
                             int64_t rows, int64_t cols, const Tensor& q) {
  if (object.is_none()) return nullptr;
  const Tensor tensor = read_floats(name, object, {batch, heads, rows, (cols + 15) / 16 * 16}, q);
  expect_aligned_rows(tensor);
  return tensor.floats();
}

// A workspace is given exactly when the gradient is asked for and added up.
inline void expect_workspace(const char* name, py::handle workspace, bool added_up,
                             const char* when) {
  if (workspace.is_none() == added_up) {
    fail<py::value_error>(name, workspace.is_none() ? "None" : "a tensor",
                          std::string("a workspace exactly when ") + when);
  }
}

inline int32_t read_splits(const Kernel& row, int32_t splits, const Shape& shape, bool whole) {
  const int32_t group = shape.heads_k == 0 ? 1 : shape.heads_q / shape.heads_k;
  const int32_t most = row.splits_groups && !whole ? std::max(group, 1) : 1;
  if (splits < 1 || splits > most) {
    fail<py::value_error>("splits", std::to_string(splits), "1 to " + std::to_string(most));
  }
  return splits;
}

inline void backward(int32_t index, py::handle dout_object, py::handle dlse_object,
                     py::handle q_object, py::handle k_object, py::handle v_object,
                     py::handle out_object, py::handle lse_object, py::handle delta_object,
                     py::handle dq_accum_object, py::handle dq_object, py::handle dk_object,
                     py::handle dv_object, double softmax_scale, int64_t window_left,
                     int64_t window_right, bool bhsd, py::handle dq_turns_object, int32_t splits,
                     py::handle dk_accum_object, py::handle dv_accum_object, py::handle modifiers,
                     py::handle dbias_object, py::handle dbias_fixed_object, py::handle packing) {
  const Kernel& row = find_kernel(index, Pass::kBackward);
  const Axes axes{bhsd};
  const Tensor q = read_tensor("q", q_object);
  const Tensor k = read_tensor("k", k_object);
  const Tensor v = read_tensor("v", v_object);
  const Tensor out = read_tensor("out", out_object);
  const Tensor dout = read_tensor("dout", dout_object);
  const Shape shape = read_shape(row, axes, q, k, v);
  if (shape.batch * shape.heads_q > std::numeric_limits<int32_t>::max()) {
    fail<py::value_error>("q", shape_text(shape), "less than 2^31 heads in all batch entries");
  }
  for (const Tensor* tensor : {&out, &dout}) {
    axes.expect(*tensor, shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v);
  }
  const bool ordered = !dq_turns_object.is_none();
  const bool split = read_splits(row, splits, shape, ordered || !packing.is_none()) > 1;
  expect_workspace("dq_accum", dq_accum_object, !dq_object.is_none(), "dq is asked for");
  expect_workspace("dk_accum", dk_accum_object, split && !dk_object.is_none(),
                   "dk is asked for and splits is above 1");
  expect_workspace("dv_accum", dv_accum_object, split && !dv_object.is_none(),
                   "dv is asked for and splits is above 1");

  BackwardParams params{};
  params.shape = shape;
  params.packing = read_packing(row, packing, bhsd, shape, q);
  params.window = read_window(window_left, window_right);
  params.dtype = row.dtype;
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.q = read_view(axes, q, row.dtype, q);
  params.k = read_view(axes, k, row.dtype, q);
  params.v = read_view(axes, v, row.dtype, q);
  params.out = read_view(axes, out, row.dtype, q);
  params.dout = read_view(axes, dout, row.dtype, q);
  const auto rows = {shape.batch, int64_t{shape.heads_q}, shape.seqlen_q};
  params.lse = read_floats("lse", lse_object, rows, q).floats();
  if (!dlse_object.is_none()) params.dlse = read_floats("dlse", dlse_object, rows, q).floats();
  params.delta = read_floats("delta", delta_object, rows, q).floats();
  const int64_t dq_step = row.whole_dq_tiles ? row.block_m : 1;  // rows are a multiple of it
  params.dq_accum = read_workspace("dq_accum", dq_accum_object, shape.batch, shape.heads_q,
                                   (shape.seqlen_q + dq_step - 1) / dq_step * dq_step,
                                   row.whole_dq_tiles ? row.head_dim : shape.head_dim, q);
  params.splits = splits;
  params.dk_accum = read_workspace("dk_accum", dk_accum_object, shape.batch, shape.heads_k,
                                   shape.seqlen_k, shape.head_dim, q);
  params.dv_accum = read_workspace("dv_accum", dv_accum_object, shape.batch, shape.heads_k,
                                   shape.seqlen_k, shape.head_dim_v, q);
  if (ordered) {
    const int64_t turns = packing.is_none() ? (shape.seqlen_q + kTurnRows - 1) / kTurnRows
                                            : shape.seqlen_q / kTurnRows + params.packing.batch + 1;
    const Tensor dq_turns = read_tensor("dq_turns", dq_turns_object);
    expect_shape(dq_turns, {1 + shape.batch * shape.heads_q * turns * (row.threads / 32)});
    expect_dtype(dq_turns, DType::kInt32);
    expect_device(dq_turns, q);
    expect_contiguous(dq_turns);
    params.dq_turns = static_cast<int32_t*>(dq_turns.data);
  }
  params.dq = read_gradient("dq", dq_object, axes, row.dtype, q, q).view;
  const Gradient dk = read_gradient("dk", dk_object, axes, row.dtype, k, q);
  const Gradient dv = read_gradient("dv", dv_object, axes, row.dtype, v, q);
  params.dk = dk.view;
  params.dv = dv.view;
  params.modifiers = read_modifiers(row, modifiers, table_of(shape, params.packing), q);
  limit_to_bias(params.packing, modifiers);
  if (!dbias_object.is_none()) {
    const BiasGradient dbias =
        read_bias_gradient(dbias_object, dbias_fixed_object, modifiers, shape, params.packing, q);
    params.dbias = dbias.view;
    params.dbias_is_sum = dbias.is_sum;
    params.dbias_fixed = dbias.fixed;
  } else if (!dbias_fixed_object.is_none()) {
    fail<py::value_error>("dbias_fixed", "a tensor", "None without dbias");
  }

  launch(index, shape, q.device, [&](void* stream) {
    if (!dout.empty()) return launch_backward(index, params, stream);
    // No query row looks at the keys: their gradients are zero, and there is nothing to launch.
    for (const Gradient& gradient : {dk, dv}) {
      if (gradient.view.data == nullptr || gradient.bytes == 0) continue;
      if (int32_t error = fill_zero(gradient.view.data, gradient.bytes, stream)) return error;
    }
    return 0;
  });
}

}  // namespace flash_ext::binding
