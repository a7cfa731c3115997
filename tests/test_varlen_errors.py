"""Bad arguments of attention_varlen: what host can see before any launch, and lengths that lie.

Each static fault is refused by `attention_varlen` on CPU and on meta tensors and by `explain`. Each
fault in the values of cu_seqlens and seqused is refused on the CPU, and on CUDA with
FLASH_EXT_CHECK=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import dispatch, ops, varlen_ops, varlen_problem
from flash_ext.dispatch import Hardware, Kernel, Plan
from flash_ext.problem import Problem
from flash_ext.testing import forced

Tq, Tk, Hq, Hk, D, Dv = 9, 12, 4, 2, 8, 6
CU_Q, CU_K = [0, 4, 4, 9], [0, 5, 12, 12]  # three sequences
half, float32, int32 = torch.float16, torch.float32, torch.int32


def arguments(device: str) -> dict[str, Any]:
    def new(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device, dtype=half)

    return {
        "q": new(Tq, Hq, D), "k": new(Tk, Hk, D), "v": new(Tk, Hk, Dv),
        "cu_seqlens_q": torch.tensor(CU_Q, dtype=int32, device=device),
        "cu_seqlens_k": torch.tensor(CU_K, dtype=int32, device=device),
    }  # fmt: skip


class Bad(NamedTuple):
    """Arguments to put in place of good ones, made for the device of the others."""

    change: Callable[[str], dict[str, Any]]
    error: type[Exception]
    message: str  # regular expression


def tensor(name: str, *shape: int, dtype: torch.dtype = half) -> Callable[[str], dict[str, Any]]:
    return lambda device: {name: torch.zeros(shape, dtype=dtype, device=device)}


def ints(dtype: torch.dtype = int32, **lists: Any) -> Callable[[str], dict[str, Any]]:
    return lambda device: {
        name: torch.tensor(values, dtype=dtype, device=device) for name, values in lists.items()
    }


def value(**change: Any) -> Callable[[str], dict[str, Any]]:
    return lambda device: change


BAD = {
    # Types
    "q_list": Bad(value(q=[0.0]), TypeError, "q must be a torch.Tensor, got list"),
    "cu_list": Bad(value(cu_seqlens_q=CU_Q), TypeError, "cu_seqlens_q must be a .* got list"),
    "cu_none": Bad(value(cu_seqlens_k=None), TypeError, "cu_seqlens_k must be .* got NoneType"),
    "used_int": Bad(value(seqused_q=3), TypeError, "seqused_q must be a torch.Tensor, got int"),
    "max_float": Bad(value(max_seqlen_q=5.0), TypeError, "max_seqlen_q must be an int.* float"),
    "max_tensor": Bad(ints(max_seqlen_k=7), TypeError, "max_seqlen_k must be an int.* Tensor"),
    "bias_list": Bad(value(attn_bias=[0.0]), TypeError, "attn_bias must be a .*Tensor, got list"),
    "causal_int": Bad(value(causal=1), TypeError, "causal must be True or False, got 1"),
    "lse_string": Bad(value(return_lse="y"), TypeError, "return_lse must be .* got 'y'"),
    "window_int": Bad(value(window_size=4), TypeError, "window_size must be a pair .* got 4"),
    "out_dtype_string": Bad(value(out_dtype="fp32"), TypeError, "out_dtype must be .* got 'fp32'"),
    # Dtypes
    "q_int": Bad(tensor("q", Tq, Hq, D, dtype=int32), TypeError, "q is int32, expected one of"),
    "k_mixed": Bad(
        tensor("k", Tk, Hk, D, dtype=torch.bfloat16),
        TypeError,
        "k is bfloat16, expected float16, the dtype of q",
    ),
    "cu_int64": Bad(
        ints(torch.int64, cu_seqlens_q=CU_Q), TypeError, "cu_seqlens_q is int64, expected int32"
    ),
    "used_int64": Bad(
        ints(torch.int64, seqused_k=[1, 2, 0]), TypeError, "seqused_k is int64, expected int32"
    ),
    "bias_int": Bad(tensor("attn_bias", 5, 7, dtype=int32), TypeError, "attn_bias is int32, expec"),
    "slopes_half": Bad(tensor("alibi_slopes", Hq), TypeError, "alibi_slopes is float16, expected"),
    # Shapes
    "q_rank": Bad(tensor("q", 1, Tq, Hq, D), ValueError, r"q has shape .*, expected 3 dimensions"),
    "k_rank": Bad(tensor("k", Tk, D), ValueError, r"k has shape .*, expected 3 .* \(T, H, D\)"),
    "k_head_dim": Bad(
        tensor("k", Tk, Hk, 9), ValueError, r"its D is 9, expected 8 as in q \(9, 4, 8\)"
    ),
    "v_rows": Bad(
        tensor("v", 11, Hk, Dv), ValueError, r"its T is 11, expected 12 as in k \(12, 2, 8\)"
    ),
    "v_heads": Bad(tensor("v", Tk, 4, Dv), ValueError, "v has .*: its H is 4, expected 2"),
    "heads": Bad(tensor("q", Tq, 3, D), ValueError, "q has 3 heads and k has 2, expected"),
    "no_key_heads": Bad(
        lambda device: tensor("k", Tk, 0, D)(device) | tensor("v", Tk, 0, Dv)(device),
        ValueError,
        "q has 4 heads and k has 0",
    ),
    "no_head_dim": Bad(tensor("v", Tk, Hk, 0), ValueError, "v has shape .* at least 1"),
    "cu_rank": Bad(ints(cu_seqlens_q=[CU_Q]), ValueError, "cu_seqlens_q has shape .* 1 dimension"),
    "cu_scalar": Bad(ints(cu_seqlens_k=0), ValueError, r"cu_seqlens_k has shape \(\), expected 1"),
    "cu_empty": Bad(
        ints(cu_seqlens_q=[]), ValueError, r"cu_seqlens_q has shape \(0,\), expected \(B \+ 1,\)"
    ),
    "cu_lengths": Bad(
        ints(cu_seqlens_k=[0, 5]),
        ValueError,
        r"cu_seqlens_k has shape \(2,\), expected \(B \+ 1,\) = \(4,\), since cu_seqlens_q has",
    ),
    "used_length": Bad(
        ints(seqused_q=[0] * 4), ValueError, r"seqused_q has shape \(4,\), expected \(B,\) = \(3,\)"
    ),
    "bias_batch": Bad(
        tensor("attn_bias", 2, 1, 5, 7),
        ValueError,
        r"attn_bias has .* \(B, Hq, max Sq, max Sk\) with \(B, Hq\) = \(3, 4\)",
    ),
    "bias_heads": Bad(tensor("attn_bias", Hk, 5, 7), ValueError, "attn_bias has shape"),
    "bias_rank": Bad(tensor("attn_bias", 1, 3, Hq, 5, 7), ValueError, "attn_bias has shape"),
    "slopes_batch": Bad(
        tensor("alibi_slopes", 2, Hq, dtype=float32), ValueError, r"\(B, Hq\) = \(3, 4\)"
    ),
    "sinks_shape": Bad(tensor("sinks", Hk), ValueError, r"sinks has shape \(2,\), .* = \(4,\)"),
    # Values
    "max_negative": Bad(value(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1, expected at lea"),
    "scale_nan": Bad(value(softmax_scale=float("nan")), ValueError, "softmax_scale is nan"),
    "softcap_negative": Bad(value(softcap=-1.0), ValueError, "softcap is -1.0, expected 0"),
    "dropout_one": Bad(value(dropout_p=1.0), ValueError, r"dropout_p is 1.0, expected .*\[0, 1\)"),
    "window_negative": Bad(value(window_size=(-2, 0)), ValueError, "window_size: left is -2"),
    "out_dtype": Bad(
        value(out_dtype=torch.bfloat16), ValueError, "out_dtype is torch.bfloat16, expected None"
    ),
}  # fmt: skip


def call(function: Callable[..., Any], given: dict[str, Any], **more: Any) -> Any:
    rest = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    return function(given["q"], given["k"], given["v"], **rest, **more)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", BAD)
def test_attention_varlen_refuses(name: str, where: str) -> None:
    change, error, message = BAD[name]
    given = {**arguments(where), **change(where)}
    with pytest.raises(error, match=message):
        call(flash_ext.attention_varlen, given)


@pytest.mark.parametrize("name", BAD)
def test_explain_refuses_alike(name: str) -> None:
    change, error, message = BAD[name]
    given = {**arguments("meta"), **change("meta")}
    with pytest.raises(error, match=message):
        call(flash_ext.explain, given, capability=(9, 0))


@pytest.mark.parametrize("name", ["k_mixed", "v_rows", "cu_int64", "used_length", "bias_batch"])
def test_recorded_calls_refuse_alike(name: str) -> None:
    change, error, message = BAD[name]
    given = {**arguments("cpu"), **change("cpu")}
    given["q"].requires_grad_()
    with pytest.raises(error, match=message):
        call(flash_ext.attention_varlen, given)


@pytest.mark.parametrize(
    "name", ["k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "attn_bias", "sinks"]
)
def test_devices_do_not_mix(name: str) -> None:
    given = {
        **arguments("cpu"), "seqused_q": torch.tensor([1, 0, 2], dtype=int32),
        "attn_bias": torch.zeros(5, 7), "sinks": torch.zeros(Hq),
    }  # fmt: skip
    call(flash_ext.attention_varlen, given)
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta, expected cpu, the device of q"):
        call(flash_ext.attention_varlen, given)


def test_cu_seqlens_are_required_and_keyword_only() -> None:
    given = arguments("cpu")
    function: Callable[..., Any] = flash_ext.attention_varlen
    with pytest.raises(TypeError, match="positional"):
        function(*given.values())
    del given["cu_seqlens_k"]
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        function(**given)


def test_alibi_slopes_have_no_gradient() -> None:
    slopes = torch.zeros(Hq, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        call(flash_ext.attention_varlen, arguments("cpu"), alibi_slopes=slopes)


def test_functorch_is_refused() -> None:
    given = {n: x.float() if n in "qkv" else x for n, x in arguments("cpu").items()}
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda q: call(flash_ext.attention_varlen, {**given, "q": q}).sum())(
            given["q"]
        )


# Lengths that lie: only the data shows it


LIES = {
    "first": Bad(ints(cu_seqlens_q=[1, 4, 4, 9]), ValueError, "cu_seqlens_q begins with 1, .* 0"),
    "first_negative": Bad(ints(cu_seqlens_k=[-1, 5, 12, 12]), ValueError, "k begins with -1"),
    "falls": Bad(
        ints(cu_seqlens_k=[0, 7, 5, 12]),
        ValueError,
        "cu_seqlens_k falls from 7 to 5 in sequence 1, expected offsets that never fall",
    ),
    "falls_at_the_end": Bad(ints(cu_seqlens_q=[0, 4, 9, 8]), ValueError, "falls from 9 to 8"),
    "ends": Bad(
        ints(cu_seqlens_q=[0, 4, 4, 10]),
        ValueError,
        r"cu_seqlens_q ends with 10, expected at most 9, the rows of q \(9, 4, 8\)",
    ),
    "beyond_in_between": Bad(ints(cu_seqlens_k=[0, 90, 90, 12]), ValueError, "falls from 90 to 12"),
    "used": Bad(
        ints(seqused_k=[5, 8, 0]),
        ValueError,
        "seqused_k is 8 for sequence 1, expected 0 to 7, which is what cu_seqlens_k gives it",
    ),
    "used_negative": Bad(ints(seqused_q=[4, 0, -1]), ValueError, "seqused_q is -1 for sequence 2"),
    "maximum": Bad(
        value(max_seqlen_k=6),
        ValueError,
        "max_seqlen_k is 6, expected at least 7, the length of sequence 1",
    ),
    "maximum_zero": Bad(value(max_seqlen_q=0), ValueError, "max_seqlen_q is 0, expected .* 4"),
    "bias_rows": Bad(
        tensor("attn_bias", 4, 7),
        ValueError,
        r"attn_bias has shape \(4, 7\): its Sq is 4, expected 1 or at least 5, the longest",
    ),
    "bias_columns": Bad(tensor("attn_bias", 6), ValueError, "its Sk is 6, expected .* 7"),
}  # fmt: skip


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused_on_cpu(name: str, recorded: bool) -> None:
    """D40: nothing was changed, and the next call works."""
    change, error, message = LIES[name]
    given = {**arguments("cpu"), **change("cpu")}
    given["v"].requires_grad_(recorded)
    with pytest.raises(error, match=message):
        call(flash_ext.attention_varlen, given)
    assert not any(x._version for x in given.values() if isinstance(x, Tensor))
    call(flash_ext.attention_varlen, arguments("cpu"))


@pytest.mark.parametrize("name", LIES)
def test_explain_reads_no_data(name: str) -> None:
    given = {**arguments("cpu"), **LIES[name].change("cpu")}
    assert call(flash_ext.explain, given).family == "reference"


def test_unused_rows_need_no_maximum() -> None:
    """Maxima and biases are held against the rows that are used."""
    change = ints(seqused_q=[2, 0, 3], seqused_k=[5, 4, 0])("cpu")
    bias = torch.zeros(3, 5)
    call(flash_ext.attention_varlen, arguments("cpu") | change, attn_bias=bias, max_seqlen_q=3)


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose one kernel reads no packed sequences, on a GPU that is not there."""
    row = {
        "family": "sm80", "pass": "forward", "dtype": "float16", "features": "full",
        "head_dim": 64, "block_m": 128, "block_n": 64, "threads": 128, "stages": 2,
        "smem_bytes": 1024, "index": 0,
    }  # fmt: skip

    def plan_on(device: torch.device, problem: Problem) -> Plan:
        kernels = [Kernel.of(row)]
        return dispatch.plan(problem, kernels, ("80",), Hardware((8, 0), 163 * 1024, 108))

    monkeypatch.setattr(ops, "plan_on", plan_on)
    monkeypatch.setattr(
        varlen_ops, "_forward_cpu", lambda *args: pytest.fail("the CPU path stood in for CUDA")
    )


def on_cuda(**change: Any) -> Any:
    """The CUDA operator, run on CPU tensors."""
    given = {**arguments("cpu"), **change}
    modifiers = [given.get(name) for name in ("attn_bias", "sinks", "alibi_slopes", "seed")]
    packing = [
        given.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    ]
    longest = [given.get(name) for name in ("max_seqlen_q", "max_seqlen_k")]
    tensors = [given[name] for name in ("q", "k", "v")]
    settings = [-1, 0, None, None, 0.0, 0.0, *longest]
    return varlen_ops._forward_cuda(*tensors, *settings, *modifiers, *packing)


@pytest.mark.usefixtures("_hopper")
def test_cuda_is_refused_with_a_reason() -> None:
    message = (
        r"forward pass is not served on .* 8.0: no compiled kernel can\n.*: does not read packed"
    )
    with pytest.raises(NotImplementedError, match=message):
        on_cuda()
    with pytest.raises(NotImplementedError, match=r"asked for: q \(9, 4, 8\), .* 3 packed sequen"):
        on_cuda()
    with pytest.raises(TypeError, match="cu_seqlens_q is int64"):
        on_cuda(cu_seqlens_q=torch.tensor(CU_Q))


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", LIES)
def test_check_finds_lies_on_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FLASH_EXT_CHECK=1 the operator looks at the data; without, it does not wait for it."""
    change, error, message = LIES[name]
    monkeypatch.setattr(varlen_problem, "CHECK", True)
    with pytest.raises(error, match=message):
        on_cuda(**change("cpu"))
    with pytest.raises(NotImplementedError, match="does not read packed sequences"):
        on_cuda()
    monkeypatch.setattr(varlen_problem, "CHECK", False)
    with pytest.raises(NotImplementedError, match="does not read packed sequences"):
        on_cuda(**change("cpu"))


@pytest.mark.parametrize("given", ["0", "1"])
def test_check_is_read_at_import(given: str) -> None:
    code = "from flash_ext import varlen_problem; print(int(varlen_problem.CHECK))"
    environment = os.environ | {"FLASH_EXT_CHECK": given}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == given


# explain


def test_explain_names_the_kernel_of_packed_sequences() -> None:
    given = {**arguments("meta"), "causal": True}
    plan = call(flash_ext.explain, given, capability=(9, 0))
    assert plan.problem.varlen
    text = str(plan)
    assert "q (9, 4, 8), k (12, 2, 8), v (12, 2, 6), 3 packed sequences, float16" in text
    if ops.compiled_kernels():
        assert plan.family == plan.backward.family == "sm80"
        assert text.count("sm80: packed lean kernel") == 2
        assert text.count("lean: does not read packed sequences") >= 2


def test_explain_on_cpu() -> None:
    plan = call(flash_ext.explain, arguments("cpu"), seqused_q=torch.zeros(3, dtype=int32))
    assert plan.family == plan.backward.family == "reference"


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_explain_needs_both_offsets(name: str) -> None:
    given = arguments("cpu")
    del given[name]
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got NoneType"):
        call(flash_ext.explain, given)


def test_explain_of_packed_sequences_has_no_layout() -> None:
    with pytest.raises(ValueError, match="layout is 'bhsd', expected 'bshd' with packed sequences"):
        call(flash_ext.explain, arguments("cpu"), layout="bhsd")


def test_forced_refuses_cpu_tensors() -> None:
    with forced(family="sm80"), pytest.raises(NotImplementedError, match="only the reference runs"):
        call(flash_ext.attention_varlen, arguments("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD)
def test_process_lives_on(name: str) -> None:
    """After a refused call on CUDA the next dense one works, in the same process."""
    change, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(flash_ext.attention_varlen, {**arguments("cuda"), **change("cuda")})
    q, k, v = (x[None] for x in list(arguments("cuda").values())[:3])
    assert not flash_ext.attention(q, k, v).any()
