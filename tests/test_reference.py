"""The tiled CPU algorithm against plain softmax in fp64, over every modifier of the contract."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_kit import (
    FLOATS,
    GRADIENTS,
    MINUS_INF,
    SMALL,
    assert_equal,
    backward,
    forward,
    hold,
    run,
)
from torch import Tensor

from flash_ext import reference
from flash_ext.testing.cases import MEMORY, Case, Inputs, guarded, make_inputs, pairwise
from flash_ext.testing.oracle import oracle

ROOT = Path(__file__).resolve().parents[1]

COMBINATIONS = pairwise(
    Case(heads_q=4, heads_k=2, head_dim=24),
    dtype=FLOATS,
    seqlen_q=[1, 33, 64, 130],
    seqlen_k=[1, 50, 96, 145],
    heads_k=[1, 2, 4],
    head_dim=[1, 24, 33],
    head_dim_v=[None, 8, 40],
    causal=[False, True],
    window_size=[(None, None), (20, 10), (0, 0), (None, 30), (30, None)],
    softcap=[0.0, 2.0],
    alibi=[None, "h", "bh"],
    bias=[None, "bhqk", "hqk", "bk", "q", ""],
    bias_dtype=[None, torch.bool, torch.float32],
    bias_hidden=[0.0, 0.3],
    sinks=[None, torch.float32, torch.bfloat16],
    dropout_p=[0.0, 0.17],
    lse_gradient=[False, True],
    layout=["bshd", "bhsd"],
    out_dtype=[None, torch.float32],
    softmax_scale=[None, 0.0, -0.3],
    memory=["contiguous", "packed"],
    magnitude=[1.0, 4.0],
)


@pytest.mark.parametrize("case", COMBINATIONS, ids=str)
def test_combinations(case: Case) -> None:
    inputs = make_inputs(case)
    values = hold(inputs, **SMALL)
    shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v or case.head_dim)
    out = values["out"].transpose(1, 2) if case.layout == "bhsd" else values["out"]
    assert out.shape == shape
    assert out.is_contiguous()
    assert values["lse"].is_contiguous()
    for name, source in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        assert values[name].is_contiguous()
        assert values[name].shape == source.shape


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_default_tiles(dtype: torch.dtype) -> None:
    case = Case(batch=1, seqlen_q=1100, seqlen_k=1300, heads_q=1, heads_k=1, head_dim=16)
    hold(make_inputs(replace(case, causal=True, dtype=dtype)))


@pytest.mark.parametrize("causal", [False, True])
def test_many_batch_entries(causal: bool) -> None:
    """More entries than go together: each batch slice gets its own bias, slopes, mask and seed."""
    case = Case(
        batch=70, seqlen_q=130, seqlen_k=70, heads_q=2, heads_k=1, head_dim=8, dropout_p=0.1
    )
    inputs = make_inputs(replace(case, bias="bk", alibi="bh", sinks=torch.float32, causal=causal))
    hold(inputs)


def test_block_sizes_change_rounding_only() -> None:
    case = Case(
        seqlen_q=100, seqlen_k=140, dtype=torch.float64, causal=True, dropout_p=0.2, bias="hqk"
    )
    inputs = make_inputs(replace(case, softcap=3.0, sinks=torch.float32, window_size=(60, None)))
    first = run(inputs)
    for block_m, block_n in ((1, 140), (16, 16), (17, 31), (100, 1), (64, 32)):
        other = run(inputs, block_m=block_m, block_n=block_n)
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-11, msg=name)


class Attention(torch.autograd.Function):
    """The smallest autograd wrapper, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, inputs: Inputs, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.inputs = replaced(inputs, tensors)
        out, lse = forward(ctx.inputs, block_m=3, block_n=4)
        ctx.save_for_backward(out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        inputs = replace(ctx.inputs, dout=dout, dlse=dlse)
        gradients = backward(inputs, *ctx.saved_tensors, block_m=3, block_n=4)
        return None, *gradients.values()


def replaced(inputs: Inputs, tensors: tuple[Tensor, ...]) -> Inputs:
    return replace(inputs, **dict(zip(inputs.leaves(), tensors, strict=True)))


GRADCHECK = {
    "plain": {},
    "causal": {"causal": True},
    "window, sinks": {"window_size": (2, 1), "sinks": torch.float64},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": "bh", "causal": True},
    "bias": {"bias": "bhqk"},
    "broadcast bias, softcap": {"bias": "hk", "softcap": 2.0},
    "mask": {"bias": "bk", "bias_dtype": torch.bool, "bias_hidden": 0.4},
    "dropout, sinks": {"dropout_p": 0.3, "sinks": torch.float64},
    "everything": {
        "causal": True,
        "window_size": (4, None),
        "softcap": 2.0,
        "alibi": "h",
        "bias": "hqk",
        "sinks": torch.float64,
        "dropout_p": 0.2,
        "layout": "bhsd",
    },
}


@pytest.mark.parametrize("name", GRADCHECK)
def test_gradcheck(name: str) -> None:
    """Numerical differentiation of out and lse by every differentiable input, in fp64."""
    case = Case(batch=2, seqlen_q=4, seqlen_k=6, heads_q=4, heads_k=2, head_dim=2, head_dim_v=3)
    inputs = make_inputs(replace(case, dtype=torch.float64, **GRADCHECK[name])).requires_grad_()
    leaves = tuple(inputs.leaves().values())
    assert torch.autograd.gradcheck(lambda *tensors: Attention.apply(inputs, *tensors), leaves)


def test_subset_of_gradients_equals_the_full_run() -> None:
    """D26: any subset of gradients is what it is when all are asked for; the rest is empty."""
    inputs = make_inputs(Case(bias="hqk", sinks=torch.float32, lse_gradient=True, dropout_p=0.1))
    out, lse = forward(inputs)
    full = backward(inputs, out, lse)
    for chosen in range(32):
        wanted = {f"want_{name}": bool(chosen >> i & 1) for i, name in enumerate(GRADIENTS)}
        tensors = (inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse)
        gradients = reference.backward(*tensors, **inputs.private(), **wanted)
        assert len({g.data_ptr() for g in gradients if g.numel()}) == sum(wanted.values())
        for name, gradient in zip(GRADIENTS, gradients, strict=True):
            if wanted[f"want_{name}"]:
                assert torch.equal(gradient, full[name])
            else:
                assert gradient.shape == (0,)


def test_inputs_stay_unchanged() -> None:
    inputs = make_inputs(
        Case(layout="bhsd", bias="hqk", sinks=torch.float32, softcap=3.0, alibi="h")
    )
    out, lse = forward(inputs)
    names = ("q", "k", "v", "dout", "attn_bias", "sinks", "alibi_slopes")
    with guarded(*(getattr(inputs, name) for name in names), out, lse) as copies:
        guarded_inputs = replace(inputs, **dict(zip(names, copies, strict=False)))
        assert_equal({"out": out, "lse": lse}, run(guarded_inputs))
        backward(guarded_inputs, *copies[-2:])


def test_gradients_are_bit_equal_from_run_to_run() -> None:
    inputs = make_inputs(Case(heads_q=4, heads_k=2, seqlen_q=200, causal=True, bias="k"))
    assert_equal(run(inputs), run(inputs))


def test_memory_layouts_of_inputs() -> None:
    """D12: every combination for q, k and v gives the bits of the contiguous run."""
    layouts = [name for name in MEMORY if "expanded" not in name]
    for case in pairwise(
        Case(seqlen_q=40, seqlen_k=56, heads_q=4, heads_k=2, head_dim=16, causal=True),
        memory=[(a, b, c) for a in layouts for b in layouts for c in layouts],
        layout=["bshd", "bhsd"],
    ):
        contiguous = make_inputs(replace(case, memory="contiguous"))
        assert_equal(run(contiguous), run(make_inputs(case)))


@pytest.mark.parametrize("memory", ["heads_expanded", "batch_expanded"])
def test_expanded_keys(memory: str) -> None:
    """D12: stride-0 keys give the bits of their copies, and per-element gradients."""
    inputs = make_inputs(Case(heads_q=4, heads_k=2, memory=("contiguous", memory, memory)))
    copies = replace(inputs, k=inputs.k.contiguous(), v=inputs.v.contiguous())
    assert 0 in inputs.k.stride()
    assert_equal(run(inputs), run(copies))


def test_layouts_of_the_incoming_gradient() -> None:
    """D11: expanded, permuted, strided and fp32 gradients of out."""
    case = Case(seqlen_q=60, heads_q=4, heads_k=2, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    assert inputs.dout is not None
    out, lse = forward(inputs)
    for dout in (
        torch.ones((), dtype=torch.bfloat16).expand(inputs.dout.shape),
        *(MEMORY[name](inputs.dout, 2) for name in MEMORY),
    ):
        contiguous = replace(inputs, dout=dout.contiguous())
        strided = replace(inputs, dout=dout)
        assert_equal(backward(contiguous, out, lse), backward(strided, out, lse))
    single = replace(inputs, dout=inputs.dout.float())
    assert_equal(backward(inputs, out, lse), backward(single, out, lse))


def test_memory_is_linear_in_the_sequence() -> None:
    """At S = 16,384 the table of one head would take 1 GiB in fp32."""
    code = """
import torch
from flash_ext import reference

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

torch.set_num_threads(1)
q, k, v, dout = (torch.randn(1, 16384, 1, 16) for _ in range(4))
kwargs = {"softmax_scale": 0.25, "window_right": 0}
short = [x[:, :512] for x in (q, k, v, dout)]
out, lse = reference.forward(*short[:3], **kwargs)
reference.backward(short[3], None, *short[:3], out, lse, **kwargs)
before = peak()
out, lse = reference.forward(q, k, v, **kwargs)
reference.backward(dout, None, q, k, v, out, lse, **kwargs)
print(peak() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak is read from /proc")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 64 * 1024  # KiB


def test_dropout_without_a_seed_is_an_error() -> None:
    inputs = replace(make_inputs(Case()), dropout_p=0.5)
    with pytest.raises(ValueError, match="seed"):
        forward(inputs)


def test_oracle_is_plain_softmax() -> None:
    """The oracle itself against torch's own attention, where that has the modifier."""
    inputs = make_inputs(Case(heads_q=4, heads_k=2, dtype=torch.float64, causal=True))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)),
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(oracle(inputs).values["out"], expected)


@pytest.mark.parametrize("zero", ["batch", "seqlen_q", "seqlen_k", "heads"])
@pytest.mark.parametrize("sinks", [None, torch.float32])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_empty_tensors(zero: str, sinks: torch.dtype | None, layout: str) -> None:
    """D10: each size 0 in turn."""
    sizes = {"heads_q": 0, "heads_k": 0} if zero == "heads" else {zero: 0}
    case = Case(
        causal=True, sinks=sinks, layout=layout, lse_gradient=True, bias="hqk", dropout_p=0.1
    )
    inputs = make_inputs(replace(case, **sizes))
    values = hold(inputs)
    if zero == "seqlen_k":
        assert not values["out"].any()
        assert not values["dq"].any()
        empty = torch.full_like(values["lse"], MINUS_INF)
        expected = empty if inputs.sinks is None else inputs.sinks[None, :, None].expand_as(empty)
        assert torch.equal(values["lse"], expected)
