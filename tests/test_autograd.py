"""Gradients of the public function: which ones, what they cost, and how they combine.

With every modifier, on CPU in float64 and on CUDA in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_ext
from flash_ext.testing.cases import Case, make_inputs

NAMES = ("q", "k", "v", "attn_bias", "sinks")
EVERYTHING: dict[str, Any] = {
    "causal": True, "softcap": 5.0, "alibi": "h", "bias": "hk", "dtype": torch.float64,
    "sinks": torch.float64, "dropout_p": 0.3,
}  # fmt: skip
ON_CUDA = {"dtype": torch.bfloat16, "sinks": torch.float32}
SUMMED_ON_CUDA = ("q", "attn_bias")  # their gradients are added up in any order


def problem(device: torch.device, **change: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors that can have a gradient, by name, and all other arguments."""
    facts = EVERYTHING if device.type == "cpu" else EVERYTHING | ON_CUDA
    case = Case(**{"seqlen_q": 9, "seqlen_k": 11, "heads_q": 4, "head_dim": 8, **facts, **change})
    inputs = make_inputs(case, device)
    leaves = {name: getattr(inputs, name) for name in NAMES}
    others = {name: x for name, x in inputs.public().items() if name not in leaves}
    return {name: x for name, x in leaves.items() if x is not None}, others


def run(leaves: dict[str, Tensor], others: dict[str, Any]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    out, lse = flash_ext.attention(**leaves, **others, return_lse=True)
    return out, lse


def gradients(
    leaves: dict[str, Tensor], others: dict[str, Any], asked: tuple[str, ...]
) -> dict[str, Tensor]:
    """Gradients of a loss on out and lse, for fresh leaves."""
    fresh = {name: x.detach().requires_grad_(name in asked) for name, x in leaves.items()}
    out, lse = run(fresh, others)
    loss = out.square().sum() + lse.where(lse.isfinite(), 0).sum()
    found = torch.autograd.grad(loss, [fresh[name] for name in asked])
    return dict(zip(asked, found, strict=True))


SUBSETS = [
    tuple(name for name, taken in zip(NAMES, bits, strict=True) if taken)
    for bits in product((False, True), repeat=5)
    if any(bits)
]


@pytest.mark.parametrize("asked", SUBSETS, ids="+".join)
def test_any_subset(asked: tuple[str, ...], device: torch.device) -> None:
    """D26: the gradients asked for are those of the full run, bit for bit."""
    leaves, others = problem(device)
    expected = gradients(leaves, others, tuple(leaves))
    for name, found in gradients(leaves, others, asked).items():
        assert found.shape == leaves[name].shape
        if device.type == "cpu" or name not in SUMMED_ON_CUDA:
            assert torch.equal(found, expected[name]), name
        else:
            torch.testing.assert_close(found, expected[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("bias", ["bhqk", "q", "bk", ""])
def test_gradcheck(bias: str, layout: str) -> None:
    """All modifiers at once, out and lse, in float64; attn_bias in each kind of broadcast."""
    change = {"seqlen_q": 4, "seqlen_k": 5, "head_dim": 3, "head_dim_v": 2, "heads_q": 2}
    leaves, others = problem(torch.device("cpu"), bias=bias, layout=layout, heads_k=1, **change)
    names = list(leaves)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return run(dict(zip(names, tensors, strict=True)), others)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in leaves.values()])


@contextmanager
def counted_storage() -> Iterator[list[int]]:
    """Bytes of storage that autograd keeps, counted once for each."""
    seen: dict[int, int] = {}
    total = [0]

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        total[0] = sum(seen.values())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total


def test_nothing_is_saved_in_vain() -> None:
    """D26: no gradient asked for, nothing kept; dv needs no out, dsinks nothing but out and lse."""
    leaves, others = problem(torch.device("cpu"), dropout_p=0.0, alibi=None, seqlen_k=500)
    size = {name: x.numel() * x.element_size() for name, x in leaves.items()}
    out, lse = run(leaves, others)
    size |= {"out": out.numel() * out.element_size(), "lse": lse.numel() * lse.element_size()}
    kept = {
        (): (),
        ("q",): tuple(size),
        ("k", "v"): tuple(size),
        ("v",): ("q", "k", "lse", "attn_bias", "sinks"),
        ("sinks",): ("out", "lse", "sinks"),
        ("v", "sinks"): ("q", "k", "out", "lse", "attn_bias", "sinks"),
    }
    for asked, names in kept.items():
        given = {name: x.detach().requires_grad_(name in asked) for name, x in leaves.items()}
        with counted_storage() as total:
            run(given, others)
        expected = sum(size[name] for name in names)
        assert expected <= total[0] <= expected + 4 * 8, asked


def test_nothing_is_recorded_without_gradients(device: torch.device) -> None:
    leaves, others = problem(device)
    assert run(leaves, others)[0].grad_fn is None
    with torch.no_grad():
        assert run({name: x.requires_grad_() for name, x in leaves.items()}, others)[0].is_leaf


def test_loss_on_lse_alone(device: torch.device) -> None:
    """D18: dv is exactly 0, also where nothing else is asked for."""
    leaves, others = problem(device)
    for asked in (("v",), ("q", "k", "v")):
        fresh = {name: x.detach().requires_grad_(name in asked) for name, x in leaves.items()}
        _, lse = run(fresh, others)
        found = torch.autograd.grad(lse.where(lse.isfinite(), 0).sum(), [fresh[n] for n in asked])
        assert not found[-1].any()
        assert all(x.any() for x in found[:-1])


def test_bool_bias_has_no_gradient() -> None:
    leaves, others = problem(torch.device("cpu"))
    mask = leaves["attn_bias"] > 0
    leaves["attn_bias"] = mask
    q = leaves["q"].requires_grad_()
    run(leaves, others)[0].sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_modifiers_get_gradients_in_their_own_dtype(dtype: torch.dtype) -> None:
    leaves, others = problem(torch.device("cpu"), dtype=torch.bfloat16)
    for name in ("attn_bias", "sinks"):
        leaves[name] = leaves[name].to(dtype).requires_grad_()
    run(leaves, others)[0].sum().backward()
    for name in ("attn_bias", "sinks"):
        gradient = leaves[name].grad
        assert gradient is not None
        assert (gradient.dtype, gradient.shape) == (dtype, leaves[name].shape)
        assert gradient.any()


def test_second_derivatives_are_an_error_in_any_mixture(device: torch.device) -> None:
    """D18: a gradient penalty must not lose its term without a word."""
    leaves, others = problem(device)
    q = leaves["q"].requires_grad_()
    loss = run(leaves, others)[0].sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match="no second derivatives"):
        (loss + dq.square().sum()).backward()


def test_create_graph_gives_the_same_first_derivatives(device: torch.device) -> None:
    leaves, others = problem(device)
    k = leaves["k"].requires_grad_()
    plain, recorded = (
        torch.autograd.grad(run(leaves, others)[0].sum(), k, create_graph=create)[0]
        for create in (False, True)
    )
    assert torch.equal(recorded.detach(), plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_checkpoint(dropout_p: float, reentrant: bool, device: torch.device) -> None:
    """D27: the recomputed call draws the same mask; everything is bit-equal."""
    leaves, others = problem(device, dropout_p=dropout_p)
    others["deterministic"] = device.type == "cpu"
    names = list(leaves)

    def block(*tensors: Tensor) -> Tensor:
        given = dict(zip(names, (torch.sin(x) for x in tensors), strict=True))
        return torch.cos(flash_ext.attention(**given, **others))

    def step(again: bool) -> list[Tensor]:
        tensors = [x.detach().clone().requires_grad_() for x in leaves.values()]
        torch.manual_seed(11)
        out = checkpoint(block, *tensors, use_reentrant=reentrant) if again else block(*tensors)
        torch.rand(3, device=device)  # the generator moves on between forward and backward
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in tensors if x.grad is not None)]

    plain, recomputed = step(again=False), step(again=True)
    assert len(plain) == len(leaves) + 1
    for a, b, name in zip(plain, recomputed, ("out", *names), strict=True):
        if device.type == "cpu" or name not in SUMMED_ON_CUDA:
            assert torch.equal(a, b), name


def test_graph_is_freed(device: torch.device) -> None:
    """Saved tensors go with the graph, and a second backward says so."""
    leaves, others = problem(device)
    leaves["q"].requires_grad_()
    out, _ = run(leaves, others)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_inputs_changed_in_place_are_noticed(device: torch.device) -> None:
    leaves, others = problem(device)
    leaves["v"].requires_grad_()
    k = leaves["k"]
    out, _ = run(leaves, others)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
