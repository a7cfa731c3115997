"""The public function for packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from flash_ext import interface, problem, varlen_ops, varlen_problem
from flash_ext.autograd import record
from flash_ext.problem import NO_WINDOW, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


class Options(interface.Modifiers, total=False):
    """Keyword arguments of `attention_varlen` that do not decide the type of its result."""

    cu_seqlens_q: Required[Tensor]
    cu_seqlens_k: Required[Tensor]
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention within each of B sequences of different lengths, packed one behind the other.

    Sequence b is what `attention` computes from q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]] and the same
    of k and v with cu_seqlens_k: no score crosses from one sequence to another, and no memory or
    time is spent on padding. Sq and Sk below are the lengths of one sequence, and differ from one
    to the next; either may be 0, anywhere. Query i of a sequence sits at its key position
    i + Sk - Sq (bottom-right alignment). A query that sees no key has out 0 and lse -inf (its sink,
    if there are sinks) and adds exactly 0 to every gradient.

    With `seqused_q` or `seqused_k` a sequence uses only its first rows, and these are its length.
    Rows behind them, and rows behind the last sequence, are never read: whatever they hold, their
    out and their gradients are 0 and their lse is -inf.

    The algorithm is that of `attention`: FlashAttention-2 (Dao, arXiv:2307.08691, section 3.1,
    algorithms 1 and 2) on each sequence. CPU tensors run it in PyTorch operations, and the lengths
    are checked on each call. CUDA tensors run it in the generic kernels, which read the lengths on
    the device: nothing waits for them, and a replayed CUDA graph takes the lengths that it finds.
    Wrong ones lead to wrong results there, never to memory outside the tensors.

    Extra memory is linear in the number of rows: lse, fp32 (Hq, Tq), and, while a pass runs, on the
    CPU what `attention` takes for the longest run of neighbours of equal lengths, its results
    included, and on CUDA in the backward pass fp32 (Hq, Tq, D + 1), with `deterministic` also a few
    counters for each 128 rows. The gradient of a bias takes up to three tables of the bias's size
    in fp32, that of a broadcast one with `deterministic` on CUDA two more.

    Args:
        q: (Tq, Hq, D), Tq rows of all sequences, fewer than 2^29. On CUDA float16 or bfloat16, on
            CPU also float32 and float64. Under autocast q, k and v are cast to its dtype. Any
            strides.
        k: (Tk, Hk, D), Hq a multiple of Hk: query head h reads key head h // (Hq / Hk).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: int32 (B + 1,) on the device of q: sequence b has the rows from
            cu_seqlens_q[b] to before cu_seqlens_q[b + 1]. It begins with 0 and never falls; it may
            end before Tq.
        cu_seqlens_k: the same for the rows of k and v. It may be the same tensor.
        max_seqlen_q: no sequence uses more queries. A hint, that may be too large or left out.
        max_seqlen_k: no sequence uses more keys; likewise.
        seqused_q: int32 (B,): queries that each sequence uses, None: all that it has.
        seqused_k: int32 (B,): keys that each sequence uses; likewise.
        causal: query i sees no key behind its own position; the right window limit becomes 0.
        softmax_scale: factor of q.k, any finite number; None is 1 / sqrt(D).
        window_size: (left, right): keys seen before and behind the query's position, inclusive;
            None or -1 is no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: float32 (Hq,) or (B, Hq); subtracts slope * |i + Sk - Sq - j| from each score.
            No gradient.
        attn_bias: broadcastable to (B, Hq, max Sq, max Sk), any strides, indexed by the position
            within the sequence; more rows and columns than the longest sequence has do no harm.
            Floating: added, -inf masks; has a gradient. Bool: True may attend.
        sinks: (Hq,), floating: a logit per head that joins the softmax denominator only. Has a
            gradient.
        dropout_p: share of probabilities dropped, in [0, 1); the others are scaled up. The mask
            depends on (seed, sequence and head, row and column within the sequence) only: the same
            seed drops the same of sequence b as `attention` does of batch entry b.
        deterministic: True gives bit-equal gradients from run to run; None follows
            `torch.are_deterministic_algorithms_enabled()`. On CUDA the gradient of an attn_bias
            that is broadcast then costs a second run of the backward kernel.
        return_lse: also return the log-sum-exp of each row's scores.
        out_dtype: of out: None is q's; float32 keeps partial results exact enough for `merge`.

    Returns:
        out (Tq, Hq, Dv), contiguous. With return_lse, (out, lse): lse is (Hq, Tq), natural
        logarithm, float32 (float64 for float64 inputs), and differentiable. Gradients are
        contiguous and have the dtype of their input; there are no second derivatives.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value. The
            message names the argument, what came and what was expected. Whether cu_seqlens and
            seqused fit the tensors, and max_seqlen and attn_bias the longest sequence, is known
            only from their values: it is checked on the CPU always, on CUDA where the environment
            variable FLASH_EXT_CHECK was 1 when the package was imported, at the price of waiting
            for the device.
        NotImplementedError: a combination that no compiled kernel serves; with the reasons that
            `explain` gives.
    """
    interface.check_tensors(q, k, v)
    packing = varlen_problem.packing_of(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    )
    autocast = interface.autocast_dtype(q)
    if autocast is not None:
        q, k, v = (x.to(problem.cast_dtype(x.dtype, autocast)) for x in (q, k, v))
    interface.check_modifiers(attn_bias, sinks, alibi_slopes)
    interface.check_plain(
        softmax_scale, softcap, dropout_p, deterministic, return_lse, out_dtype, "bshd"
    )
    left, right = problem.window_limits(causal, window_size)
    leaves = [x for x in (q, k, v, attn_bias, sinks) if x is not None]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    if not recorded:
        deterministic = None
    elif deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    settings: tuple[Any, ...] = (
        *(left, right, deterministic, softmax_scale, softcap, dropout_p),
        *(packing.max_seqlen_q, packing.max_seqlen_k),
    )
    seed = interface.new_seed(q.device) if dropout_p > 0.0 else None
    tensors: tuple[Any, ...] = (
        *(attn_bias, sinks, alibi_slopes, seed),
        *(packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_q, packing.seqused_k),
    )
    if recorded:
        operators = varlen_ops.OPERATORS
        return record(q, k, v, settings, return_lse, *tensors, out_dtype, operators=operators)
    out, lse = varlen_ops.forward(q, k, v, *settings, *tensors, out_dtype)
    return (out, lse) if return_lse else out
