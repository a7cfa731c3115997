"""Probabilities of an attention call as a whole table, signed by the dropout mask.

What `return_attn_probs` of `flash_ext.flash_attn` returns where there is dropout. It holds Sq x Sk
numbers per head, for tests and for looking at: the attention itself never needs it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flash_ext import interface, problem
from flash_ext.interface import Modifiers
from flash_ext.score import MINUS_INF, Scores
from flash_ext.tiles import Tiling
from flash_ext.varlen_problem import Packing


def next_seed(device: torch.device) -> Tensor:
    """The seed that the next call with dropout on this device will draw; nothing is drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return interface.new_seed(device)


@torch.no_grad()
def signed(
    q: Tensor, k: Tensor, lse: Tensor, seed: Tensor, modifiers: Modifiers, first_batch: int = 0
) -> Tensor:
    """softmax(scores), with a minus sign where dropout drops the entry.

    Args:
        q, k: (B, Sq, Hq, D) and (B, Sk, Hk, D) of a call that was served.
        lse: (B, Hq, Sq), what it returned.
        seed: int64 (1,), what it drew.
        modifiers: those of the call: no attn_bias and no sinks.
        first_batch: number of the first batch entry in the dropout mask.

    Returns:
        (B, Hq, Sq, Sk), fp32 (fp64 for fp64 inputs); 0 where the query does not see the key.
    """
    tiling = Tiling.of(q, k, bhsd=False, first_batch=first_batch)
    left, right = problem.window_limits(modifiers["causal"], modifiers["window_size"])
    softcap, slopes = modifiers["softcap"], modifiers["alibi_slopes"]
    score = Scores.of(tiling, left, right, softcap, slopes, None)
    batch, rows, cols = (slice(0, n) for n in (tiling.batch, tiling.seqlen_q, tiling.seqlen_k))
    scale = modifiers["softmax_scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    autocast = interface.autocast_dtype(q)
    q, k = (x.to(problem.cast_dtype(x.dtype, autocast)) for x in (q, k))
    with torch.autocast(q.device.type, enabled=False):
        q_, k_ = (tiling.load(tiling.by_head(x), n) for x, n in ((q, rows), (k, cols)))
        table = score.cap(q_ * scale @ k_.mT)  # (B, Hk, G * Sq, Sk)
    score.add_biases(table, batch, rows, cols)
    lse_ = tiling.column(tiling.by_group(lse, 1), rows)
    p = (table - lse_.masked_fill(lse_ == MINUS_INF, 0)).exp_()
    hidden = score.hidden(batch, rows, cols)
    if hidden is not None:
        p.masked_fill_(hidden, 0)
    dropped = tiling.dropout_factor(seed, batch, rows, cols, modifiers["dropout_p"]) == 0
    return tiling.by_row(torch.where(dropped, -p, p), rows).flatten(1, 2)


@torch.no_grad()
def signed_varlen(
    q: Tensor, k: Tensor, lse: Tensor, seed: Tensor, packing: Packing, modifiers: Modifiers
) -> Tensor:
    """`signed` of each packed sequence; waits for the device, to read the lengths.

    Args:
        q, k: (Tq, Hq, D) and (Tk, Hk, D).
        lse: (Hq, Tq).
        packing: cu_seqlens and, where they are known, the maxima; no seqused.
        The others are those of `signed`.

    Returns:
        (B, Hq, max Sq, max Sk), 0 beyond the end of a sequence.
    """
    starts_q, starts_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
    sequences = [
        (slice(*rows), slice(*cols))
        for rows, cols in zip(pairwise(starts_q), pairwise(starts_k), strict=True)
    ]
    longest_q, longest_k = packing.max_seqlen_q, packing.max_seqlen_k
    if longest_q is None:
        longest_q = max((rows.stop - rows.start for rows, _ in sequences), default=0)
    if longest_k is None:
        longest_k = max((cols.stop - cols.start for _, cols in sequences), default=0)
    table = lse.new_zeros((len(sequences), q.shape[1], longest_q, longest_k))
    slopes = modifiers["alibi_slopes"]
    for b, (rows, cols) in enumerate(sequences):
        given = modifiers.copy()
        if slopes is not None and slopes.dim() == 2:
            given["alibi_slopes"] = slopes[b]
        parts = (q[None, rows], k[None, cols], lse[None, :, rows])
        table[b, :, : rows.stop - rows.start, : cols.stop - cols.start] = signed(
            *parts, seed, given, first_batch=b
        )[0]
    return table
