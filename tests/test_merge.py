"""merge: two partial results over disjoint keys are the result over all keys, with gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import merge

B, H, S, D = 2, 3, 4, 8
INF = float("inf")
SHAPES = {  # out and lse by kind of result
    "bshd": ((B, S, H, D), (B, H, S)),
    "bhsd": ((B, H, S, D), (B, H, S)),
    "packed": ((S, H, D), (H, S)),
}


def partial(kind: str, device: torch.device, lse: float | None = None) -> tuple[Tensor, Tensor]:
    """Random out and lse; a given lse is that of every row, and out is 0 where it is -inf."""
    out_shape, lse_shape = SHAPES[kind]
    out = torch.randn(out_shape, device=device)
    if lse is None:
        return out, torch.randn(lse_shape, device=device)
    return out * (lse > -INF), torch.full(lse_shape, lse, device=device)


def layout_of(kind: str) -> str:
    return "bhsd" if kind == "bhsd" else "bshd"


def exact(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], kind: str) -> tuple[Tensor, Tensor]:
    """In float64, by softmax over the two parts."""
    lse = torch.stack((a[1], b[1])).double()
    weights = torch.softmax(lse, 0).nan_to_num()
    weights = (weights if kind == "bhsd" else weights.transpose(-1, -2)).unsqueeze(-1)
    return weights[0] * a[0] + weights[1] * b[0], torch.logsumexp(lse, 0)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("lse_a", "lse_b"), [(None, None), (80.0, -80.0), (300.0, -300.0), (1.5, 1.5), (-300.0, -301.0)]
)
def test_values(lse_a: float | None, lse_b: float | None, kind: str, device: torch.device) -> None:
    """D06: extremes equal log-add-exp in float64."""
    a, b = partial(kind, device, lse_a), partial(kind, device, lse_b)
    out, lse = merge(*a, *b, layout=layout_of(kind))
    expected_out, expected_lse = exact(a, b, kind)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("empty", [-INF, INF])
def test_empty_parts(empty: float, kind: str, device: torch.device) -> None:
    """D06: (0, -inf) stays so; one empty side returns the other bit for bit, whatever it holds."""
    nothing = partial(kind, device, empty)
    garbage = (torch.full_like(nothing[0], torch.nan), nothing[1])
    some = partial(kind, device)
    for a, b in ((garbage, some), (some, garbage), (some, nothing)):
        out, lse = merge(*a, *b, layout=layout_of(kind))
        assert torch.equal(out, some[0])
        assert torch.equal(lse, some[1])
    out, lse = merge(*nothing, *garbage, layout=layout_of(kind))
    assert not out.any()
    assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients(kind: str) -> None:
    def call(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        return merge(out_a, lse_a, out_b, lse_b, layout=layout_of(kind))

    cpu = torch.device("cpu")
    tensors = [x.double().requires_grad_() for x in (*partial(kind, cpu), *partial(kind, cpu))]
    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize(
    ("lse_a", "lse_b"), [(-INF, -INF), (-INF, 1.0), (1.0, -INF), (300.0, -300.0)]
)
def test_gradients_are_finite(lse_a: float, lse_b: float, device: torch.device) -> None:
    """D06: a later loss has finite gradients, 0 for a part without weight."""
    a, b = partial("bshd", device, lse_a), partial("bshd", device, lse_b)
    tensors = [x.requires_grad_() for x in (*a, *b)]
    out, lse = merge(*tensors)
    loss = out.square().sum() + lse.where(lse > -INF, 0).sum()
    gradients = torch.autograd.grad(loss, tensors)
    assert all(x.isfinite().all() for x in gradients)
    for part, other, (d_out, d_lse) in (
        (lse_a, lse_b, gradients[:2]),
        (lse_b, lse_a, gradients[2:]),
    ):
        assert d_out.any() == (part > -INF and part >= other)
        assert d_lse.any() == (part > -INF and part >= other)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("cut", [0, 3, 10, 13])
def test_halves_of_the_keys(cut: int, layout: str, device: torch.device) -> None:
    """Attention over two parts, merged, is attention over all, and so are its gradients."""
    seq = 1 if layout == "bshd" else 2
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    shape = (B, 13, 2, 64) if layout == "bshd" else (B, 2, 13, 64)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3))
    wide: dict[str, Any] = {"layout": layout, "return_lse": True}
    if device.type == "cuda":
        wide["out_dtype"] = torch.float32
    whole, whole_lse = flash_ext.attention(q, k, v, **wide)
    parts = [
        flash_ext.attention(q, k.narrow(seq, start, length), v.narrow(seq, start, length), **wide)
        for start, length in ((0, cut), (cut, 13 - cut))
    ]
    out, lse = merge(*parts[0], *parts[1], layout=layout)
    close = {"atol": 1e-10, "rtol": 1e-10} if device.type == "cpu" else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(out, whole, **close)
    torch.testing.assert_close(lse, whole_lse, **close)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for found, expected in zip(
        torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)),
        torch.autograd.grad((whole, whole_lse), (q, k, v), (dout, dlse)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **close)


def test_dtypes(device: torch.device) -> None:
    """The wider dtype of both results; weights are computed in that of lse."""
    (out_a, lse_a), (out_b, lse_b) = partial("bshd", device), partial("bshd", device)
    assert merge(out_a.half(), lse_a, out_b.half(), lse_b)[0].dtype == torch.float16
    assert merge(out_a.bfloat16(), lse_a, out_b, lse_b)[0].dtype == torch.float32
    out, lse = merge(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_133_parts_in_any_order(device: torch.device) -> None:
    """D06: as many parts as there are, some of them empty, not contiguous."""
    outs = torch.randn(133, 2 * B, S, H, D, device=device)[:, ::2]
    lses = torch.randn(133, B, H, S, device=device) * 20
    lses[::3] = -INF
    outs[::3] = 0
    order = torch.randperm(133).tolist()
    out, lse = outs[order[0]], lses[order[0]]
    for index in order[1:]:
        out, lse = merge(out, lse, outs[index], lses[index])
    weights = torch.softmax(lses.double(), 0).transpose(-1, -2).unsqueeze(-1)
    torch.testing.assert_close(out.double(), (weights * outs).sum(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(0), atol=1e-5, rtol=1e-5)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"out_a": [1.0]}, TypeError, "out_a must be a torch.Tensor, got list"),
    ({"lse_b": torch.zeros(B, H, S).half()}, TypeError, "lse_b is float16, expected one of"),
    ({"out_b": torch.zeros(B, S, H, D).int()}, TypeError, "out_b is int32, expected one of"),
    ({"lse_a": torch.zeros(B, S, H)}, ValueError, "lse_a has shape (2, 4, 3), expected (2, 3, 4)"),
    ({"out_b": torch.zeros(B, S, H, 2)}, ValueError, "out_b has shape (2, 4, 3, 2), expected (2"),
    ({"out_a": torch.zeros(S, H)}, ValueError, "out_a has shape (4, 3), expected 3 or 4 dim"),
    ({"lse_b": torch.zeros(B, H, S, device="meta")}, ValueError, "lse_b is on meta, expected cpu"),
    ({"layout": "shbd"}, ValueError, "layout is 'shbd', expected 'bshd' or 'bhsd'"),
    ({"layout": "bhsd"}, ValueError, "lse_a has shape (2, 3, 4), expected (2, 4, 3)"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    (out_a, lse_a), (out_b, lse_b) = (partial("bshd", torch.device("cpu")) for _ in range(2))
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, **change}
    with pytest.raises(error, match=re.escape(message)):
        merge(**given)


def test_packed_results_have_one_layout() -> None:
    part = partial("packed", torch.device("cpu"))
    with pytest.raises(ValueError, match="layout is 'bhsd', expected 'bshd' with packed out_a"):
        merge(*part, *part, layout="bhsd")
