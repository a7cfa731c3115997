"""Tensors as kernels take them: copies of what cannot be read in place, workspaces, modifiers.

Both pairs of operators use it, `ops.py` for dense tensors and `varlen_ops.py` for packed ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_ext.dispatch import WORKSPACE_STEP, Kernel
from flash_ext.philox import drop_threshold

ALIGNMENT = 16  # bytes: kernels read rows in pieces of this size
HEAD_DIM_STEP = 8  # kernels read head dims that are multiples of this
TURN_ROWS = 128  # in a deterministic pass a block adds to this many rows in one turn

Modifiers = tuple[float, Tensor | None, Tensor | None, int, Tensor | None]


def modifiers(
    softcap: float,
    dropout_p: float,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
) -> Modifiers | None:
    """What only kernels with all features take; None where nothing is asked of them."""
    if softcap == 0.0 and dropout_p == 0.0 and attn_bias is None and alibi_slopes is None:
        return None
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"seed is None, but dropout_p is {dropout_p}: a seed is needed")
    return (
        softcap,
        None if alibi_slopes is None else alibi_slopes.contiguous(),
        None if attn_bias is None else _rank_4(attn_bias).to(_bias_dtype(attn_bias)),
        drop_threshold(dropout_p),
        None if seed is None else seed.reshape(1),
    )


def _rank_4(attn_bias: Tensor) -> Tensor:
    return attn_bias[(None,) * (4 - attn_bias.dim())]


def _bias_dtype(attn_bias: Tensor) -> torch.dtype:
    """The dtype that kernels read a bias in."""
    return torch.float32 if attn_bias.dtype == torch.float64 else attn_bias.dtype


def bias_gradient(
    attn_bias: Tensor, added_up: bool, deterministic: bool
) -> tuple[Tensor, Tensor | None]:
    """Zeros of rank 4 for a gradient: fp32 where it is added up over broadcast dims.

    With `deterministic` also zeros for such sums in fixed point, int64: one for the largest
    addition, then one for each element.
    """
    dtype = torch.float32 if added_up else _bias_dtype(attn_bias)
    dbias = attn_bias.new_zeros(_rank_4(attn_bias).shape, dtype=dtype)
    if not (added_up and deterministic):
        return dbias, None
    return dbias, attn_bias.new_zeros(1 + attn_bias.numel(), dtype=torch.int64)


def has_readable_layout(x: Tensor, bhsd: bool) -> bool:
    """Whether kernels can read x at its strides: unit last one, rows at multiples of 16 bytes,
    each in a place of its own."""
    step = ALIGNMENT // x.element_size()
    sizes, strides = x.shape[:-1], x.stride()
    sequence = 2 if bhsd else 1
    return (
        (strides[sequence] != 0 or sizes[sequence] == 1)
        and x.shape[-1] % step == 0
        and strides[-1] == 1
        and all(
            stride % step == 0 for size, stride in zip(sizes, strides, strict=False) if size > 1
        )
    )


def readable(x: Tensor, bhsd: bool) -> Tensor:
    """x itself if kernels can read it in place, else one copy with the head dim zero-padded."""
    if has_readable_layout(x, bhsd) and x.data_ptr() % ALIGNMENT == 0:
        return x
    D = x.shape[-1]
    wide = x.new_zeros((*x.shape[:-1], _rounded_up(D, HEAD_DIM_STEP)))
    wide[..., :D].copy_(x)
    return wide


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def workspace(lse: Tensor, rows: Sequence[int], columns: int) -> Tensor:
    """Uninitialised fp32 (*rows, columns rounded up): thread blocks add up a gradient in it."""
    return lse.new_empty((*rows, _rounded_up(columns, WORKSPACE_STEP)))


def dq_workspace(kernel: Kernel, lse: Tensor, D: int) -> Tensor:
    """The same for dQ of rows like those of lse: (*rows, D rounded up), or whole tiles where the
    kernel asks for them: (B, Hq, Sq rounded up to its tiles, its head dim)."""
    if not kernel.whole_dq_tiles:
        return workspace(lse, lse.shape, D)
    rows = _rounded_up(lse.shape[-1], kernel.block_m)
    return workspace(lse, (*lse.shape[:-1], rows), kernel.head_dim)


def dq_turns(kernel: Kernel, lse: Tensor, turns: int) -> Tensor:
    """Counters, zero, that make thread blocks start and add to dQ in a fixed order: one for the
    blocks, then (B, Hq, turns, warps); packed (Hq, turns, warps)."""
    counters = lse.shape[:-1].numel() * turns * (kernel.threads // 32)
    return lse.new_zeros(1 + counters, dtype=torch.int32)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink has weight exp(sink - lse) in each row and no value, so its dP is 0: (Hq,).

    lse and delta are (B, Hq, Sq) or (Hq, Tq).
    """
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    rows = torch.where(lse == float("-inf"), 0.0, -weight * delta)
    return rows.sum((0, 2) if lse.dim() == 3 else 1).to(sinks.dtype)


def absent(q: Tensor) -> Tensor:
    """In place of a gradient that nobody asked for."""
    return q.new_empty(0)
