// The forward pass of a plain eager call in one function, from three tensors to the launch. What
// follows from their shapes, strides and dtypes is worked out once.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "binding/passes.h"
#include "binding/tensor.h"

namespace flash_ext::binding {

class DirectForward {
 public:
  // questions: (function, usual answer) pairs; an answer is None, a bool or a small int.
  // choose: function (q, k, v, window_left, window_right, bhsd, deterministic) that checks its
  //     arguments and returns (kernel, softmax_scale, out, lse), or None where the operator has to
  //     run.
  DirectForward(const py::tuple& questions, py::object choose) : choose_(std::move(choose)) {
    for (py::handle item : questions) {
      const auto pair = py::reinterpret_borrow<py::tuple>(item);
      questions_.push_back({pair[0], pair[1]});
    }
    const py::module_ torch = py::module_::import("torch");
    parameter_type_ = torch.attr("nn").attr("Parameter");
    is_negated_ = torch.attr("Tensor").attr("is_neg");
    empty_like_ = torch.attr("empty_like");
  }

  // settings: (window_left, window_right, bhsd, deterministic, softmax_scale).
  // Returns out, or (out, lse) where lse is wanted, or None where the operator has to run.
  py::object operator()(py::handle q, py::handle k, py::handle v, py::handle settings,
                        bool wants_lse) {
    Inputs inputs;
    if (!is_usual() || !read(q, 0, inputs) || !read(k, 1, inputs) || !read(v, 2, inputs)) {
      return py::none();
    }
    const auto setting = [&settings](int i) -> py::handle {
      return PyTuple_GET_ITEM(settings.ptr(), i);
    };
    const bool bhsd = setting(2).ptr() == Py_True;
    const py::handle deterministic = setting(3);
    const py::handle softmax_scale = setting(4);
    const int64_t gradients = deterministic.is_none() ? 0 : deterministic.ptr() == Py_True ? 1 : 2;
    inputs.key[kFlags] = 2 * gradients + (bhsd ? 1 : 0);
    Window window{};
    if (!read(setting(0), window.left) || !read(setting(1), window.right)) return py::none();
    inputs.key[kFlags + 1] = window.left;
    inputs.key[kFlags + 2] = window.right;

    std::shared_ptr<const Route> route;  // our own: what allocates may run code that calls again
    if (const auto found = routes_.find(inputs.key); found != routes_.end()) {
      route = found->second;
    } else {
      route = make_route(q, k, v, window, bhsd, deterministic);
      if (routes_.size() >= kMostRoutes) routes_.clear();
      routes_.emplace(inputs.key, route);
    }
    if (route == nullptr) return py::none();

    ForwardCall call = route->call;
    call.params.q.data = inputs.data[0];
    call.params.k.data = inputs.data[1];
    call.params.v.data = inputs.data[2];
    py::object out = call_with(empty_like_, route->out_like);
    call.params.out.data = read_tensor("out", out).data;
    if (!softmax_scale.is_none()) call.params.softmax_scale = softmax_scale.cast<float>();
    if (!wants_lse) {
      call.params.lse = nullptr;
      run(call);
      return out;
    }
    const py::object lse = call_with(empty_like_, route->lse_like);
    call.params.lse = read_tensor("lse", lse).floats();
    run(call);
    return py::make_tuple(out, lse);
  }

 private:
  static constexpr size_t kMostRoutes = 4096;
  static constexpr int kFacts = 2 * kMaxRank + 1;  // of a tensor: shape, strides, dtype and device
  static constexpr int kFlags = 3 * kFacts;  // then the flags and the window
  using Key = std::array<int64_t, kFlags + 3>;

  struct Hash {
    size_t operator()(const Key& key) const {
      uint64_t hash = 0;
      for (const int64_t word : key) {
        hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
        hash ^= hash >> 32;
      }
      return hash;
    }
  };

  // Where a combination of arguments leads to: a call whose addresses each call replaces, and
  // tensors without memory that out and lse are allocated alike. Null leads to the operator.
  struct Route {
    ForwardCall call;
    py::object out_like;
    py::object lse_like;
  };

  struct Question {
    py::object ask;
    py::object usual;
  };

  struct Inputs {
    Key key;
    std::array<void*, 3> data;
  };

  static py::object call_with(py::handle function, py::handle argument) {
    PyObject* const result = PyObject_CallOneArg(function.ptr(), argument.ptr());
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }

  bool is_usual() const {
    for (const Question& question : questions_) {
      const auto answer =
          py::reinterpret_steal<py::object>(PyObject_CallNoArgs(question.ask.ptr()));
      if (!answer) throw py::error_already_set();
      if (!answer.is(question.usual)) return false;
    }
    return true;
  }

  static bool read(py::handle object, int64_t& limit) {
    limit = PyLong_AsLongLong(object.ptr());
    if (limit != -1 || PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();
    return false;
  }

  // Takes in a tensor of PyTorch's own types with CUDA memory at an address that kernels can read;
  // false for any other.
  bool read(py::handle object, int position, Inputs& inputs) const {
    const TorchExchange& exchange = TorchExchange::get();
    const auto* const type = reinterpret_cast<const PyObject*>(Py_TYPE(object.ptr()));
    if (type != reinterpret_cast<const PyObject*>(exchange.tensor_type) &&
        type != parameter_type_.ptr()) {
      return false;
    }
    dlpack::Tensor source;
    if (exchange.api->borrow == nullptr || exchange.api->borrow(object.ptr(), &source) != 0) {
      PyErr_Clear();  // the operator knows better what to say
      return false;
    }
    if (source.device.type != dlpack::kCuda || source.rank != kMaxRank ||
        source.strides == nullptr || source.data == nullptr) {
      return false;
    }
    void* const data = static_cast<char*>(source.data) + source.byte_offset;
    if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) return false;
    // A view may stand for the negative of what lies in memory, and the table does not tell.
    if (call_with(is_negated_, object).ptr() != Py_False) return false;

    int64_t* const facts = &inputs.key[position * kFacts];
    std::copy_n(source.shape, kMaxRank, facts);
    std::copy_n(source.strides, kMaxRank, facts + kMaxRank);
    facts[2 * kMaxRank] = int64_t{source.device.index} << 32 | int64_t{source.dtype.lanes} << 16 |
                          int64_t{source.dtype.bits} << 8 | int64_t{source.dtype.code};
    inputs.data[position] = data;
    return true;
  }

  std::shared_ptr<const Route> make_route(py::handle q, py::handle k, py::handle v, Window window,
                                          bool bhsd, py::handle deterministic) const {
    const py::object chosen = choose_(q, k, v, window.left, window.right, bhsd, deterministic);
    if (chosen.is_none()) return nullptr;
    const auto facts = py::reinterpret_borrow<py::tuple>(chosen);
    const py::object out = facts[2];
    const py::object lse = facts[3];
    const ForwardCall call = prepare_forward(facts[0].cast<int32_t>(), q, k, v, out, lse,
                                             py::none(), facts[1].cast<double>(), window.left,
                                             window.right, bhsd, py::none(), py::none());
    for (const py::object& tensor : {out, lse}) {
      tensor.attr("untyped_storage")().attr("resize_")(0);
    }
    return std::make_shared<const Route>(Route{call, out, lse});
  }

  std::vector<Question> questions_;
  py::object choose_;
  py::object parameter_type_;
  py::object is_negated_;
  py::object empty_like_;
  std::unordered_map<Key, std::shared_ptr<const Route>, Hash> routes_;
};

// Calls the DirectForward that `self` holds. By pybind11's way from Python to C++ a call would take
// a tenth of a microsecond longer.
inline PyObject* call_direct_forward(PyObject* self, PyObject* const* arguments,
                                     Py_ssize_t count) noexcept {
  constexpr Py_ssize_t kArguments = 5;
  constexpr Py_ssize_t kSettings = 5;
  if (count != kArguments || !PyTuple_Check(arguments[3]) ||
      PyTuple_GET_SIZE(arguments[3]) != kSettings) {
    PyErr_SetString(PyExc_TypeError,
                    "expected q, k, v, settings (a tuple of 5) and wants_lse, by position");
    return nullptr;
  }
  try {
    auto& direct = *static_cast<DirectForward*>(PyCapsule_GetPointer(self, nullptr));
    const bool wants_lse = arguments[4] == Py_True;
    return direct(arguments[0], arguments[1], arguments[2], arguments[3], wants_lse)
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A function that is a DirectForward.
inline py::object direct_forward(const py::tuple& questions, const py::object& choose) {
  static PyMethodDef method = {
      "direct_forward",
      reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_direct_forward)), METH_FASTCALL,
      "direct_forward(q, k, v, settings, wants_lse, /) -> out, (out, lse) or None"};
  const py::capsule direct(new DirectForward(questions, choose),
                           [](void* pointer) { delete static_cast<DirectForward*>(pointer); });
  PyObject* const function = PyCFunction_New(&method, direct.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

}  // namespace flash_ext::binding
