"""Softcap, ALiBi, bias, bool masks and dropout: together, at their edges, and in odd memory.

On CUDA these are the kernels with all features, in every head-dim class; the CPU runs the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_kit import assert_bit_equal, attend, hold, run, run_and_hold
from torch import Tensor

from flash_ext.philox import keep_mask, keep_scale
from flash_ext.testing import forced
from flash_ext.testing.cases import Case, Inputs, guarded, make_inputs, pairwise

HALVES = [torch.float16, torch.bfloat16]
CLASSES = [32, 64, 96, 128, 192, 256]  # of head dims
BASE = Case(
    batch=2, seqlen_q=70, seqlen_k=150, heads_q=4, heads_k=2, head_dim=64, dtype=torch.bfloat16
)
TOGETHER = pairwise(
    BASE,
    dtype=HALVES,
    head_dim=[*CLASSES, 40],
    head_dim_v=[None, 24, 128],
    seqlen_q=[1, 70, 200],
    seqlen_k=[33, 150, 257],
    heads_q=[2, 6],
    heads_k=[1, 2],
    causal=[False, True],
    window_size=[(None, None), (40, 20)],
    softcap=[0.0, 5.0],
    alibi=[None, "h", "bh"],
    bias=[None, "bhqk", "hq", "bk"],
    bias_dtype=[None, torch.float32, torch.bool],
    bias_hidden=[0.0, 0.3],
    dropout_p=[0.0, 0.3],
    sinks=[None, torch.float32],
    lse_gradient=[False, True],
    layout=["bshd", "bhsd"],
    softmax_scale=[None, -0.2],
)


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_together(case: Case, device: torch.device) -> None:
    """Every pair of values of any two arguments."""
    run_and_hold(case, device)


EACH: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0, "magnitude": 3.0},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "bhqk", "bias_hidden": 0.2},
    "mask": {"bias": "qk", "bias_dtype": torch.bool, "bias_hidden": 0.4},
    "dropout": {"dropout_p": 0.3},
    "all": {"softcap": 8.0, "alibi": "h", "bias": "hqk", "bias_hidden": 0.1, "dropout_p": 0.2,
            "sinks": torch.float32, "lse_gradient": True, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", CLASSES)
@pytest.mark.parametrize("name", EACH)
def test_each_in_every_class(
    name: str, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Several tiles of queries and of keys, the last ones cut."""
    case = replace(BASE, head_dim=head_dim, dtype=dtype, seqlen_q=300, seqlen_k=275)
    run_and_hold(replace(case, **EACH[name]), device)


@pytest.mark.gpu
@pytest.mark.parametrize("kib", [99, 163])
@pytest.mark.parametrize("head_dim", CLASSES)
def test_tiles_for_less_shared_memory(head_dim: int, kib: int) -> None:
    """D39: dropout and bias variants, too, run on cards with less shared memory."""
    with forced(smem_limit=kib * 1024):
        run_and_hold(replace(BASE, head_dim=head_dim, **EACH["all"]), torch.device("cuda"))


# Softcap


@pytest.mark.parametrize(("softcap", "magnitude"), [(0.5, 4.0), (50.0, 6.0), (3e4, 1.0)])
@pytest.mark.parametrize("dtype", HALVES)
def test_softcap_of_any_size(
    softcap: float, magnitude: float, dtype: torch.dtype, device: torch.device
) -> None:
    """D02: saturated, usual, and so large that tanh must be exact near 0."""
    run_and_hold(replace(BASE, softcap=softcap, magnitude=magnitude, dtype=dtype), device)


# ALiBi


@pytest.mark.parametrize(("Sq", "Sk"), [(1, 300), (5, 300), (300, 5), (129, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_d34_alibi_of_unequal_lengths(Sq: int, Sk: int, causal: bool, device: torch.device) -> None:
    """D34: the distance was of the wrong end, or of a padded length."""
    case = replace(BASE, seqlen_q=Sq, seqlen_k=Sk, causal=causal, alibi="bh", lse_gradient=True)
    inputs = make_inputs(case, device)
    hold(inputs, run(inputs))
    inputs = replace(inputs, q=torch.zeros_like(inputs.q))
    _, lse = attend(inputs)
    assert inputs.alibi_slopes is not None
    query = torch.arange(Sq, device=device)[:, None] + Sk - Sq
    distance = query - torch.arange(Sk, device=device)
    scores = -inputs.alibi_slopes.double()[..., None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-6)


# Bias

BROADCASTS = ["".join(d for d, kept in zip("bhqk", bits, strict=True) if kept)
              for bits in product((False, True), repeat=4)]  # fmt: skip


@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("dims", BROADCASTS)
def test_gradient_of_every_broadcast(
    dims: str, bias_dtype: torch.dtype | None, device: torch.device
) -> None:
    """The gradient is summed over the dims in which the bias has one element."""
    case = replace(BASE, bias=dims, bias_dtype=bias_dtype, head_dim=40, seqlen_q=150, causal=True)
    _, found = run_and_hold(case, device)
    sizes = zip("bhqk", (2, 4, 150, 150), strict=True)
    assert found.gradients["dbias"].shape == tuple(n if d in dims else 1 for d, n in sizes)
    assert found.gradients["dbias"].dtype == (bias_dtype or case.dtype)


@pytest.mark.parametrize("dims", range(5))
def test_bias_of_any_rank(dims: int, device: torch.device) -> None:
    inputs = make_inputs(replace(BASE, bias="bhqk"), device)
    assert inputs.attn_bias is not None
    bias = inputs.attn_bias[(0,) * (4 - dims)].clone()
    inputs.attn_bias = bias
    found = run(inputs)
    hold(inputs, found)
    assert found.gradients["dbias"].shape == bias.shape


def _shifted(bias: Tensor) -> Tensor:
    flat = bias.new_empty(bias.numel() + 1)[1:]
    return flat.view(bias.shape).copy_(bias)


def _longer_rows(bias: Tensor, extra: int) -> Tensor:
    wide = torch.cat((bias, bias[..., :extra]), -1)
    return wide[..., : bias.shape[-1]]


BIAS_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "heads last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "rows of odd length": lambda x: _longer_rows(x, 1 + x.shape[-1] % 2),
    "rows of even length": lambda x: _longer_rows(x, 2 - x.shape[-1] % 2),
    "shifted": _shifted,
}


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("memory", BIAS_MEMORY)
@pytest.mark.parametrize("Sk", [64, 45])
def test_memory_of_a_bias(
    Sk: int, memory: str, bias_dtype: torch.dtype, device: torch.device
) -> None:
    """D12: the strides of a bias are its own; so are those of its gradient."""
    case = replace(BASE, bias="bhqk", bias_dtype=bias_dtype, bias_hidden=0.2, seqlen_k=Sk)
    inputs = make_inputs(case, device)
    expected = run(inputs)
    hold(inputs, expected)
    assert inputs.attn_bias is not None
    moved = BIAS_MEMORY[memory](inputs.attn_bias.detach())
    found = run(replace(inputs, attn_bias=moved))
    assert_bit_equal(found.out, expected.out)
    assert_bit_equal(found.lse, expected.lse)
    for name in found.gradients.keys() - {"dq"}:
        assert found.gradients[name].is_contiguous()
        assert_bit_equal(found.gradients[name], expected.gradients[name], name)


def test_expanded_bias(device: torch.device) -> None:
    """An expanded bias is a full one: its gradient arrives in full and autograd sums it."""
    inputs = make_inputs(replace(BASE, bias="hqk", dtype=torch.float16), device)
    assert inputs.attn_bias is not None
    leaf = inputs.attn_bias.detach().clone().requires_grad_()
    expected = run(inputs)
    out, _ = attend(replace(inputs, attn_bias=leaf.expand(2, -1, -1, -1)))
    (dbias,) = torch.autograd.grad(out, leaf, inputs.dout)
    assert_bit_equal(out, expected.out)
    torch.testing.assert_close(dbias, expected.gradients["dbias"], atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("Sk", [64, 45])
def test_nothing_beside_a_bias_is_read_or_changed(
    Sk: int, bias_dtype: torch.dtype, device: torch.device
) -> None:
    inputs = make_inputs(
        replace(BASE, bias="bhqk", bias_dtype=bias_dtype, bias_hidden=0.1, seqlen_k=Sk), device
    )
    expected = run(inputs)
    assert inputs.attn_bias is not None
    with guarded(inputs.attn_bias.detach()) as (bias,):
        found = run(replace(inputs, attn_bias=bias))
    assert_bit_equal(found.out, expected.out)
    assert_bit_equal(found.gradients["dv"], expected.gradients["dv"])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_lowest_finite_bias(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Masks of the lowest finite number: rows of nothing else average all values; no NaN."""
    inputs = make_inputs(replace(BASE, dtype=dtype, head_dim=head_dim), device)
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(70, 150, device=device)
    bias[:, 100:] = lowest
    bias[:9] = lowest
    found = run(replace(inputs, attn_bias=bias))
    mean = inputs.v.detach().double().mean(1).repeat_interleave(2, 1)[:, None].expand(2, 9, 4, -1)
    torch.testing.assert_close(found.out[:, :9].double(), mean, atol=4e-3, rtol=1e-2)
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
    cut = replace(inputs, k=inputs.k[:, :100], v=inputs.v[:, :100])
    torch.testing.assert_close(found.out[:, 9:], attend(cut)[0][:, 9:], atol=4e-3, rtol=1e-2)


# What a mask hides


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0, "dropout_p": 0.2}], ids=str)
def test_hidden_keys_never_show(
    extra: dict[str, Any],
    head_dim: int,
    bias_dtype: torch.dtype,
    value: float,
    device: torch.device,
) -> None:
    """A key that a bias hides from every query may hold anything, and its gradients are 0."""
    case = replace(BASE, head_dim=head_dim, bias="qk", bias_dtype=bias_dtype, **extra)
    inputs = make_inputs(case, device)
    unseen = torch.arange(150, device=device) % 7 == 3
    assert inputs.attn_bias is not None
    inputs.attn_bias[..., unseen] = False if bias_dtype == torch.bool else -torch.inf
    clean = run(inputs)
    dirty = replace(inputs, k=inputs.k.detach().clone(), v=inputs.v.detach().clone())
    dirty.k[:, unseen], dirty.v[:, unseen] = value, value
    found = run(dirty)
    assert_bit_equal(found.out, clean.out)
    assert_bit_equal(found.lse, clean.lse)
    for name, gradient in found.gradients.items():
        assert gradient.isfinite().all(), name
    assert (found.gradients["dk"][:, unseen] == 0).all()
    assert (found.gradients["dv"][:, unseen] == 0).all()


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.bool])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_hidden_from_some_rows(
    head_dim: int, bias_dtype: torch.dtype, device: torch.device
) -> None:
    """NaN in a key reaches the rows that see it and no other."""
    inputs = make_inputs(replace(BASE, head_dim=head_dim, bias="qk", bias_dtype=bias_dtype), device)
    assert inputs.attn_bias is not None
    sees = torch.arange(70, device=device) % 3 == 1
    hidden = False if bias_dtype == torch.bool else -torch.inf
    inputs.attn_bias[0, 0, ~sees, 77] = hidden
    clean = run(inputs)
    dirty = replace(inputs, k=inputs.k.detach().clone(), v=inputs.v.detach().clone())
    dirty.k[:, 77, :, 5], dirty.v[:, 77, :, 9] = torch.nan, torch.inf
    found = run(dirty)
    assert_bit_equal(found.out[:, ~sees], clean.out[:, ~sees])
    assert not found.out[:, sees].isfinite().any()
    for name in ("dq",):
        assert found.gradients[name][:, ~sees].isfinite().all()
        torch.testing.assert_close(
            found.gradients[name][:, ~sees], clean.gradients[name][:, ~sees], atol=1e-2, rtol=1e-2
        )


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.bool])
@pytest.mark.parametrize("sinks", [None, torch.float32])
def test_rows_that_a_mask_empties(
    sinks: torch.dtype | None, bias_dtype: torch.dtype, device: torch.device
) -> None:
    """D03: out 0, lse -inf or the sink, and nothing added to any gradient."""
    case = replace(BASE, bias="bhqk", bias_dtype=bias_dtype, sinks=sinks, lse_gradient=True)
    inputs = make_inputs(case, device)
    assert inputs.attn_bias is not None
    inputs.attn_bias[:, :, 20:40] = False if bias_dtype == torch.bool else -torch.inf
    found = run(inputs)
    hold(inputs, found)
    assert (found.out[:, 20:40] == 0).all()
    assert (found.gradients["dq"][:, 20:40] == 0).all()
    if sinks is None:
        assert (found.lse[..., 20:40] == -torch.inf).all()


# Dropout


def uniform(N: int, dropout_p: float, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Equal probabilities, and identities for v and dout: out and dv show the mask."""
    q = torch.zeros(3, N, 4, N, dtype=dtype, device=device)
    one = torch.eye(N, dtype=dtype, device=device)[:, None]
    dout = one.expand(3, N, 4, N).contiguous()
    v = one.expand(3, N, 2, N).contiguous()
    return Inputs(q, torch.zeros_like(v), v, dout, dropout_p=dropout_p)


@pytest.mark.parametrize("N", [8, 40, 64, 96, 128, 192, 200, 256])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.97])
def test_mask_bit_for_bit(
    dropout_p: float, dtype: torch.dtype, N: int, device: torch.device
) -> None:
    """Forward and backward drop what `flash_ext.philox` says, on every device."""
    inputs = uniform(N, dropout_p, dtype, device)
    found = run(inputs)
    assert inputs.seed is not None
    keep = keep_mask(inputs.seed, slice(0, 12), slice(0, N), slice(0, N), dropout_p)
    keep = keep.view(3, 4, N, N)  # (B, Hq, Sq, Sk)
    assert torch.equal(found.out.transpose(1, 2) != 0, keep)
    dropped = keep.double() * keep_scale(dropout_p) / N
    torch.testing.assert_close(found.out.transpose(1, 2).double(), dropped, atol=0, rtol=2**-7)
    dv = dropped.unflatten(1, (2, 2)).sum(2).mT  # (B, Hk, Sk, Sq): summed over the group
    torch.testing.assert_close(found.gradients["dv"].transpose(1, 2).double(), dv, atol=0,
                               rtol=2**-6)  # fmt: skip


@pytest.mark.parametrize(("Sq", "Sk"), [(700, 3001), (3001, 700)])
def test_mask_far_from_the_corner(Sq: int, Sk: int, device: torch.device) -> None:
    N = 64
    q = torch.zeros(1, Sq, 2, N, dtype=torch.float16, device=device)
    v = torch.zeros(1, Sk, 2, N, dtype=torch.float16, device=device)
    v[:, -N:] = torch.eye(N, device=device)[:, None]
    inputs = Inputs(q, torch.zeros_like(v), v, torch.ones_like(q), dropout_p=0.4)
    found = run(inputs)
    assert inputs.seed is not None
    keep = keep_mask(inputs.seed, slice(0, 2), slice(0, Sq), slice(Sk - N, Sk), 0.4)
    assert torch.equal(found.out[0].transpose(0, 1) != 0, keep)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_adjoint_under_dropout(head_dim: int, device: torch.device) -> None:
    """sum(dout * out) == sum(dv * v) whatever the mask, if both passes have the same."""
    case = replace(BASE, head_dim=head_dim, seqlen_q=500, seqlen_k=700, dropout_p=0.5, alibi="h")
    inputs = make_inputs(case, device)
    found = run(inputs)
    assert inputs.dout is not None
    left = inputs.dout.double() * found.out.double()
    right = found.gradients["dv"].double() * inputs.v.detach().double()
    size = left.abs().sum() + right.abs().sum()
    assert abs(left.sum() - right.sum()) <= 2**-12 * size


def test_probability_too_small_to_drop(device: torch.device) -> None:
    """p below half a step of 2^-16 drops nothing and scales nothing."""
    inputs = make_inputs(BASE, device)
    out, lse = attend(inputs)
    found, found_lse = attend(inputs, dropout_p=1e-7)
    torch.testing.assert_close(found, out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found_lse, lse)


# deterministic


@pytest.mark.parametrize("head_dim", [64, 128])
def test_d20_deterministic_with_modifiers(head_dim: int, device: torch.device) -> None:
    extra = {"softcap": 5.0, "alibi": "h", "bias": "bhqk", "dropout_p": 0.1}
    case = replace(BASE, head_dim=head_dim, seqlen_q=390, seqlen_k=500, **extra)
    inputs = make_inputs(case, device)
    first = run(inputs, deterministic=True)
    hold(inputs, first)
    for _ in range(10 if device.type == "cuda" else 1):
        again = run(inputs, deterministic=True)
        for name, gradient in first.gradients.items():
            assert_bit_equal(again.gradients[name], gradient, name)


# Memory


@pytest.mark.gpu
def test_no_table_beside_a_bias() -> None:
    """D38: softcap, ALiBi and dropout take memory linear in the length; so does a broadcast bias.

    An unbroadcast one takes its gradient and nothing else of its size.
    """

    def peak(length: int, **extra: Any) -> int:
        case = replace(BASE, batch=1, seqlen_q=length, seqlen_k=length, **extra)
        inputs = make_inputs(case, "cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(inputs)
        return torch.cuda.max_memory_allocated() - before

    linear = {"softcap": 5.0, "alibi": "h", "bias": "hk", "dropout_p": 0.1}
    peak(256, **linear)
    assert peak(8192, **linear) <= 2.1 * peak(4096, **linear)
    table = 4 * 4096**2 * 2  # bytes of a bf16 bias
    assert peak(4096, bias="bhqk") <= 1.4 * table
