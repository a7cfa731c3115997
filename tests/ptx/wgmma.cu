// One product of 64 x 16 k by 16 k x N for every wgmma that ptx/wgmma.h has, from images of shared
// memory that the test laid out itself.
#include <type_traits>
#include <utility>

#include "core/wgmma_layout.h"
#include "harness.h"
#include "ptx/proxy_fence.h"
#include "ptx/wgmma.h"

namespace flash_ext::test {

using ptx::Major;

constexpr int kMostK = 256;
constexpr int kThreads = 128;

enum class Form : int {
  kSmemKK,    // A in shared memory, K-major; B K-major
  kSmemKMN,   // A K-major; B MN-major
  kRegsK,     // A in registers; B K-major
  kRegsMN,    // A in registers; B MN-major
  kSmemMNK,   // A MN-major; B K-major
  kSmemMNMN,  // A MN-major; B MN-major
};

struct Product {
  const void* a;  // image (kABytes), or (64, kMostK) row-major for registers
  const void* b;  // image
  float* out;     // (64, N)
  int steps;      // of k16, at least 1
  int a_slab;     // columns of A's and B's slabs, 64 or 32
  int b_slab;
};

// An M or N x K operand in shared memory; MN-major tiles hold it transposed.
template <int kMN, int kSlabCols, Major kMajor>
using Tile = std::conditional_t<kMajor == Major::kK, SlabTile<kMN, kMostK, kSlabCols>,
                                SlabTile<kMostK, kMN, kSlabCols>>;

template <int kMN, Major kMajor>
constexpr int kImageBytes = Tile<kMN, 64, kMajor>::kBytes;  // the larger one

// The descriptors of all steps, so that the loop over products holds nothing else.
template <int kMN, Major kMajor>
__device__ void describe(uint64_t (&steps)[kMostK / 16], uint32_t image, int slab) {
  const int step = threadIdx.x;
  if (step < kMostK / 16)
    steps[step] = slab == 64 ? WgmmaOperand<Tile<kMN, 64, kMajor>, kMajor>(image).at(step)
                             : WgmmaOperand<Tile<kMN, 32, kMajor>, kMajor>(image).at(step);
}

template <int kN>
__device__ void write(const float (&acc)[kN / 2], float* out) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i)
    out[accumulator_row(threadIdx.x, i) * kN + accumulator_col(threadIdx.x, i)] = acc[i];
}

template <typename T, int kN, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(kThreads, 1) smem_product(Product p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t a[kMostK / 16], b[kMostK / 16];
  constexpr int kABytes = kImageBytes<64, kMajorA>;
  copy_chunks(smem, p.a, kABytes);
  copy_chunks(smem + kABytes, p.b, kImageBytes<kN, kMajorB>);
  describe<64, kMajorA>(a, ptx::shared_address(smem), p.a_slab);
  describe<kN, kMajorB>(b, ptx::shared_address(smem) + kABytes, p.b_slab);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[kN / 2];
  int step = 0;
#pragma unroll 1
  do {
    ptx::wgmma_fence();
    ptx::wgmma<T, kN, kMajorA, kMajorB>(acc, a[step], b[step], step > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(acc);
  } while (++step < p.steps);
  write<kN>(acc, p.out);
}

template <typename T, int kN, Major kMajorB>
__global__ void __launch_bounds__(kThreads, 1) register_product(Product p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t b[kMostK / 16];
  copy_chunks(smem, p.b, kImageBytes<kN, kMajorB>);
  describe<kN, kMajorB>(b, ptx::shared_address(smem), p.b_slab);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  const int row = accumulator_row(threadIdx.x, 0), pair = threadIdx.x % 4;
  float acc[kN / 2];
  int step = 0;
#pragma unroll 1
  do {
    uint32_t a[4];  // (row, 2q..) (row + 8, 2q..) (row, 8 + 2q..) (row + 8, 8 + 2q..)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = static_cast<const uint32_t*>(
          p.a)[((row + i % 2 * 8) * kMostK + step * 16 + i / 2 * 8) / 2 + pair];
    ptx::pin(a);
    ptx::wgmma_fence();
    ptx::wgmma<T, kN, kMajorB>(acc, a, b[step], step > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(acc);
  } while (++step < p.steps);
  write<kN>(acc, p.out);
}

template <typename T, int kN>
int run_form(Form form, Product p) {
  const auto smem = [&](auto kernel, int a_bytes, int b_bytes) {
    return run(kernel, {1, kThreads, a_bytes + b_bytes}, p);
  };
  constexpr int kA = kImageBytes<64, Major::kK>, kATrans = kImageBytes<64, Major::kMN>;
  constexpr int kB = kImageBytes<kN, Major::kK>, kBTrans = kImageBytes<kN, Major::kMN>;
  if (form == Form::kSmemKK) return smem(smem_product<T, kN, Major::kK, Major::kK>, kA, kB);
  if (form == Form::kSmemKMN) return smem(smem_product<T, kN, Major::kK, Major::kMN>, kA, kBTrans);
  if (form == Form::kRegsK) return smem(register_product<T, kN, Major::kK>, 0, kB);
  if (form == Form::kRegsMN) return smem(register_product<T, kN, Major::kMN>, 0, kBTrans);
  if constexpr (kN == 64 || kN == 128) {
    if (form == Form::kSmemMNK)
      return smem(smem_product<T, kN, Major::kMN, Major::kK>, kATrans, kB);
    if (form == Form::kSmemMNMN)
      return smem(smem_product<T, kN, Major::kMN, Major::kMN>, kATrans, kBTrans);
  }
  return cudaErrorInvalidValue;
}

template <typename T, int... kNs>
int run_n(std::integer_sequence<int, kNs...>, int n, Form form, Product p) {
  int error = cudaErrorInvalidValue;
  ((n == kNs ? void(error = run_form<T, kNs>(form, p)) : void()), ...);
  return error;
}

}  // namespace flash_ext::test

using namespace flash_ext::test;

extern "C" int test_product(int bf16, int n, int form, const void* a, const void* b, float* out,
                            int steps, int a_slab, int b_slab) {
  using Ns = std::integer_sequence<int, 32, 48, 64, 80, 96, 128, 160, 176, 192, 256>;
  const Product p{a, b, out, steps, a_slab, b_slab};
  const Form as = static_cast<Form>(form);
  return bf16 ? run_n<__nv_bfloat16>(Ns(), n, as, p) : run_n<__half>(Ns(), n, as, p);
}
