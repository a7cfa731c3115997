"""Gradients of attention: what forward keeps, and what arrives at the backward operator."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_ext import direct, ops


class Attention(torch.autograd.Function):
    """flash_ext::forward recorded for autograd. out and lse are differentiable, once.

    lse is a result only where it is asked for: each result takes host time."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None,
        sinks: Tensor | None,
        rest: tuple[Any, ...],
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`rest` is what the operator takes after v. attn_bias and sinks are part of it and given
        apart for the sake of their gradients."""
        out, lse = direct.forward(q, k, v, *rest)
        settings, modifiers = rest[:7], rest[7:11]
        wants = ctx.needs_input_grad
        if wants[0] or wants[1] or wants[3]:
            ctx.save_for_backward(q, k, v, out, lse, *modifiers)
        else:  # dv needs the probabilities only, dsinks needs delta only
            if not wants[2]:
                q, k, modifiers = hollow(q), hollow(k), modifiers and (None, *modifiers[1:])
            kept_out = out if wants[4] else hollow(out)
            ctx.save_for_backward(q, k, hollow(v), kept_out, lse, *modifiers)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *modifiers = ctx.saved_tensors
        if dout is None:
            dout = hollow(out)
        want = ctx.needs_input_grad[:5]
        differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        run = Derivative.apply if differentiated else ops.backward
        gradients = run(dout, dlse, q, k, v, out, lse, want, *ctx.settings, *modifiers)
        return (
            *(x if wanted else None for x, wanted in zip(gradients, want, strict=True)),
            None,
            None,
        )


class Derivative(torch.autograd.Function):
    """flash_ext::backward where a second derivative may be asked for: an error then, not zeros."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> ops.Gradients:
        return ops.backward(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise RuntimeError(
            "flash_ext.attention has no second derivatives: its gradients came from a call with "
            "create_graph=True and were differentiated again"
        )


_eager_apply = super(torch.autograd.Function, Attention).apply


def record(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
    rest: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    """`Attention.apply`. In eager mode without the wrapper that serves functorch only: it is a
    seventh of the host time of a small call."""
    if torch.compiler.is_compiling():  # a Function is traced with distinct tensors only
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
    elif not torch._C._are_functorch_transforms_active():
        return _eager_apply(q, k, v, attn_bias, sinks, rest, return_lse)
    return Attention.apply(q, k, v, attn_bias, sinks, rest, return_lse)


def hollow(x: Tensor) -> Tensor:
    """Zeros of x's shape, dtype and device that take the memory of one element."""
    return x.new_zeros(()).expand(x.shape)
