"""Attention over packed sequences in plain PyTorch: the CPU path and the executable specification.

Packing adds nothing to the algorithm. Each sequence is a dense problem of its own: its rows are a
view of the packed tensors, its first query and key have position 0, and everything that depends on
positions or lengths (alignment, window, ALiBi, bias, dropout mask) uses its own. So each is given
to the tiled one-pass algorithm of `reference.py`; neighbours of equal lengths go there together,
as the batch that they are. What belongs to no sequence, or lies behind the used rows of one, is
never read: its results and gradients are zeros, its lse is -inf.

Extra memory is that of the dense algorithm for the longest run of equal sequences, results of that
run included, and so O(T). The gradient of a bias costs up to three tables of its size: the sum over
all sequences, and of one run the bias and the gradient, all in the computing precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_ext import reference
from flash_ext.tiles import take
from flash_ext.varlen_problem import Packing, Run, read_sequences, runs

MINUS_INF = float("-inf")


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **modifiers: Any,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, sequence by sequence.

    Args:
        q: (Tq, Hq, D); k: (Tk, Hk, D); v: (Tk, Hk, Dv).
        packing: where the sequences lie; checked.
        attn_bias: broadcasts to (B, Hq, max Sq, max Sk), indexed by positions in the sequence.
        alibi_slopes: (Hq,) or (B, Hq).
        modifiers: sinks, seed, softmax_scale, window_left, window_right, softcap and dropout_p, as
            of `reference.forward`.

    Returns:
        out (Tq, Hq, Dv) and lse (Hq, Tq), fp32 (fp64 for fp64 inputs); zeros and -inf in rows that
        no sequence uses.
    """
    rows, heads = q.shape[:2]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((rows, heads, v.shape[-1]), dtype=out_dtype or q.dtype)
    lse = q.new_full((heads, rows), MINUS_INF, dtype=lse_dtype)
    for run in _runs_with_queries(q, k, attn_bias, packing):
        out_run, lse_run = reference.forward(
            run.of_q(q),
            run.of_k(k),
            run.of_k(v),
            attn_bias=_bias_of(attn_bias, run),
            alibi_slopes=_slopes_of(alibi_slopes, run),
            out_dtype=out_dtype,
            first_batch=run.first,
            **modifiers,
        )
        run.of_q(out).copy_(out_run)
        run.of_q(lse, 1).copy_(lse_run.transpose(0, 1))  # (Hq, count, Sq)
    return out, lse


@torch.no_grad()
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    *,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    want_dq: bool = True,
    want_dk: bool = True,
    want_dv: bool = True,
    want_dbias: bool = False,
    want_dsinks: bool = False,
    **modifiers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by recomputation, sequence by sequence.

    Args:
        dout: gradient of out (Tq, Hq, Dv), any floating dtype.
        dlse: gradient of lse (Hq, Tq), or None.
        out, lse: what forward returned for the same arguments.
        want_dq, want_dk, want_dv, want_dbias, want_dsinks: the gradients to compute.
        The other arguments are those of forward.

    Returns:
        dq, dk, dv, dbias, dsinks: contiguous, each in shape and dtype of its input, zeros in rows
        that no sequence uses; a gradient not wanted is an empty tensor of shape (0,).
    """
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) if want else q.new_empty(0)
        for x, want in ((q, want_dq), (k, want_dk), (v, want_dv))
    )
    dbias = _wide_zeros(attn_bias, lse) if want_dbias else None
    dsinks = _wide_zeros(sinks, lse) if want_dsinks else None
    wants = {
        "want_dq": want_dq,
        "want_dk": want_dk,
        "want_dv": want_dv,
        "want_dbias": want_dbias,
        "want_dsinks": want_dsinks,
    }
    for run in _runs_with_queries(q, k, attn_bias, packing):
        bias_run = _bias_of(attn_bias, run)
        dq_run, dk_run, dv_run, dbias_run, dsinks_run = reference.backward(
            run.of_q(dout),
            None if dlse is None else run.of_q(dlse, 1).transpose(0, 1),  # (count, Hq, Sq)
            run.of_q(q),
            run.of_k(k),
            run.of_k(v),
            run.of_q(out),
            run.of_q(lse, 1).transpose(0, 1),
            attn_bias=bias_run if dbias is None or bias_run is None else bias_run.to(dbias.dtype),
            alibi_slopes=_slopes_of(alibi_slopes, run),
            sinks=sinks if dsinks is None or sinks is None else sinks.to(dsinks.dtype),
            first_batch=run.first,
            **wants,
            **modifiers,
        )
        if want_dq:
            run.of_q(dq).copy_(dq_run)
        if want_dk:
            run.of_k(dk).copy_(dk_run)
        if want_dv:
            run.of_k(dv).copy_(dv_run)
        sum_run = _bias_of(dbias, run)
        if sum_run is not None:
            sum_run += dbias_run
        if dsinks is not None:
            dsinks += dsinks_run
    return dq, dk, dv, _rounded(dbias, attn_bias, q), _rounded(dsinks, sinks, q)


def _wide_zeros(x: Tensor | None, lse: Tensor) -> Tensor | None:
    """Room for the gradient of what all sequences share: summed in the computing precision."""
    if x is None:
        return None
    return x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, lse.dtype))


def _rounded(total: Tensor | None, like: Tensor | None, q: Tensor) -> Tensor:
    return q.new_empty(0) if total is None or like is None else total.to(like.dtype)


def _runs_with_queries(
    q: Tensor, k: Tensor, attn_bias: Tensor | None, packing: Packing
) -> Iterator[Run]:
    """Without queries a sequence has no results, and its keys get no gradient."""
    return (run for run in runs(*read_sequences(q, k, attn_bias, packing)) if run.q.used > 0)


def _slopes_of(slopes: Tensor | None, run: Run) -> Tensor | None:
    return slopes[run.sequences] if slopes is not None and slopes.dim() == 2 else slopes


def _bias_of(bias: Tensor | None, run: Run) -> Tensor | None:
    """View of the part that a run's sequences see, four dims."""
    if bias is None:
        return None
    table = take(bias[(None,) * (4 - bias.dim())], 0, run.sequences)
    return take(take(table, 2, slice(0, run.q.used)), 3, slice(0, run.k.used))
