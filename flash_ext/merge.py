"""Two partial attention results over disjoint keys become the result over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext.problem import CPU_DTYPES, check_is_tensor, check_layout, name_of, shape_of

MINUS_INF = float("-inf")


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """Combine two partial results of the same queries over disjoint sets of keys.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    the rule by which blocks of keys are combined inside attention (Dao, arXiv:2307.08691, section
    3.1.1). Differentiable in all four tensors. A part that saw no key, lse -inf, has no weight: the
    other part comes back bit for bit, and two such parts give out 0 and lse -inf. Some kernels mark
    such rows by lse +inf; that is understood as well. Partial results with sinks count them twice:
    give sinks to one part only. Computed in float32 (float64 if lse is); extra memory is a few
    tensors of the size of out.

    Args:
        out_a, out_b: (B, Sq, Hq, Dv), with layout "bhsd" (B, Hq, Sq, Dv); of packed sequences
            (Tq, Hq, Dv), told by the rank. Floating; rounding is least with `out_dtype=float32`.
        lse_a, lse_b: (B, Hq, Sq), of packed sequences (Hq, Tq). float32 or float64.
        layout: "bshd" or "bhsd"; packed results have one layout only.

    Returns:
        out of the same shape, in the wider dtype of both, and lse.

    Raises:
        TypeError, ValueError: tensors that do not belong together.
    """
    check_layout(layout)
    _check(out_a, lse_a, out_b, lse_b, layout)
    lse_a, lse_b = (x.masked_fill(x == -MINUS_INF, MINUS_INF) for x in (lse_a, lse_b))
    # A constant shift changes no result, so it needs no gradient; 0 where neither part saw a key.
    shift = torch.maximum(lse_a, lse_b).detach()
    shift = shift.masked_fill(shift == MINUS_INF, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (shift + torch.log(total)).masked_fill(empty, MINUS_INF)
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    out = _weighted(out_a, weight_a / total, layout) + _weighted(out_b, weight_b / total, layout)
    return out.to(dtype), lse


def _weighted(out: Tensor, weight: Tensor, layout: str) -> Tensor:
    """Rows of out times their weights; what lies in a row without weight does not matter."""
    weight = (weight if layout == "bhsd" else weight.transpose(-1, -2)).unsqueeze(-1)
    return weight * out.masked_fill(weight == 0, 0.0).to(weight.dtype)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, layout: str) -> None:
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in named.items():
        check_is_tensor(name, x)
        if x.device != out_a.device:
            raise ValueError(f"{name} is on {x.device}, expected {out_a.device}, as out_a")
        allowed = CPU_DTYPES if name.startswith("out") else CPU_DTYPES[-2:]
        if x.dtype not in allowed:
            names = ", ".join(map(name_of, allowed))
            raise TypeError(f"{name} is {name_of(x.dtype)}, expected one of {names}")
    if out_a.dim() not in (3, 4):
        raise ValueError(f"out_a has shape {shape_of(out_a)}, expected 3 or 4 dimensions")
    if out_a.dim() == 3 and layout != "bshd":
        raise ValueError(f"layout is {layout!r}, expected 'bshd' with packed out_a (Tq, Hq, Dv)")
    rows = out_a.shape[:-1]
    lse_shape = tuple(rows if layout == "bhsd" else (*rows[:-2], rows[-1], rows[-2]))
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(x.shape) != lse_shape:
            raise ValueError(f"{name} has shape {shape_of(x)}, expected {lse_shape} as of out_a")
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b has shape {shape_of(out_b)}, expected {shape_of(out_a)} as out_a")
