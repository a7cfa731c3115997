"""Packed sequences under torch.compile, the operators' own checks, and fake results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from varlen_kit import MIXED, NONE, USED, Lengths, Packed, pack

import flash_ext
from flash_ext import varlen_ops
from flash_ext.testing.cases import Case

BASE = Case(heads_q=4, head_dim=16, causal=True)
MODIFIERS = {"bias": "hqk", "alibi": "h", "sinks": torch.float32}
LENGTHS = [  # other rows, other numbers of sequences; none equals another dim of the first call
    Lengths((33, 0, 20, 0), (47, 9, 13, 1)),
    Lengths((5, 6, 40, 0, 7, 3), (8, 6, 40, 11, 0, 3)),
    Lengths((101, 2, 2, 9, 0), (30, 32, 41, 3, 10), used_q=(90, 2, 1, 0, 0)),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def plain(x: dict[str, Any]) -> Any:
    return flash_ext.attention_varlen(**x)


def with_lse(x: dict[str, Any]) -> Any:
    out, lse = flash_ext.attention_varlen(**x, return_lse=True, softmax_scale=0.3)
    return out, lse.exp()


def self_attention(x: dict[str, Any]) -> Any:
    """One tensor for all of q, k and v, and one for both offsets."""
    q, cu_seqlens = x["q"], x["cu_seqlens_q"]
    return flash_ext.attention_varlen(
        q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True
    )


def with_hints(x: dict[str, Any]) -> Any:
    rows = x["q"].shape[0]
    return flash_ext.attention_varlen(**x, max_seqlen_q=rows, max_seqlen_k=1000)


CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    plain: {},
    with_lse: MODIFIERS,
    self_attention: {},
    with_hints: {"dropout_p": 0.3, "window_size": (9, 2), "causal": False},
}


def results(call: Callable[..., Any], packed: Packed) -> list[Tensor]:
    """What a call returns, and its gradients; with the same random numbers."""
    torch.manual_seed(5)
    packed.requires_grad_()
    others = {name: x for name, x in packed.others.items() if x is not None}
    found = call({**packed.leaves, **others})
    outs = [found] if isinstance(found, Tensor) else list(found)
    loss = sum(out.where(out.isfinite(), 0).square().sum() for out in outs)
    leaves = [x for x in packed.leaves.values() if x.requires_grad]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outs, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_compiled_equals_eager(call: Callable[..., Any]) -> None:
    """fullgraph, dynamic, both passes; other lengths and numbers must not compile again."""
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for index, lengths in enumerate(LENGTHS):
        packed = pack(lengths, replace(BASE, **CALLS[call]))
        if lengths.used_q is not None:
            torch._dynamo.reset()  # seqused is one argument more
        with torch._dynamo.config.patch(error_on_recompile=index == 1):
            found = results(compiled, packed)
        expected = results(call, packed)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, equal_nan=True)


def test_lengths_change_in_a_compiled_call() -> None:
    """The same tensors with other values: nothing of the lengths is in the graph."""
    packed = pack(Lengths((12, 8, 20), (16, 20, 24)), BASE)
    cu_q, cu_k = packed.others["cu_seqlens_q"], packed.others["cu_seqlens_k"]
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for offsets in ([0, 12, 20, 40], [0, 0, 39, 40], [0, 5, 5, 5]):
        cu_q.copy_(torch.tensor(offsets))
        cu_k.copy_(torch.tensor([0, offsets[1], 59, 60]))
        for a, b in zip(results(compiled, packed), results(plain, packed), strict=True):
            torch.testing.assert_close(a, b)


def test_errors_while_tracing_name_the_argument() -> None:
    packed = pack(MIXED, BASE)
    packed.others["cu_seqlens_k"] = packed.others["cu_seqlens_k"][1:].contiguous()
    with pytest.raises(Exception, match="cu_seqlens_k has shape"):
        torch.compile(plain, fullgraph=True, dynamic=True, backend="eager")(
            {**packed.leaves, **packed.others}
        )


def operator_arguments(packed: Packed) -> tuple[list[Any], list[Any]]:
    """q, k and v, and all that both operators take after their tensors."""
    x, y = packed.leaves, packed.others
    right = 0 if y["causal"] else -1
    seed = torch.tensor([7]) if y["dropout_p"] > 0 else None
    rest = [
        -1, right, None, y["softmax_scale"], y["softcap"], y["dropout_p"], 200, None,
        x.get("attn_bias"), x.get("sinks"), y["alibi_slopes"], seed,
        y["cu_seqlens_q"], y["cu_seqlens_k"], y["seqused_q"], y["seqused_k"],
    ]  # fmt: skip
    return [x["q"], x["k"], x["v"]], rest


@pytest.mark.parametrize("change", [{}, {"dropout_p": 0.3, "softcap": 4.0}, MODIFIERS], ids=str)
@pytest.mark.parametrize("lengths", [MIXED, USED], ids=["mixed", "used"])
def test_operators_pass_opcheck(lengths: Lengths, change: dict[str, Any]) -> None:
    """Schema, fake implementation and tracing, for inputs without gradients."""
    packed = pack(lengths, replace(BASE, head_dim_v=8, **change))
    for name, x in packed.leaves.items():
        packed.leaves[name] = x.nan_to_num() if name in ("q", "k", "v") else x
    tensors, rest = operator_arguments(packed)
    torch.library.opcheck(varlen_ops.forward, (*tensors, *rest))
    out, lse = varlen_ops.forward(*tensors, *rest)
    want = [True, False, True, "attn_bias" in packed.leaves, "sinks" in packed.leaves]
    dout, dlse = packed.dout.nan_to_num(), packed.dlse.nan_to_num()
    args = (dout, dlse, *tensors, out, lse, want, *rest)
    torch.library.opcheck(varlen_ops.backward, args)


@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("lengths", [MIXED, USED, NONE], ids=["mixed", "used", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_fake_results_look_like_real_ones(
    dtype: torch.dtype, lengths: Lengths, memory: str, where: str
) -> None:
    """D24: shape, stride and dtype of every result, of both operators."""
    case = replace(BASE, dtype=dtype, head_dim_v=24, memory=memory, **MODIFIERS)
    packed = pack(lengths, case)
    out_dtype = torch.float32 if dtype == torch.float16 else None

    def run(move: Callable[[Tensor], Tensor]) -> list[tuple[Any, ...]]:
        def moved(values: list[Any]) -> list[Any]:
            return [move(x) if isinstance(x, Tensor) else x for x in values]

        tensors, rest = (moved(values) for values in operator_arguments(packed))
        out, lse = varlen_ops.forward(*tensors, *rest, out_dtype)
        dout, dlse = moved([packed.dout, packed.dlse])
        want = (True, False, True, True, True)
        gradients = varlen_ops.backward(dout, dlse, *tensors, out, lse, want, *rest)
        return [(tuple(x.shape), x.stride(), x.dtype) for x in (out, lse, *gradients)]

    real = run(lambda x: x)
    if where == "meta":
        assert run(lambda x: x.to("meta")) == real
        return
    with FakeTensorMode() as mode:
        assert run(mode.from_tensor) == real


def test_public_function_on_meta_tensors() -> None:
    packed = pack(USED, BASE)
    given = {
        name: x.to("meta") if isinstance(x, Tensor) else x
        for name, x in {**packed.leaves, **packed.others}.items()
    }
    out, lse = flash_ext.attention_varlen(**given, return_lse=True)
    assert out.shape == packed.leaves["q"].shape
    assert lse.shape == (4, out.shape[0])
    assert out.is_meta


def test_operators_are_pure_and_seeded() -> None:
    assert torch.Tag.nondeterministic_seeded in varlen_ops.forward.tags
    assert not varlen_ops.forward._schema.is_mutable
    assert not varlen_ops.backward._schema.is_mutable


def test_other_tensors_are_refused() -> None:
    x = torch.ones(2, 1, 8).to_sparse()
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"q is a torch.sparse_coo tensor on cpu, expec"):
        flash_ext.attention_varlen(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
