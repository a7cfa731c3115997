"""Is a provider's result right? Compared with fp64 attention on a slice before it is timed.

The slice is the last batch entry's last key head with the query heads of its group: the largest
offsets, and small enough for long sequences because the score table is made in blocks of rows.
This guards a benchmark against timing nonsense; the tests judge accuracy far more strictly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.providers import Inputs

TABLE_ELEMENTS = 2**26  # of one fp64 block of the score table: 512 MiB

# Largest relative error of a whole result, and of one row against the larger of its own norm and
# the root mean square over rows (small rows, such as the first dq under a causal mask, are exact
# zeros that rounding blurs).
WHOLE_LIMIT = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
ROW_LIMIT = {"bfloat16": 0.3, "float16": 0.1, "float32": 1e-2}


@dataclass(frozen=True)
class Errors:
    """Relative errors of one result: of the whole, and of its worst row."""

    whole: float
    row: float


def slice_oracle(x: Inputs, gradients: bool) -> dict[str, Tensor]:
    """fp64 results of the slice: out (G,Sq,Dv), and with gradients dq, dk, dv as (heads,S,D)."""
    group = x.q.shape[2] // x.k.shape[2]
    q, dout = (last_heads(t, group).double() for t in (x.q, x.dout))  # (G, Sq, D), (G, Sq, Dv)
    k, v = (last_heads(t, 1).double()[0] for t in (x.k, x.v))  # (Sk, D), (Sk, Dv)
    Sq, Sk, scale = q.shape[1], k.shape[0], 1 / math.sqrt(q.shape[2])
    out, dq, dk, dv = torch.empty_like(dout), torch.empty_like(q), 0 * k, 0 * v
    columns = torch.arange(Sk, device=q.device)
    block = max(1, TABLE_ELEMENTS // (group * Sk))
    for start in range(0, Sq, block):
        rows = slice(start, min(start + block, Sq))
        scores = scale * (q[:, rows] @ k.T)  # (G, rows, Sk)
        if x.causal:
            last = torch.arange(rows.start, rows.stop, device=q.device) + Sk - Sq
            scores.masked_fill_(columns > last[:, None], -math.inf)
        P = torch.softmax(scores, dim=-1)
        out[:, rows] = P @ v
        if gradients:
            dP = dout[:, rows] @ v.T  # (G, rows, Sk)
            delta = (dout[:, rows] * out[:, rows]).sum(-1, keepdim=True)
            dS = P * (dP - delta)
            dq[:, rows] = scale * (dS @ k)
            dk += scale * (dS.transpose(1, 2) @ q[:, rows]).sum(0)
            dv += (P.transpose(1, 2) @ dout[:, rows]).sum(0)
    return {"out": out, "dq": dq, "dk": dk[None], "dv": dv[None]} if gradients else {"out": out}


def last_heads(t: Tensor, heads: int) -> Tensor:
    """(B, S, H, D) -> (heads, S, D) of the last batch entry."""
    return t.detach()[-1, :, -heads:].transpose(0, 1)


def errors(results: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> dict[str, Errors]:
    """name -> relative errors of each result the oracle knows."""
    found = {}
    for name, result in results.items():
        expected = oracle[name]
        row_norm = expected.norm(dim=-1)  # (heads, S)
        gap = (last_heads(result, expected.shape[0]).double() - expected).norm(dim=-1)
        typical = row_norm.square().mean().sqrt()
        whole = gap.norm() / row_norm.norm()
        found[name] = Errors(whole.item(), (gap / row_norm.clamp(min=typical)).max().item())
    return found


def complaint(found: Mapping[str, Errors], dtype: str) -> str:
    """What is wrong with the results, in one line; empty if nothing is. NaN is wrong."""
    for name, error in found.items():
        if not error.whole <= WHOLE_LIMIT[dtype]:
            return f"{name}: relative error {error.whole:.2g}, limit {WHOLE_LIMIT[dtype]:.2g}"
        if not error.row <= ROW_LIMIT[dtype]:
            return f"{name}: a row's error {error.row:.2g}, limit {ROW_LIMIT[dtype]:.2g}"
    return ""
