"""The private operators flash_ext::varlen_forward and flash_ext::varlen_backward.

As their dense twins in `ops.py` they have a CPU, a CUDA and a fake implementation, check their
tensors wherever a call lands, and are pure functions of their arguments. To the CUDA kernels packed
tensors are one batch entry, and the offsets say which of its rows are a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_ext import dispatch, operands, ops, varlen_problem, varlen_reference
from flash_ext.dispatch import Plan
from flash_ext.problem import check_out_dtype
from flash_ext.varlen_problem import Packing, check_inputs, read_sequences

# What both operators take after their tensors, in the order in which `autograd.py` keeps it:
# settings, the modifiers that may have a gradient, tensors that have none.
_REST = (
    "SymInt window_left, SymInt window_right, bool? deterministic, float? softmax_scale, "
    "float softcap, float dropout_p, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "Tensor? attn_bias, Tensor? sinks, Tensor? alibi_slopes, Tensor? seed, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
)
_FORWARD = (
    f"varlen_forward(Tensor q, Tensor k, Tensor v, {_REST}, ScalarType? out_dtype=None) "
    "-> (Tensor out, Tensor lse)"
)
_BACKWARD = (  # want: which of dq, dk, dv, dbias and dsinks
    "varlen_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, bool[5] want, {_REST}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_TENSORS = ("q", "k", "v", "attn_bias", "alibi_slopes", "sinks")
_FLAGS = ("window_left", "window_right", "softcap", "dropout_p", "out_dtype", "deterministic")
_WANT = ("want_dq", "want_dk", "want_dv", "want_dbias", "want_dsinks")


def _call(operator: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[dict[str, Any], Packing]:
    """All arguments by name, those that say where the sequences lie apart."""
    named = ops.named_arguments(operator, args)
    return named, Packing(**{name: named.pop(name) for name in Packing._fields})


def _plan(named: dict[str, Any], packing: Packing) -> Plan:
    """What the loaded build does with checked arguments."""
    facts: list[Any] = [named.get(name) for name in (*_TENSORS, *_FLAGS)]
    device = named["q"].device
    asked = varlen_problem.of_tensors(packing, *facts, device_type=device.type)
    return ops.plan_on(device, asked)


# CPU


def _prepare_cpu(
    operator: torch._ops.OpOverload, args: Sequence[Any]
) -> tuple[dict[str, Any], Packing]:
    named, packing = _call(operator, args)
    _plan(named, packing)  # raises
    del named["deterministic"]  # each sum has one order
    if named["softmax_scale"] is None:
        named["softmax_scale"] = named["q"].shape[-1] ** -0.5
    return named, packing


def _forward_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    named, packing = _prepare_cpu(forward, args)
    tensors = [named.pop(name) for name in ("q", "k", "v")]
    with torch.autocast("cpu", enabled=False):
        return varlen_reference.forward(*tensors, packing, **named)


def _backward_cpu(*args: Any) -> ops.Gradients:
    named, packing = _prepare_cpu(backward, args)
    tensors = [named.pop(name) for name in ("dout", "dlse", "q", "k", "v", "out", "lse")]
    wanted = dict(zip(_WANT, named.pop("want"), strict=True))
    with torch.autocast("cpu", enabled=False):
        return varlen_reference.backward(*tensors, packing, **wanted, **named)


# CUDA


def _launch_of(named: dict[str, Any], packing: Packing) -> ops.Launch:
    """The Launch of checked arguments, found once per combination of their facts.

    With FLASH_EXT_CHECK=1 the sequences are checked on each call, which waits for the device.
    """
    flags = tuple(named.get(name) for name in _FLAGS)
    tensors = (*(named[name] for name in _TENSORS), *packing[:4])
    facts = tuple(
        x is None or (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors
    )
    hints = tuple(x is None or x >= 0 for x in packing[4:])
    key = (facts, hints, flags, dispatch.in_force)
    launch = _launches.get(key)
    if launch is None:
        launch = _new_launch(named, packing)
        if len(_launches) >= ops.MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    if varlen_problem.CHECK:
        read_sequences(named["q"], named["k"], named["attn_bias"], packing)
    return launch


def _new_launch(named: dict[str, Any], packing: Packing) -> ops.Launch:
    plan = _plan(named, packing)
    problem = plan.problem
    like = named["q"].new_empty(0, device="meta")
    out = like.new_empty((problem.Sq, problem.Hq, problem.Dv))
    lse = like.new_empty((problem.Hq, problem.Sq))
    return ops.Launch.of(plan, out, lse, in_place=False)  # asked tensor by tensor


_launches: dict[tuple[Any, ...], ops.Launch] = {}


def _as_batch(x: Tensor) -> Tensor:
    """(T, H, D) as the one batch entry that kernels take, in memory that they can read."""
    return operands.readable(x.unsqueeze(0), bhsd=False)


def _settings(named: dict[str, Any], launch: ops.Launch) -> tuple[float, int, int, bool]:
    """Scale, window and layout as the extension takes them."""
    scale = named["softmax_scale"]
    scale = launch.default_scale if scale is None else scale
    return scale, named["window_left"], named["window_right"], False


def _modifiers(named: dict[str, Any]) -> operands.Modifiers | None:
    names = ("softcap", "dropout_p", "attn_bias", "alibi_slopes", "seed")
    return operands.modifiers(*(named[name] for name in names))


def _offsets(packing: Packing) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.contiguous() for x in packing[:4])


def _forward_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    """out and lse by a kernel. No workspace; inputs that it cannot read in place are copied."""
    named, packing = _call(forward, args)
    launch = _launch_of(named, packing)
    kernel = launch.kernel_for(named["deterministic"])
    out, lse = launch.new_results(named["q"], named["out_dtype"])
    q, k, v = (_as_batch(named[name]) for name in ("q", "k", "v"))
    sinks = named["sinks"]
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    wide = out if v.shape[-1] == out.shape[-1] else out.new_empty((*out.shape[:-1], v.shape[-1]))
    launch.extension.forward(
        kernel.index, q, k, v, wide.unsqueeze(0), lse.unsqueeze(0), sinks,
        *_settings(named, launch), _modifiers(named), _offsets(packing),
    )  # fmt: skip
    if wide is not out:
        out.copy_(wide[..., : out.shape[-1]])
    return out, lse


def _backward_cuda(*args: Any) -> ops.Gradients:
    """Gradients by a kernel.

    Workspace in fp32: delta (Hq, Tq) and, where dq is wanted, dQ (Hq, Tq, D rounded up to 16). With
    `deterministic` counters, int32 (1 + Hq * (Tq / 128 + B + 1) * warps,), and copies of the
    offsets. The gradient of a broadcast 16-bit or fp64 attn_bias is added up in fp32 in the shape
    of attn_bias, that of any broadcast one with `deterministic` also in int64. Tensors that kernels
    cannot read in place are copied.
    """
    named, packing = _call(backward, args)
    deterministic = bool(named["deterministic"])
    launch = _launch_of(named | {"deterministic": deterministic}, packing)
    kernel = launch.backward or launch.plan.kernel("backward")  # raises
    problem = launch.plan.problem
    want_dq, want_dk, want_dv, want_dbias, want_dsinks = named["want"]
    like, sinks, attn_bias = named["q"], named["sinks"], named["attn_bias"]
    q, k, v, out, dout = (
        _as_batch(named[name].to(like.dtype)) for name in ("q", "k", "v", "out", "dout")
    )
    lse, dlse = named["lse"].contiguous().unsqueeze(0), named["dlse"]
    if dlse is not None:
        dlse = dlse.to(torch.float32).contiguous().unsqueeze(0)
    delta = torch.empty_like(lse)
    dq_accum = operands.dq_workspace(kernel, lse, problem.D) if want_dq else None
    dq, dk, dv = (
        x.new_empty(x.shape) if wanted else None
        for x, wanted in ((q, want_dq), (k, want_dk), (v, want_dv))
    )
    dq_turns = None
    if want_dq and deterministic:
        turns = problem.Sq // operands.TURN_ROWS + problem.B + 1
        dq_turns = operands.dq_turns(kernel, lse, turns)
        packing = _rising(packing)
    dbias = dbias_fixed = None
    if want_dbias and attn_bias is not None:
        added_up = varlen_problem.is_broadcast(attn_bias, problem.B, problem.Hq)
        dbias, dbias_fixed = operands.bias_gradient(attn_bias, added_up, deterministic)
    launch.extension.backward(
        kernel.index, dout, dlse, q, k, v, out, lse, delta, dq_accum, dq, dk, dv,
        *_settings(named, launch), dq_turns, 1, None, None,
        _modifiers(named), dbias, dbias_fixed, _offsets(packing),
    )  # fmt: skip
    absent = operands.absent(like)
    return (
        absent if dq is None else dq[0, ..., : problem.D].contiguous(),
        absent if dk is None else dk[0, ..., : problem.D].contiguous(),
        absent if dv is None else dv[0, ..., : problem.Dv].contiguous(),
        absent if dbias is None else dbias.view(attn_bias.shape).to(attn_bias.dtype),
        operands.sink_gradient(sinks, lse[0], delta[0])
        if sinks is not None and want_dsinks
        else absent,
    )


def _rising(packing: Packing) -> Packing:
    """Offsets that never fall. Thread blocks that take turns wait for those of the same sequence:
    where offsets fall, some of these would not exist."""
    return packing._replace(
        cu_seqlens_q=torch.cummax(packing.cu_seqlens_q, 0).values,
        cu_seqlens_k=torch.cummax(packing.cu_seqlens_k, 0).values,
    )


# Fake: shapes, strides and dtypes


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    named, packing = _call(forward, args)
    q, out_dtype = named["q"], named["out_dtype"]
    _, Tq, _, Hq, _, _, Dv = _check_fake(named, packing)
    check_out_dtype(q.dtype, out_dtype)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((Tq, Hq, Dv), dtype=out_dtype or q.dtype)
    return out, q.new_empty((Hq, Tq), dtype=lse_dtype)


def _backward_fake(*args: Any) -> ops.Gradients:
    named, packing = _call(backward, args)
    _check_fake(named, packing)
    inputs = (named[name] for name in ("q", "k", "v", "attn_bias", "sinks"))
    return ops.empty_gradients(named["q"], inputs, named["want"])


def _check_fake(named: dict[str, Any], packing: Packing) -> tuple[int, ...]:
    tensors = [named[name] for name in _TENSORS]
    return check_inputs(packing, *tensors, device_type=tensors[0].device.type)


_library = torch.library.Library("flash_ext", "FRAGMENT")
_library.define(_FORWARD, tags=torch.Tag.nondeterministic_seeded)
_library.define(_BACKWARD)
ops.implement(_library, "varlen_forward", _forward_cpu, _forward_cuda, _forward_fake)
ops.implement(_library, "varlen_backward", _backward_cpu, _backward_cuda, _backward_fake)

forward = torch.ops.flash_ext.varlen_forward.default
backward = torch.ops.flash_ext.varlen_backward.default
OPERATORS: ops.Operators = (forward, backward)
