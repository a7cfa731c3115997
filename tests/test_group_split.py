"""Backward passes on a GPU that split the query heads of a group over thread blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_kit import assert_bit_equal, capture, hold, run, run_and_hold
from binding_kit import Arguments, make_call, split
from binding_kit import run as run_binding

import flash_ext
from flash_ext.dispatch import Choice
from flash_ext.testing import forced
from flash_ext.testing.cases import Case, Inputs, make_inputs, poison_allocator

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SMALL_CARD = 99 * 1024  # bytes of shared memory

MULTI_QUERY = Case(
    batch=1, seqlen_q=200, seqlen_k=200, heads_q=8, heads_k=1, dtype=torch.bfloat16, causal=True
)
LENGTHS = [(128, 128), (300, 300), (129, 257), (257, 130), (1, 300), (300, 1)]
MASKS = [(False, (None, None)), (True, (None, None)), (False, (32, 64)), (True, (100, None))]
DIMS = [(64, None), (128, None), (40, None), (59, 33), (64, 128), (128, 72)]


def backward_choice(inputs: Inputs, **arguments: bool) -> Choice:
    plan = flash_ext.explain(inputs.q, inputs.k, inputs.v, **inputs.public(), **arguments)
    return plan.backward


@pytest.mark.parametrize(("D", "Dv"), DIMS)
@pytest.mark.parametrize(("causal", "window_size"), MASKS)
@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_lengths_masks_and_head_dims(
    Sq: int,
    Sk: int,
    causal: bool,
    window_size: tuple[int | None, int | None],
    D: int,
    Dv: int | None,
) -> None:
    case = replace(
        MULTI_QUERY, seqlen_q=Sq, seqlen_k=Sk, causal=causal, window_size=window_size,
        head_dim=D, head_dim_v=Dv,
    )  # fmt: skip
    inputs, _ = run_and_hold(case, DEVICE)
    assert backward_choice(inputs).splits == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smem_limit", [None, SMALL_CARD])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_kernel(head_dim: int, smem_limit: int | None, dtype: torch.dtype) -> None:
    limited: AbstractContextManager[None] = (
        nullcontext() if smem_limit is None else forced(smem_limit=smem_limit)
    )
    with limited:
        inputs, _ = run_and_hold(replace(MULTI_QUERY, head_dim=head_dim, dtype=dtype), DEVICE)
        assert backward_choice(inputs).splits == 8


@pytest.mark.parametrize(
    "facts",
    [
        {"heads_q": 6, "heads_k": 2, "batch": 3},
        {"heads_q": 7, "layout": "bhsd"},
        {"lse_gradient": True, "sinks": torch.float32, "layout": "bhsd", "heads_q": 4},
        {"memory": "strided", "softmax_scale": -0.3},
        {"out_dtype": torch.float32, "softmax_scale": 0.0},
        {"magnitude": 5.0, "heads_q": 32, "heads_k": 4},
    ],
    ids=str,
)
def test_heads_and_features(facts: dict[str, object]) -> None:
    inputs, _ = run_and_hold(replace(MULTI_QUERY, **facts), DEVICE)
    heads = 1 if inputs.layout == "bhsd" else 2
    assert backward_choice(inputs).splits == inputs.q.shape[heads] // inputs.k.shape[heads]


def test_as_many_blocks_as_the_gpu_takes() -> None:
    """Fewer splits than heads, the heads dealt out unevenly."""
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    case = replace(MULTI_QUERY, batch=count // 2, seqlen_q=70, seqlen_k=64, heads_q=7)
    inputs, _ = run_and_hold(case, DEVICE)
    choice = backward_choice(inputs)
    assert 1 < choice.splits < 7
    assert f"group of 7 query heads split over {choice.splits} thread blocks" in str(choice)
    full = make_inputs(replace(case, batch=2 * count), DEVICE)
    assert (backward_choice(full).splits, backward_choice(full).split_reason) == (1, "")


@pytest.mark.parametrize("asked", [bits for bits in product((0, 1), repeat=3) if any(bits)])
def test_some_gradients(asked: tuple[int, ...]) -> None:
    """Workspaces exist for the gradients that are asked for."""
    inputs = make_inputs(replace(MULTI_QUERY, head_dim=40), DEVICE)
    inputs.differentiable = tuple(name for name, bit in zip("qkv", asked, strict=True) if bit)
    poison_allocator(DEVICE)
    found = run(inputs)
    assert set(found.gradients) == {f"d{name}" for name in inputs.differentiable}
    hold(inputs, found)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_gradients_are_not_split(head_dim: int) -> None:
    inputs = make_inputs(replace(MULTI_QUERY, head_dim=head_dim, seqlen_k=300), DEVICE)
    choice = backward_choice(inputs, deterministic=True)
    assert choice.splits == 1
    assert "not split: with deterministic=True" in choice.split_reason
    first = run(inputs, deterministic=True)
    hold(inputs, first)
    for _ in range(20):
        again = run(inputs, deterministic=True)
        for name, gradient in first.gradients.items():
            assert_bit_equal(again.gradients[name], gradient, name)


def test_replayed_workspaces_start_at_zero() -> None:
    """A graph sets the sums to zero each time it is replayed."""
    inputs = make_inputs(MULTI_QUERY, DEVICE)
    graph, found = capture(lambda: run(inputs))
    for _ in range(3):
        graph.replay()
    hold(inputs, found)


# The binding alone, where the number of splits is free

SIZES = {"B": 2, "Sq": 200, "Sk": 150, "Hq": 10, "Hk": 2}
each_family = pytest.mark.parametrize("kernel", [{}, {"family": "sm80"}], ids=["first", "sm80"])


def gradients(call: Arguments) -> dict[str, torch.Tensor]:
    run_binding("backward", call)
    return {name: call[name].float() for name in ("dq", "dk", "dv")}


@each_family
@pytest.mark.parametrize("splits", [2, 3, 4, 5])
def test_any_number_of_splits(splits: int, kernel: dict[str, str]) -> None:
    """Sums in fp32, rounded once: dk and dv differ from those of one block by one rounding."""
    call = make_call("backward", "cuda", **SIZES, **kernel)
    whole = gradients(call)
    shared = gradients(call | split(call, splits))
    for name, expected in whole.items():
        atol = 2**-8 * expected.abs().max().item()
        torch.testing.assert_close(shared[name], expected, atol=atol, rtol=2**-7)


@each_family
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (40, 56)])
def test_workspaces_hold_the_sums(D: int, Dv: int, kernel: dict[str, str]) -> None:
    call = make_call("backward", "cuda", **SIZES, D=D, Dv=Dv, **kernel)
    call |= split(call, 3)
    found = gradients(call)
    for name in ("dk", "dv"):
        sums = call[f"{name}_accum"]
        assert sums.isfinite().all()
        columns = found[name].shape[-1]
        assert sums.shape[-1] == -(-columns // 16) * 16
        by_row = sums.transpose(1, 2).sort(-1).values  # columns are in an order of their own
        padded = torch.nn.functional.pad(found[name], (0, sums.shape[-1] - columns))
        torch.testing.assert_close(by_row, padded.sort(-1).values, atol=2**-8, rtol=2**-7)


@each_family
@pytest.mark.parametrize("sizes", [{"Sq": 0}, {"Sk": 0}], ids=str)
def test_nothing_to_add(sizes: dict[str, int], kernel: dict[str, str]) -> None:
    call = make_call("backward", "cuda", **SIZES | sizes, **kernel)
    call |= split(call, 5)
    for name, gradient in gradients(call).items():
        assert (gradient == 0).all(), name
