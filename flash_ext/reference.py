"""FlashAttention in plain PyTorch: the CPU path and the executable specification.

Attention is out = softmax(scale * q k^T) v. The table of scores has Sq x Sk entries per head; this
file never holds it. Two ideas suffice.

1. Online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Sums
   of exp(s - m), with m the maximum so far, can be carried from one block of keys to the next:
   when the maximum grows from m to m', what was summed is multiplied by exp(m - m'). So is the
   sum of exp(s - m) * v, and one pass over the keys gives the output.
2. Recomputation (Dao, "FlashAttention-2", 2023, algorithms 1 and 2). The forward pass keeps one
   number per row, lse = log(sum of exp(s)). The backward pass computes each tile of scores again
   and has its probabilities at once: p = exp(s - lse).

The gradients of one tile, with P its probabilities and dP = dO V^T:

    dV += P^T dO        dS = P * (dP - delta)        dQ += scale * dS K        dK += scale * dS^T Q

where delta = rowsum(P * dP), a sum over the keys, equals rowsum(dO * O), a sum over the head dim
that needs no pass over the keys. A gradient dlse of lse adds P * dlse to dS: it is subtracted from
delta. Dropout multiplies P on its way to V, and dP on its way back, by 0 or 1 / (1 - p).

Extra memory is a few tiles plus O(S): delta, and dq in the computing precision. Inputs are
converted tile by tile to fp32 (fp64 for fp64 inputs); nothing is rounded before the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext.score import MINUS_INF, Scores
from flash_ext.tiles import Tiling, block_size, blocks

BLOCK_M = 256  # queries of a tile, for long sequences
BLOCK_N = 512  # keys of a tile, for long sequences


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    bhsd: bool = False,
    first_batch: int = 0,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp in one pass over the keys (FlashAttention-2, algorithm 1).

    Args:
        q: (B, Sq, Hq, D); fp16, bf16, fp32 or fp64. With bhsd, heads come before the sequence.
        k: (B, Sk, Hk, D), Hq a multiple of Hk.
        v: (B, Sk, Hk, Dv).
        attn_bias: broadcasts to (B, Hq, Sq, Sk). Floating: added, -inf masks. Bool: True is seen.
        alibi_slopes: (Hq,) or (B, Hq): slope * |i + Sk - Sq - j| is subtracted.
        sinks: (Hq,), a logit that joins the denominator only.
        seed: int64, one element; needed where dropout_p > 0.
        softmax_scale: factor of q.k, any sign.
        window_left, window_right: keys seen before and after a query's own position; -1: no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        dropout_p: share of probabilities dropped, in [0, 1).
        out_dtype: dtype of out, q's by default.
        first_batch: number of the first batch entry in the dropout mask.
        block_m, block_n: queries and keys of a tile; they change results by rounding only.

    Returns:
        out (B, Sq, Hq, Dv) contiguous (with bhsd its transposed view) and lse (B, Hq, Sq), natural
        log, fp32 (fp64 for fp64 inputs). A row that sees no key has out 0 and lse -inf (its sink).
    """
    tiling = Tiling.of(q, k, bhsd, first_batch)
    block_m = block_m or block_size(tiling.seqlen_q, BLOCK_M)
    block_n = block_n or block_size(tiling.seqlen_k, BLOCK_N)
    score = Scores.of(tiling, window_left, window_right, softcap, alibi_slopes, attn_bias)
    out = q.new_empty(
        (tiling.batch, tiling.seqlen_q, tiling.heads_q, v.shape[-1]), dtype=out_dtype or q.dtype
    )
    out = out.transpose(1, 2) if bhsd else out
    lse = q.new_empty((tiling.batch, tiling.heads_q, tiling.seqlen_q), dtype=tiling.dtype)
    q_, k_, v_, out_ = (tiling.by_head(x) for x in (q, k, v, out))  # (B, Hk, G, S, D)
    lse_ = tiling.by_group(lse, 1)  # (B, Hk, G, Sq)
    sinks_ = None if sinks is None else tiling.by_group(sinks, 0)[None, ..., None]

    for batch in tiling.batches(block_m, block_n):
        for rows in blocks(0, tiling.seqlen_q, block_m):
            q_i = tiling.load(q_[batch], rows) * softmax_scale  # (B, Hk, G * M, D)
            # What a row carries from one block of keys to the next.
            maximum = q_i.new_full((*q_i.shape[:3], 1), MINUS_INF)  # (B, Hk, G * M, 1)
            total = torch.zeros_like(maximum)  # sum of exp(s - maximum)
            acc = q_i.new_zeros((*q_i.shape[:3], v.shape[-1]))  # sum of exp(s - maximum) * v
            if sinks_ is not None:  # as if a first key had the score `sink` and the value 0
                maximum.copy_(tiling.column(sinks_, rows))
                total.fill_(1)

            for cols in score.key_blocks(rows, block_n):
                k_j = tiling.load(k_[batch], cols)  # (B, Hk, N, D)
                v_j = tiling.load(v_[batch], cols)  # (B, Hk, N, Dv)
                s = score.cap(q_i @ k_j.mT)  # (B, Hk, G * M, N)
                score.add_biases(s, batch, rows, cols)
                hidden = score.hidden(batch, rows, cols)
                if hidden is not None:
                    s.masked_fill_(hidden, MINUS_INF)

                new_maximum = torch.maximum(maximum, s.amax(-1, keepdim=True))
                reference = _zero_if_empty(new_maximum)
                p = s.sub_(reference).exp_()
                correction = maximum.sub_(reference).exp_()
                total.mul_(correction).add_(p.sum(-1, keepdim=True))
                if dropout_p > 0:
                    p *= tiling.dropout_factor(seed, batch, rows, cols, dropout_p)
                acc.mul_(correction).add_(_product(p, v_j, hidden))
                maximum = new_maximum

            acc /= total.masked_fill(total == 0, 1)
            out_[batch, :, :, rows] = tiling.by_row(acc, rows).to(out.dtype)
            lse_[batch, :, :, rows] = tiling.by_row(maximum + total.log(), rows).squeeze(-1)

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
    *,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = True,
    bhsd: bool = False,
    first_batch: int = 0,
    want_dq: bool = True,
    want_dk: bool = True,
    want_dv: bool = True,
    want_dbias: bool = False,
    want_dsinks: bool = False,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by recomputation, keys in the outer loop (FlashAttention-2, algorithm 2).

    Args:
        dout: gradient of out, in its shape; any strides, any floating dtype.
        dlse: gradient of lse (B, Hq, Sq), or None.
        out, lse: what forward returned for the same arguments.
        deterministic: gradients are bit-equal from run to run either way: each sum has one order.
        want_dq, want_dk, want_dv, want_dbias, want_dsinks: the gradients to compute.
        The other arguments are those of forward.

    Returns:
        dq, dk, dv, dbias, dsinks: contiguous, each in shape and dtype of its input; a gradient not
        wanted is an empty tensor of shape (0,). A row that sees no key adds nothing to any.
    """
    tiling = Tiling.of(q, k, bhsd, first_batch)
    block_m = block_m or block_size(tiling.seqlen_q, BLOCK_M)
    block_n = block_n or block_size(tiling.seqlen_k, BLOCK_N)
    score = Scores.of(tiling, window_left, window_right, softcap, alibi_slopes, attn_bias)
    q_, k_, v_, out_, dout_ = (tiling.by_head(x) for x in (q, k, v, out, dout))  # (B, Hk, G, S, D)
    lse_ = tiling.by_group(lse, 1)  # (B, Hk, G, Sq)
    # An output of 0 counts 0 whatever its gradient: a row that sees no key may receive inf.
    delta = torch.where(out_ == 0, 0, dout_.to(tiling.dtype) * out_).sum(-1)  # (B, Hk, G, Sq)
    if dlse is not None:
        delta -= tiling.by_group(dlse, 1)

    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if want else q.new_empty(0)
        for x, want in ((q, want_dq), (k, want_dk), (v, want_dv))
    )
    dbias_ = score.zero_bias_gradient() if want_dbias else None
    want_ds = want_dq or want_dk or want_dbias

    for batch in tiling.batches(block_m, block_n) if want_ds or want_dv else ():
        dq_acc = torch.zeros(q_[batch].shape if want_dq else 0, dtype=tiling.dtype, device=q.device)
        for cols in blocks(0, tiling.seqlen_k, block_n):
            k_j = tiling.load(k_[batch], cols)  # (B, Hk, N, D)
            v_j = tiling.load(v_[batch], cols)  # (B, Hk, N, Dv)
            dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)

            for rows in score.query_blocks(cols, block_m):
                q_i = tiling.load(q_[batch], rows) * softmax_scale  # (B, Hk, G * M, D)
                dout_i = tiling.load(dout_[batch], rows)  # (B, Hk, G * M, Dv)
                lse_i = tiling.column(lse_[batch], rows)  # (B, Hk, G * M, 1)
                delta_i = tiling.column(delta[batch], rows)

                s = score.cap(q_i @ k_j.mT)  # (B, Hk, G * M, N)
                cap_slope = score.cap_slope(s)
                score.add_biases(s, batch, rows, cols)
                hidden = score.hidden(batch, rows, cols)
                p = s.sub_(_zero_if_empty(lse_i)).exp_()
                if hidden is not None:
                    p.masked_fill_(hidden, 0)
                dropout_factor = None
                if dropout_p > 0:
                    dropout_factor = tiling.dropout_factor(seed, batch, rows, cols, dropout_p)

                if want_dv:
                    kept = p if dropout_factor is None else p * dropout_factor
                    dv_j += _transposed_product(kept, dout_i, hidden)
                if not want_ds:
                    continue
                dp = dout_i @ v_j.mT  # (B, Hk, G * M, N)
                if dropout_factor is not None:
                    dp *= dropout_factor
                ds = dp.sub_(delta_i).mul_(p)
                if hidden is not None:
                    ds.masked_fill_(hidden, 0)  # dp may be NaN there
                if dbias_ is not None:
                    score.add_bias_gradient(dbias_, ds, batch, rows, cols)
                if cap_slope is not None:
                    ds *= cap_slope if hidden is None else cap_slope.masked_fill_(hidden, 0)
                if want_dq:
                    dq_acc[:, :, :, rows] += tiling.by_row(_product(ds, k_j, hidden), rows)
                if want_dk:
                    dk_j += _transposed_product(ds, q_i, hidden)  # q_i carries the scale

            if want_dk:
                tiling.by_head(dk)[batch, :, 0, cols] = dk_j.to(k.dtype)
            if want_dv:
                tiling.by_head(dv)[batch, :, 0, cols] = dv_j.to(v.dtype)
        if want_dq:
            tiling.by_head(dq)[batch] = dq_acc.mul_(softmax_scale).to(q.dtype)

    dbias, dsinks = q.new_empty(0), q.new_empty(0)
    if dbias_ is not None and attn_bias is not None:
        dbias = dbias_.view(attn_bias.shape).to(attn_bias.dtype)
    if want_dsinks and sinks is not None:
        # The sink is a key with value 0: dP is 0 there, and dS = -P * delta.
        sink_p = (tiling.by_group(sinks, 0)[None, ..., None] - lse_).exp_()  # (B, Hk, G, Sq)
        dsink_p = torch.where(lse_ == MINUS_INF, 0, -sink_p * delta)
        dsinks = dsink_p.sum((0, 3)).flatten().to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _zero_if_empty(maximum: Tensor) -> Tensor:
    """0 for the -inf of a row that has seen no key: s - 0 is -inf then, but -inf + inf is NaN."""
    return maximum.masked_fill(maximum == MINUS_INF, 0)


def _transposed_product(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """weights^T @ values for weights (…, R, C) and values (…, R, D)."""
    return _product(weights.mT, values, None if hidden is None else hidden.mT)


def _product(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """weights @ values, (…, R, C) by (…, C, D), in which a hidden weight is absent, not just 0.

    The two differ where a value is not finite: 0 * NaN is NaN. Such values are taken out of the
    matrix product and added row by row to those that see them. The sum is a quick test: a finite
    one has only finite terms.
    """
    if hidden is None or values.sum().isfinite():
        return weights @ values
    finite = values.isfinite()
    product = weights @ values.masked_fill(~finite, 0)
    others = values.masked_fill(finite, 0)
    for c in (~finite).any(-1).flatten(0, 1).any(0).nonzero().flatten().tolist():
        addend = weights[..., c, None] * others[..., c, None, :]
        product += addend.masked_fill(hidden[..., c, None], 0)
    return product
