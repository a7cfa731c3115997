// The Python module flash_ext._classic: the classic algorithms and one pass for all of them.
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "binding/passes.h"
#include "classic/launch.h"
#include "classic_facts.h"

namespace flash_ext::binding {
namespace {

py::list algorithms() {
  py::list rows;
  for (int32_t i = 0; i < classic::algorithm_count(); ++i) {
    const classic::Algorithm& row = classic::algorithm(i);
    py::dict entry;
    entry["name"] = row.name;
    entry["block_m"] = row.block_m;
    entry["block_n"] = py::dict();
    entry["block_n"][py::int_(64)] = row.block_n_64;
    entry["block_n"][py::int_(128)] = row.block_n_128;
    entry["scores"] = row.scores;
    entry["probabilities"] = row.probabilities;
    entry["row_statistics"] = row.row_statistics;
    entry["accumulator"] = row.accumulator;
    rows.append(std::move(entry));
  }
  return rows;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FLASH_EXT_VERSION;
  info["archs"] = FLASH_EXT_ARCHS;
  info["digest"] = FLASH_EXT_DIGEST;
  return info;
}

// A contiguous workspace as torch allocates it, with 16-byte aligned memory, given exactly when the
// algorithm keeps it.
void* read_kept(const char* name, py::handle object, bool kept, DType dtype,
                std::initializer_list<int64_t> shape, const Tensor& q) {
  if (object.is_none() == kept) {
    fail<py::value_error>(name, kept ? "None" : "a tensor",
                          "a tensor exactly when the algorithm keeps it");
  }
  if (!kept) return nullptr;
  const Tensor tensor = read_tensor(name, object);
  expect_shape(tensor, shape);
  expect_dtype(tensor, dtype);
  expect_device(tensor, q);
  expect_contiguous(tensor);
  return tensor.data;
}

void classic_forward(int32_t index, py::handle q_object, py::handle k_object, py::handle v_object,
                     py::handle out_object, double softmax_scale, bool causal, py::handle scores,
                     py::handle probabilities, py::handle row_max, py::handle row_sum,
                     py::handle accumulator) {
  if (index < 0 || index >= classic::algorithm_count()) {
    fail<py::value_error>("algorithm", std::to_string(index), "the index of a row of algorithms()");
  }
  const classic::Algorithm& row = classic::algorithm(index);
  const Axes axes{/*bhsd=*/false};
  const Tensor q = read_tensor("q", q_object);
  const Tensor k = read_tensor("k", k_object);
  const Tensor v = read_tensor("v", v_object);
  const Tensor out = read_tensor("out", out_object);
  Kernel limits{};
  limits.head_dim = limits.head_dim_v = 128;
  const Shape shape = read_shape(limits, axes, q, k, v);
  if ((shape.head_dim != 64 && shape.head_dim != 128) || shape.head_dim_v != shape.head_dim) {
    fail<py::value_error>(
        "q", std::to_string(shape.head_dim) + " and v " + std::to_string(shape.head_dim_v),
        "one head dim of 64 or 128");
  }
  if (!(softmax_scale > 0)) {
    fail<py::value_error>("softmax_scale", std::to_string(softmax_scale), "a number above 0");
  }
  axes.expect(out, shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim);

  classic::Params params{};
  params.shape = shape;
  params.window = {-1, causal ? 0 : -1};
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.q = read_view(axes, q, DType::kBFloat16, q);
  params.k = read_view(axes, k, DType::kBFloat16, q);
  params.v = read_view(axes, v, DType::kBFloat16, q);
  params.out = read_view(axes, out, DType::kBFloat16, q);
  params.table_cols = (shape.seqlen_k + classic::kTableAlignment - 1) / classic::kTableAlignment *
                      classic::kTableAlignment;
  const int64_t heads = shape.heads_q;
  const auto rows = {shape.batch, heads, shape.seqlen_q};
  const auto table = {shape.batch, heads, shape.seqlen_q, params.table_cols};
  params.scores =
      static_cast<float*>(read_kept("scores", scores, row.scores, DType::kFloat32, table, q));
  params.probabilities =
      read_kept("probabilities", probabilities, row.probabilities, DType::kBFloat16, table, q);
  params.row_max = static_cast<float*>(
      read_kept("row_max", row_max, row.row_statistics, DType::kFloat32, rows, q));
  params.row_sum = static_cast<float*>(
      read_kept("row_sum", row_sum, row.row_statistics, DType::kFloat32, rows, q));
  params.accumulator = static_cast<float*>(
      read_kept("accumulator", accumulator, row.accumulator, DType::kFloat32,
                {shape.batch, heads, shape.seqlen_q, int64_t{shape.head_dim}}, q));
  if (out.empty() || k.empty()) {
    fail<py::value_error>("q", shape_text(shape), "at least one query and one key");
  }

  require_driver();
  int32_t error = 0;
  {
    const DeviceGuard guard(q.device);
    error = guard.error();
    if (error == 0) error = row.launch(params, current_stream(q.device));
  }
  if (error == 0) return;
  std::string message = std::string("the classic algorithm ") + row.name +
                        " failed on cuda:" + std::to_string(q.device) + " for " +
                        shape_text(shape) + ": " + error_text(error);
  if (is_missing_code(error)) {
    message += "; this build holds code for " FLASH_EXT_ARCHS
               ": rebuild with FLASH_EXT_CUDA_ARCHS naming the device's architecture";
  }
  throw std::runtime_error(message);
}

}  // namespace

PYBIND11_MODULE(_classic, module) {
  module.doc() = "The classic kernels. Private: flash_ext.classic is the interface.";
  py::options options;
  options.disable_function_signatures();
  module.def("algorithms", &algorithms, "algorithms() -> list[dict]: in the order of the ladder.");
  module.def("build_info", &build_info, "build_info() -> dict: version, archs, digest.");
  module.def("forward", &classic_forward,
             "forward(algorithm, q, k, v, out, softmax_scale, causal, scores, probabilities, "
             "row_max, row_sum, accumulator, /) -> None: writes out; workspaces are None unless "
             "the algorithm keeps them.");
}

}  // namespace flash_ext::binding
