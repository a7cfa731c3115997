"""Gradients of attention: what forward keeps, and what arrives at the backward operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_ext import ops


class Attention(torch.autograd.Function):
    """flash_ext::forward recorded for autograd; both results are differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
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
        deterministic: bool,
        bhsd: bool,
    ) -> tuple[Tensor, Tensor]:
        settings = (softmax_scale, window_left, window_right, softcap, dropout_p)
        out, lse = ops.forward(
            q, k, v, attn_bias, alibi_slopes, sinks, seed, *settings, out_dtype, deterministic, bhsd
        )
        wants_q, wants_k, wants_v, wants_bias, _, wants_sinks = ctx.needs_input_grad[:6]
        # dv needs the probabilities only, dsinks only delta; the other gradients need everything.
        scores = wants_q or wants_k or wants_bias
        probabilities = scores or wants_v
        delta = scores or wants_sinks
        ctx.save_for_backward(
            q if probabilities else hollow(q),
            k if probabilities else hollow(k),
            v if scores else hollow(v),
            out if delta else hollow(out),
            lse,
            attn_bias if probabilities else None,
            alibi_slopes,
            sinks if wants_sinks else None,
            seed,
        )
        ctx.set_materialize_grads(False)
        ctx.settings = (*settings, deterministic, bhsd)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, attn_bias, alibi_slopes, sinks, seed = ctx.saved_tensors
        wants = (*ctx.needs_input_grad[:4], ctx.needs_input_grad[5])
        dq, dk, dv, dbias, dsinks = (
            gradient if want else None
            for want, gradient in zip(
                wants,
                ops.backward(
                    hollow(out) if dout is None else dout, dlse, q, k, v, out, lse,
                    attn_bias, alibi_slopes, sinks, seed, *ctx.settings, *wants,
                ),
                strict=True,
            )
        )  # fmt: skip
        return (dq, dk, dv, dbias, None, dsinks, *[None] * 9)


def hollow(x: Tensor) -> Tensor:
    """Zeros of x's shape, dtype and device that take the memory of one element."""
    return x.new_zeros(()).expand(x.shape)
