"""Packed sequences: each is a dense problem of its own, and nothing else is ever read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_kit import assert_bit_equal
from reference_kit import FLOATS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from varlen_kit import (
    ALL,
    EQUAL,
    EVERYTHING,
    MINUS_INF,
    MIXED,
    PLAIN,
    USED,
    Lengths,
    Packed,
    bias_of,
    pack,
    require_served,
)

import flash_ext
from flash_ext import reference, varlen_reference
from flash_ext.testing import numeric
from flash_ext.testing.cases import Case, pairwise, poison_allocator
from flash_ext.varlen_problem import Packing

float64 = torch.float64
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "left_window": {"window_size": (4, None), "causal": True},
    "scale": {"softmax_scale": -0.3},
    "softcap": {"softcap": 2.0},
    "alibi_h": {"alibi": "h"},
    "alibi_bh": {"alibi": "bh", "causal": True},
    "bias_bhqk": {"bias": "bhqk", "bias_hidden": 0.3},
    "bias_hk": {"bias": "hk"},
    "bias_scalar": {"bias": ""},
    "mask": {"bias": "bqk", "bias_dtype": torch.bool, "bias_hidden": 0.3},
    "sinks": {"sinks": float64, "causal": True},
    "dropout": {"dropout_p": 0.4},
    "one_head": {"heads_q": 1, "heads_k": 1},
    "everything": {
        "causal": True, "softcap": 5.0, "alibi": "bh", "bias": "bk", "bias_hidden": 0.2,
        "sinks": float64, "dropout_p": 0.3, "window_size": (30, 2),
    },
}  # fmt: skip

each_lengths = pytest.mark.parametrize("lengths", ALL.values(), ids=ALL)


def hold_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("change", MODIFIERS.values(), ids=MODIFIERS)
@each_lengths
def test_sequence_by_sequence(lengths: Lengths, change: dict[str, Any]) -> None:
    """Every modifier, forward and backward, is that of dense calls with the same seed."""
    packed = pack(lengths, replace(PLAIN, **change)).requires_grad_()
    out, lse = packed.run()
    expected_out, expected_lse = packed.run_by_sequence()
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    if len(lengths) == 0:
        assert not any(x.any() for x in packed.gradients(out, lse).values())
        return
    hold_close(packed.gradients(out, lse), packed.gradients(expected_out, expected_lse))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mixed", "used"])
def test_same_bits_as_dense(name: str, dtype: torch.dtype) -> None:
    """No neighbour has its lengths, so each sequence is computed alone."""
    lengths = ALL[name]
    packed = pack(lengths, replace(PLAIN, dtype=dtype, causal=True)).requires_grad_()
    out, lse = packed.run()
    found = packed.gradients(out, lse)
    for b, (rows, cols) in enumerate(packed.parts()):
        inputs = packed.inputs_of(b, replace(PLAIN, causal=True)).requires_grad_()
        dense = flash_ext.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
        gradients = torch.autograd.grad(
            dense, [inputs.q, inputs.k, inputs.v], [inputs.dout, inputs.dlse]
        )
        assert_bit_equal(out[rows], dense[0][0])
        assert_bit_equal(lse[:, rows], dense[1][0], "lse")
        for leaf, part, gradient in zip("qkv", (rows, cols, cols), gradients, strict=True):
            assert_bit_equal(found[leaf][part], gradient[0], f"d{leaf}")


def replace_leaves(packed: Packed, change: Callable[[Tensor], Tensor]) -> Packed:
    leaves = {name: change(x.detach()) for name, x in packed.leaves.items()}
    return replace(packed, leaves=leaves).requires_grad_()


def hold(lengths: Lengths, case: Case, device: torch.device) -> None:
    """The rule on every result, over poisoned memory, each sequence as a problem of its own."""
    packed = pack(lengths, case, device).requires_grad_()
    require_served(packed)
    poison_allocator(device)
    out, lse = packed.run()
    found = packed.gradients(out, lse, "q", "k", "v")
    for b, (rows, cols) in enumerate(packed.parts()):
        parts = {"dq": found["q"][rows], "dk": found["k"][cols], "dv": found["v"][cols]}
        numeric.check(
            packed.inputs_of(b, case),
            out.detach()[None, rows],
            lse.detach()[None, :, rows],
            **{name: x[None] for name, x in parts.items()},
        )


CASES = pairwise(
    Case(heads_q=4, head_dim=32),
    dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64],
    causal=[False, True],
    window_size=[(None, None), (20, 4)],
    heads_k=[4, 2, 1],
    head_dim_v=[None, 24],
    softcap=[0.0, 3.0],
    alibi=[None, "h", "bh"],
    bias=[None, "bqk", "h"],
    sinks=[None, torch.float32],
    out_dtype=[None, torch.float32],
)


@pytest.mark.parametrize("lengths", [MIXED, USED, EQUAL], ids=["mixed", "used", "equal"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, lengths: Lengths, device: torch.device) -> None:
    """Every result against the oracle in fp64."""
    if case.dtype == torch.float64:
        case = replace(case, out_dtype=None)
    if device.type == "cuda" and case.dtype not in (torch.float16, torch.bfloat16):
        pytest.skip("CUDA takes halves only")
    hold(lengths, case, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", ["hk", "bhqk", "k", ""])
def test_sums_over_sequences_are_rounded_once(bias: str, dtype: torch.dtype) -> None:
    """Gradients of bias and sinks: sums over many sequences, as exact as their dtype."""
    lengths = Lengths(tuple(range(1, 30)), tuple(range(30, 1, -1)))
    case = Case(heads_q=2, head_dim=8, bias=bias, bias_dtype=dtype, sinks=dtype)
    packed = pack(lengths, case).requires_grad_()
    found = packed.gradients(*packed.run(), "attn_bias", "sinks")
    expected = {name: torch.zeros_like(x, dtype=float64) for name, x in found.items()}
    for b, (Sq, Sk) in enumerate(zip(lengths.q, lengths.k, strict=True)):
        values = numeric.oracle(packed.inputs_of(b, case)).values
        dbias = bias_of(expected["attn_bias"], b, Sq, Sk)
        dbias += values["dbias"]
        expected["sinks"] += values["dsinks"].flatten()
    for name, x in found.items():
        assert x.dtype == dtype
        rtol = max(torch.finfo(dtype).eps / 2, 1e-5)
        torch.testing.assert_close(x.double(), expected[name], rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("bias", ["bhqk", "q", "bk", ""])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck(dropout_p: float, bias: str) -> None:
    """All modifiers at once, out and lse, with empty and partly used sequences."""
    lengths = Lengths(
        (0, 3, 2, 3, 1), (2, 4, 0, 4, 3), used_q=(0, 3, 2, 1, 1), used_k=(2, 3, 0, 4, 3),
        behind=(1, 2),
    )  # fmt: skip
    change = {"heads_q": 2, "heads_k": 1, "head_dim": 3, "head_dim_v": 2, "bias_hidden": 0.0}
    case = replace(EVERYTHING, bias=bias, dropout_p=dropout_p, **change)
    packed = pack(lengths, case).requires_grad_()
    leaves = {name: x.detach().nan_to_num().requires_grad_() for name, x in packed.leaves.items()}
    used = ~packed.unused_q()

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = packed.run(**dict(zip(leaves, tensors, strict=True)))
        return out, lse[:, used]

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@each_lengths
@pytest.mark.parametrize("sinks", [None, torch.float32])
def test_unused_rows_are_zero(lengths: Lengths, sinks: torch.dtype | None) -> None:
    """D05: they hold NaN, in dout and dlse too, over poisoned memory; nothing of it comes out."""
    case = replace(PLAIN, dtype=torch.float32, sinks=sinks, bias="qk")
    packed = pack(lengths, case).requires_grad_()
    poison_allocator()
    out, lse = packed.run()
    found = packed.gradients(out, lse)
    unused_q, unused_k = packed.unused_q(), packed.unused_k()
    assert not out[unused_q].any()
    assert (lse[:, unused_q] == MINUS_INF).all()
    assert not found["q"][unused_q].any()
    assert not found["k"][unused_k].any()
    assert not found["v"][unused_k].any()
    assert all(x.isfinite().all() for x in (out, *found.values()))


@pytest.mark.parametrize("sink", [None, 0.7, MINUS_INF])
def test_sequences_without_keys(sink: float | None) -> None:
    """D10, D42: out 0, lse -inf or the sink; no gradient but that of the sink by lse."""
    lengths = Lengths((4, 3), (0, 5), used_k=(0, 0))
    packed = pack(lengths, PLAIN)
    if sink is not None:
        packed.leaves["sinks"] = torch.full((4,), sink, dtype=float64)
    packed.requires_grad_()
    out, lse = packed.run()
    assert not out.any()
    assert (lse == (MINUS_INF if sink is None else sink)).all()
    found = packed.gradients(out, lse)
    assert not any(found[name].any() for name in "qkv")
    if sink is not None:
        expected = packed.dlse.sum(1) * (sink > MINUS_INF)
        torch.testing.assert_close(found["sinks"], expected)


@pytest.mark.parametrize("lengths_k", [(1, 1, 1), (2, 63, 65), (127, 64, 129)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("magnitude", [3.0, 10.0])
def test_short_keys(
    magnitude: float, causal: bool, lengths_k: tuple[int, ...], device: torch.device
) -> None:
    """D04: gradients were NaN where keys end within a tile."""
    case = Case(
        heads_q=1, heads_k=1, head_dim=32, dtype=torch.float16, causal=causal, magnitude=magnitude
    )
    hold(Lengths((76, 34, 146), lengths_k), case, device)


def test_dropout_mask_is_that_of_the_batch_entry() -> None:
    """Sequences of one length have the masks that the entries of a dense batch have."""
    packed = pack(EQUAL, replace(PLAIN, dropout_p=0.5))
    q, k, v = (
        x.unflatten(0, (len(EQUAL), -1)) for x in (packed.leaves[name] for name in ("q", "k", "v"))
    )
    torch.manual_seed(7)
    dense = flash_ext.attention(q, k, v, dropout_p=0.5)
    out, _ = packed.run()
    assert_bit_equal(out, dense.flatten(0, 1))
    assert (packed.run(dropout_p=0.0)[0] - out).abs().amax((1, 2)).all()


def test_neighbours_of_equal_lengths_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """80,000 short sequences are a few dense calls, not 80,000."""
    calls = []
    dense = reference.forward

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(args[0].shape[0])
        return dense(*args, **more)

    monkeypatch.setattr(varlen_reference.reference, "forward", counted)
    lengths = Lengths((4, 4, 4, 3, 0, 0, 5, 5), (6, 6, 6, 6, 2, 2, 1, 1))
    pack(lengths, PLAIN).run()
    assert calls == [3, 1, 2]


def test_many_sequences() -> None:
    """D09: more than 65,535, forward and backward."""
    B = 70_000
    lengths = Lengths((2,) * B, (2,) * B)
    packed = pack(lengths, Case(heads_q=1, heads_k=1, head_dim=4, causal=True)).requires_grad_()
    out, lse = packed.run()
    found = packed.gradients(out, lse)
    last = packed.inputs_of(B - 1, Case(causal=True)).requires_grad_()
    dense = flash_ext.attention(last.q, last.k, last.v, causal=True, return_lse=True)
    gradients = torch.autograd.grad(dense, [last.q, last.k, last.v], [last.dout, last.dlse])
    torch.testing.assert_close(out[-2:], dense[0][0])
    for name, gradient in zip("qkv", gradients, strict=True):
        torch.testing.assert_close(found[name][-2:], gradient[0])


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.elements = max(self.elements, found.untyped_storage().nbytes() // found.itemsize)
        return found


def test_memory_is_linear_in_the_rows() -> None:
    """D38: one sequence is long, and nothing is as large as its table of scores."""
    packed = pack(Lengths((3, 4096, 9), (5, 4096, 2)), Case(heads_q=1, heads_k=1, head_dim=16))
    q, k, v = (packed.leaves[name] for name in ("q", "k", "v"))
    packing = Packing(packed.others["cu_seqlens_q"], packed.others["cu_seqlens_k"])
    with Largest() as largest:
        out, lse = varlen_reference.forward(q, k, v, packing, softmax_scale=0.25)
        varlen_reference.backward(
            packed.dout, packed.dlse, q, k, v, out, lse, packing, softmax_scale=0.25
        )
    assert q.numel() <= largest.elements <= 256 * 512


@pytest.mark.parametrize("memory", ["transposed", "packed", "strided", "heads_expanded"])
def test_any_strides(memory: str) -> None:
    """D11, D12: values and gradients are those of contiguous tensors; a dout of any strides."""
    packed = pack(MIXED, replace(PLAIN, memory=memory)).requires_grad_()
    assert not packed.leaves["q"].is_contiguous()
    out, lse = packed.run()
    contiguous = replace_leaves(packed, lambda x: x.contiguous())
    expected = contiguous.run()
    assert out.is_contiguous()
    assert_bit_equal(out, expected[0])
    dout = packed.dout
    packed.dout = dout.transpose(0, 1).contiguous().transpose(0, 1)
    found, gradients = packed.gradients(out, lse), contiguous.gradients(*expected)
    for name, x in found.items():
        assert_bit_equal(x, gradients[name], name)
        assert x.is_contiguous()
    packed.dout = dout.new_ones(()).expand(dout.shape)
    contiguous.dout = packed.dout.contiguous()
    for name, x in packed.gradients(*packed.run()).items():
        assert_bit_equal(x, contiguous.gradients(*contiguous.run())[name], name)


def test_hints_change_nothing() -> None:
    """Maxima that are exact, too large or absent: the same bits."""
    packed = pack(MIXED, EVERYTHING)
    expected, _ = packed.run()
    for longest in ({"max_seqlen_q": 40, "max_seqlen_k": 130}, {"max_seqlen_q": 10**9}):
        assert_bit_equal(packed.run(**longest)[0], expected)


def test_wider_bias_is_no_fault() -> None:
    """Rows and columns of a bias beyond the longest sequence are not read and get no gradient."""
    packed = pack(MIXED, replace(PLAIN, bias="hqk")).requires_grad_()
    expected = packed.gradients(*packed.run())["attn_bias"]
    bias = packed.leaves["attn_bias"].detach()
    wide = torch.nn.functional.pad(bias, (0, 3, 0, 2), value=float("nan")).requires_grad_()
    packed.leaves["attn_bias"] = wide
    found = packed.gradients(*packed.run())["attn_bias"]
    assert_bit_equal(found[:, :, :-2, :-3], expected)
    assert not found[:, :, -2:].any()
    assert not found[..., -3:].any()


def test_parts_merge() -> None:
    """Keys in two parts, joined by the packed results."""
    packed = pack(Lengths((5, 9), (6, 12)), PLAIN)
    q, k, v = (packed.leaves[name] for name in ("q", "k", "v"))
    cu_q, cu_k = packed.others["cu_seqlens_q"], packed.others["cu_seqlens_k"]
    first = torch.tensor([4, 5], dtype=torch.int32)
    near = flash_ext.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=first, return_lse=True
    )
    rest = torch.cat((torch.arange(4, 6), torch.arange(11, 18)))
    cu_rest = torch.tensor([0, 2, 9], dtype=torch.int32)
    far = flash_ext.attention_varlen(
        q, k[rest], v[rest], cu_seqlens_q=cu_q, cu_seqlens_k=cu_rest, return_lse=True
    )
    out, lse = flash_ext.merge(*near, *far)
    expected_out, expected_lse = packed.run()
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_kit_has_something_to_hold() -> None:
    """The dense calls differ from sequence to sequence, and rows of each kind exist."""
    packed: Packed = pack(USED, EVERYTHING)
    out, lse = packed.run_by_sequence()
    assert out.shape == (*packed.leaves["q"].shape[:2], 6)
    assert lse.shape == (4, packed.leaves["q"].shape[0])
    assert packed.unused_q().sum() == 6 + 3 + 7 + 1 + 7
    assert packed.leaves["q"].isnan().any()
