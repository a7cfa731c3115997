"""Packed sequences: what a call of `attention_varlen` asks for, checked.

The sequences lie one behind the other in the first dim of q, k and v. Sequence b has the rows from
cu_seqlens[b] to cu_seqlens[b + 1], of which the first seqused[b] are used, all without seqused.

Types, shapes, dtypes and devices are checked without a look at data, as for dense attention. What
cu_seqlens and seqused say is data: `read_sequences` reads and checks it, on the CPU always, on CUDA
only with FLASH_EXT_CHECK=1, since that waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext import problem
from flash_ext.problem import Problem, check_device, check_is_tensor, name_of, shape_of

CHECK = os.environ.get("FLASH_EXT_CHECK", "0") not in ("", "0")


class Packing(NamedTuple):
    """Where the sequences lie. A maximum is a hint that may be too large; None: not given."""

    cu_seqlens_q: Tensor  # int32 (B + 1,)
    cu_seqlens_k: Tensor  # int32 (B + 1,)
    seqused_q: Tensor | None = None  # int32 (B,)
    seqused_k: Tensor | None = None  # int32 (B,)
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


def packing_of(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Packing:
    """Arguments of the right types, nothing else is checked.

    Raises:
        TypeError: another type, or no cu_seqlens.
    """
    check_is_tensor("cu_seqlens_q", cu_seqlens_q)
    check_is_tensor("cu_seqlens_k", cu_seqlens_k)
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            check_is_tensor(name, used)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and not isinstance(longest, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int or None, got {type(longest).__name__}")
    return Packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)


# Facts: no data is read


def check_inputs(
    packing: Packing,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    device_type: str,
    autocast: torch.dtype | None = None,
) -> tuple[int, int, int, int, int, int, int]:
    """Check types, shapes, dtypes and devices of all tensors; arguments as of the dense twin.

    Returns:
        B, Tq, Tk, Hq, Hk, D, Dv.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    problem.check_dtypes(q, k, v, device_type, autocast)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {shape_of(x)}, expected 3 dimensions (T, H, D)")
        check_device(name, x, q.device)
    Tq, Hq, D = q.shape
    Tk, Hk, Dv = k.shape[0], k.shape[1], v.shape[2]
    for name, x, like, sizes in (
        ("k", k, f"q {shape_of(q)}", (("D", 2, D),)),
        ("v", v, f"k {shape_of(k)}", (("T", 0, Tk), ("H", 1, Hk))),
    ):
        for letter, dim, size in sizes:
            if x.shape[dim] != size:
                raise ValueError(
                    f"{name} has shape {shape_of(x)}: its {letter} is {x.shape[dim]}, "
                    f"expected {size} as in {like}"
                )
    if D < 1 or Dv < 1:
        name, x = ("v", v) if D else ("q", q)
        raise ValueError(f"{name} has shape {shape_of(x)}, expected a head dim of at least 1")
    if Hk < 1 or Hq % Hk:
        raise ValueError(
            f"q has {Hq} heads and k has {Hk}, expected the heads of q to be a multiple of those "
            "of k"
        )
    B = _check_packing(packing, q.device)
    if attn_bias is not None:
        _check_bias(attn_bias, q.device, B, Hq)
    problem.check_head_modifiers(alibi_slopes, sinks, q.device, B, Hq)
    return B, Tq, Tk, Hq, Hk, D, Dv


def _check_packing(packing: Packing, device: torch.device) -> int:
    """Returns B, the number of sequences."""
    named = packing._asdict()
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if named[name] is not None and named[name] < 0:
            raise ValueError(f"{name} is {named[name]}, expected at least 0, or None")
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        x = named[name]
        if x is None:
            continue
        check_device(name, x, device)
        if x.dtype != torch.int32:
            raise TypeError(f"{name} is {name_of(x.dtype)}, expected int32")
        if x.dim() != 1:
            raise ValueError(f"{name} has shape {shape_of(x)}, expected 1 dimension")
    B = packing.cu_seqlens_q.shape[0] - 1
    if B < 0:
        raise ValueError("cu_seqlens_q has shape (0,), expected (B + 1,) for B sequences")
    for name, x, size, meant in (
        ("cu_seqlens_k", packing.cu_seqlens_k, B + 1, "(B + 1,)"),
        ("seqused_q", packing.seqused_q, B, "(B,)"),
        ("seqused_k", packing.seqused_k, B, "(B,)"),
    ):
        if x is not None and x.shape[0] != size:
            raise ValueError(
                f"{name} has shape {shape_of(x)}, expected {meant} = ({size},), since cu_seqlens_q "
                f"has shape {shape_of(packing.cu_seqlens_q)}"
            )
    return B


def _check_bias(attn_bias: Tensor, device: torch.device, B: int, Hq: int) -> None:
    """Its last two dims are checked against the sequences, see `read_sequences`."""
    problem.check_bias_dtype(attn_bias, device)
    rank = attn_bias.dim()
    sizes = zip(attn_bias.shape[:-2], (B, Hq)[max(4 - rank, 0) :], strict=False)
    if rank > 4 or any(size != 1 and size != full for size, full in sizes):
        raise ValueError(
            f"attn_bias has shape {shape_of(attn_bias)}, expected one that broadcasts to "
            f"(B, Hq, max Sq, max Sk) with (B, Hq) = ({B}, {Hq})"
        )


def is_broadcast(attn_bias: Tensor, B: int, Hq: int) -> bool:
    """Whether an element of a checked bias may be added to more than one score."""
    shape = (1,) * (4 - attn_bias.dim()) + tuple(attn_bias.shape)
    return shape[:2] != (B, Hq) or 1 in shape[2:]


def of_tensors(
    packing: Packing,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
    deterministic: bool | None,
    *,
    device_type: str,
    autocast: torch.dtype | None = None,
) -> Problem:
    """The Problem of checked tensors; arguments and errors as in `check_inputs`."""
    sizes = check_inputs(
        packing,
        *(q, k, v, attn_bias, alibi_slopes, sinks),
        device_type=device_type,
        autocast=autocast,
    )
    dtype = problem.cast_dtype(q.dtype, autocast)
    problem.check_out_dtype(dtype, out_dtype)
    return Problem(
        *sizes,
        dtype=dtype,
        out_dtype=out_dtype or dtype,
        window=(window_left, window_right),
        modifiers=problem.modifiers_of(softcap, alibi_slopes, attn_bias, dropout_p),
        deterministic=deterministic,
        varlen=True,
    )


# Data: what the sequences are


class Rows(NamedTuple):
    """One sequence of a packed tensor."""

    start: int
    length: int  # rows that lie there
    used: int  # the first so many of them


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences of equal lengths: together a dense batch, as views."""

    first: int  # number of the first sequence
    count: int
    q: Rows  # of the first sequence
    k: Rows

    @property
    def sequences(self) -> slice:
        return slice(self.first, self.first + self.count)

    def of_q(self, x: Tensor, dim: int = 0) -> Tensor:
        """View of a packed tensor, Tq in the given dim, with (count, used rows) there."""
        return self._of(x, dim, self.q)

    def of_k(self, x: Tensor) -> Tensor:
        """View of a packed tensor (Tk, ...) as (count, used rows, ...)."""
        return self._of(x, 0, self.k)

    def _of(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        packed = x.narrow(dim, rows.start, self.count * rows.length)
        return packed.unflatten(dim, (self.count, rows.length)).narrow(dim + 1, 0, rows.used)


def runs(sequences_q: list[Rows], sequences_k: list[Rows]) -> Iterator[Run]:
    """All sequences in their order, as few dense batches as views allow."""

    def lengths(pair: tuple[int, tuple[Rows, Rows]]) -> tuple[int, ...]:
        q, k = pair[1]
        return q.length, q.used, k.length, k.used

    numbered = enumerate(zip(sequences_q, sequences_k, strict=True))
    for _, equals in groupby(numbered, lengths):
        (first, (q, k)), *others = equals
        yield Run(first, 1 + len(others), q, k)


def read_sequences(
    q: Tensor, k: Tensor, attn_bias: Tensor | None, packing: Packing
) -> tuple[list[Rows], list[Rows]]:
    """The sequences of q and of k. Reads data, and so waits for the device it is on.

    Raises:
        ValueError: offsets that do not begin at 0, fall, or end beyond the tensor; more rows used
            than there are; a maximum or a bias smaller than the longest sequence.
    """
    sequences_q = _read_rows("q", q, packing.cu_seqlens_q, packing.seqused_q, packing.max_seqlen_q)
    sequences_k = _read_rows("k", k, packing.cu_seqlens_k, packing.seqused_k, packing.max_seqlen_k)
    if attn_bias is not None:
        for dim, letter, sequences in ((-2, "q", sequences_q), (-1, "k", sequences_k)):
            longest = max((rows.used for rows in sequences), default=0)
            size = attn_bias.shape[dim] if attn_bias.dim() >= -dim else 1
            if size != 1 and size < longest:
                raise ValueError(
                    f"attn_bias has shape {shape_of(attn_bias)}: its S{letter} is {size}, "
                    f"expected 1 or at least {longest}, the longest sequence"
                )
    return sequences_q, sequences_k


def _read_rows(
    name: str, x: Tensor, cu_seqlens: Tensor, seqused: Tensor | None, longest: int | None
) -> list[Rows]:
    offsets = cu_seqlens.tolist()
    used = None if seqused is None else seqused.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens_{name} begins with {offsets[0]}, expected 0")
    if offsets[-1] > x.shape[0]:
        raise ValueError(
            f"cu_seqlens_{name} ends with {offsets[-1]}, expected at most {x.shape[0]}, the rows "
            f"of {name} {shape_of(x)}"
        )
    sequences = []
    for b, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise ValueError(
                f"cu_seqlens_{name} falls from {start} to {stop} in sequence {b}, expected offsets "
                "that never fall"
            )
        rows = Rows(start, stop - start, stop - start if used is None else used[b])
        if not 0 <= rows.used <= rows.length:
            raise ValueError(
                f"seqused_{name} is {rows.used} for sequence {b}, expected 0 to {rows.length}, "
                f"which is what cu_seqlens_{name} gives it"
            )
        if longest is not None and rows.used > longest:
            raise ValueError(
                f"max_seqlen_{name} is {longest}, expected at least {rows.used}, the length of "
                f"sequence {b}"
            )
        sequences.append(rows)
    return sequences
