// The part of the DLPack 1.x C ABI that the binding reads, declared from the published layout
// (https://dmlc.github.io/dlpack/latest/c_api.html). Field order and widths are the ABI; the names
// are ours.
//
// A tensor library publishes a table of functions in a capsule named kExchangeCapsule, found at
// `type(tensor).__dlpack_c_exchange_api__`. It lives as long as the process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_ext::dlpack {

inline constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajorVersion = 1;

struct Version {
  uint32_t major;  // another major number is another layout
  uint32_t minor;  // only adds enumerators
};

enum DeviceType : int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kRocm = 10,
};

struct Device {
  int32_t type;  // a DeviceType or one not listed here
  int32_t index;
};

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kComplex = 5,
  kBool = 6,
};

struct DataType {
  uint8_t code;  // a TypeCode or one not listed here
  uint8_t bits;
  uint16_t lanes;  // 1 for scalars
};

struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;    // `rank` lengths
  int64_t* strides;  // `rank` strides in elements; before DLPack 1.2 null meant contiguous
  uint64_t byte_offset;
};

// A tensor that its holder must give back through `deleter`.
struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);  // may be null
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // the same library's table of an older version, or null
};

// Functions return 0, or -1 with a Python error set.
struct Exchange {
  ExchangeHeader header;
  void (*allocate)();  // not used here
  int (*export_managed)(void* object, ManagedTensor** out);
  void (*import_managed)();  // not used here
  // Lends the tensor without ownership, valid while the caller holds `object`. May be null.
  int (*borrow)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};

static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, byte_offset) == 40);
static_assert(offsetof(ManagedTensor, tensor) == 32);
static_assert(sizeof(Exchange) == 56 && offsetof(Exchange, current_stream) == 48);

}  // namespace flash_ext::dlpack
