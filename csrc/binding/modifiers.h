// What a call asks of a kernel with all features, from Python to params.h.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "binding/tensor.h"
#include "launch.h"
#include "params.h"

namespace flash_ext::binding {

constexpr uint32_t kDropSteps = 1 << 16;  // values of the random numbers that drop probabilities

// The members of the tuple.
enum ModifierIndex { kSoftcap, kAlibiSlopes, kAttnBias, kDropThreshold, kSeed, kModifierCount };

// Shape of the table of scores. Of packed sequences rows and keys are those of the longest one,
// which the host does not know: kAny.
using Table = std::array<int64_t, 4>;
constexpr int64_t kAny = -1;

inline Table table_of(const Shape& shape, const Packing& packing) {
  if (packing.cu_seqlens_q != nullptr) return {packing.batch, shape.heads_q, kAny, kAny};
  return {shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k};
}

inline TableView table_view(const Tensor& tensor) {
  const auto stride = [&tensor](int axis) {
    return tensor.shape[axis] > 1 ? tensor.strides[axis] : int64_t{0};
  };
  return {tensor.data, tensor.dtype, stride(0), stride(1), stride(2), stride(3)};
}

// A bias of rank 4, each dim that of the table or 1.
inline Tensor read_bias(py::handle object, const Table& table, const Tensor& q) {
  const Tensor bias = read_tensor("attn_bias", object);
  bool broadcasts = bias.rank == 4;
  for (int i = 0; broadcasts && i < 4; ++i) {
    broadcasts = bias.shape[i] == 1 || bias.shape[i] == table[i] || table[i] == kAny;
  }
  if (!broadcasts) {
    fail<py::value_error>("attn_bias", tuple_text(bias.shape.data(), bias.rank),
                          "rank 4 and a shape that broadcasts to " + tuple_text(table.data(), 4));
  }
  if (bias.dtype == DType::kInt32 || bias.dtype == DType::kInt64) {
    fail<py::type_error>("attn_bias", dtype_name(bias.dtype),
                         "dtype float16, bfloat16, float32 or bool");
  }
  expect_device(bias, q);
  return bias;
}

// Whether one load can take so many neighbouring keys wherever it starts at a multiple of them.
inline bool lies_in_groups(const TableView& view, int64_t keys) {
  return view.key_stride == 1 &&
         reinterpret_cast<uintptr_t>(view.data) % (keys * dtype_bytes(view.dtype)) == 0 &&
         view.batch_stride % keys == 0 && view.head_stride % keys == 0 &&
         view.row_stride % keys == 0;
}

// `object`: None, or (softcap, alibi_slopes, attn_bias, drop_threshold, seed).
inline Modifiers read_modifiers(const Kernel& row, py::handle object, const Table& table,
                                const Tensor& q) {
  Modifiers modifiers{};
  modifiers.keep_scale = 1.f;
  if (object.is_none()) return modifiers;
  if (row.features != Features::kFull) {
    fail<py::value_error>("modifiers", "a tuple", "None for a lean kernel");
  }
  if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != kModifierCount) {
    fail<py::type_error>("modifiers", Py_TYPE(object.ptr())->tp_name, "None or a tuple of 5");
  }
  const auto member = [&object](int i) -> py::handle { return PyTuple_GET_ITEM(object.ptr(), i); };

  modifiers.softcap = member(kSoftcap).cast<float>();
  if (!(modifiers.softcap >= 0.f) || std::isinf(modifiers.softcap)) {
    fail<py::value_error>("softcap", std::to_string(modifiers.softcap), "0 or a finite number");
  }
  if (const py::handle slopes = member(kAlibiSlopes); !slopes.is_none()) {
    if (read_tensor("alibi_slopes", slopes).rank == 2) {
      modifiers.alibi_slopes =
          read_floats("alibi_slopes", slopes, {table[0], table[1]}, q).floats();
      modifiers.alibi_batch_stride = table[1];
    } else {
      modifiers.alibi_slopes = read_floats("alibi_slopes", slopes, {table[1]}, q).floats();
    }
  }
  if (const py::handle bias = member(kAttnBias); !bias.is_none()) {
    modifiers.bias = table_view(read_bias(bias, table, q));
    modifiers.bias_in_pairs = lies_in_groups(modifiers.bias, 2);
    modifiers.bias_in_chunks =
        dtype_bytes(modifiers.bias.dtype) == 2 && lies_in_groups(modifiers.bias, 8);
  }
  const auto threshold = member(kDropThreshold).cast<int64_t>();
  if (threshold < 0 || threshold >= kDropSteps) {
    fail<py::value_error>("drop_threshold", std::to_string(threshold), "0 to 65535");
  }
  if (threshold > 0) {
    const Tensor seed = read_tensor("seed", member(kSeed));
    expect_shape(seed, {1});
    expect_dtype(seed, DType::kInt64);
    expect_device(seed, q);
    modifiers.seed = static_cast<const int64_t*>(seed.data);
    modifiers.drop_threshold = static_cast<uint32_t>(threshold);
    modifiers.keep_scale =
        static_cast<float>(kDropSteps / static_cast<double>(kDropSteps - threshold));
  }
  return modifiers;
}

// Where the gradient of a bias goes.
struct BiasGradient {
  TableView view;
  bool is_sum;  // over a dim in which the bias is broadcast
  FixedPoint fixed;
};

inline int32_t log2_rounded_up(int64_t x) {
  int32_t log = 0;
  while ((int64_t{1} << log) < x) ++log;
  return log;
}

// The workspace of a sum whose bits do not depend on the order of additions: one element for the
// largest addition, then one for each element of the gradient.
inline FixedPoint read_fixed_point(py::handle object, const BiasGradient& dbias, const Tensor& bias,
                                   const Shape& shape, const Packing& packing, const Tensor& q) {
  if (object.is_none()) return {};
  if (!dbias.is_sum) {
    fail<py::value_error>("dbias_fixed", "a tensor", "None where dbias is not a sum");
  }
  const int64_t elements = bias.shape[0] * bias.shape[1] * bias.shape[2] * bias.shape[3];
  const Tensor fixed = read_tensor("dbias_fixed", object);
  expect_shape(fixed, {1 + elements});
  expect_dtype(fixed, DType::kInt64);
  expect_device(fixed, q);
  expect_contiguous(fixed);
  const auto terms = [&bias](int axis, int64_t size) { return bias.shape[axis] == 1 ? size : 1; };
  // Packed sequences share their rows and keys; dense ones are as long as all of them.
  const bool packed = packing.cu_seqlens_q != nullptr;
  const int64_t sequences = packed && bias.shape[2] == 1 ? 1 : packed ? packing.batch : shape.batch;
  auto* const data = static_cast<int64_t*>(fixed.data);
  return {data + 1, reinterpret_cast<uint32_t*>(data), elements,
          log2_rounded_up(terms(0, sequences)) + log2_rounded_up(terms(1, shape.heads_q)) +
              log2_rounded_up(terms(2, shape.seqlen_q)) + log2_rounded_up(terms(3, shape.seqlen_k)),
          /*measures=*/false};
}

// In the shape of the bias; float32 where it is a sum, else of the bias's dtype.
inline BiasGradient read_bias_gradient(py::handle object, py::handle fixed, py::handle modifiers,
                                       const Shape& shape, const Packing& packing,
                                       const Tensor& q) {
  if (modifiers.is_none() || py::handle(PyTuple_GET_ITEM(modifiers.ptr(), kAttnBias)).is_none()) {
    fail<py::value_error>("dbias", "a tensor", "None without an attn_bias");
  }
  const Table table = table_of(shape, packing);
  const Tensor bias = read_bias(PyTuple_GET_ITEM(modifiers.ptr(), kAttnBias), table, q);
  if (bias.dtype == DType::kBool) {
    fail<py::value_error>("dbias", "a tensor", "None for a bool attn_bias");
  }
  const Tensor dbias = read_tensor("dbias", object);
  expect_shape(dbias, {bias.shape[0], bias.shape[1], bias.shape[2], bias.shape[3]});
  bool is_sum = false;
  for (int i = 0; i < 4; ++i)
    is_sum |= table[i] == kAny ? bias.shape[i] == 1 : bias.shape[i] != table[i];
  expect_dtype(dbias, is_sum ? DType::kFloat32 : bias.dtype);
  expect_device(dbias, q);
  expect_contiguous(dbias);
  BiasGradient gradient{table_view(dbias), is_sum, {}};
  gradient.fixed = read_fixed_point(fixed, gradient, bias, shape, packing, q);
  return gradient;
}

}  // namespace flash_ext::binding
