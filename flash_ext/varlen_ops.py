"""The private operators flash_ext::varlen_forward and flash_ext::varlen_backward.

As their dense twins in `ops.py` they have a CPU, a CUDA and a fake implementation, check their
tensors wherever a call lands, and are pure functions of their arguments. No CUDA kernel reads
packed sequences yet: there they raise what `explain` gives as the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_ext import ops, varlen_problem, varlen_reference
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


def _forward_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    return _refuse(forward, args, "forward")


def _backward_cuda(*args: Any) -> ops.Gradients:
    return _refuse(backward, args, "backward")


def _refuse(operator: torch._ops.OpOverload, args: Sequence[Any], pass_: str) -> Any:
    """Checks what was given, the sequences too with FLASH_EXT_CHECK=1, and says why not."""
    named, packing = _call(operator, args)
    plan = _plan(named, packing)
    if varlen_problem.CHECK:
        read_sequences(named["q"], named["k"], named["attn_bias"], packing)
    return plan.kernel(pass_)  # raises


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
