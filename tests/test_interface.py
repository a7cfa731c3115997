"""What the arguments of `attention` mean: defaults, spellings, layouts, dtypes, and `explain`."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext import interface
from flash_ext.testing import forced
from flash_ext.testing.cases import Case, make_inputs

HALF = torch.float16


def small(device: torch.device, **change: Any) -> tuple[Tensor, Tensor, Tensor]:
    facts = {"seqlen_q": 9, "seqlen_k": 13, "heads_q": 4, "head_dim": 16, "dtype": HALF}
    inputs = make_inputs(Case(**{**facts, **change}), device)
    return inputs.q, inputs.k, inputs.v


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Defaults and spellings


@pytest.mark.parametrize("D", [16, 33])
def test_default_scale_is_that_of_the_true_head_dim(D: int, device: torch.device) -> None:
    """D25: 1/sqrt(33), not 1/sqrt(40)."""
    q, k, v = small(device, head_dim=D)
    default = flash_ext.attention(q, k, v, return_lse=True)
    assert same(default, flash_ext.attention(q, k, v, softmax_scale=D**-0.5, return_lse=True))


NONE, CAUSAL = {}, {"causal": True}
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (NONE, {"window_size": (-1, -1)}),
    (NONE, {"window_size": [None, -1]}),
    (NONE, {"window_size": (10**9, 10**9)}),
    (NONE, {"softcap": 0, "dropout_p": 0}),
    (NONE, {"out_dtype": HALF}),
    (CAUSAL, {"causal": True, "window_size": (-1, -1)}),
    (CAUSAL, {"causal": True, "window_size": (-1, 0)}),
    (CAUSAL, {"causal": True, "window_size": (None, 7)}),
    (CAUSAL, {"window_size": (-1, 0)}),
    (CAUSAL, {"window_size": (13, 0)}),
]


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_spellings_of_one_meaning(
    one: dict[str, Any], other: dict[str, Any], device: torch.device
) -> None:
    """D30: no limit, causal and their combinations; never an empty band."""
    q, k, v = small(device)
    expected = flash_ext.attention(q, k, v, **one, return_lse=True)
    found = flash_ext.attention(q, k, v, **other, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b)


# Layouts


@pytest.mark.parametrize("D", [16, 33])
def test_layouts_agree(D: int, device: torch.device) -> None:
    q, k, v = small(device, head_dim=D, heads_k=2)
    expected, lse = flash_ext.attention(q, k, v, causal=True, return_lse=True)
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, same_lse = flash_ext.attention(*heads_first, causal=True, return_lse=True, layout="bhsd")
    assert out.shape == (2, 4, 9, D)
    assert out.transpose(1, 2).is_contiguous()
    assert same((out.transpose(1, 2), same_lse), (expected, lse))


# Precision


def test_autocast_does_not_reach_the_reference() -> None:
    """Inside, products stay in the precision that the algorithm chose."""
    q, k, v = small(torch.device("cpu"), dtype=torch.bfloat16)
    expected = flash_ext.attention(q, k, v, return_lse=True, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = flash_ext.attention(q, k, v, return_lse=True, out_dtype=torch.float32)
    assert same(found, expected)


def test_autocast_leaves_fp64_and_modifiers_alone() -> None:
    q, k, v = small(torch.device("cpu"), dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_ext.attention(q, k, v).dtype == torch.float64
        with pytest.raises(TypeError, match="k is bfloat16, expected float64"):
            flash_ext.attention(q, k.float(), v)
    bias = torch.randn(9, 13)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = flash_ext.attention(q, k, v, attn_bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flash_ext.attention(q.float(), k, v, attn_bias=bias), expected)


def test_explain_sees_autocast(device: torch.device) -> None:
    q, k, v = (x.float() for x in small(device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert flash_ext.explain(q, k, v.half()).problem.dtype == torch.bfloat16


@pytest.mark.parametrize("D", [16, 33])
def test_out_dtype(D: int, device: torch.device) -> None:
    """float32 results are those of the input dtype before they are rounded."""
    q, k, v = small(device, head_dim=D)
    wide = flash_ext.attention(q, k, v, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.half(), flash_ext.attention(q, k, v))
    assert not torch.equal(wide.half().float(), wide)


def test_lse_dtype_and_default_result(device: torch.device) -> None:
    q, k, v = small(device)
    assert isinstance(flash_ext.attention(q, k, v), Tensor)
    _, lse = flash_ext.attention(q, k, v, return_lse=True)
    assert lse.dtype == torch.float32
    if device.type == "cpu":
        _, lse = flash_ext.attention(q.double(), k.double(), v.double(), return_lse=True)
        assert lse.dtype == torch.float64


def test_typed_options_are_the_arguments() -> None:
    """What type checkers are told is what the function takes."""
    keywords = {
        name
        for name, parameter in inspect.signature(flash_ext.attention).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords == {*interface.Options.__annotations__, "return_lse"}


# Dropout


def test_dropout_follows_the_generator() -> None:
    q, k, v = small(torch.device("cpu"))
    torch.manual_seed(3)
    first = flash_ext.attention(q, k, v, dropout_p=0.4)
    second = flash_ext.attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(flash_ext.attention(q, k, v, dropout_p=0.4), first)
    assert not torch.equal(first, second)


# Explain


def test_explain_on_cpu_is_the_reference() -> None:
    """D38: a query tells which path will run."""
    q, k, v = small(torch.device("cpu"), dtype=torch.float64)
    plan = flash_ext.explain(q, k, v, causal=True, softcap=5.0, dropout_p=0.1)
    assert plan.family == "reference"
    assert plan.problem.modifiers == ("softcap", "dropout_p")
    assert plan.problem.window == (-1, 0)
    assert "float64, window (None, 0), softcap, dropout_p" in str(plan)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
def test_explain_for_a_capability(where: str) -> None:
    """For hardware that is not there, wherever the tensors are; nothing runs."""
    q, k, v = small(torch.device("cpu"), layout="bhsd")
    if where == "meta":
        q, k, v = (x.to("meta") for x in (q, k, v))
    with FakeTensorMode() if where == "fake" else nullcontext() as mode:
        if mode is not None:
            q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        plan = flash_ext.explain(q, k, v, layout="bhsd", return_lse=True, capability=(9, 0))
    assert (plan.problem.Sq, plan.problem.Hq) == (9, 4)
    assert plan.target == "compute capability 9.0"
    assert plan.forward.reason
    if not flash_ext.build_info().archs:
        assert "installed without compiled kernels" in plan.forward.reason


def test_explain_follows_determinism(device: torch.device) -> None:
    q, k, v = small(device)
    assert not flash_ext.explain(q, k, v).problem.deterministic
    assert flash_ext.explain(q, k, v, deterministic=True).problem.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert flash_ext.explain(q, k, v).problem.deterministic
        assert not flash_ext.explain(q, k, v, deterministic=False).problem.deterministic
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.gpu
def test_explain_tells_what_runs() -> None:
    q, k, v = small(torch.device("cuda"), head_dim=64)
    plan = flash_ext.explain(q, k, v)
    assert plan.family in ("sm80", "sm90")
    assert plan.tile is not None
    with forced(family="sm80"):
        assert flash_ext.explain(q, k, v).family == "sm80"
        flash_ext.attention(q, k, v)
    smem = plan.kernel("forward").smem_bytes - 1
    with forced(smem_limit=smem):
        smaller = flash_ext.explain(q, k, v)
        assert smaller.family is None or smaller.kernel("forward").smem_bytes <= smem


@pytest.mark.gpu
def test_global_determinism_is_followed() -> None:
    """D20: deterministic=None reads the global switch when it is called."""
    inputs = make_inputs(Case(seqlen_q=300, seqlen_k=300, head_dim=64, dtype=HALF), "cuda")
    inputs.requires_grad_()
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        plan = flash_ext.explain(inputs.q, inputs.k, inputs.v)
        if plan.backward.family is None:
            with pytest.raises(NotImplementedError, match="deterministic"):
                flash_ext.attention(inputs.q, inputs.k, inputs.v)
            return
        outs = [flash_ext.attention(inputs.q, inputs.k, inputs.v) for _ in range(5)]
        runs = [torch.autograd.grad(out, inputs.q, inputs.dout) for out in outs]
        assert all(torch.equal(runs[0][0], other[0]) for other in runs)
    finally:
        torch.use_deterministic_algorithms(before)
