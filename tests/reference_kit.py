"""What the tests of the CPU algorithm share: its two passes on the inputs of a case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext import reference
from flash_ext.testing import numeric
from flash_ext.testing.cases import Inputs

MINUS_INF = float("-inf")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
SMALL = {"block_m": 32, "block_n": 48}  # tiles whose edges small problems cross


def forward(inputs: Inputs, **blocks: int) -> tuple[Tensor, Tensor]:
    return reference.forward(
        inputs.q, inputs.k, inputs.v, out_dtype=inputs.out_dtype, **inputs.private(), **blocks
    )


def backward(inputs: Inputs, out: Tensor, lse: Tensor, **extra: Any) -> dict[str, Tensor]:
    """The gradients that the inputs allow, by name."""
    bias = inputs.attn_bias
    wanted = {
        "want_dbias": bias is not None and bias.is_floating_point(),
        "want_dsinks": inputs.sinks is not None,
    }
    assert inputs.dout is not None
    tensors = (inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse)
    gradients = reference.backward(*tensors, **{**inputs.private(), **wanted, **extra})
    named = dict(zip(GRADIENTS, gradients, strict=True))
    return {name: g for name, g in named.items() if wanted.get(f"want_{name}", True)}


def run(inputs: Inputs, **blocks: int) -> dict[str, Tensor]:
    """Results of both passes by name."""
    out, lse = forward(inputs, **blocks)
    return {"out": out, "lse": lse} | backward(inputs, out, lse, **blocks)


def hold(inputs: Inputs, **blocks: int) -> dict[str, Tensor]:
    """Run both passes and hold every result against the rule."""
    values = run(inputs, **blocks)
    numeric.check(inputs, **values)
    return values


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal in every bit, but for the sign of zero."""
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
