"""Rows of the table of probabilities against softmax written out in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.testing.cases import Case, Inputs, make_inputs
from flash_ext.testing.oracle import _Problem, _Table

BASE = Case(batch=2, seqlen_q=21, seqlen_k=34, heads_q=4, heads_k=2, head_dim=16)
CASES = [
    BASE,
    replace(BASE, causal=True),
    replace(BASE, seqlen_q=40, causal=True),  # rows that see no key
    replace(BASE, window_size=(3, 2), layout="bhsd"),
    replace(BASE, softcap=2.0, magnitude=3.0, dtype=torch.float16),
    replace(BASE, alibi="bh", causal=True, dtype=torch.float64),
    replace(BASE, alibi="h", sinks=torch.float32, softmax_scale=-0.3),
    replace(BASE, bias="bhqk", bias_hidden=0.4),
    replace(BASE, bias="k", bias_dtype=torch.bool, bias_hidden=0.5, causal=True),
    replace(BASE, bias="hq", dtype=torch.bfloat16, sinks=torch.bfloat16),
]
MODIFIERS = ("causal", "softmax_scale", "window_size", "softcap", "alibi_slopes", "attn_bias")


def arguments(inputs: Inputs, *more: str) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in (*MODIFIERS, "layout", *more)}


def expected(inputs: Inputs) -> Tensor:
    """(B, Hq, Sq, Sk) of the oracle."""
    inputs = replace(inputs, dout=None)
    problem = _Problem(inputs)
    (chunk,) = problem.chunks()
    table = _Table.of(problem, chunk, torch.float64)
    column = table.scores.new_full((*table.scores.shape[:3], 1), float("-inf"))
    if table.sinks is not None:
        column = table.sinks.expand_as(column)
    lse = torch.logsumexp(torch.cat((table.scores, column), -1), -1, keepdim=True)
    return table.probabilities(lse)


@pytest.mark.parametrize("given", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_softmax_in_fp64(case: Case, given: bool, device: torch.device) -> None:
    if device.type == "cuda" and case.dtype in (torch.float32, torch.float64) and given:
        pytest.skip("attention takes no such dtype on CUDA")
    inputs = make_inputs(case, device)
    asked: dict[str, Any] = arguments(inputs) if given else arguments(inputs, "sinks")
    if given:
        _, asked["lse"] = flash_ext.attention(
            inputs.q, inputs.k, inputs.v, return_lse=True, **arguments(inputs, "sinks")
        )
    rows, heads = [0, case.seqlen_q - 1, 7, 7], [3, 0]
    found = flash_ext.attention_map(inputs.q, inputs.k, rows=rows, heads=heads, **asked)
    assert (found.dtype, found.shape) == (torch.float32, (2, 2, 4, 34))
    reference = expected(inputs)[:, heads][:, :, rows]
    torch.testing.assert_close(found.double(), reference, atol=2e-6, rtol=2e-5)
    assert torch.equal(found == 0, reference == 0)


@pytest.mark.parametrize(
    ("rows", "same"),
    [
        (3, [3]),
        (-1, [20]),
        (slice(None), list(range(21))),
        (slice(18, None, 2), [18, 20]),
        (range(2, 4), [2, 3]),
        (torch.tensor([5, -2]), [5, 19]),
        ([], []),
    ],
)
def test_ways_to_name_rows(rows: Any, same: list[int]) -> None:
    inputs = make_inputs(BASE)
    whole = flash_ext.attention_map(inputs.q, inputs.k, rows=slice(None))
    found = flash_ext.attention_map(inputs.q, inputs.k, rows=rows)
    assert found.shape == (2, 4, len(same), 34)
    torch.testing.assert_close(found, whole[:, :, same])
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 21))


def test_map_times_v_is_attention() -> None:
    inputs = make_inputs(replace(BASE, causal=True))
    table = flash_ext.attention_map(inputs.q, inputs.k, rows=slice(None), causal=True)
    v = inputs.v.transpose(1, 2).repeat_interleave(2, 1)
    out = flash_ext.attention(inputs.q, inputs.k, inputs.v, causal=True)
    torch.testing.assert_close((table @ v).transpose(1, 2), out, atol=1e-5, rtol=1e-5)


def test_no_row_beside_those_asked_for_is_held() -> None:
    """The table of all rows of these sizes has 2^42 elements."""
    q = torch.zeros(1, 1, 1, 8).expand(1, 2**21, 1, 8)
    found = flash_ext.attention_map(q, q, rows=[0, -1], causal=True)
    assert found[0, 0, 0, 0] == 1
    assert found[0, 0, 1].sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"rows": 21}, IndexError, "rows: index 21 is out of range for 21"),
        ({"rows": 0, "heads": [-5]}, IndexError, "heads: index -5 is out of range for 4"),
        ({"rows": "all"}, TypeError, "rows must be an int, a slice or some ints"),
        ({"rows": [0.5]}, TypeError, "got 0.5 in it"),
        ({"rows": torch.zeros(2)}, TypeError, "rows is float32"),
        ({"rows": True}, TypeError, "rows must be"),
        ({"rows": 0, "lse": torch.zeros(2, 21, 4)}, ValueError, r"\(B, Hq, Sq\) = \(2, 4, 21\)"),
        ({"rows": 0, "lse": torch.zeros(2, 4, 21).half()}, TypeError, "lse is float16"),
        ({"rows": 0, "lse": torch.zeros(2, 4, 21), "sinks": torch.zeros(4)}, ValueError,
         "sinks and lse are both given"),
        ({"rows": 0, "layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ({"rows": 0, "softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"rows": 0, "attn_bias": torch.zeros(3, 3)}, ValueError, "attn_bias has shape"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes: dict[str, Any], error: type, said: str) -> None:
    inputs = make_inputs(BASE)
    with pytest.raises(error, match=said):
        flash_ext.attention_map(inputs.q, inputs.k, **changes)
