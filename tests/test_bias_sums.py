"""The gradient of a broadcast bias with `deterministic`: sums in fixed point on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_kit import assert_bit_equal, attend, capture, hold, run
from torch import Tensor

from flash_ext import operands
from flash_ext.testing.cases import Case, make_inputs, poison_allocator

BASE = Case(
    batch=3, seqlen_q=290, seqlen_k=410, heads_q=6, heads_k=2, head_dim=64, dtype=torch.bfloat16
)
SUMS = ["hqk", "bqk", "qk", "bhq", "bhk", "hq", "hk", "bq", "bk", "q", "k", "bh", "h", "b", ""]
MASKS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 3)},
    "all": {
        "causal": True, "softcap": 5.0, "alibi": "bh", "bias_hidden": 0.2, "dropout_p": 0.3,
        "sinks": torch.float32, "lse_gradient": True,
    },
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dims", SUMS)
def test_same_bits_and_right(dims: str, mask: dict[str, Any]) -> None:
    """Every broadcast, query heads in groups: the bits of every gradient stay, and it is right."""
    inputs = make_inputs(replace(BASE, bias=dims, **mask), "cuda")
    poison_allocator("cuda")
    first = run(inputs, deterministic=True)
    hold(inputs, first)
    for _ in range(5):
        for name, gradient in run(inputs, deterministic=True).gradients.items():
            assert_bit_equal(gradient, first.gradients[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_kernel(head_dim: int, dtype: torch.dtype) -> None:
    for dims in ("qk", "bk", "hq", ""):
        inputs = make_inputs(replace(BASE, head_dim=head_dim, dtype=dtype, bias=dims), "cuda")
        first = run(inputs, deterministic=True)
        hold(inputs, first)
        again = run(inputs, deterministic=True)
        assert_bit_equal(again.gradients["dbias"], first.gradients["dbias"], "dbias")


@pytest.mark.gpu
@pytest.mark.parametrize("dims", ["qk", "k", ""])
@pytest.mark.parametrize("factor", [1e-25, 1e-12, 1e12, 1e25])
def test_any_magnitude(factor: float, dims: str) -> None:
    """The unit of the sums follows the gradients: as exact far from 1 as near it."""
    case = replace(BASE, bias=dims, bias_dtype=torch.float32)
    inputs = make_inputs(case, "cuda")
    near = run(inputs, deterministic=True).gradients["dbias"]
    power = 2.0 ** round(float(torch.log2(torch.tensor(factor))))
    inputs.dout = inputs.dout * power
    far = run(inputs, deterministic=True).gradients["dbias"] / power
    torch.testing.assert_close(far, near, rtol=1e-5, atol=1e-5 * float(near.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", ["qk", "hqk", "bk", "hq", ""])
def test_nan_and_infinity_stay_where_they_belong(dims: str) -> None:
    """The sums that meet one are what fp32 makes of it; the others do not notice."""
    inputs = make_inputs(replace(BASE, bias=dims, bias_dtype=torch.float32, causal=True), "cuda")
    inputs.dout[1, 100, 3, 5] = float("nan")
    inputs.dout[2, 200, 4, 0] = float("inf")
    found, loose = (run(inputs, deterministic=x).gradients["dbias"] for x in (True, False))
    again = run(inputs, deterministic=True).gradients["dbias"]
    assert_bit_equal(again, found, "dbias")
    assert loose.isnan().any()
    torch.testing.assert_close(found, loose, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.gpu
def test_what_nobody_sees_takes_no_precision() -> None:
    """Keys that the bias hides hold huge numbers: the largest addition does not come from them."""
    inputs = make_inputs(replace(BASE, bias="k", bias_dtype=torch.float32), "cuda")
    assert inputs.attn_bias is not None
    inputs.attn_bias[..., 300:] = float("-inf")
    plain = run(inputs, deterministic=True).gradients["dbias"]
    inputs.v = inputs.v.detach().clone()
    inputs.v[:, 300:] = 1e30
    found = run(inputs, deterministic=True).gradients["dbias"]
    assert_bit_equal(found, plain, "dbias")


@pytest.mark.gpu
def test_bias_alone_and_in_a_graph() -> None:
    """Without dq nothing takes turns; a graph replays the sums."""
    inputs = make_inputs(replace(BASE, bias="hqk"), "cuda")
    all_at_once = run(inputs, deterministic=True).gradients["dbias"]
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_(False)
    assert inputs.attn_bias is not None
    bias = inputs.attn_bias

    def both() -> Tensor:
        out, _ = attend(inputs, deterministic=True)
        return torch.autograd.grad(out, bias, inputs.dout)[0]

    assert_bit_equal(both(), all_at_once, "dbias")
    graph, result = capture(both)
    for _ in range(2):
        result.zero_()
        graph.replay()
        assert_bit_equal(result, all_at_once, "dbias")


@pytest.mark.sanitizer
@pytest.mark.gpu
@pytest.mark.parametrize("dims", ["qk", "k", "q", ""])
def test_under_sanitizer(dims: str) -> None:
    case = Case(seqlen_q=40, seqlen_k=70, heads_q=2, heads_k=1, head_dim=64, dtype=torch.float16)
    inputs = make_inputs(replace(case, bias=dims), "cuda")
    hold(inputs, run(inputs, deterministic=True))


@pytest.mark.parametrize("added_up", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_workspaces(added_up: bool, deterministic: bool) -> None:
    bias = torch.ones(5, 7, dtype=torch.float16)
    dbias, fixed = operands.bias_gradient(bias, added_up, deterministic)
    assert dbias.shape == (1, 1, 5, 7)
    assert dbias.dtype == (torch.float32 if added_up else torch.float16)
    assert (fixed is not None) == (added_up and deterministic)
    if fixed is not None:
        assert (fixed.shape, fixed.dtype) == ((36,), torch.int64)
        assert not fixed.any()
