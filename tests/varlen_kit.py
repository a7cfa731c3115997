"""What the tests of packed sequences share: problems, and the same by dense calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.testing.cases import Case, Inputs, make_inputs

MINUS_INF = float("-inf")
PLAIN = Case(heads_q=4, head_dim=8, head_dim_v=6, dtype=torch.float64)
EVERYTHING = replace(
    PLAIN, causal=True, softcap=5.0, alibi="bh", bias="hk", bias_hidden=0.2, sinks=torch.float64,
    dropout_p=0.3,
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Rows of each sequence, as they lie and as they are used (None: all), and rows behind them."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    behind: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.q)

    def rows_q(self) -> list[slice]:
        """Used rows of each sequence."""
        return _used_rows(self.q, self.used_q)

    def rows_k(self) -> list[slice]:
        return _used_rows(self.k, self.used_k)


# Sequences without queries, without keys, without both; at the ends, and one after the other.
MIXED = Lengths((0, 3, 40, 0, 0, 17, 1, 5, 0), (5, 4, 33, 0, 9, 70, 130, 0, 0))
USED = Lengths(
    (6, 3, 40, 9, 0, 17, 5), (5, 7, 33, 4, 9, 70, 5),
    used_q=(0, 3, 37, 2, 0, 17, 4), used_k=(5, 4, 33, 0, 3, 50, 5), behind=(7, 11),
)  # fmt: skip
EQUAL = Lengths((20,) * 5, (24,) * 5)  # one dense batch
EQUAL_USED = Lengths((20,) * 4, (24,) * 4, used_q=(13,) * 4, used_k=(19,) * 4, behind=(0, 3))
SAME_USED = Lengths((6, 4, 5, 5), (7, 7, 9, 4), used_q=(3,) * 4, used_k=(4,) * 4)
EMPTY = Lengths((0, 0), (0, 0))
NONE = Lengths((), (), behind=(4, 3))
ALL = {
    "mixed": MIXED, "used": USED, "equal": EQUAL, "equal_used": EQUAL_USED, "same_used": SAME_USED,
    "empty": EMPTY, "none": NONE,
}  # fmt: skip


def _used_rows(lengths: tuple[int, ...], used: tuple[int, ...] | None) -> list[slice]:
    starts = list(accumulate(lengths, initial=0))
    return [slice(start, start + n) for start, n in zip(starts, used or lengths, strict=False)]


def length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _int32(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


@dataclass
class Packed:
    """Arguments of attention_varlen. Rows that no sequence uses are NaN, in dout and dlse too."""

    lengths: Lengths
    leaves: dict[str, Tensor]  # q, k, v and, where there are any, attn_bias and sinks
    others: dict[str, Any]
    dout: Tensor  # (Tq, Hq, Dv)
    dlse: Tensor  # (Hq, Tq)

    def run(self, **change: Any) -> tuple[Tensor, Tensor]:
        """out and lse. A call with dropout draws the same seed each time."""
        torch.manual_seed(7)
        given = {**self.leaves, **self.others, "return_lse": True, **change}
        return flash_ext.attention_varlen(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    def run_by_sequence(self) -> tuple[Tensor, Tensor]:
        """out and lse by a dense call for each sequence, zeros and -inf elsewhere.

        Sequence b is batch entry b of b + 1 equal ones, so that it has its own dropout mask.
        """
        q, k, v = (self.leaves[name] for name in ("q", "k", "v"))
        bias, slopes = self.leaves.get("attn_bias"), self.others["alibi_slopes"]
        packing = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        given = {name: x for name, x in self.others.items() if name not in packing}
        given |= {"sinks": self.leaves.get("sinks"), "return_lse": True}
        out, lse = torch.zeros_like(self.dout), torch.full_like(self.dlse, MINUS_INF)
        for b, (rows, cols) in enumerate(self.parts()):
            parts = ((q, rows), (k, cols), (v, cols))
            dense = [x[part].expand(b + 1, -1, -1, -1) for x, part in parts]
            if bias is not None:
                given["attn_bias"] = bias_of(bias, b, length(rows), length(cols))
            if slopes is not None and slopes.dim() == 2:
                given["alibi_slopes"] = slopes[: b + 1]
            torch.manual_seed(7)
            out_b, lse_b = flash_ext.attention(*dense, **given)
            out[rows], lse[:, rows] = out_b[b], lse_b[b]
        return out, lse

    def parts(self) -> list[tuple[slice, slice]]:
        """Used rows of q and of k, sequence by sequence."""
        return list(zip(self.lengths.rows_q(), self.lengths.rows_k(), strict=True))

    def gradients(self, out: Tensor, lse: Tensor, *asked: str) -> dict[str, Tensor]:
        """Gradients of the used rows for dout and dlse; all leaves where none is asked for."""
        asked = asked or tuple(name for name, x in self.leaves.items() if x.requires_grad)
        found = torch.autograd.grad(
            [out, lse],
            [self.leaves[name] for name in asked],
            [self.dout.to(out.dtype), self.dlse],
            allow_unused=True,
        )
        zeros = (torch.zeros_like(self.leaves[name]) for name in asked)
        return {n: z if g is None else g for n, g, z in zip(asked, found, zeros, strict=True)}

    def requires_grad_(self, *asked: str) -> Packed:
        for name, x in self.leaves.items():
            if x.is_floating_point():
                x.requires_grad_(not asked or name in asked)
        return self

    def unused_q(self) -> Tensor:
        """bool (Tq,): rows that no sequence uses."""
        return _unused(self.leaves["q"].shape[0], self.lengths.rows_q())

    def unused_k(self) -> Tensor:
        return _unused(self.leaves["k"].shape[0], self.lengths.rows_k())

    def inputs_of(self, b: int, case: Case) -> Inputs:
        """Sequence b as a dense problem of one batch entry, for the tolerance kit."""
        rows, cols = self.parts()[b]
        q, k, v = (self.leaves[name].detach() for name in ("q", "k", "v"))
        bias, slopes = self.leaves.get("attn_bias"), self.others["alibi_slopes"]
        if bias is not None:
            bias = bias_of(bias.detach(), b, length(rows), length(cols))
        sinks = self.leaves.get("sinks")
        return Inputs(
            q=q[None, rows], k=k[None, cols], v=v[None, cols],
            dout=self.dout[None, rows], dlse=self.dlse[None, :, rows],
            attn_bias=bias, sinks=None if sinks is None else sinks.detach(),
            alibi_slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
            causal=case.causal, window_size=case.window_size, softmax_scale=case.softmax_scale,
            softcap=case.softcap, out_dtype=case.out_dtype,
        )  # fmt: skip


def _unused(rows: int, used: list[slice]) -> Tensor:
    unused = torch.ones(rows, dtype=torch.bool)
    for part in used:
        unused[part] = False
    return unused


def bias_of(bias: Tensor, b: int, rows: int, cols: int) -> Tensor:
    """The part of a bias of four dims that sequence b sees."""
    bias = bias if bias.shape[0] == 1 else bias[b : b + 1]
    bias = bias if bias.shape[2] == 1 else bias[:, :, :rows]
    return bias if bias.shape[3] == 1 else bias[..., :cols]


def pack(lengths: Lengths, case: Case, device: torch.device | str = "cpu") -> Packed:
    """Packed sequences with the heads, head dims, dtype and modifiers of a case."""
    device = torch.device(device)
    total_q, total_k = sum(lengths.q) + lengths.behind[0], sum(lengths.k) + lengths.behind[1]
    rows = make_inputs(
        replace(case, batch=1, seqlen_q=total_q, seqlen_k=total_k, bias=None, lse_gradient=True),
        device,
    )
    longest_q, longest_k = (
        max(map(length, used), default=0) for used in (lengths.rows_q(), lengths.rows_k())
    )
    tables = make_inputs(
        replace(case, batch=len(lengths), seqlen_q=longest_q, seqlen_k=longest_k), device
    )
    assert rows.dout is not None
    assert rows.dlse is not None
    shared = {"attn_bias": tables.attn_bias, "sinks": tables.sinks}
    leaves = {"q": rows.q[0], "k": rows.k[0], "v": rows.v[0]}
    others = {name: x for name, x in tables.public().items() if name not in (*shared, "layout")}
    others |= {
        "cu_seqlens_q": _int32(accumulate(lengths.q, initial=0), device),
        "cu_seqlens_k": _int32(accumulate(lengths.k, initial=0), device),
        "seqused_q": None if lengths.used_q is None else _int32(lengths.used_q, device),
        "seqused_k": None if lengths.used_k is None else _int32(lengths.used_k, device),
    }
    found = Packed(lengths, leaves, others, rows.dout[0], rows.dlse[0])
    unused_q, unused_k = (mask.to(device) for mask in (found.unused_q(), found.unused_k()))
    nan = float("nan")
    for name, unused in (("q", unused_q), ("k", unused_k), ("v", unused_k)):
        if unused.any():  # a copy
            leaves[name] = leaves[name].masked_fill(unused[:, None, None], nan)
    leaves |= {name: x for name, x in shared.items() if x is not None}
    found.dout = found.dout.masked_fill(unused_q[:, None, None], nan)
    found.dlse = found.dlse.masked_fill(unused_q, nan)
    return found


def require_served(packed: Packed) -> None:
    """Skip a call that this CUDA build does not serve."""
    if packed.leaves["q"].is_cpu:
        return
    plan = flash_ext.explain(**packed.leaves, **packed.others)
    for choice in (plan.forward, plan.backward):
        if choice.family is None:
            pytest.skip(f"not served: {choice.reason}")
