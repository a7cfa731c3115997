"""How exact is exact enough: the rule that results are held against.

No tolerance here is chosen. Plain PyTorch in the inputs' own dtype makes an error e against the
fp64 result from the same, already rounded inputs. An implementation may make, in every row and so
in the whole tensor,

    factor * e + floor,    factor 2 for out and lse (3 with a soft cap) and 3 for gradients.

The yardstick e of a row is the worst error of plain PyTorch within 16 rows of it, over all heads of
the batch entry: against its own row alone, a rightly rounding implementation fails by bad luck.
(The gradient of a sink, a sum over all rows of a head with a scale of its own, has its own.)
Where scores are so large that rounding them turns the plain run into noise, the yardstick is a run
that rounds just what a tiled kernel rounds: P, dS and O.

The floor of a row is twice the rounding of its largest element and, for gradients, what an ideal
kernel must err by since it takes delta from an already rounded O and rounds dS. For dq that is

    u * |scale| * max_d sum_j P_ij (|dP_ij| + sum |dO_i| |O_i| + |dlse_i|) |k_jd|,

with u half the dtype's eps, and transposed with |q| for dk; plus the smallest subnormal. In fp32
and fp64, where only the order of summation differs, u counts 16 times, and out and dv have floors
of the same kind. To u comes the relative error of P from scores rounded in the accumulator, which
shows where scores are large.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from flash_ext.testing.cases import Inputs
from flash_ext.testing.oracle import Result, accumulator, heads_first, lowp, oracle, unit

__all__ = ["check", "check_backward", "check_forward", "lowp", "oracle", "yardstick"]

ROW_WINDOW = 16
NOISE = 0.25  # error of a score, from rounding it alone, beyond which exp of it is noise


def yardstick(inputs: Inputs, exact: Result) -> Result:
    """The plain run, or the tiled one where plain is noise or overflows."""
    if exact.noise <= NOISE:
        plain = lowp(inputs)
        finite = (exact.values[name].isfinite() for name in plain.values)
        values = plain.values.values()
        if all(bool(v[f].isfinite().all()) for v, f in zip(values, finite, strict=True)):
            return plain
    return lowp(inputs, "tiled")


def check(
    inputs: Inputs, out: Tensor, lse: Tensor | None = None, **gradients: Tensor | None
) -> dict[str, float]:
    """check_forward and check_backward in one call; the oracle and the yardstick are computed."""
    exact = oracle(inputs)
    measure = yardstick(inputs, exact)
    ratios = check_forward(inputs, out, lse, exact, measure)
    return ratios | check_backward(inputs, gradients, exact, measure)


def check_forward(
    inputs: Inputs, out: Tensor, lse: Tensor | None, exact: Result, measure: Result
) -> dict[str, float]:
    """Hold out, and lse if there is one, against the rule.

    Returns:
        The largest error of each, over the allowance of its row: below 1.

    Raises:
        AssertionError: wrong shape, dtype, value, or a NaN or Inf that the oracle does not have.
    """
    factor = 3 if inputs.softcap > 0 else 2
    expected_dtype = inputs.out_dtype or inputs.q.dtype
    if out.dtype != expected_dtype:
        raise AssertionError(f"out: dtype {out.dtype}, expected {expected_dtype}")
    ratios = {"out": _hold("out", heads_first(out, inputs), exact, measure, factor)}
    if lse is not None:
        if lse.dtype != accumulator(inputs.q.dtype):
            raise AssertionError(f"lse: dtype {lse.dtype} for {inputs.q.dtype} inputs")
        ratios["lse"] = _hold("lse", lse.unsqueeze(-1), exact, measure, factor)
    return ratios


def check_backward(
    inputs: Inputs, gradients: dict[str, Tensor | None], exact: Result, measure: Result
) -> dict[str, float]:
    """Hold gradients, by name dq, dk, dv, dbias, dsinks, against the rule; None is left out.

    Returns and raises as check_forward.
    """
    sources = {"dq": "q", "dk": "k", "dv": "v", "dbias": "attn_bias", "dsinks": "sinks"}
    ratios = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        source = getattr(inputs, sources[name])
        if gradient.shape != source.shape or gradient.dtype != source.dtype:
            raise AssertionError(
                f"{name}: {tuple(gradient.shape)} {gradient.dtype}, "
                f"expected {tuple(source.shape)} {source.dtype}"
            )
        ours = heads_first(gradient, inputs) if name in ("dq", "dk", "dv") else gradient
        ratios[name] = _hold(name, ours, exact, measure, factor=3)
    return ratios


def _hold(name: str, ours: Tensor, exact: Result, measure: Result, factor: float) -> float:
    """The rule for one tensor; returns the largest ratio of error to allowance."""
    reference = exact.values[name]
    dtype = ours.dtype
    if name in ("dbias", "dsinks"):
        ours = ours.reshape(reference.shape)
    if ours.shape != reference.shape:
        raise AssertionError(
            f"{name}: shape {tuple(ours.shape)}, expected {tuple(reference.shape)} (heads first)"
        )
    if ours.numel() == 0:
        return 0.0
    ours = ours.double()
    rounded = reference.to(dtype).double()

    finite = rounded.isfinite()
    same = (ours == rounded) | (ours.isnan() & rounded.isnan())
    strange = torch.where(finite, ~ours.isfinite(), ~same)
    if strange.any():
        where = tuple(strange.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {ours[where].item()} at {where}, the oracle has {reference[where].item()}; "
            f"{int(strange.sum())} of {ours.numel()} elements are like this"
        )

    error = _row_error(ours, reference, finite)  # (B, H, S, 1)
    yard = _row_error(measure.values[name].double(), reference, finite)
    floor = exact.floors[name] + _rounding_floor(rounded, finite, dtype)
    window = (yard if name == "dsinks" else _worst_near(yard)).expand_as(error)
    allowed = factor * window + floor
    ratio = torch.where(error > 0, error / allowed, 0.0)
    if not ratio.max() <= 1:  # a NaN fails too
        b, h, s, _ = (int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        bad_rows = int((ratio > 1).sum())
        raise AssertionError(
            f"{name}: row {s} of head {h}, batch entry {b} is off by {error[b, h, s, 0]:.3e}, "
            f"{ratio.max():.2f} times the {allowed[b, h, s, 0]:.3e} allowed = {factor} * yardstick "
            f"{window[b, h, s, 0]:.3e} + floor {floor[b, h, s, 0]:.3e}, in a row that reaches "
            f"{rounded[b, h, s].abs().max():.3e}; {bad_rows} of {ratio.numel()} rows fail"
        )
    return ratio.max().item()


def _row_error(values: Tensor, reference: Tensor, finite: Tensor) -> Tensor:
    """Largest error of each row where the reference is finite: (B, H, S, 1)."""
    return torch.where(finite, (values - reference).abs(), 0.0).amax(-1, keepdim=True)


def _worst_near(row_error: Tensor) -> Tensor:
    """(B, H, S, 1) -> (B, 1, S, 1): the worst over all heads and the rows within ROW_WINDOW."""
    worst_head = row_error.amax(1).squeeze(-1)  # (B, S)
    width = 2 * ROW_WINDOW + 1
    return max_pool1d(worst_head, width, stride=1, padding=ROW_WINDOW)[:, None, :, None]


def _rounding_floor(rounded: Tensor, finite: Tensor, dtype: torch.dtype) -> Tensor:
    """Twice the rounding of the largest element of each row, and the smallest subnormal."""
    info = torch.finfo(dtype)
    largest = torch.where(finite, rounded.abs(), 0.0).amax(-1, keepdim=True)
    return 2 * unit(dtype) * largest + info.smallest_normal * info.eps
