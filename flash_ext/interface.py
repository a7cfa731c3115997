"""The public functions: `attention`, and `explain`, which tells what it would do.

Their twin for packed sequences, `attention_varlen`, is in `varlen.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from flash_ext import direct, dispatch, ops, problem, varlen_problem
from flash_ext.autograd import eager_apply, record
from flash_ext.dispatch import Hardware, Plan
from flash_ext.problem import NO_WINDOW, Capability, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Modifiers(TypedDict, total=False):
    """Keyword arguments of both functions that do not decide the type of their result."""

    causal: bool
    softmax_scale: float | None
    window_size: WindowSize
    softcap: float
    alibi_slopes: Tensor | None
    attn_bias: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    deterministic: bool | None
    out_dtype: torch.dtype | None


class Options(Modifiers, total=False):
    """Keyword arguments of `attention` that do not decide the type of its result."""

    layout: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    layout: str = "bshd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, out = softmax(scale * q k^T) v, without the table of scores in memory.

    A score passes through, in this order: scale * q.k, softcap * tanh(score / softcap), + ALiBi,
    + attn_bias, masks, softmax (a sink joins its denominator), dropout, product with v. Query i
    sits at key position i + Sk - Sq (bottom-right alignment). A row that sees no key has out 0 and
    lse -inf (its sink, if there are sinks) and adds exactly 0 to every gradient.

    The algorithm is FlashAttention-2 (Dao, arXiv:2307.08691, section 3.1, algorithms 1 and 2): one
    pass over the keys with a running softmax (Milakov and Gimelshein, arXiv:1805.02867), and a
    backward pass that computes the scores again from the saved log-sum-exp. CPU tensors run the
    same algorithm in PyTorch operations.

    Extra memory is linear in the sequence length. Forward: lse alone, fp32 (B, Hq, Sq). Backward,
    while it runs: as much again and, where q has a gradient, dq in fp32, its rows padded to a
    multiple of 16 columns. Hopper's own backward kernels pad it to whole tiles: Sq to a multiple of
    64 or 128 and D to 64, 128 or 256. The gradient of a broadcast attn_bias is added up in fp32. On
    CUDA also, with `deterministic`, one int32 counter for each warp of each 128 queries and the
    gradient of a broadcast attn_bias in int64; without, where a group of query heads is split over
    thread blocks, which `explain` tells, dk and dv in fp32. On CPU also a few tiles.

    Args:
        q: (B, Sq, Hq, D). On CUDA float16 or bfloat16, on CPU also float32 and float64. Under
            autocast q, k and v are cast to its dtype. Any strides; a last stride other than 1, rows
            that do not begin at multiples of 16 bytes and head dims that are not multiples of 8
            cost a CUDA call one copy.
        k: (B, Sk, Hk, D), Hq a multiple of Hk: query head h reads key head h // (Hq / Hk).
        v: (B, Sk, Hk, Dv).
        causal: query i sees no key behind its own position; the right window limit becomes 0.
        softmax_scale: factor of q.k, any finite number; None is 1 / sqrt(D).
        window_size: (left, right): keys seen before and behind the query's position, inclusive;
            None or -1 is no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: float32 (Hq,) or (B, Hq); subtracts slope * |i + Sk - Sq - j| from each score.
            No gradient. (Press et al., arXiv:2108.12409, section 3.)
        attn_bias: broadcastable to (B, Hq, Sq, Sk), any strides. Floating: added, -inf masks;
            has a gradient. Bool: True may attend.
        sinks: (Hq,), floating: a logit per head that joins the softmax denominator only. Has a
            gradient. (Xiao et al., arXiv:2309.17453, section 3.)
        dropout_p: share of probabilities dropped, in [0, 1); the others are scaled up. The mask
            depends on (seed, batch and head, row, column) only; the seed is one int64 drawn on the
            device by a PyTorch random operation. 0 draws nothing.
        deterministic: True gives bit-equal gradients from run to run; None follows
            `torch.are_deterministic_algorithms_enabled()`. On CUDA the gradient of an attn_bias
            that is broadcast then costs a second run of the backward kernel.
        return_lse: also return the log-sum-exp of each row's scores.
        out_dtype: of out: None is q's; float32 keeps partial results exact enough for `merge`.
        layout: "bshd", or "bhsd" for tensors with heads before the sequence: (B, H, S, D).

    Returns:
        out (B, Sq, Hq, Dv), contiguous; with layout "bhsd" the transposed view of that memory. With
        return_lse, (out, lse): lse is (B, Hq, Sq), natural logarithm, float32 (float64 for float64
        inputs), and differentiable. Gradients are contiguous in their input's layout and have its
        dtype; there are no second derivatives.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value. The
            message names the argument, what came and what was expected.
        NotImplementedError: no kernel of this build serves the call on this GPU, forward or, when
            an input requires a gradient, backward; with the reasons that `explain` gives.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_tensors(q, k, v)  # raises
    if torch._C._is_any_autocast_enabled():  # on any device: one question in place of two
        autocast = autocast_dtype(q)
        if autocast is not None:
            q, k, v = (x.to(problem.cast_dtype(x.dtype, autocast)) for x in (q, k, v))
    modified = not (
        attn_bias is None
        and sinks is None
        and alibi_slopes is None
        and out_dtype is None
        and softcap == 0.0
        and dropout_p == 0.0
    )
    if modified:
        check_modifiers(attn_bias, sinks, alibi_slopes)
    if (
        modified
        or softmax_scale is not None
        or deterministic is not None
        or return_lse is not False
        or layout != "bshd"
    ):
        check_plain(softmax_scale, softcap, dropout_p, deterministic, return_lse, out_dtype, layout)
    left, right = problem.window_limits(causal, window_size)
    recorded = (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (attn_bias is not None and attn_bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ) and torch.is_grad_enabled()
    if not recorded:
        deterministic = None
    elif deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    settings: tuple[Any, ...] = (left, right, layout == "bhsd", deterministic, softmax_scale)
    modifiers: tuple[Any, ...] = ()
    if modified:
        settings += (softcap, dropout_p)
        seed = new_seed(q.device) if dropout_p > 0.0 else None
        modifiers = (attn_bias, sinks, alibi_slopes, seed, out_dtype)
    else:
        found = direct.forward(q, k, v, settings, recorded or return_lse)
        if found is not None:
            call = (found, settings, return_lse, ops.OPERATORS)
            return eager_apply(q, k, v, call) if recorded else found
    if recorded:
        return record(q, k, v, settings, return_lse, *modifiers)
    out, lse = ops.forward(q, k, v, *settings, *modifiers)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    layout: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    capability: Capability | None = None,
) -> Plan:
    """What `attention` would do with the same arguments, and why. Runs nothing, reads no data.

    With `cu_seqlens_q` and `cu_seqlens_k` it is what `attention_varlen` would do.

    Args:
        q, k, v and the modifiers: as for `attention`. Real, fake and meta tensors.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as for
            `attention_varlen`, which takes packed q, k and v and no layout.
        capability: explain for CUDA hardware of this compute capability, such as (9, 0), wherever
            the tensors are. None: CPU tensors explain the reference path, CUDA tensors their own
            GPU, and meta tensors the current GPU.

    Returns:
        A `Plan` with the choice for the forward and the backward pass: kernel family, tile, why it
        was chosen, why each one before it in the build's order of preference was not. A pass that
        no kernel serves has family None and the reasons. `print(plan)` shows all of it. On hardware
        that is not present, the shared memory of a block is taken from NVIDIA's tables, and what
        depends on the number of multiprocessors is left open.

    Raises:
        TypeError, ValueError: as the function does; also where a capability is needed, because the
            tensors are not on the CPU and there is no GPU.
    """
    check_tensors(q, k, v)
    check_plain(softmax_scale, softcap, dropout_p, deterministic, return_lse, out_dtype, layout)
    left, right = problem.window_limits(causal, window_size)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_modifiers(attn_bias, sinks, alibi_slopes)
    on_cpu = q.is_cpu and capability is None
    device_type, autocast = "cpu" if on_cpu else "cuda", autocast_dtype(q)
    tensors = (q, k, v, attn_bias, alibi_slopes, sinks)
    flags = (left, right, softcap, dropout_p, out_dtype, deterministic)
    sequences = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    if all(x is None for x in sequences):
        asked = problem.of_tensors(
            *tensors, *flags, layout == "bhsd", device_type=device_type, autocast=autocast
        )
    else:
        if layout != "bshd":
            raise ValueError(f"layout is {layout!r}, expected 'bshd' with packed sequences")
        packing = varlen_problem.packing_of(*sequences)
        asked = varlen_problem.of_tensors(
            packing, *tensors, *flags, device_type=device_type, autocast=autocast
        )
    if on_cpu:
        return dispatch.plan_cpu(asked, dispatch.in_force)
    return ops.plan_for(_hardware(q.device, capability), asked)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, value in (("q", q), ("k", k), ("v", v)):
            problem.check_is_tensor(name, value)


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for where q is, None outside autocast."""
    device_type = "cpu" if q.is_cpu else "cuda"
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def check_plain(
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
    layout: str,
) -> None:
    if softmax_scale is not None:
        problem.check_scale(softmax_scale)
    if softcap != 0.0:
        problem.check_softcap(softcap)
    if dropout_p != 0.0:
        problem.check_dropout(dropout_p)
    if deterministic is not None:
        problem.check_flag("deterministic", deterministic)
    if return_lse is not False:
        problem.check_flag("return_lse", return_lse)
    if out_dtype is not None:
        problem.check_is_dtype("out_dtype", out_dtype)
    problem.check_layout(layout)


def check_modifiers(
    attn_bias: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None
) -> None:
    named = {"attn_bias": attn_bias, "sinks": sinks, "alibi_slopes": alibi_slopes}
    for name, value in named.items():
        if value is not None:
            problem.check_is_tensor(name, value)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, expected a constant: it has none")


def new_seed(device: torch.device) -> Tensor:
    """One int64 (1,) for the dropout mask, drawn where it is used."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def _hardware(device: torch.device, capability: Capability | None) -> Hardware:
    """What is explained."""
    if capability is not None:
        problem.check_capability(capability)
        return Hardware.absent(capability)
    if not torch.cuda.is_available():
        raise ValueError(
            f"capability is None, expected one such as (9, 0): q is on {device} and there is no "
            "GPU to ask"
        )
    if device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return ops.hardware_of(device)
