"""Packed sequences on the CUDA kernels: every modifier against the CPU path in fp64, the same bits
as dense calls, lengths that only the device knows, and lengths that lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_kit import assert_bit_equal, capture
from torch import Tensor
from varlen_kit import (
    ALL,
    EQUAL,
    MINUS_INF,
    MIXED,
    USED,
    Lengths,
    Packed,
    bias_of,
    length,
    pack,
    require_served,
)

import flash_ext
from flash_ext import build, dispatch, varlen_ops
from flash_ext.testing import forced
from flash_ext.testing.cases import Case, guarded, poison_allocator
from flash_ext.testing.oracle import oracle

pytestmark = pytest.mark.gpu
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
PLAIN = Case(heads_q=4, heads_k=2, head_dim=64, dtype=torch.float16)
LONG = Lengths((300, 0, 129, 700, 1, 128), (257, 90, 129, 700, 400, 0), behind=(70, 200))
LENGTHS = {**ALL, "long": LONG}
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 3)},
    "scale": {"softmax_scale": -0.3},
    "sinks": {"sinks": torch.float32, "causal": True},
    "wide_v": {"head_dim": 40, "head_dim_v": 64},
    "odd_dims": {"head_dim": 33, "head_dim_v": 59},
    "d128": {"head_dim": 128, "causal": True},
    "d256": {"head_dim": 256},
    "out_fp32": {"out_dtype": torch.float32},
    "softcap": {"softcap": 2.0},
    "alibi_h": {"alibi": "h"},
    "alibi_bh": {"alibi": "bh", "causal": True},
    "bias_bhqk": {"bias": "bhqk", "bias_hidden": 0.3},
    "bias_hk": {"bias": "hk"},
    "bias_bq": {"bias": "bq"},
    "bias_scalar": {"bias": ""},
    "mask": {"bias": "bqk", "bias_dtype": torch.bool, "bias_hidden": 0.3},
    "dropout": {"dropout_p": 0.4},
    "everything": {
        "causal": True, "softcap": 5.0, "alibi": "bh", "bias": "bk", "bias_hidden": 0.2,
        "sinks": torch.float32, "dropout_p": 0.3, "window_size": (30, 2),
    },
}  # fmt: skip


def both_passes(packed: Packed, case: Case, deterministic: bool = False) -> dict[str, Tensor]:
    """Results of the operators for a given seed, wanted or not; unused rows of dout are NaN."""
    leaves, others = packed.leaves, packed.others
    q, k, v = (leaves[name].detach() for name in ("q", "k", "v"))
    left, right = (-1 if limit is None else limit for limit in case.window_size)
    seed = torch.tensor([1234567], device=q.device) if case.dropout_p else None
    settings = (
        *(left, 0 if case.causal else right, deterministic, case.softmax_scale, case.softcap),
        *(case.dropout_p, None, None),
    )
    bias, sinks = (
        None if x is None else x.detach() for x in map(leaves.get, ("attn_bias", "sinks"))
    )
    packing = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    tensors = (bias, sinks, others["alibi_slopes"], seed, *(others[name] for name in packing))
    out, lse = varlen_ops.forward(q, k, v, *settings, *tensors, case.out_dtype)
    want = (True, True, True, bias is not None and bias.is_floating_point(), sinks is not None)
    gradients = varlen_ops.backward(
        packed.dout, packed.dlse, q, k, v, out, lse, want, *settings, *tensors
    )
    return dict(zip(NAMES, (out, lse, *gradients), strict=True))


def on_cpu(packed: Packed) -> Packed:
    """The same problem on the CPU, in fp64."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().cpu().double() if x.dtype in (torch.float16, torch.bfloat16) else x.cpu()

    return replace(
        packed,
        leaves={name: move(x) for name, x in packed.leaves.items()},
        others={name: move(x) for name, x in packed.others.items()},
        dout=move(packed.dout),
        dlse=move(packed.dlse),
    )


def by_the_reference(packed: Packed, case: Case) -> dict[str, Tensor]:
    """All results in fp64 on the CPU, whatever family the kernels have to be of meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "in_force", None)
        return both_passes(on_cpu(packed), replace(case, dtype=torch.float64, out_dtype=None))


def bias_floor(packed: Packed, case: Case) -> float:
    """What an ideal kernel may err by in the gradient of a bias that sequences share.

    It is a sum, which may cancel, of terms rounded one by one. For those of one sequence the oracle
    tells; errors of sequences are independent as those of rows are, so their squares add up.
    """
    bias = packed.leaves["attn_bias"]
    squares = torch.zeros(*bias.shape[:-1], 1, dtype=torch.float64, device=bias.device)
    for b, (rows, cols) in enumerate(packed.parts()):
        if length(rows) and length(cols):
            floor = oracle(packed.inputs_of(b, case)).floors["dbias"]
            bias_of(squares, b, length(rows), length(cols)).add_(floor.square())
    return float(squares.sqrt().max())


def hold_close(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    floors: Mapping[str, float] | None = None,
) -> None:
    """The largest error of each result is within `tolerance` of the largest value, or its floor."""
    for name, x in found.items():
        y = expected[name].to(torch.float64)
        x = x.detach().cpu().to(torch.float64)
        assert x.shape == y.shape, name
        empty = y == MINUS_INF
        assert ((x == MINUS_INF) == empty).all(), name
        x, y = x.masked_fill(empty, 0.0), y.masked_fill(empty, 0.0)
        assert x.isfinite().all(), name
        if x.numel():
            error, largest = float((x - y).abs().max()), float(y.abs().max())
            allowed = max(tolerance * largest, (floors or {}).get(name, 0.0)) + 1e-6
            assert error <= allowed, f"{name}: {error:.3e} of {largest:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("change", MODIFIERS.values(), ids=MODIFIERS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_result(lengths: Lengths, change: dict[str, Any]) -> None:
    """Forward and all gradients, those of the bias and the sinks too, over poisoned memory."""
    case = replace(PLAIN, **change)
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    poison_allocator("cuda")
    found = both_passes(packed, case)
    expected = by_the_reference(packed, case)
    hold_close(found, expected, 1e-2)
    unused_q, unused_k = packed.unused_q(), packed.unused_k()
    assert not found["out"].cpu()[unused_q].any()
    assert not found["dq"].cpu()[unused_q].any()
    assert not found["dk"].cpu()[unused_k].any()
    assert not found["dv"].cpu()[unused_k].any()


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["lean", "full"])
def test_every_kernel(head_dim: int, dtype: torch.dtype, softcap: float) -> None:
    """The same, by each kernel once."""
    change = {"softcap": softcap, "head_dim": head_dim, "dtype": dtype, "causal": True}
    case = replace(PLAIN, **change)
    packed = pack(LONG, case, "cuda")
    require_served(packed)
    found = both_passes(packed, case)
    expected = by_the_reference(packed, case)
    hold_close(found, expected, 1e-2 if dtype == torch.float16 else 3e-2)


@pytest.mark.parametrize("lengths", [MIXED, USED, LONG], ids=["mixed", "used", "long"])
@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["lean", "full"])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_as_dense(lengths: Lengths, softcap: float, causal: bool) -> None:
    """Each sequence takes the steps of a dense call of the generic kernels, in the same order."""
    case = replace(PLAIN, softcap=softcap, causal=causal)
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    found = both_passes(packed, case, deterministic=True)
    more: dict[str, Any] = {"softcap": softcap, "causal": causal, "deterministic": True}
    for b, (rows, cols) in enumerate(packed.parts()):
        inputs = packed.inputs_of(b, case).requires_grad_()
        if inputs.q.numel() == 0:
            continue
        with forced(family="sm80"):
            dense = flash_ext.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **more)
            gradients = torch.autograd.grad(
                dense, [inputs.q, inputs.k, inputs.v], [inputs.dout, inputs.dlse]
            )
        assert_bit_equal(found["out"][rows], dense[0][0])
        assert_bit_equal(found["lse"][:, rows], dense[1][0], "lse")
        for name, part, gradient in zip("qkv", (rows, cols, cols), gradients, strict=True):
            assert_bit_equal(found[f"d{name}"][part], gradient[0], f"d{name} of sequence {b}")


def test_dropout_mask_is_that_of_the_batch_entry() -> None:
    case = replace(PLAIN, dropout_p=0.5)
    packed = pack(EQUAL, case, "cuda")
    require_served(packed)
    q, k, v = (packed.leaves[name].unflatten(0, (len(EQUAL), -1)) for name in ("q", "k", "v"))
    torch.manual_seed(7)
    with forced(family="sm80"):
        dense = flash_ext.attention(q, k, v, dropout_p=0.5)
    assert_bit_equal(packed.run()[0], dense.flatten(0, 1))


@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["lean", "full"])
def test_deterministic_runs_are_equal(softcap: float) -> None:
    """D20: dQ is added up in one order, sequences of all lengths beside each other."""
    lengths = Lengths((700, 0, 3, 1500, 64, 900), (900, 5, 3, 1500, 2000, 130), behind=(9, 0))
    case = replace(PLAIN, softcap=softcap, causal=True)
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    first = both_passes(packed, case, deterministic=True)
    for _ in range(5):
        for name, x in both_passes(packed, case, deterministic=True).items():
            assert_bit_equal(x, first[name], name)


@pytest.mark.parametrize("dims", ["hqk", "bqk", "qk", "bhk", "hk", "bq", "q", "k", "bh", ""])
@pytest.mark.parametrize("change", [{}, {"causal": True}, {"window_size": (70, 3)}], ids=str)
@pytest.mark.parametrize("lengths", [MIXED, USED, LONG], ids=["mixed", "used", "long"])
def test_deterministic_sum_of_a_bias_gradient(
    lengths: Lengths, change: dict[str, Any], dims: str
) -> None:
    """Sequences of any lengths add to one bias: the same bits each time, and right."""
    case = replace(PLAIN, bias=dims, **change)
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    poison_allocator("cuda")
    first = both_passes(packed, case, deterministic=True)
    floors = {"dbias": bias_floor(packed, case)}
    hold_close(first, by_the_reference(packed, case), 1e-2, floors)
    for _ in range(5):
        for name, x in both_passes(packed, case, deterministic=True).items():
            assert_bit_equal(x, first[name], name)


@pytest.mark.parametrize("B", [1, 31, 32, 33, 5_000, 80_000])
def test_many_short_sequences(B: int) -> None:
    """D09: sequence b is batch entry b of a dense call."""
    case = replace(PLAIN, heads_q=1, heads_k=1, causal=True)
    packed = pack(Lengths((16,) * B, (16,) * B), case, "cuda")
    require_served(packed)
    found = both_passes(packed, case)
    q, k, v = (packed.leaves[name].unflatten(0, (B, 16)) for name in ("q", "k", "v"))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with forced(family="sm80"):
        dense = flash_ext.attention(*leaves, causal=True, return_lse=True)
        gradients = torch.autograd.grad(
            dense, leaves, [packed.dout.unflatten(0, (B, 16)), packed.dlse.view(B, 1, 16)]
        )
    assert_bit_equal(found["out"], dense[0].flatten(0, 1))
    assert_bit_equal(found["lse"], dense[1].view(1, -1), "lse")
    for name, gradient in zip("qkv", gradients, strict=True):
        assert_bit_equal(found[f"d{name}"], gradient.flatten(0, 1), f"d{name}")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("change", [{}, {"softcap": 5.0, "bias": "bhqk"}], ids=["lean", "full"])
def test_replay_with_other_lengths(change: dict[str, Any], deterministic: bool) -> None:
    """D22: a graph reads the lengths anew, and nothing waits for the device."""
    case = replace(PLAIN, **change)
    lengths = Lengths((300, 10, 40), (300, 30, 70), used_q=(290, 9, 40), used_k=(280, 2, 70))
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    packed.dout, packed.dlse = packed.dout.nan_to_num(), packed.dlse.nan_to_num()
    packed.leaves |= {name: packed.leaves[name].nan_to_num() for name in ("q", "k", "v")}
    graph, results = capture(lambda: both_passes(packed, case, deterministic))
    others = (
        ([0, 0, 350, 350], [0, 100, 400, 400], [0, 290, 0], [99, 280, 0]),
        ([0, 1, 2, 301], [0, 100, 101, 400], [0, 1, 290], [99, 0, 280]),
    )
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    for offsets in others:
        for name, values in zip(names, offsets, strict=True):
            packed.others[name].copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        expected = both_passes(packed, case, deterministic)
        hold_close(results, {name: x.cpu() for name, x in expected.items()}, 1e-3)
        reference = by_the_reference(packed, case)
        hold_close(results, reference, 1e-2)


class GuardedExtension:
    """The extension with every tensor, those it writes to included, between guard zones."""

    def __init__(self) -> None:
        self.real = build.extension()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def forward(self, *args: Any) -> None:
        self._call("forward", args)

    def backward(self, *args: Any) -> None:
        self._call("backward", args)

    def _call(self, pass_: str, args: tuple[Any, ...]) -> None:
        found: list[Tensor] = []

        def tensors(value: Any) -> None:
            if isinstance(value, tuple):
                for x in value:
                    tensors(x)
            elif isinstance(value, Tensor):
                found.append(value)

        tensors(args)
        with guarded(*found, unchanged=False) as inside:
            copies = iter(inside)

            def replaced(value: Any) -> Any:
                if isinstance(value, tuple):
                    return tuple(map(replaced, value))
                return next(copies) if isinstance(value, Tensor) else value

            getattr(self.real, pass_)(*replaced(args))
            torch.cuda.synchronize()
            for x, copy in zip(found, inside, strict=True):
                x.copy_(copy)


@pytest.fixture
def _guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    extension = GuardedExtension()
    monkeypatch.setattr(build, "extension", lambda: extension)
    varlen_ops._launches.clear()
    yield
    varlen_ops._launches.clear()


LIES: dict[str, dict[str, list[int]]] = {
    "true": {},
    "falling": {"cu_seqlens_q": [0, 200, 100, 300], "cu_seqlens_k": [0, 300, 20, 310]},
    "negative": {"cu_seqlens_q": [-5, -400, 100, 300], "cu_seqlens_k": [0, 30, -(2**31), 310]},
    "beyond": {"cu_seqlens_q": [0, 10, 100, 2**31 - 1], "cu_seqlens_k": [0, 10**6, 10**8, 10**9]},
    "late": {"cu_seqlens_q": [100, 110, 120, 300], "cu_seqlens_k": [2**30] * 4},
    "used": {"seqused_q": [10**6, -3, 2**31 - 1], "seqused_k": [-(2**31), 10**9, 310]},
    "all": {
        "cu_seqlens_q": [2**31 - 1, -(2**31), 77, 3], "cu_seqlens_k": [7, 2**31 - 1, 5, -1],
        "seqused_q": [2**31 - 1] * 3, "seqused_k": [2**31 - 1] * 3,
    },
}  # fmt: skip


@pytest.mark.usefixtures("_guarded")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("change", [{}, {"softcap": 5.0, "bias": "bhqk"}], ids=["lean", "full"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies_stay_inside(
    lie: dict[str, list[int]], change: dict[str, Any], deterministic: bool
) -> None:
    """D40: whatever the device is told, it ends, and no byte beside a tensor is written."""
    case = replace(PLAIN, **change)
    lengths = Lengths((130, 40, 150), (100, 200, 10), used_q=(130, 40, 150), used_k=(100, 200, 10))
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    for name, values in lie.items():
        packed.others[name] = torch.tensor(values, dtype=torch.int32, device="cuda")
    both_passes(packed, case, deterministic)
    torch.cuda.synchronize()


@pytest.mark.sanitizer
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("change", [{}, {"softcap": 5.0, "bias": "bhqk"}], ids=["lean", "full"])
def test_packed_under_sanitizer(change: dict[str, Any], deterministic: bool) -> None:
    """Tiny sequences for the sanitizers, unused rows and empty ones among them."""
    case = replace(PLAIN, heads_q=2, heads_k=1, sinks=torch.float32, causal=True, **change)
    lengths = Lengths(
        (0, 33, 1, 130), (3, 70, 0, 140), used_q=(0, 20, 1, 130), used_k=(3, 70, 0, 9)
    )
    packed = pack(lengths, case, "cuda")
    require_served(packed)
    found = both_passes(packed, case, deterministic)
    expected = by_the_reference(packed, case)
    hold_close(found, expected, 1e-2)
