"""Gradients of packed sequences: which ones, what they cost, and how they combine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_kit import assert_bit_equal
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from varlen_kit import EVERYTHING, MIXED, PLAIN, USED, pack

import flash_ext

NAMES = ("q", "k", "v", "attn_bias", "sinks")  # what can have a gradient


@pytest.mark.parametrize(
    "asked", [c for n in (1, 2) for c in product(NAMES, repeat=n)], ids="+".join
)
def test_any_subset_of_gradients(asked: tuple[str, ...]) -> None:
    """D26: bit for bit those of the full run."""
    asked = tuple(dict.fromkeys(asked))
    packed = pack(USED, EVERYTHING).requires_grad_()
    expected = packed.gradients(*packed.run())
    packed.requires_grad_(*asked)
    for name, x in packed.gradients(*packed.run(), *asked).items():
        assert_bit_equal(x, expected[name], name)


def test_nothing_is_recorded_without_gradients() -> None:
    packed = pack(MIXED, EVERYTHING)
    assert packed.run()[0].grad_fn is None
    with torch.no_grad():
        assert packed.requires_grad_().run()[0].is_leaf


def test_loss_on_lse_alone() -> None:
    """D18: dv is exactly 0."""
    packed = pack(MIXED, PLAIN).requires_grad_()
    _, lse = packed.run()
    dq, dk, dv = torch.autograd.grad(lse, [packed.leaves[n] for n in "qkv"], packed.dlse)
    assert not dv.any()
    assert dq.any()
    assert dk.any()


def test_second_derivatives_are_an_error() -> None:
    packed = pack(MIXED, PLAIN).requires_grad_()
    (dq,) = torch.autograd.grad(packed.run()[0].sum(), packed.leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dq.square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    """D27: the recomputed call draws the same mask; everything is bit-equal."""
    packed = pack(MIXED, EVERYTHING)
    names = list(packed.leaves)

    def block(*tensors: Tensor) -> Tensor:
        given = {**dict(zip(names, tensors, strict=True)), **packed.others}
        return flash_ext.attention_varlen(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    def step(again: bool) -> list[Tensor]:
        tensors = [x.detach().clone().requires_grad_() for x in packed.leaves.values()]
        torch.manual_seed(11)
        out = checkpoint(block, *tensors, use_reentrant=reentrant) if again else block(*tensors)
        torch.rand(3)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in tensors if x.grad is not None)]

    for a, b in zip(step(again=False), step(again=True), strict=True):
        assert_bit_equal(a, b)


def test_lengths_changed_in_place_are_noticed() -> None:
    packed = pack(MIXED, PLAIN).requires_grad_()
    out, _ = packed.run()
    packed.others["cu_seqlens_q"].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_autocast(amp: torch.dtype) -> None:
    """D28: mixed dtypes are cast, gradients come back in each input's own."""
    packed = pack(MIXED, replace(PLAIN, dtype=torch.float32))
    packed.leaves["v"] = packed.leaves["v"].to(torch.bfloat16)
    packed.requires_grad_()
    with torch.autocast("cpu", dtype=amp):
        out, lse = packed.run()
    assert (out.dtype, lse.dtype) == (amp, torch.float32)
    cast = {name: x.detach().to(amp) for name, x in packed.leaves.items()}
    assert_bit_equal(out, packed.run(**cast)[0])
    for name, x in packed.gradients(out, lse).items():
        assert x.dtype == packed.leaves[name].dtype
