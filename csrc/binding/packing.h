// Where packed sequences lie, from Python to params.h.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "binding/modifiers.h"
#include "binding/tensor.h"
#include "launch.h"
#include "params.h"

namespace flash_ext::binding {

// int32 (length,), contiguous.
inline Tensor read_int32(const char* name, py::handle object, int64_t length, const Tensor& q) {
  const Tensor tensor = read_tensor(name, object);
  expect_shape(tensor, {length});
  expect_dtype(tensor, DType::kInt32);
  expect_device(tensor, q);
  expect_contiguous(tensor);
  return tensor;
}

// `object`: None, or (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), None for an absent
// seqused. The rows of all sequences are then those of one batch entry.
inline Packing read_packing(const Kernel& row, py::handle object, bool bhsd, const Shape& shape,
                            const Tensor& q) {
  if (object.is_none()) return {};
  if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != 4) {
    fail<py::type_error>("packing", Py_TYPE(object.ptr())->tp_name, "None or a tuple of 4");
  }
  if (!row.packed || bhsd || shape.batch != 1) {
    const char* came = !row.packed ? "a tuple"
                       : bhsd      ? "a tuple with bhsd"
                                   : "a tuple with a batch";
    fail<py::value_error>("packing", came,
                          !row.packed ? "None for a kernel that reads no packed sequences"
                                      : "None but for q, k and v (1, T, H, D)");
  }
  for (const int64_t rows : {shape.seqlen_q, shape.seqlen_k}) {
    if (rows >= kMaxSeqlen) {
      fail<py::value_error>("q or k", std::to_string(rows) + " rows",
                            "less than " + std::to_string(kMaxSeqlen) + " rows");
    }
  }
  const auto member = [&object](int i) -> py::handle { return PyTuple_GET_ITEM(object.ptr(), i); };
  const Tensor first = read_tensor("cu_seqlens_q", member(0));
  expect_rank(first, 1);
  const int64_t batch = first.shape[0] - 1;
  if (batch < 0) fail<py::value_error>("cu_seqlens_q", "shape (0,)", "shape (B + 1,)");
  const auto read = [&](const char* name, int i, int64_t length) -> const int32_t* {
    if (member(i).is_none()) return nullptr;
    return static_cast<const int32_t*>(read_int32(name, member(i), length, q).data);
  };
  Packing packing{};
  packing.batch = batch;
  packing.cu_seqlens_q = read("cu_seqlens_q", 0, batch + 1);
  packing.cu_seqlens_k = read("cu_seqlens_k", 1, batch + 1);
  if (packing.cu_seqlens_k == nullptr) {
    fail<py::type_error>("cu_seqlens_k", "None", "a torch.Tensor");
  }
  packing.seqused_q = read("seqused_q", 2, batch);
  packing.seqused_k = read("seqused_k", 3, batch);
  packing.longest_q = shape.seqlen_q;
  packing.longest_k = shape.seqlen_k;
  return packing;
}

// Sequences longer than their bias would read what lies behind it.
inline void limit_to_bias(Packing& packing, py::handle modifiers) {
  if (packing.cu_seqlens_q == nullptr || modifiers.is_none()) return;
  const py::handle object = PyTuple_GET_ITEM(modifiers.ptr(), kAttnBias);
  if (object.is_none()) return;
  const Tensor bias = read_tensor("attn_bias", object);
  if (bias.shape[2] != 1) packing.longest_q = std::min(packing.longest_q, bias.shape[2]);
  if (bias.shape[3] != 1) packing.longest_k = std::min(packing.longest_k, bias.shape[3]);
}

}  // namespace flash_ext::binding
