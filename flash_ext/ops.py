"""The private operators flash_ext::forward and flash_ext::backward.

Each has three implementations: CPU (the reference), CUDA (a kernel of the extension) and fake
(shapes only, for tracing and meta tensors). All check their tensors, so a call is checked wherever
it lands, and eager calls are checked once per combination of shapes, strides, dtypes and flags.

Gradients live in `autograd.py`. The forward operator is told of a backward pass to come by a
`deterministic` that is not None, so that one no kernel serves is refused at once. Both operators
are pure functions of their arguments, dropout included: its seed is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_ext import build, dispatch, operands, reference
from flash_ext.dispatch import Hardware, Kernel, Plan
from flash_ext.problem import Problem, check_inputs, check_out_dtype, is_broadcast, of_tensors

# What both operators take after their tensors. Arguments that are left at their defaults cost no
# host time, so what a plain call needs comes first.
_REST = (
    "SymInt window_left=-1, SymInt window_right=-1, bool bhsd=False, bool? deterministic=None, "
    "float? softmax_scale=None, float softcap=0.0, float dropout_p=0.0, Tensor? attn_bias=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? seed=None"
)
_FORWARD = (
    f"forward(Tensor q, Tensor k, Tensor v, {_REST}, ScalarType? out_dtype=None) "
    "-> (Tensor out, Tensor lse)"
)
_BACKWARD = (  # want: which of dq, dk, dv, dbias and dsinks
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"bool[5] want, {_REST}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # one that is not wanted: shape (0,)
Operators = tuple[torch._ops.OpOverload, torch._ops.OpOverload]  # of both passes
MOST_LAUNCHES = 4096


# Checking and choosing, once per combination of arguments


@dataclass(frozen=True, slots=True)
class Launch:
    """All that a call needs to know about its arguments beside their addresses."""

    plan: Plan
    extension: Any
    forward: Kernel | None
    backward: Kernel | None
    out_shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_stride: tuple[int, ...]
    default_scale: float
    in_place: bool  # kernels can read q, k and v with their strides and head dims

    @classmethod
    def of(cls, plan: Plan, out: Tensor, lse: Tensor, *, in_place: bool) -> Launch:
        """What `plan` leads to, with results like out and lse, which need no memory."""
        return cls(
            plan=plan,
            extension=build.extension(),
            forward=plan.forward.kernel,
            backward=plan.backward.kernel,
            out_shape=tuple(out.shape),
            out_stride=out.stride(),
            lse_shape=tuple(lse.shape),
            lse_stride=lse.stride(),
            default_scale=plan.problem.D**-0.5,
            in_place=in_place,
        )

    def kernel_for(self, deterministic: bool | None) -> Kernel:
        """The kernel of the forward pass; raises where it, or the backward pass to come, has none.

        A `deterministic` that is not None announces a backward pass.
        """
        if deterministic is not None and self.backward is None:
            self.plan.kernel("backward")  # raises
        return self.forward or self.plan.kernel("forward")  # raises

    def new_results(self, q: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """out and lse in fresh memory beside q."""
        out_dtype = out_dtype or q.dtype
        out = q.new_empty_strided(self.out_shape, self.out_stride, dtype=out_dtype)
        lse = q.new_empty_strided(self.lse_shape, self.lse_stride, dtype=torch.float32)
        return out, lse


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
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        attn_bias is None
        or (attn_bias.shape, attn_bias.dtype, attn_bias.device, attn_bias.requires_grad),
        alibi_slopes is None or (alibi_slopes.shape, alibi_slopes.dtype, alibi_slopes.device),
        sinks is None or (sinks.shape, sinks.dtype, sinks.device),
        flags, dispatch.in_force,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        problem = of_tensors(
            q, k, v, attn_bias, alibi_slopes, sinks, *flags, device_type=q.device.type
        )
        plan = plan_on(q.device, problem)
        like = q.new_empty(0, device="meta")
        sizes = (problem.B, problem.Sq, problem.Hq, problem.Dv)
        out = _new_out(like, *sizes, bhsd=flags[-1], dtype=problem.out_dtype)
        lse = like.new_empty((problem.B, problem.Hq, problem.Sq))
        in_place = all(operands.has_readable_layout(x, bhsd=flags[-1]) for x in (q, k, v))
        launch = Launch.of(plan, out, lse, in_place=in_place)
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    return launch


def plan_on(device: torch.device, problem: Problem) -> Plan:
    """What the loaded build does on a device."""
    if device.type == "cpu":
        return dispatch.plan_cpu(problem, dispatch.in_force)
    return plan_for(hardware_of(device), problem)


def plan_for(hardware: Hardware, problem: Problem) -> Plan:
    """What the loaded build does on a GPU."""
    kernels = compiled_kernels()
    archs, missing = build.build_info().archs, build.missing_reason()
    return dispatch.plan(problem, kernels, archs, hardware, dispatch.in_force, missing)


@lru_cache(maxsize=1)
def compiled_kernels() -> tuple[Kernel, ...]:
    """The table of the extension, empty if there is none."""
    extension = build.extension()
    return tuple(map(Kernel.of, extension.kernels())) if extension else ()


@lru_cache
def hardware_of(device: torch.device) -> Hardware:
    """A GPU that is there."""
    properties = torch.cuda.get_device_properties(device)
    return Hardware(
        (properties.major, properties.minor),
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )


# CUDA


def _forward_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_left: int = -1,
    window_right: int = -1,
    bhsd: bool = False,
    deterministic: bool | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse by a kernel. No workspace; inputs that it cannot read in place are copied."""
    launch = launch_of(
        q, k, v, attn_bias, alibi_slopes, sinks,
        window_left, window_right, softcap, dropout_p, out_dtype, deterministic, bhsd,
    )  # fmt: skip
    kernel = launch.kernel_for(deterministic)
    out, lse = launch.new_results(q, out_dtype)
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    if softmax_scale is None:
        softmax_scale = launch.default_scale
    wide = out
    if not launch.in_place or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % operands.ALIGNMENT:
        q, k, v = (operands.readable(x, bhsd) for x in (q, k, v))
        if v.shape[-1] != out.shape[-1]:
            wide = out.new_empty((*out.shape[:-1], v.shape[-1]))
    launch.extension.forward(
        kernel.index, q, k, v, wide, lse, sinks, softmax_scale, window_left, window_right, bhsd,
        operands.modifiers(softcap, dropout_p, attn_bias, alibi_slopes, seed), None,
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
    want: Sequence[bool],
    window_left: int = -1,
    window_right: int = -1,
    bhsd: bool = False,
    deterministic: bool | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
) -> Gradients:
    """Gradients by a kernel.

    Workspace in fp32: delta (B, Hq, Sq) and, where dq is wanted, dQ (`operands.dq_workspace`).
    Where the plan splits groups, also dK (B, Hk, Sk, D rounded up to 16) and dV likewise, if
    wanted; with `deterministic` counters, int32 (1 + B * Hq * query tiles * warps,). The gradient
    of a broadcast 16-bit or fp64 attn_bias is added up in fp32 in the shape of attn_bias, that of
    any broadcast one with `deterministic` also in int64. Tensors that kernels cannot read in place
    are copied.
    """
    deterministic = bool(deterministic)
    launch = launch_of(
        q, k, v, attn_bias, alibi_slopes, sinks,
        window_left, window_right, softcap, dropout_p, None, deterministic, bhsd,
    )  # fmt: skip
    kernel = launch.backward or launch.plan.kernel("backward")  # raises
    want_dq, want_dk, want_dv, want_dbias, want_dsinks = want
    D, Dv = q.shape[-1], v.shape[-1]
    q, k, v, out, dout = (operands.readable(x.to(q.dtype), bhsd) for x in (q, k, v, out, dout))
    lse = lse.contiguous()
    if dlse is not None:
        dlse = dlse.to(torch.float32).contiguous()
    delta = torch.empty_like(lse)
    problem, splits = launch.plan.problem, launch.plan.backward.splits
    keys = (problem.B, problem.Hk, problem.Sk)
    dq_accum = operands.dq_workspace(kernel, lse, D) if want_dq else None
    dk_accum = operands.workspace(lse, keys, D) if want_dk and splits > 1 else None
    dv_accum = operands.workspace(lse, keys, Dv) if want_dv and splits > 1 else None
    dq_turns = None
    if want_dq and deterministic:
        dq_turns = operands.dq_turns(kernel, lse, -(-problem.Sq // operands.TURN_ROWS))
    dq = q.new_empty(q.shape) if want_dq else None
    dk = k.new_empty(k.shape) if want_dk else None
    dv = v.new_empty(v.shape) if want_dv else None
    dbias = dbias_fixed = None
    if want_dbias and attn_bias is not None:
        added_up = is_broadcast(attn_bias, problem.table)
        dbias, dbias_fixed = operands.bias_gradient(attn_bias, added_up, deterministic)
    if softmax_scale is None:
        softmax_scale = launch.default_scale
    launch.extension.backward(
        kernel.index, dout, dlse, q, k, v, out, lse, delta, dq_accum, dq, dk, dv,
        softmax_scale, window_left, window_right, bhsd, dq_turns, splits, dk_accum, dv_accum,
        operands.modifiers(softcap, dropout_p, attn_bias, alibi_slopes, seed), dbias, dbias_fixed,
        None,
    )  # fmt: skip
    return (
        operands.absent(q) if dq is None else dq[..., :D].contiguous(),
        operands.absent(q) if dk is None else dk[..., :D].contiguous(),
        operands.absent(q) if dv is None else dv[..., :Dv].contiguous(),
        operands.absent(q)
        if dbias is None or attn_bias is None
        else dbias.view(attn_bias.shape).to(attn_bias.dtype),
        operands.sink_gradient(sinks, lse, delta)
        if sinks is not None and want_dsinks
        else operands.absent(q),
    )


# CPU


def _forward_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    named = _checked_on_cpu(forward, args)
    del named["deterministic"]
    with torch.autocast("cpu", enabled=False):
        return reference.forward(named.pop("q"), named.pop("k"), named.pop("v"), **named)


def _backward_cpu(*args: Any) -> Gradients:
    named = _checked_on_cpu(backward, args)
    tensors = [named.pop(name) for name in ("dout", "dlse", "q", "k", "v", "out", "lse")]
    wanted = dict(zip(_WANT, named.pop("want"), strict=True))
    with torch.autocast("cpu", enabled=False):
        return reference.backward(*tensors, **wanted, **named)


def _checked_on_cpu(operator: torch._ops.OpOverload, args: Sequence[Any]) -> dict[str, Any]:
    named = named_arguments(operator, args)
    launch = launch_of(*(named.get(name) for name in (*_TENSORS, *_FLAGS)))
    if named["softmax_scale"] is None:
        named["softmax_scale"] = launch.default_scale
    return named


_TENSORS = ("q", "k", "v", "attn_bias", "alibi_slopes", "sinks")
_FLAGS = ("window_left", "window_right", "softcap", "dropout_p", "out_dtype", "deterministic",
          "bhsd")  # fmt: skip
_WANT = ("want_dq", "want_dk", "want_dv", "want_dbias", "want_dsinks")


def named_arguments(operator: torch._ops.OpOverload, args: Sequence[Any]) -> dict[str, Any]:
    """All arguments by name; an operator drops those at the end that have their default."""
    schema = operator._schema.arguments
    given = {item.name: value for item, value in zip(schema, args, strict=False)}
    return {item.name: item.default_value for item in schema} | given


# Fake: shapes, strides and dtypes


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    named = named_arguments(forward, args)
    q, bhsd, out_dtype = named["q"], named["bhsd"], named["out_dtype"]
    B, Sq, _, Hq, _, _, Dv = _check_fake(named)
    check_out_dtype(q.dtype, out_dtype)
    out = _new_out(q, B, Sq, Hq, Dv, bhsd=bhsd, dtype=out_dtype or q.dtype)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty((B, Hq, Sq), dtype=lse_dtype)


def _backward_fake(*args: Any) -> Gradients:
    named = named_arguments(backward, args)
    _check_fake(named)
    inputs = (named[name] for name in ("q", "k", "v", "attn_bias", "sinks"))
    return empty_gradients(named["q"], inputs, named["want"])


def empty_gradients(q: Tensor, inputs: Iterable[Tensor | None], want: Sequence[bool]) -> Gradients:
    """Uninitialised gradients of q, k, v, attn_bias and sinks, those that are wanted."""
    dq, dk, dv, dbias, dsinks = (
        x.new_empty(x.shape) if x is not None and wanted else operands.absent(q)
        for x, wanted in zip(inputs, want, strict=True)
    )
    return dq, dk, dv, dbias, dsinks


def _check_fake(named: dict[str, Any]) -> tuple[int, ...]:
    tensors = [named[name] for name in _TENSORS]
    return check_inputs(*tensors, bhsd=named["bhsd"], device_type=tensors[0].device.type)


def _new_out(
    like: Tensor, B: int, Sq: int, Hq: int, Dv: int, *, bhsd: bool, dtype: torch.dtype
) -> Tensor:
    """out: (B, Sq, Hq, Dv) in memory, for bhsd its transposed view."""
    out = like.new_empty((B, Sq, Hq, Dv), dtype=dtype)
    return out.transpose(1, 2) if bhsd else out


# Other devices


def _other_device(*args: Any) -> NoReturn:
    q = next(x for x in args if isinstance(x, Tensor))
    raise NotImplementedError(
        f"q is a {q.layout} tensor on {q.device}, expected a dense one on a CUDA or CPU device"
    )


def implement(
    library: torch.library.Library,
    name: str,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Register all implementations of an operator that the library defines."""
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda, "CUDA")
    library.impl(name, _other_device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_ext::{name}", fake, lib=library)


_library = torch.library.Library("flash_ext", "DEF")
# As a whole a call with dropout is random, although its seed is an argument.
_library.define(_FORWARD, tags=torch.Tag.nondeterministic_seeded)
_library.define(_BACKWARD)
implement(_library, "forward", _forward_cpu, _forward_cuda, _forward_fake)
implement(_library, "backward", _backward_cpu, _backward_cuda, _backward_fake)

forward = torch.ops.flash_ext.forward.default
backward = torch.ops.flash_ext.backward.default
OPERATORS: Operators = (forward, backward)
