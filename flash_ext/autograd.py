"""Gradients of attention: what forward keeps, and what arrives at the backward operator."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from flash_ext import ops

# (out, lse) where they are there already; what the operators take after their tensors, up to the
# modifiers; whether lse is a result; the operators of both passes.
Call: TypeAlias = tuple[tuple[Tensor, Tensor] | None, tuple[Any, ...], bool, ops.Operators]


class Attention(torch.autograd.Function):
    """A forward operator recorded for autograd. out and lse are differentiable, once.

    Each input and each result takes host time. So lse is a result only where it is asked for, what
    has no gradient is one input, `Call`, and modifiers are inputs only where there are any."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *modifiers: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`modifiers` is what the operator takes after the settings: attn_bias, sinks, and others
        without a gradient, of which the last, out_dtype, is no matter of the backward pass."""
        results, ctx.settings, return_lse, (forward, ctx.backward_operator) = call
        out, lse = results or forward(q, k, v, *ctx.settings, *modifiers)
        needs, kept = ctx.needs_input_grad, modifiers[:-1]
        if needs[0] or needs[1] or (modifiers and needs[4]):
            ctx.save_for_backward(q, k, v, out, lse, *kept)
        else:  # dv needs the probabilities only, dsinks needs delta only
            if not needs[2]:
                q, k, kept = hollow(q), hollow(k), (None, *kept[1:])
            kept_out = out if modifiers and needs[5] else hollow(out)
            ctx.save_for_backward(q, k, hollow(v), kept_out, lse, *kept)
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *modifiers = ctx.saved_tensors
        if dout is None:
            dout = hollow(out)
        needs = ctx.needs_input_grad
        want = (*needs[:3], *(needs[4:6] or (False, False)))
        differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        args = (dout, dlse, q, k, v, out, lse, want, *ctx.settings, *modifiers)
        backward = ctx.backward_operator
        found = Derivative.apply(backward, *args) if differentiated else backward(*args)
        dq, dk, dv, *others = (x if asked else None for x, asked in zip(found, want, strict=True))
        if modifiers:
            return dq, dk, dv, None, *others, *[None] * (len(modifiers) - 1)
        return dq, dk, dv, None


class Derivative(torch.autograd.Function):
    """A backward operator where a second derivative may be asked for: an error then, not zeros."""

    @staticmethod
    def forward(ctx: Any, operator: torch._ops.OpOverload, *args: Any) -> ops.Gradients:
        return operator(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise RuntimeError(
            "flash_ext has no second derivatives: gradients of attention came from a call with "
            "create_graph=True and were differentiated again"
        )


# `Attention.apply` without the wrapper that serves functorch only: it is a seventh of the host time
# of a small call.
eager_apply = super(torch.autograd.Function, Attention).apply


def record(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: tuple[Any, ...],
    return_lse: bool,
    *modifiers: Any,
    operators: ops.Operators = ops.OPERATORS,
) -> Any:
    """Run the operator, recorded for autograd; arguments as of `Attention.forward`."""
    call: Call = None, settings, return_lse, operators
    if torch.compiler.is_compiling():
        q, k, v, *others = distinct(q, k, v, *modifiers)
        return Attention.apply(q, k, v, call, *others)
    if not torch._C._are_functorch_transforms_active():
        return eager_apply(q, k, v, call, *modifiers)
    return Attention.apply(q, k, v, call, *modifiers)


def distinct(*inputs: Any) -> list[Any]:
    """The inputs with views for tensors that come again: a Function is traced without repeats."""
    found: list[Any] = []
    for x in inputs:
        again = isinstance(x, Tensor) and any(x is other for other in found)
        found.append(x.view_as(x) if again else x)
    return found


def hollow(x: Tensor) -> Tensor:
    """Zeros of x's shape, dtype and device that take the memory of one element."""
    return x.new_zeros(()).expand(x.shape)
