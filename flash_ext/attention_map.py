"""Rows of the table of probabilities, for looking at: what attention itself never holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flash_ext import interface, problem
from flash_ext.problem import NO_WINDOW, WindowSize
from flash_ext.score import MINUS_INF

Selection: TypeAlias = int | slice | range | Sequence[int] | Tensor


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    *,
    rows: Selection,
    heads: Selection | None = None,
    lse: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: WindowSize = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bshd",
) -> Tensor:
    """Exact rows of the table of probabilities, softmax of the scores: what the queries look at.

    Computed from q and k in PyTorch operations, on any device. Memory: the rows asked for, and
    beside them the keys of one head in float32 and a few rows of one head.

    Args:
        q: (B, Sq, Hq, D), as for `attention`.
        k: (B, Sk, Hk, D).
        rows: queries to show: an index, a slice, or some indices, from the end where negative.
        heads: query heads to show, in the same way; None is all of them.
        lse: (B, Hq, Sq), what `attention(..., return_lse=True)` returned for the same arguments;
            None computes it for the rows shown.
        causal, softmax_scale, window_size, softcap, alibi_slopes, attn_bias, layout: as for
            `attention`.
        sinks: (Hq,), as for `attention`; not together with lse, which holds them already.

    Returns:
        (B, heads, rows, Sk) float32, heads and rows in the order asked for. A row sums to 1, with a
        sink to less, and is 0 where the query sees no key. No gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value. The
            message names the argument, what came and what was expected.
        IndexError: a row or a head beyond the end.
    """
    interface.check_tensors(q, k, k)
    interface.check_modifiers(attn_bias, sinks, alibi_slopes)
    interface.check_plain(softmax_scale, softcap, 0.0, None, False, None, layout)
    left, right = problem.window_limits(causal, window_size)
    bhsd = layout == "bhsd"
    autocast = interface.autocast_dtype(q)
    B, Sq, Sk, Hq, Hk, D, _ = problem.check_inputs(
        *(q, k, k, attn_bias, alibi_slopes, sinks),
        bhsd=bhsd,
        device_type="cpu",  # PyTorch's operations: every dtype, wherever the tensors are
        autocast=autocast,
    )
    if lse is not None:
        _check_lse(lse, q.device, (B, Hq, Sq), sinks)
    at_rows = _indices("rows", rows, Sq, q.device)
    at_heads = _indices("heads", slice(None) if heads is None else heads, Hq, q.device)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    q, k = (x.to(problem.cast_dtype(x.dtype, autocast)) for x in (q, k))
    q, k = (x if bhsd else x.transpose(1, 2) for x in (q, k))  # (B, H, S, D)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    distance = torch.arange(Sk, device=q.device) - (at_rows + Sk - Sq)[:, None]  # (rows, Sk)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    bias = None if attn_bias is None else attn_bias[(None,) * (4 - attn_bias.dim())]
    if bias is not None and bias.shape[2] > 1:
        bias = bias.index_select(2, at_rows)

    table = torch.empty((B, len(at_heads), len(at_rows), Sk), dtype=torch.float32, device=q.device)
    for i, head in enumerate(at_heads.tolist()):
        q_rows = q[:, head].index_select(1, at_rows).to(wide)  # (B, rows, D)
        keys = k[:, head // (Hq // Hk)].to(wide)  # (B, Sk, D)
        with torch.autocast(q.device.type, enabled=False):
            scores = q_rows * scale @ keys.mT  # (B, rows, Sk)
        if softcap > 0:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if alibi_slopes is not None:
            slope = alibi_slopes[..., head].to(wide).reshape(-1, 1, 1)  # (B|1, 1, 1)
            scores -= slope * distance.abs()
        masked = hidden
        if bias is not None:
            of_head = bias[:, head if bias.shape[1] > 1 else 0]  # (B|1, rows|1, Sk|1)
            if bias.dtype == torch.bool:
                masked = hidden | ~of_head
            else:
                scores += of_head
                masked = hidden | (of_head == MINUS_INF)
        scores.masked_fill_(masked, MINUS_INF)
        if lse is not None:
            total = lse[:, head].index_select(1, at_rows)[..., None].to(wide)
        else:
            total = torch.logsumexp(scores, -1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[head].to(wide))
        # A row that sees no key has only exp(-inf - 0).
        table[:, i] = scores.sub_(total.masked_fill(total == MINUS_INF, 0)).exp_()
    return table


def _check_lse(
    lse: Tensor, device: torch.device, shape: tuple[int, int, int], sinks: Tensor | None
) -> None:
    problem.check_is_tensor("lse", lse)
    problem.check_device("lse", lse, device)
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lse is {problem.name_of(lse.dtype)}, expected float32 or float64")
    if lse.shape != shape:
        raise ValueError(f"lse has shape {problem.shape_of(lse)}, expected (B, Hq, Sq) = {shape}")
    if sinks is not None:
        raise ValueError("sinks and lse are both given, expected one: lse holds the sinks already")


def _indices(name: str, selection: Selection, size: int, device: torch.device) -> Tensor:
    """int64 indices in [0, size)."""
    if isinstance(selection, slice):
        selection = range(size)[selection]
    elif isinstance(selection, int) and not isinstance(selection, bool):
        selection = (selection,)
    if isinstance(selection, Tensor):
        if selection.dim() != 1 or selection.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{name} is {problem.name_of(selection.dtype)} of shape "
                f"{problem.shape_of(selection)}, expected int32 or int64 of one dimension"
            )
        selection = selection.tolist()
    if not isinstance(selection, Sequence) or isinstance(selection, str):
        raise TypeError(f"{name} must be an int, a slice or some ints, got {selection!r}")
    for index in selection:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"{name} must be an int, a slice or some ints, got {index!r} in it")
        if not -size <= index < size:
            raise IndexError(f"{name}: index {index} is out of range for {size}")
    return torch.tensor([index % size for index in selection], dtype=torch.int64, device=device)
