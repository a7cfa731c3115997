"""CUDA graphs and synchronisation: every call can be captured, and none waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_kit import capture, run
from torch import Tensor

import flash_ext
from flash_ext.testing.cases import Case, Inputs, make_inputs

pytestmark = pytest.mark.gpu
CASES = [
    Case(seqlen_q=200, seqlen_k=200, head_dim=64, causal=True),
    Case(seqlen_q=70, seqlen_k=130, heads_q=4, head_dim=128, layout="bhsd", sinks=torch.float16),
    Case(seqlen_q=70, seqlen_k=130, head_dim=59, head_dim_v=40, memory="strided"),
    Case(causal=True, head_dim=33, lse_gradient=True, sinks=torch.float32),
    Case(seqlen_q=70, seqlen_k=130, head_dim=64, out_dtype=torch.float32, lse_gradient=True),
]
FRESH = ("q", "k", "v", "dout", "dlse", "sinks")


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    return make_inputs(replace(case, dtype=torch.bfloat16, seed=seed), "cuda").requires_grad_()


def both_passes(inputs: Inputs) -> dict[str, Tensor]:
    """out, lse and all gradients, by name."""
    found = run(inputs)
    return {"out": found.out, "lse": found.lse, **found.gradients}


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    """Any call that waits for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_waits_for_the_device(case: Case) -> None:
    inputs = inputs_of(case)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(2):  # the first call fills the caches
        both_passes(inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_equals_eager(case: Case) -> None:
    """D22: both passes in one graph, replayed with other inputs in the same memory."""
    inputs = inputs_of(case)
    graph, results = capture(lambda: both_passes(inputs))
    for seed in (1, 2):
        other = inputs_of(case, seed)
        with torch.no_grad():
            for name in FRESH:
                if getattr(inputs, name) is not None:
                    getattr(inputs, name).copy_(getattr(other, name))
        graph.replay()
        for name, expected in both_passes(other).items():
            if name == "dq":  # dq adds up in any order
                torch.testing.assert_close(results[name], expected, atol=0.02, rtol=0.02)
            else:
                assert torch.equal(results[name], expected), name


def test_inference_in_a_graph_needs_no_more_memory() -> None:
    """Without gradients a replay allocates nothing and leaves the results of other calls alone."""
    inputs = inputs_of(CASES[0])

    def call() -> dict[str, Tensor]:
        with torch.inference_mode():
            return {"out": flash_ext.attention(inputs.q, inputs.k, inputs.v, causal=True)}

    graph, results = capture(call)
    apart = call()["out"].clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(results["out"], apart)
