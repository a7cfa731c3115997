"""The classic algorithms: their arguments everywhere, their results on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext import classic
from flash_ext.testing import numeric
from flash_ext.testing.cases import Case, Inputs, guarded, make_inputs, poison_allocator
from flash_ext.testing.oracle import Result

BASE = Case(batch=2, heads_q=3, heads_k=3, dtype=torch.bfloat16)
LENGTHS = [
    *[(1, 1), (64, 64), (128, 128), (65, 127), (129, 190), (300, 300), (1, 239), (200, 70)],
    *[(1000, 1000), (64, 1)],
]
each_algorithm = pytest.mark.parametrize("algorithm", classic.ALGORITHMS)


def case_of(D: int, lengths: tuple[int, int], causal: bool, **more: Any) -> Case:
    return replace(
        BASE, head_dim=D, seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal, **more
    )


CASES = [
    *[case_of(D, lengths, causal) for D, lengths, causal in
      product((64, 128), LENGTHS, (False, True))],
    *[case_of(D, (190, 190), True, heads_q=4, heads_k=2, memory=memory)
      for D, memory in product((64, 128), ("transposed", "packed", "strided", "offset"))],
    *[case_of(D, (150, 210), causal, magnitude=5.0) for D, causal in
      product((64, 128), (False, True))],
]  # fmt: skip


@cache
def problem_of(case: Case) -> tuple[Inputs, Result, Result]:
    """Inputs, the oracle and the yardstick: the same for every algorithm."""
    inputs = replace(make_inputs(case, "cuda"), dout=None)
    exact = numeric.oracle(inputs)
    return inputs, exact, numeric.yardstick(inputs, exact)


def run(case: Case, algorithm: str) -> None:
    """One case over poisoned memory, held against the rule."""
    inputs, exact, measure = problem_of(case)
    device = inputs.q.device
    poison_allocator(device)
    out = classic.attention(inputs.q, inputs.k, inputs.v, algorithm=algorithm, causal=case.causal)
    assert out.is_contiguous()
    numeric.check_forward(inputs, out, None, exact, measure)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@each_algorithm
def test_against_softmax_in_fp64(algorithm: str, case: Case) -> None:
    run(case, algorithm)


SANITIZED = [case_of(D, lengths, causal, batch=1, heads_q=2, heads_k=1) for D, lengths, causal in
             product((64, 128), ((70, 150), (150, 33)), (False, True))]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", SANITIZED, ids=str)
@each_algorithm
def test_small_case_of_every_kernel(algorithm: str, case: Case) -> None:
    run(case, algorithm)


@pytest.mark.gpu
@each_algorithm
def test_same_bits_again_and_on_a_side_stream(algorithm: str) -> None:
    inputs = make_inputs(case_of(64, (300, 300), True), "cuda")
    call = {"algorithm": algorithm, "causal": True}
    first = classic.attention(inputs.q, inputs.k, inputs.v, **call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = classic.attention(inputs.q, inputs.k, inputs.v, **call)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(first, second)


@pytest.mark.gpu
@each_algorithm
def test_nothing_beside_the_inputs_is_read(algorithm: str) -> None:
    inputs = make_inputs(case_of(128, (90, 77), False), "cuda")
    expected = classic.attention(inputs.q, inputs.k, inputs.v, algorithm=algorithm)
    with guarded(inputs.q, inputs.k, inputs.v) as (q, k, v):
        found = classic.attention(q, k, v, algorithm=algorithm)
    assert torch.equal(found, expected)
    assert found.isfinite().all()


@pytest.mark.gpu
@each_algorithm
def test_no_keys_and_no_queries(algorithm: str) -> None:
    for Sq, Sk in ((5, 0), (0, 5)):
        inputs = make_inputs(case_of(64, (Sq, Sk), False), "cuda")
        out = classic.attention(inputs.q, inputs.k, inputs.v, algorithm=algorithm)
        assert out.shape == (2, Sq, 3, 64)
        assert not out.any()


@pytest.mark.gpu
def test_kernels_are_those_of_the_table() -> None:
    rows = classic._extension().algorithms()
    assert [row.pop("name") for row in rows] == list(classic.ALGORITHMS)
    assert rows == [vars(row) for row in classic.ALGORITHMS.values()]


@pytest.mark.gpu
def test_table_larger_than_the_card_is_refused() -> None:
    # 2^18 queries and keys of 64 heads: 16 TiB of scores
    x = torch.empty((1, 1, 64, 64), dtype=torch.bfloat16, device="cuda").expand(1, 2**18, 64, 64)
    with pytest.raises(torch.OutOfMemoryError, match="'two_pass' keeps a table.*16384.0 GiB"):
        classic._check(x, x, x, "two_pass", False)
        classic.check_fits("two_pass", (1, 64, 2**18, 2**18), classic.free_bytes(x.device))


# Without a GPU


def tensors(**changes: Any) -> dict[str, Any]:
    x = torch.zeros((2, 8, 4, 64), dtype=torch.bfloat16)
    return {"q": x, "k": x, "v": x, "algorithm": "fa1", **changes}


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"algorithm": "fa0"}, ValueError, "algorithm is 'fa0', expected one of 'three_pass', '"),
        ({"algorithm": 1}, ValueError, "algorithm is 1, expected one of"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"k": 3}, TypeError, "k must be a torch.Tensor, got int"),
        ({"v": torch.zeros(2, 8, 4, 64)}, TypeError, "v is float32, expected bfloat16"),
        ({"q": torch.zeros(2, 8, 4, 64, dtype=torch.float16)}, TypeError, "q is float16"),
        ({"k": torch.zeros(2, 8, 4, 128, dtype=torch.bfloat16)}, ValueError, "k has shape"),
        ({"k": torch.zeros(2, 8, 3, 64, dtype=torch.bfloat16)}, ValueError, "v has shape"),
        ({"v": torch.zeros(2, 8, 4, 128, dtype=torch.bfloat16)}, ValueError, "that of q, 64"),
        (dict.fromkeys("qkv", torch.zeros(2, 8, 4, 96, dtype=torch.bfloat16)), ValueError,
         "its head dim is 96, expected 64 or 128"),
        ({}, ValueError, "q is on cpu, expected a CUDA device"),
        ({"v": torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16).requires_grad_()},
         NotImplementedError, r"v\.detach\(\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        classic.attention(**tensors(**changes))


def test_table_that_does_not_fit_is_named() -> None:
    table = (1, 16, 1024, 1024)
    classic.check_fits("three_pass", table, 6 * 2**24)
    classic.check_fits("two_pass", table, 4 * 2**24)
    with pytest.raises(torch.OutOfMemoryError, match=r"1 x 16 x 1024 x 1024 elements, 6 bytes"):
        classic.check_fits("three_pass", table, 6 * 2**24 - 1)


def test_absent_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_ext._classic", None)
    classic._extension.cache_clear()
    with pytest.raises(NotImplementedError, match="classic kernels are not installed.*--inplace"):
        classic._extension()
    classic._extension.cache_clear()
    assert flash_ext.build_info().version  # and everything else works


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "packed", "strided", "offset"])
def test_rows_are_copied_only_where_they_must_be(memory: str) -> None:
    x = make_inputs(replace(BASE, memory=memory)).q
    found = classic._in_rows(x)
    assert torch.equal(found, x)
    assert (found is x) == (memory in ("contiguous", "transposed", "packed"))
    assert found.data_ptr() % 16 == 0
