// The seam between the binding and the kernels: plain structs, no Python, no torch, no CUDA types.
//
// One alphabet everywhere: B batch, Sq/Sk query/key length, Hq/Hk query/key heads, D head dim of
// q and k, Dv head dim of v. Strides count elements, never bytes, and are 64-bit.
#pragma once

#include <cstdint>

namespace flash_ext {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kInt32, kInt64, kBool };

// A tensor read as (batch, sequence, head, dim), whatever the order of its memory.
// The dim stride is 1. A stride may be 0 (expanded input).
struct View {
  void* data;  // null when the tensor is absent (a gradient nobody asked for) or empty
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
};

// A tensor read as the table of scores, (B, Hq, Sq, Sk). A stride is 0 where the tensor has one
// element for the whole dim.
struct TableView {
  void* data;  // null when the tensor is absent
  DType dtype;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  int64_t key_stride;
};

// Sequences, and packed ones together, are shorter than this, so that positions and their
// differences fit 32 bits.
constexpr int64_t kMaxSeqlen = int64_t{1} << 29;

// Query rows to which a thread block of a deterministic backward pass adds in one turn, a multiple
// of every kBlockM. With more rows blocks wait less often, but start later one after the other.
constexpr int kTurnRows = 128;

// Sizes shared by every pass.
struct Shape {
  int64_t batch;       // B
  int64_t seqlen_q;    // Sq
  int64_t seqlen_k;    // Sk
  int32_t heads_q;     // Hq, a multiple of heads_k
  int32_t heads_k;     // Hk
  int32_t head_dim;    // D, a multiple of 8
  int32_t head_dim_v;  // Dv, a multiple of 8
};

// Where packed sequences lie. Then the batch entry that Shape speaks of is one, and its rows are
// those of all sequences. Sequence b has the rows from cu_seqlens[b] to before cu_seqlens[b + 1],
// and uses the first seqused[b] of them.
struct Packing {
  const int32_t* cu_seqlens_q;  // (batch + 1,), or null: not packed
  const int32_t* cu_seqlens_k;  // (batch + 1,)
  const int32_t* seqused_q;     // (batch,), or null: all rows
  const int32_t* seqused_k;     // (batch,), or null
  int64_t batch;
  int64_t longest_q;  // rows of a sequence that may be used, for the sake of a bias
  int64_t longest_k;
};

// Query i sits at key position i + Sk - Sq and sees keys in
// [position - window_left, position + window_right]; -1 is no limit. Causal is window_right = 0.
struct Window {
  int64_t left;
  int64_t right;
};

// What kernels with all features do to scores and probabilities, in this order, beyond masks.
struct Modifiers {
  float softcap;  // scores become softcap * tanh(score / softcap); 0: off

  // (B, Hq), or (Hq,) with batch stride 0; null: off. Subtracts slope * |i + Sk - Sq - j|.
  const float* alibi_slopes;
  int64_t alibi_batch_stride;

  // Null: none. kFloat16, kBFloat16, kFloat32: added, -inf masks. kBool: true may attend.
  TableView bias;
  bool bias_in_pairs;  // keys 2n and 2n + 1 of a row lie where one load can fetch both
  bool bias_in_chunks;  // so do keys 8n to 8n + 7, of 16 bits each

  // Probabilities whose 16-bit random value is below the threshold are dropped (core/dropout.h) and
  // the others multiplied by keep_scale. 0 and 1: off.
  uint32_t drop_threshold;
  float keep_scale;
  const int64_t* seed;  // one element
};

struct ForwardParams {
  Shape shape;
  Packing packing;
  Window window;
  DType dtype;  // of q, k, v
  DType out_dtype;  // dtype, or kFloat32 for partial results fit to be merged
  float softmax_scale;  // any sign

  View q;  // (B, Sq, Hq, D)
  View k;  // (B, Sk, Hk, D)
  View v;  // (B, Sk, Hk, Dv)
  View out;  // (B, Sq, Hq, Dv)

  // (B, Hq, Sq) contiguous, natural log; -inf where a row sees no key. Null: nobody needs it.
  float* lse;
  const float* sinks;  // (Hq,) or null: exp(sink) joins the softmax denominator

  Modifiers modifiers;  // lean kernels do not look at them
};

// What makes the sum of a bias gradient independent of the order of additions: the main kernel runs
// twice, first to find the largest addition, then to add integers (core/fixed_point.h).
struct FixedPoint {
  int64_t* sums;  // one for each element of the gradient, zero at the start; null: off
  uint32_t* largest;  // bits of one float, zero at the start: the largest finite |addition|
  int64_t elements;
  int32_t log_terms;  // an element is the sum of at most 2^log_terms scores' gradients
  bool measures;  // the first run
};

struct BackwardParams {
  Shape shape;
  Packing packing;
  Window window;
  DType dtype;  // of every 16-bit tensor below
  float softmax_scale;

  View q;  // (B, Sq, Hq, D)
  View k;  // (B, Sk, Hk, D)
  View v;  // (B, Sk, Hk, Dv)
  View out;  // (B, Sq, Hq, Dv)
  View dout;  // (B, Sq, Hq, Dv)

  const float* lse;  // (B, Hq, Sq) contiguous, of the forward pass
  const float* dlse;  // (B, Hq, Sq) contiguous or null: gradient that arrived at lse

  float* delta;  // (B, Hq, Sq) workspace, written first: rowsum(dO * O) - dlse

  // Workspace of dQ, zeroed by the kernels: (B, Hq, Sq, D rounded up to 16), or, where the kernel
  // asks for whole tiles, (B, Hq, Sq rounded up to block_m, head_dim). Null when dq is absent.
  float* dq_accum;

  // Counters, zero at the start, or null: 1 for blocks, then (B, Hq, Sq / kTurnRows rounded up,
  // warps), packed (Hq, Tq / kTurnRows rounded down + batch + 1, warps). With them thread blocks
  // start in order and add to dQ in order, so that its bits never change.
  int32_t* dq_turns;

  // Thread blocks that share the query heads of a group, 1 to Hq / Hk; 1 where dq_turns or packing
  // is given.
  // With more than 1 they add up dK and dV in workspaces, zeroed by the launch: null with 1, and
  // where the gradient is absent.
  int32_t splits;
  float* dk_accum;  // (B, Hk, Sk, D rounded up to 16)
  float* dv_accum;  // (B, Hk, Sk, Dv rounded up to 16)

  View dq;  // (B, Sq, Hq, D), data may be null
  View dk;  // (B, Sk, Hk, D), data may be null
  View dv;  // (B, Sk, Hk, Dv), data may be null

  Modifiers modifiers;  // lean kernels do not look at them

  // Gradient of an added bias, zero at the start; data may be null. Where the bias is broadcast it
  // is kFloat32 and thread blocks add to it, else each element is written once.
  TableView dbias;
  bool dbias_is_sum;
  FixedPoint dbias_fixed;  // of a sum; then only what is not finite is added to dbias itself
};

}  // namespace flash_ext
