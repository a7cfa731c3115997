// Reads torch tensors without torch headers: through the table of C functions that torch.Tensor
// publishes (DLPack exchange API, torch >= 2.10). It lends pointer, shape, strides and stream.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>

#include "binding/dlpack_abi.h"
#include "params.h"

namespace flash_ext::binding {

namespace py = pybind11;

constexpr int kMaxRank = 4;
constexpr int64_t kAlignment = 16;  // bytes: the widest load of the kernels

// A CUDA tensor as it came, valid while the caller's Python object lives.
struct Tensor {
  const char* name;  // argument name, for errors
  void* data;        // null only without elements
  DType dtype;
  int32_t device;
  int32_t rank;
  std::array<int64_t, kMaxRank> shape;
  std::array<int64_t, kMaxRank> strides;  // elements; arbitrary where the length is 1

  float* floats() const { return static_cast<float*>(data); }
  bool empty() const {
    for (int i = 0; i < rank; ++i) {
      if (shape[i] == 0) return true;
    }
    return false;
  }
};

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

inline int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

// "(2, 128, 8, 64)"
inline std::string tuple_text(const int64_t* values, int32_t count) {
  std::string text = "(";
  for (int32_t i = 0; i < count; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return text + (count == 1 ? ",)" : ")");
}

template <class Error>
[[noreturn]] void fail(const char* name, const std::string& came, const std::string& expected) {
  throw Error(std::string(name) + ": " + expected + " was expected, got " + came);
}

// The exchange table of torch.Tensor, looked up once. Neither torch nor its tensor type is ever
// unloaded, so plain pointers do.
struct TorchExchange {
  PyTypeObject* tensor_type;
  const dlpack::Exchange* api;

  static const TorchExchange& get() {
    // Importing may let another thread run, which must not wait for us while it holds the GIL.
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchExchange> storage;
    return storage.call_once_and_store_result(load).get_stored();
  }

 private:
  static TorchExchange load() {
    const py::module_ torch = py::module_::import("torch");
    const py::object type = torch.attr("Tensor");
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    void* table = nullptr;
    if (!capsule.is_none()) {
      table = PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule);
      if (table == nullptr) throw py::error_already_set();
    }
    auto* header = static_cast<const dlpack::ExchangeHeader*>(table);
    while (header != nullptr && header->version.major != dlpack::kMajorVersion) {
      header = header->previous;
    }
    if (header == nullptr) {
      throw py::import_error(
          "torch >= 2.10 with the DLPack 1.x exchange API is needed, got torch " +
          py::str(torch.attr("__version__")).cast<std::string>());
    }
    return {reinterpret_cast<PyTypeObject*>(type.ptr()),
            reinterpret_cast<const dlpack::Exchange*>(header)};  // its first member
  }
};

inline std::string device_text(const dlpack::Device& device) {
  switch (device.type) {
    case dlpack::kCpu:
      return "cpu";
    case dlpack::kCuda:
      return "cuda:" + std::to_string(device.index);
    case dlpack::kCudaHost:
      return "pinned cpu memory";
    case dlpack::kRocm:
      return "rocm:" + std::to_string(device.index);
    default:
      return "DLPack device type " + std::to_string(device.type);
  }
}

inline std::string dtype_text(const dlpack::DataType& dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case dlpack::kInt:
      return "int" + bits;
    case dlpack::kUInt:
      return "uint" + bits;
    case dlpack::kFloat:
      return "float" + bits;
    case dlpack::kBFloat:
      return "bfloat" + bits;
    case dlpack::kComplex:
      return "complex" + bits;
    case dlpack::kBool:
      return "bool";
    default:
      return bits + "-bit DLPack type " + std::to_string(dtype.code);
  }
}

inline DType convert_dtype(const char* name, const dlpack::DataType& dtype) {
  if (dtype.lanes == 1) {
    if (dtype.code == dlpack::kBFloat && dtype.bits == 16) return DType::kBFloat16;
    if (dtype.code == dlpack::kFloat && dtype.bits == 16) return DType::kFloat16;
    if (dtype.code == dlpack::kFloat && dtype.bits == 32) return DType::kFloat32;
    if (dtype.code == dlpack::kInt && dtype.bits == 32) return DType::kInt32;
    if (dtype.code == dlpack::kInt && dtype.bits == 64) return DType::kInt64;
    if (dtype.code == dlpack::kBool && dtype.bits == 8) return DType::kBool;
  }
  fail<py::type_error>(name, dtype_text(dtype), "dtype float16, bfloat16 or float32");
}

// The library could not describe the tensor: it has no memory (meta, a functorch wrapper), is
// sparse, quantized, ... Of its own error only the first line is kept: a C++ trace follows.
[[noreturn]] inline void fail_unreadable(const char* name, py::handle object) {
  const py::error_already_set cause;
  const std::string reason = py::str(cause.value()).cast<std::string>();
  fail<py::value_error>(name,
                        std::string("a ") + Py_TYPE(object.ptr())->tp_name +
                            " that lends none: " + reason.substr(0, reason.find('\n')),
                        "a dense tensor with CUDA memory");
}

inline Tensor convert(const char* name, const dlpack::Tensor& source) {
  if (source.device.type != dlpack::kCuda) {
    fail<py::value_error>(name, device_text(source.device), "a CUDA tensor");
  }
  if (source.rank < 1 || source.rank > kMaxRank) {
    fail<py::value_error>(name, tuple_text(source.shape, source.rank), "a tensor of rank 1 to 4");
  }
  Tensor tensor;
  tensor.name = name;
  tensor.data = source.data;
  tensor.dtype = convert_dtype(name, source.dtype);
  tensor.device = source.device.index;
  tensor.rank = source.rank;
  int64_t elements = 1;
  for (int i = source.rank - 1; i >= 0; --i) {
    tensor.shape[i] = source.shape[i];
    tensor.strides[i] = source.strides != nullptr ? source.strides[i] : elements;
    elements *= source.shape[i];
  }
  if (source.data != nullptr) {
    tensor.data = static_cast<char*>(source.data) + source.byte_offset;
  } else if (elements != 0) {
    fail<py::value_error>(name, "null memory (a fake tensor?)", "a CUDA tensor with memory");
  }
  return tensor;
}

// Reads one argument. ~0.1 us; takes no reference and copies no data.
inline Tensor read_tensor(const char* name, py::handle object) {
  const TorchExchange& exchange = TorchExchange::get();
  if (!PyObject_TypeCheck(object.ptr(), exchange.tensor_type)) {
    fail<py::type_error>(name, Py_TYPE(object.ptr())->tp_name, "a torch.Tensor");
  }
  if (exchange.api->borrow != nullptr) {
    dlpack::Tensor source;
    if (exchange.api->borrow(object.ptr(), &source) != 0) fail_unreadable(name, object);
    return convert(name, source);
  }
  dlpack::ManagedTensor* managed = nullptr;
  if (exchange.api->export_managed(object.ptr(), &managed) != 0) fail_unreadable(name, object);
  struct Release {
    dlpack::ManagedTensor* held;
    ~Release() {
      if (held->deleter != nullptr) held->deleter(held);
    }
  } release{managed};
  if (managed->version.major != dlpack::kMajorVersion) {
    fail<py::value_error>(name, "version " + std::to_string(managed->version.major), "DLPack 1.x");
  }
  return convert(name, managed->tensor);
}

// The stream that torch would use now on `device`.
inline void* current_stream(int32_t device) {
  void* stream = nullptr;
  if (TorchExchange::get().api->current_stream(dlpack::kCuda, device, &stream) != 0) {
    throw py::error_already_set();
  }
  return stream;
}

inline void expect_dtype(const Tensor& tensor, DType expected) {
  if (tensor.dtype != expected) {
    fail<py::type_error>(tensor.name, dtype_name(tensor.dtype),
                         std::string("dtype ") + dtype_name(expected));
  }
}

inline void expect_rank(const Tensor& tensor, int32_t rank) {
  if (tensor.rank != rank) {
    fail<py::value_error>(tensor.name, "shape " + tuple_text(tensor.shape.data(), tensor.rank),
                          "rank " + std::to_string(rank));
  }
}

inline void expect_shape(const Tensor& tensor, std::initializer_list<int64_t> expected) {
  const auto rank = static_cast<int32_t>(expected.size());
  bool same = tensor.rank == rank;
  for (int i = 0; same && i < rank; ++i) same = tensor.shape[i] == expected.begin()[i];
  if (!same) {
    fail<py::value_error>(tensor.name, tuple_text(tensor.shape.data(), tensor.rank),
                          "shape " + tuple_text(expected.begin(), rank));
  }
}

inline void expect_device(const Tensor& tensor, const Tensor& reference) {
  if (tensor.device != reference.device) {
    fail<py::value_error>(
        tensor.name, "cuda:" + std::to_string(tensor.device),
        "device cuda:" + std::to_string(reference.device) + " of " + reference.name);
  }
}

// Rows that the kernels can load in vectors: unit last stride, aligned base and other strides.
inline void expect_aligned_rows(const Tensor& tensor) {
  if (tensor.empty()) return;
  const int64_t bytes = dtype_bytes(tensor.dtype);
  const int last = tensor.rank - 1;
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % kAlignment == 0;
  for (int i = 0; i < last; ++i) {
    aligned &= tensor.shape[i] == 1 || tensor.strides[i] * bytes % kAlignment == 0;
  }
  if (!aligned || (tensor.shape[last] != 1 && tensor.strides[last] != 1)) {
    fail<py::value_error>(
        tensor.name,
        "strides " + tuple_text(tensor.strides.data(), tensor.rank) + " and an address that is " +
            std::to_string(reinterpret_cast<uintptr_t>(tensor.data) % kAlignment) + " modulo 16",
        "last stride 1 and rows at multiples of 16 bytes");
  }
}

inline void expect_contiguous(const Tensor& tensor) {
  if (tensor.empty()) return;
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) {
      fail<py::value_error>(tensor.name,
                            "strides " + tuple_text(tensor.strides.data(), tensor.rank) +
                                " for shape " + tuple_text(tensor.shape.data(), tensor.rank),
                            "a contiguous tensor");
    }
    stride *= tensor.shape[i];
  }
}

// A contiguous fp32 tensor: lse, sinks, workspaces.
inline Tensor read_floats(const char* name, py::handle object, std::initializer_list<int64_t> shape,
                          const Tensor& q) {
  const Tensor tensor = read_tensor(name, object);
  expect_shape(tensor, shape);
  expect_dtype(tensor, DType::kFloat32);
  expect_device(tensor, q);
  expect_contiguous(tensor);
  return tensor;
}

}  // namespace flash_ext::binding
