"""Eager calls past PyTorch's dispatcher, on a GPU: the same results as by the operator."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flash_ext
from flash_ext import direct

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


class ByTheOperator(TorchFunctionMode):
    """A mode, under which no call is direct."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each plain call launched directly."""
    launch = direct._launcher()
    taken: list[bool] = []

    def counted(*args: Any) -> Any:
        found = launch(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(direct, "_launcher", lambda: counted)
    return taken


def on_gpu(layout: str, requires_grad: bool = False) -> list[Tensor]:
    shape = (2, 40, 4, 64) if layout == "bshd" else (2, 4, 40, 64)
    return [
        torch.randn(shape, device="cuda", dtype=BF16).requires_grad_(requires_grad)
        for _ in range(3)
    ]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("scale", [None, -0.3, 2])
def test_both_ways_give_the_same(
    layout: str, scale: float | None, direct_calls: list[bool]
) -> None:
    q, k, v = on_gpu(layout)
    results = []
    for way in (nullcontext, nullcontext, ByTheOperator):
        with way():
            results.append(
                flash_ext.attention(
                    q, k, v, causal=True, softmax_scale=scale, layout=layout, return_lse=True
                )
            )
    assert direct_calls == [True, True, False]
    *direct_results, expected = results
    for found in direct_results:
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
            assert (x.dtype, x.stride(), x.device) == (y.dtype, y.stride(), y.device)
    memory = {x.untyped_storage().data_ptr() for result in results for x in result}
    assert len(memory) == 2 * len(results)


@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_lse_that_nobody_asked_for(D: int, direct_calls: list[bool]) -> None:
    """It is neither allocated nor written, and out is the same without it."""
    q, k, v = (torch.randn(2, 70, 4, D, device="cuda", dtype=BF16) for _ in range(3))
    expected, _ = flash_ext.attention(q, k, v, causal=True, return_lse=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_ext.attention(q, k, v, causal=True)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * out.element_size()
    assert torch.equal(out, expected)
    assert direct_calls == [True, True]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_both_ways_have_the_same_gradients(
    layout: str, return_lse: bool, direct_calls: list[bool]
) -> None:
    """One block of keys: nothing depends on the order of additions."""
    tensors = on_gpu(layout, requires_grad=True)
    found = []
    for way in (nullcontext, ByTheOperator):
        with way():
            result = flash_ext.attention(*tensors, layout=layout, return_lse=return_lse)
        loss = sum(x.float().square().sum() for x in (result if return_lse else (result,)))
        found.append(torch.autograd.grad(loss, tensors))
    assert direct_calls == [True, False]
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_inference_mode_and_back(direct_calls: list[bool]) -> None:
    """What the first call of a combination leaves behind serves calls in other modes."""
    q, k, v = (x[:, :17] for x in on_gpu("bshd"))
    with torch.inference_mode():
        assert flash_ext.attention(q, k, v).is_inference()
    out = flash_ext.attention(q, k, v)
    assert not out.is_inference()
    out.record_stream(torch.cuda.Stream())
    assert direct_calls == [True, True]


def test_captured_in_a_graph(direct_calls: list[bool]) -> None:
    """out and lse come from the graph's pool; the first call of a combination may be captured."""
    q, k, v = (x[:, :23].contiguous() for x in on_gpu("bshd"))
    flash_ext.attention(*on_gpu("bshd"))  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flash_ext.attention(q, k, v)
        second = flash_ext.attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected = flash_ext.attention(q, k, v)
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert all(direct_calls)
