"""The private operators flash_ext::forward and flash_ext::backward.

Each has three implementations: CPU (the reference), CUDA (a kernel of the extension) and fake
(shapes only, for tracing and meta tensors). All check their tensors, so a call is checked wherever
it lands, and eager calls are checked once per combination of shapes, strides, dtypes and flags.

Gradients live in `autograd.py`. The forward operator is told of a backward pass to come by a
`deterministic` that is not None, so that one no kernel serves is refused at once. Both operators
are pure functions of their arguments, dropout included: its seed is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_ext import build, dispatch, reference
from flash_ext.dispatch import Kernel, Plan
from flash_ext.problem import Capability, Problem, check_inputs, check_out_dtype, of_tensors

_MODIFIERS = (
    "Tensor? attn_bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, float softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap, float dropout_p"
)
_FORWARD = (
    f"forward(Tensor q, Tensor k, Tensor v, {_MODIFIERS}, ScalarType? out_dtype, "
    "bool? deterministic, bool bhsd) -> (Tensor out, Tensor lse)"
)
_BACKWARD = (
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_MODIFIERS}, bool deterministic, bool bhsd, bool want_dq, bool want_dk, bool want_dv, "
    "bool want_dbias, bool want_dsinks) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # one that is not wanted: shape (0,)
ALIGNMENT = 16  # bytes: kernels read rows in pieces of this size
MOST_LAUNCHES = 4096


# Checking and choosing, once per combination of arguments


@dataclass(frozen=True, slots=True)
class Launch:
    """All that a call needs to know about its arguments beside their addresses."""

    plan: Plan
    forward: Kernel | None
    backward: Kernel | None
    out_shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    lse_shape: tuple[int, ...]
    in_place: bool  # kernels can read q, k and v with their strides and head dims


_launches: dict[tuple[Any, ...], Launch] = {}


def launch_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *flags: Any,
) -> Launch:
    """The Launch of checked arguments; `flags` are those of `problem.of_tensors`."""
    key = (
        *(q.shape, q.stride(), q.dtype, q.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
        attn_bias is None or (attn_bias.shape, attn_bias.dtype, attn_bias.device),
        alibi_slopes is None or (alibi_slopes.shape, alibi_slopes.dtype, alibi_slopes.device),
        sinks is None or (sinks.shape, sinks.dtype, sinks.device),
        flags,
        dispatch.in_force,
    )
    launch = _launches.get(key)
    if launch is None:
        problem = of_tensors(
            q, k, v, attn_bias, alibi_slopes, sinks, *flags, device_type=q.device.type
        )
        plan = plan_on(q.device, problem)
        sizes = (problem.B, problem.Sq, problem.Hq, problem.Dv)
        out = _new_out(q.new_empty(0, device="meta"), *sizes, flags[-1], problem.out_dtype)
        launch = Launch(
            plan=plan,
            forward=plan.forward.kernel,
            backward=plan.backward.kernel,
            out_shape=tuple(out.shape),
            out_stride=out.stride(),
            lse_shape=(problem.B, problem.Hq, problem.Sq),
            in_place=all(_has_readable_layout(x) for x in (q, k, v)),
        )
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    return launch


def plan_on(device: torch.device, problem: Problem) -> Plan:
    """What the loaded build does on a device."""
    if device.type == "cpu":
        return dispatch.plan_cpu(problem, dispatch.in_force)
    return plan_for(*limits(device), problem)


def plan_for(capability: Capability, smem_limit: int, problem: Problem) -> Plan:
    """What the loaded build does on hardware of a capability."""
    kernels = compiled_kernels()
    archs, missing = build.build_info().archs, build.missing_reason()
    return dispatch.plan(
        problem, kernels, archs, capability, smem_limit, dispatch.in_force, missing
    )


@lru_cache(maxsize=1)
def compiled_kernels() -> tuple[Kernel, ...]:
    """The table of the extension, empty if there is none."""
    extension = build.extension()
    return tuple(map(Kernel.of, extension.kernels())) if extension else ()


@lru_cache
def limits(device: torch.device) -> tuple[Capability, int]:
    """Compute capability and shared memory that a block may ask for, in bytes."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.shared_memory_per_block_optin


# CUDA


def _forward_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
    deterministic: bool | None,
    bhsd: bool,
) -> tuple[Tensor, Tensor]:
    """out and lse by a kernel. No workspace; inputs that it cannot read in place are copied."""
    flags = (window_left, window_right, softcap, dropout_p, out_dtype, deterministic, bhsd)
    launch = launch_of(q, k, v, attn_bias, alibi_slopes, sinks, *flags)
    kernel = launch.forward or launch.plan.kernel("forward")  # raises
    if deterministic is not None and launch.backward is None:
        launch.plan.kernel("backward")  # raises
    q, k, v = _readable(launch, q, k, v)
    out = torch.empty_strided(
        launch.out_shape, launch.out_stride, dtype=out_dtype or q.dtype, device=q.device
    )
    lse = torch.empty(launch.lse_shape, dtype=torch.float32, device=q.device)
    wide = _widened(out)
    _extension().forward(
        kernel.index, q, k, v, wide, lse, _floats(sinks),
        softmax_scale, window_left, window_right, bhsd,
    )  # fmt: skip
    if wide is not out:
        out.copy_(wide[..., : out.shape[-1]])
    return out, lse


def _backward_cuda(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    bhsd: bool,
    want_dq: bool,
    want_dk: bool,
    want_dv: bool,
    want_dbias: bool,
    want_dsinks: bool,
) -> Gradients:
    """Gradients by a kernel. Workspace: fp32 (B, Hq, Sq), and (B, Hq, Sq, D) where dq is wanted."""
    flags = (window_left, window_right, softcap, dropout_p, None, deterministic, bhsd)
    launch = launch_of(q, k, v, attn_bias, alibi_slopes, sinks, *flags)
    kernel = launch.backward or launch.plan.kernel("backward")  # raises
    dtype, D, Dv = q.dtype, q.shape[-1], v.shape[-1]
    q, k, v = _readable(launch, q, k, v)
    out, dout = (_readable_copy(x.to(dtype)) for x in (out, dout))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    delta = torch.empty_like(lse)
    dq_accum = lse.new_empty((*lse.shape, q.shape[-1])) if want_dq else None
    wanted = ((q, want_dq), (k, want_dk), (v, want_dv))
    dq, dk, dv = (x.new_empty(x.shape) if want else None for x, want in wanted)
    _extension().backward(
        kernel.index, dout, dlse, q, k, v, out, lse, delta, dq_accum, dq, dk, dv,
        softmax_scale, window_left, window_right, bhsd, deterministic,
    )  # fmt: skip
    return (
        _absent(q) if dq is None else dq[..., :D].contiguous(),
        _absent(q) if dk is None else dk[..., :D].contiguous(),
        _absent(q) if dv is None else dv[..., :Dv].contiguous(),
        _absent(q),
        _sink_gradient(sinks, lse, delta) if sinks is not None and want_dsinks else _absent(q),
    )


def _absent(q: Tensor) -> Tensor:
    """In place of a gradient that nobody asked for."""
    return q.new_empty(0)


def _extension() -> Any:
    return build.extension()


def _has_readable_layout(x: Tensor) -> bool:
    """Whether kernels can read x at its strides: unit last one, rows at multiples of 16 bytes."""
    step = ALIGNMENT // x.element_size()
    return (
        x.shape[-1] % step == 0
        and x.stride(-1) == 1
        and all(
            stride % step == 0
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
            if size > 1
        )
    )


def _readable(launch: Launch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v themselves, if layouts and addresses allow it."""
    if launch.in_place and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        return q, k, v
    return _readable_copy(q), _readable_copy(k), _readable_copy(v)


def _readable_copy(x: Tensor) -> Tensor:
    """x itself if kernels can read it in place, else one copy with the head dim zero-padded."""
    if _has_readable_layout(x) and x.data_ptr() % ALIGNMENT == 0:
        return x
    wide = x.new_zeros((*x.shape[:-1], _padded(x.shape[-1])))
    wide[..., : x.shape[-1]].copy_(x)
    return wide


def _padded(head_dim: int) -> int:
    """Kernels read head dims that are multiples of 8."""
    return -(-head_dim // 8) * 8


def _widened(out: Tensor) -> Tensor:
    """out itself, or room for its padded head dim."""
    Dv = out.shape[-1]
    return out if Dv % 8 == 0 else out.new_empty((*out.shape[:-1], _padded(Dv)))


def _floats(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.to(torch.float32).contiguous()


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink has weight exp(sink - lse) in each row and no value, so its dP is 0: (Hq,)."""
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    rows = torch.where(lse == float("-inf"), 0.0, -weight * delta)
    return rows.sum((0, 2)).to(sinks.dtype)


# CPU

_CHECKED = ("q", "k", "v", "attn_bias", "alibi_slopes", "sinks", "window_left", "window_right",
            "softcap", "dropout_p", "out_dtype", "deterministic", "bhsd")  # fmt: skip


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    named = dict(zip(_FORWARD_NAMES[3:], rest, strict=True))
    _check_on_cpu(named, q=q, k=k, v=v)
    del named["deterministic"]
    with torch.autocast("cpu", enabled=False):
        return reference.forward(q, k, v, **named)


def _backward_cpu(*args: Any) -> Gradients:
    tensors, rest = args[:7], args[7:]
    named = dict(zip(_BACKWARD_NAMES[7:], rest, strict=True))
    _check_on_cpu(named, **dict(zip(_BACKWARD_NAMES, tensors, strict=False)), out_dtype=None)
    with torch.autocast("cpu", enabled=False):
        return reference.backward(*tensors, **named)


def _check_on_cpu(named: dict[str, Any], **more: Any) -> None:
    arguments = {**named, **more}
    launch_of(*(arguments[name] for name in _CHECKED))


# Fake: shapes, strides and dtypes


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    named = dict(zip(_FORWARD_NAMES[3:], rest, strict=True))
    B, Sq, _, Hq, _, _, Dv = _check_fake(q, k, v, named)
    check_out_dtype(q.dtype, named["out_dtype"])
    out = _new_out(q, B, Sq, Hq, Dv, named["bhsd"], dtype=named["out_dtype"] or q.dtype)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty((B, Hq, Sq), dtype=lse_dtype)


def _backward_fake(*args: Any) -> Gradients:
    named = dict(zip(_BACKWARD_NAMES, args, strict=True))
    q, k, v = named["q"], named["k"], named["v"]
    _check_fake(q, k, v, named)
    inputs = {"dq": q, "dk": k, "dv": v, "dbias": named["attn_bias"], "dsinks": named["sinks"]}
    dq, dk, dv, dbias, dsinks = (
        x.new_empty(x.shape) if x is not None and named[f"want_{gradient}"] else _absent(q)
        for gradient, x in inputs.items()
    )
    return dq, dk, dv, dbias, dsinks


def _check_fake(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> tuple[int, ...]:
    modifiers = (named[name] for name in ("attn_bias", "alibi_slopes", "sinks"))
    return check_inputs(q, k, v, *modifiers, bhsd=named["bhsd"], device_type=q.device.type)


def _new_out(
    like: Tensor, B: int, Sq: int, Hq: int, Dv: int, bhsd: bool, dtype: torch.dtype
) -> Tensor:
    """out: (B, Sq, Hq, Dv) in memory, for bhsd its transposed view."""
    out = like.new_empty((B, Sq, Hq, Dv), dtype=dtype)
    return out.transpose(1, 2) if bhsd else out


# Other devices


def _other_device(*args: Any) -> NoReturn:
    device = next(x.device for x in args if isinstance(x, Tensor))
    raise NotImplementedError(f"q is on {device}, expected a CUDA or CPU device")


_library = torch.library.Library("flash_ext", "DEF")
for _schema, _name, _cpu, _cuda, _fake in (
    (_FORWARD, "forward", _forward_cpu, _forward_cuda, _forward_fake),
    (_BACKWARD, "backward", _backward_cpu, _backward_cuda, _backward_fake),
):
    _library.define(_schema, tags=torch.Tag.nondeterministic_seeded)
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _other_device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_ext::{_name}", _fake, lib=_library)

forward = torch.ops.flash_ext.forward.default
backward = torch.ops.flash_ext.backward.default
_FORWARD_NAMES = [argument.name for argument in forward._schema.arguments]
_BACKWARD_NAMES = [argument.name for argument in backward._schema.arguments]
