"""What the tests of attention share: a call with gradients, and the rule on its results.

Every call has to be served. Only where the tests run on the kernels of one family alone is a call
with modifiers skipped, if that family lacks them, with the reasons of the refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import dispatch
from flash_ext.testing import numeric
from flash_ext.testing.cases import Case, Inputs, make_inputs, poison_allocator

T = TypeVar("T")
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dbias": "attn_bias", "dsinks": "sinks"}
torch.set_num_threads(1)  # many small tensors: threads cost more than they bring


@dataclass
class Outcome:
    """Results of one call; gradients by name, those of inputs that asked for one."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]


def attend(inputs: Inputs, **arguments: object) -> tuple[Tensor, Tensor]:
    """out and lse of the public function."""
    asked = {**inputs.public(), **arguments}
    try:
        return flash_ext.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **asked)
    except NotImplementedError as error:
        one_family = dispatch.in_force is not None and dispatch.in_force.family is not None
        modified = any(asked[name] is not None for name in ("attn_bias", "alibi_slopes"))
        modified |= any(asked[name] != 0.0 for name in ("softcap", "dropout_p"))
        if one_family and (modified or asked.get("deterministic")):
            pytest.skip(str(error).splitlines()[0])
        raise


def run(inputs: Inputs, **arguments: object) -> Outcome:
    """Forward and backward of the public function, for the inputs' dout and dlse.

    The seed of a dropout mask is drawn as the public function draws it and kept in the inputs.
    """
    inputs.requires_grad_()
    if inputs.dropout_p > 0:
        device = inputs.q.device
        torch.manual_seed(5)
        inputs.seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
        torch.manual_seed(5)
    out, lse = attend(inputs, **arguments)
    results = [(out, inputs.dout), (lse, inputs.dlse)]
    given = [(result, gradient) for result, gradient in results if gradient is not None]
    leaves = inputs.leaves()
    gradients = torch.autograd.grad(
        [result for result, _ in given], list(leaves.values()), [gradient for _, gradient in given]
    )
    names = {source: name for name, source in GRADIENTS.items()}
    by_name = {names[leaf]: g for leaf, g in zip(leaves, gradients, strict=True)}
    return Outcome(out.detach(), lse.detach(), by_name)


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a call, warmed up on a side stream, and the results that each replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def hold(inputs: Inputs, found: Outcome) -> dict[str, float]:
    """The rule on every result; the largest ratio of error to allowance of each."""
    return numeric.check(inputs, found.out, found.lse, **found.gradients)


def run_and_hold(case: Case, device: torch.device) -> tuple[Inputs, Outcome]:
    """Run a case over poisoned memory and hold its results against the rule."""
    inputs = make_inputs(case, device)
    poison_allocator(device)
    found = run(inputs)
    hold(inputs, found)
    return inputs, found


def assert_bit_equal(found: Tensor, expected: Tensor, name: str = "out") -> None:
    """Raise AssertionError that says how far two tensors are apart, unless they are the same bits.

    They may be on different devices.
    """
    found, expected = found.detach(), expected.detach()
    if found.device != expected.device:
        found, expected = found.cpu(), expected.cpu()
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise AssertionError(
            f"{name}: {found.dtype} {tuple(found.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    if torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits)):
        return
    apart = (found.double() - expected.double()).abs()
    raise AssertionError(
        f"{name}: {int((apart != 0).sum())} of {apart.numel()} elements differ, by up to "
        f"{apart.max():.3e}; the largest expected is {expected.abs().max():.3e}"
    )
