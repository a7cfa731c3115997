"""Attention against softmax in fp64: one suite for CPU tensors and, where there is a GPU, CUDA.

Every case runs forward and backward over poisoned memory, and out, lse and each gradient are held
against the rule of `flash_ext.testing.numeric`. Two or three axes at a time are combined in full;
the values of the others are drawn, each as often as any other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_kit import Outcome, assert_bit_equal, attend, hold, run, run_and_hold

from flash_ext.testing.cases import Case, Inputs, guarded, make_inputs

LENGTHS = [
    *[(1, 1), (1, 239), (3, 799), (113, 203), (128, 217), (256, 512), (512, 256), (129, 128)],
    *[(64, 65), (300, 1)],
]
LONG = [(1023, 1024), (1024, 1023)]
MASKS = [
    *[(False, (None, None)), (True, (None, None)), (False, (32, 64)), (True, (100, None))],
    *[(False, (0, 0)), (False, (17, None)), (False, (None, 5)), (True, (0, None))],
]
HEADS = [(3, 3), (4, 2), (4, 1)]
HEAD_DIMS = [
    *[(8, None), (33, None), (40, None), (59, None), (64, None), (72, None), (80, None)],
    *[(96, None), (111, None), (128, None), (64, 128), (128, 64), (40, 8), (64, 33), (1, 5)],
]
HALVES = [torch.float16, torch.bfloat16]
FEATURES: list[dict[str, Any]] = [
    {"lse_gradient": True},
    {"sinks": torch.float32},
    {"sinks": torch.bfloat16, "lse_gradient": True, "layout": "bhsd"},
    {"layout": "bhsd"},
    {"out_dtype": torch.float32},
    {"softmax_scale": 0.3, "memory": "packed"},
    {"softmax_scale": -0.1, "memory": "transposed"},
    {"softmax_scale": 0.0},
    {"magnitude": 5.0},
]
MODIFIERS: list[dict[str, Any]] = [
    {"softcap": 5.0, "magnitude": 3.0},
    {"alibi": "h"},
    {"alibi": "bh", "softcap": 10.0},
    {"bias": "bhqk"},
    {"bias": "hqk", "bias_dtype": torch.float32, "bias_hidden": 0.3},
    {"bias": "bk", "bias_dtype": torch.bool, "bias_hidden": 0.5},
    {"dropout_p": 0.2},
    {"dropout_p": 0.5, "alibi": "h", "bias": "q", "sinks": torch.float32, "lse_gradient": True},
]


PAIRS = {
    "lengths": ("seqlen_q", "seqlen_k"),
    "mask": ("causal", "window_size"),
    "heads": ("heads_q", "heads_k"),
    "dims": ("head_dim", "head_dim_v"),
}


def deck(values: list[Any], seed: str) -> Iterator[Any]:
    """The values in a random order, again and again: each occurs as often as any other."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(values, len(values))


def cases(combined: dict[str, list[Any]], drawn: dict[str, list[Any]]) -> list[Case]:
    """A case for each combination of values of the first axes; values of the others are drawn."""
    decks = {name: deck(values, seed=name) for name, values in drawn.items()}
    found = []
    for values in product(*combined.values()):
        chosen = dict(zip(combined, values, strict=True))
        chosen |= {name: next(cards) for name, cards in decks.items()}
        feature = chosen.pop("feature", {})
        sizes = {
            field: value
            for name in PAIRS.keys() & chosen.keys()
            for field, value in zip(PAIRS[name], chosen.pop(name), strict=True)
        }
        found.append(Case(**sizes, **chosen, **feature, seed=len(found)))
    return found


COMMON_DIMS = [(64, None), (128, None), (80, None)]
BY_LENGTH_AND_MASK = cases(
    {"lengths": LENGTHS, "mask": MASKS}, {"dtype": HALVES, "heads": HEADS, "dims": COMMON_DIMS}
)
BY_LENGTH_AND_MASK += cases(
    {"lengths": LONG, "mask": MASKS},
    {"dtype": HALVES, "heads": [(1, 1), (2, 1)], "dims": COMMON_DIMS, "batch": [1]},
)
BY_HEAD_DIM = cases(
    {"dims": HEAD_DIMS, "dtype": HALVES, "mask": MASKS[:2]},
    {"lengths": [(129, 190), (77, 33)], "heads": HEADS},
)
BY_FEATURE = cases(
    {"feature": FEATURES, "heads": HEADS, "dtype": HALVES},
    {"lengths": [(150, 150), (130, 260), (70, 20)], "mask": MASKS, "dims": HEAD_DIMS},
)
BY_MODIFIER = cases(
    {"feature": MODIFIERS, "heads": HEADS[1:]},
    {"lengths": [(150, 150), (70, 140), (70, 20)], "mask": MASKS, "dims": HEAD_DIMS,
     "dtype": HALVES},
)  # fmt: skip
WIDE = cases(
    {"dims": [(192, 128), (256, None)], "mask": MASKS[:2]}, {"dtype": HALVES, "lengths": [(70, 90)]}
)
FULL_PRECISION = cases(
    {"dtype": [torch.float32, torch.float64], "mask": MASKS},
    {"lengths": [*LENGTHS, (300, 500)], "heads": HEADS, "dims": HEAD_DIMS,
     "feature": [*MODIFIERS, *FEATURES[:4], *FEATURES[5:]]},
)  # fmt: skip


@pytest.mark.parametrize("case", BY_LENGTH_AND_MASK, ids=str)
def test_lengths_and_masks(case: Case, device: torch.device) -> None:
    run_and_hold(case, device)


@pytest.mark.parametrize("case", BY_HEAD_DIM, ids=str)
def test_head_dims(case: Case, device: torch.device) -> None:
    run_and_hold(case, device)


@pytest.mark.parametrize("case", BY_FEATURE, ids=str)
def test_features(case: Case, device: torch.device) -> None:
    run_and_hold(case, device)


@pytest.mark.parametrize("case", BY_MODIFIER, ids=str)
def test_modifiers(case: Case, device: torch.device) -> None:
    """Softcap, ALiBi, bias and dropout."""
    run_and_hold(case, device)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_heads(case: Case, device: torch.device) -> None:
    run_and_hold(case, device)


@pytest.mark.parametrize("case", FULL_PRECISION, ids=str)
def test_full_precision(case: Case) -> None:
    run_and_hold(case, torch.device("cpu"))


# Identities: they need no reference. Inputs of their own, over the masks.

IDENTITY = Case(
    batch=2, seqlen_q=90, seqlen_k=150, heads_q=4, heads_k=2, head_dim=64, dtype=torch.bfloat16
)
MASKED = pytest.mark.parametrize("mask", MASKS, ids=str)


def masked(case: Case, mask: tuple[bool, tuple[int | None, int | None]]) -> Case:
    return replace(case, causal=mask[0], window_size=mask[1])


def summed(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[float, float]:
    """Sum of the products of two tensors, and of their magnitudes."""
    assert a is not None
    assert b is not None
    product_ = a.detach().double() * b.detach().double()
    return product_.sum().item(), product_.abs().sum().item()


@MASKED
def test_adjoint_in_v(
    mask: tuple[bool, tuple[int | None, int | None]], device: torch.device
) -> None:
    """sum(dout * out) == sum(dv * v), with a gradient of lse as well."""
    inputs = make_inputs(masked(replace(IDENTITY, lse_gradient=True), mask), device)
    found = run(inputs)
    left, left_size = summed(inputs.dout, found.out)
    right, right_size = summed(found.gradients["dv"], inputs.v)
    assert abs(left - right) <= 2**-8 * (left_size + right_size) / 16


@MASKED
def test_balance_of_q_and_k(
    mask: tuple[bool, tuple[int | None, int | None]], device: torch.device
) -> None:
    """sum(dq * q) == sum(dk * k) over all heads of a group."""
    inputs = make_inputs(masked(replace(IDENTITY, lse_gradient=True), mask), device)
    found = run(inputs)
    left, left_size = summed(found.gradients["dq"], inputs.q)
    right, right_size = summed(found.gradients["dk"], inputs.k)
    assert abs(left - right) <= 2**-8 * (left_size + right_size) / 16


@pytest.mark.parametrize("step", [-200.0, -9.0, 4.0, 7.0, 20.0, 70.0, 120.0, 3000.0])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (None, 7), (150, None)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_that_drift(
    step: float,
    window: tuple[int | None, int | None],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Scores change by `step` with every 64 keys: a running maximum has to follow from far away.

    Kernels walk from the last key to the first, and some guess that the maximum stays. Rows that
    see nothing of the last tiles start late, far from 0.
    """
    sizes = Case(1, 200, 509, 2, 1, head_dim, dtype=dtype, window_size=window)
    inputs = make_inputs(sizes, device)
    level = step * (7 - torch.arange(509, device=device) // 64)
    inputs.q[..., 0] = 8.0
    inputs.k[..., 0] = (level[None, :, None] * head_dim**0.5 / 8).to(dtype)
    out, lse = attend(inputs)
    hold(inputs, Outcome(out, lse, {}))
    again, lse_again = attend(inputs)
    assert_bit_equal(again, out)
    assert_bit_equal(lse_again, lse, "lse")


@pytest.mark.parametrize("logit", [100.0, -100.0, 300.0, -1e4, 1e4])
@pytest.mark.parametrize("causal", [False, True])
def test_key_shift(logit: float, causal: bool, device: torch.device) -> None:
    """One vector added to every key changes no output; lse moves by scale * q.c.

    q.c is the same for every row here and exact: the first channel of q is 8, that of the keys 0,
    and c has that channel alone. What is lost is what scores of that size cannot hold in fp32.
    """
    inputs = make_inputs(replace(IDENTITY, dtype=torch.float16, causal=causal), device)
    inputs.q[..., 0], inputs.k[..., 0] = 8.0, 0.0
    before, lse_before = attend(inputs)
    inputs.k[..., 0] = logit  # scale * q.c, since the scale is 1 / 8
    after, lse_after = attend(inputs)
    lost = abs(logit) * 2**-19
    torch.testing.assert_close(lse_after - logit, lse_before, atol=lost, rtol=0)
    assert (after - before).abs().max() <= (2**-9 + 2 * lost) * before.abs().max()


@MASKED
def test_ones_for_v(mask: tuple[bool, tuple[int | None, int | None]], device: torch.device) -> None:
    """v of ones: out is 1 on rows that see a key and 0, with lse -inf, on others."""
    inputs = make_inputs(masked(replace(IDENTITY, seqlen_q=200), mask), device)
    inputs.v.fill_(1.0)
    out, lse = attend(inputs)
    sees = lse.isfinite().transpose(1, 2)[..., None].expand_as(out)
    assert (out - sees.to(out.dtype)).abs().max() <= 2**-8
    assert bool((out[~sees] == 0).all())


@MASKED
def test_visible_keys(
    mask: tuple[bool, tuple[int | None, int | None]], device: torch.device
) -> None:
    """With q = 0 and one key's v one-hot, out tells who sees it: 1 / (number of keys seen)."""
    case = replace(IDENTITY, seqlen_q=40, seqlen_k=64, dtype=torch.float16)
    inputs = make_inputs(masked(case, mask), device)
    inputs.q.zero_()
    inputs.v.zero_()
    inputs.v[0, :, 0].copy_(torch.eye(64))  # channel j is 1 at key j
    out, lse = attend(inputs)
    causal, (left, right) = mask
    row = torch.arange(40)[:, None] + 64 - 40
    key = torch.arange(64)[None]
    visible = torch.ones(40, 64, dtype=torch.bool)
    if left is not None:
        visible &= key >= row - left
    if right is not None:
        visible &= key <= row + right
    if causal:
        visible &= key <= row
    assert torch.equal(out[0, :, 0].cpu() > 0, visible)
    torch.testing.assert_close(lse[0, 0].cpu(), visible.sum(1).float().log())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("Sq", "causal"), [(1, False), (1, True), (70, False)])
def test_one_key(Sq: int, causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Softmax over one key: out is v bit for bit, and dq, dk are rounding noise."""
    case = replace(IDENTITY, seqlen_q=Sq, seqlen_k=1, dtype=dtype, causal=causal, magnitude=3.0)
    inputs = make_inputs(case, device)
    found = run(inputs)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    assert inputs.dout is not None
    expected = v.repeat_interleave(2, dim=2).expand_as(found.out)
    assert_bit_equal(found.out, expected.contiguous())
    noise = 2**-18 * 64**-0.5 * (inputs.dout.abs().float() * expected.abs().float()).sum(-1)
    bound = noise[..., None] * k.abs().max().float() + 2**-24
    assert bool((found.gradients["dq"].abs().float() <= bound).all())
    total = noise.sum(1).unflatten(1, (2, 2)).sum(2)[:, None, :, None]  # over rows and the group
    assert bool((found.gradients["dk"].abs().float() <= total * q.abs().max() + 2**-24).all())


def test_order_of_keys_does_not_matter(device: torch.device) -> None:
    inputs = make_inputs(IDENTITY, device)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0)).to(device)
    found = run(inputs)
    permuted = replace(inputs, k=inputs.k[:, order].detach(), v=inputs.v[:, order].detach())
    again = run(permuted.requires_grad_())
    back = {name: x.clone() for name, x in again.gradients.items()}
    for name in ("dk", "dv"):
        back[name][:, order] = again.gradients[name]
    again.gradients = back
    hold(inputs, found)
    hold(inputs, again)


def test_same_tensor_thrice(device: torch.device) -> None:
    """q, k and v one tensor: its gradient is the sum of three."""
    case = replace(IDENTITY, seqlen_q=70, seqlen_k=70, heads_k=4, dtype=torch.float16)
    x = make_inputs(case, device).q
    inputs = Inputs(*(x.clone() for _ in range(3)), dout=torch.ones_like(x))
    apart = run(inputs)
    leaf = x.clone().requires_grad_()
    out, _ = attend(replace(inputs, q=leaf, k=leaf, v=leaf))
    (together,) = torch.autograd.grad(out, leaf, inputs.dout)
    assert_bit_equal(out.detach(), apart.out)
    total = sum(apart.gradients[name].double() for name in ("dq", "dk", "dv"))
    torch.testing.assert_close(together.double(), total, atol=2**-8, rtol=2**-9)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_results_have_their_promised_memory(layout: str, device: torch.device) -> None:
    """out contiguous as (B, Sq, Hq, Dv), gradients in their input's layout, lse contiguous."""
    inputs = make_inputs(replace(IDENTITY, layout=layout, memory="strided", head_dim=40), device)
    found = run(inputs)
    out = found.out if layout == "bshd" else found.out.transpose(1, 2)
    assert out.shape == (2, 90, 4, 40)
    assert out.is_contiguous()
    assert found.lse.is_contiguous()
    assert all(gradient.is_contiguous() for gradient in found.gradients.values())


@pytest.mark.parametrize("head_dim", [64, 40, 33])
def test_nothing_beside_the_inputs_is_read(head_dim: int, device: torch.device) -> None:
    """Inputs between guard zones of NaN: same results, and neither zones nor inputs change."""
    inputs = make_inputs(replace(IDENTITY, seqlen_k=77, head_dim=head_dim, causal=True), device)
    assert inputs.dout is not None
    expected = run(inputs)
    with guarded(inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), inputs.dout) as inside:
        found = run(Inputs(*inside, causal=True))
    hold(inputs, expected)
    assert_bit_equal(found.out, expected.out)
    assert_bit_equal(found.lse, expected.lse)
    hold(inputs, found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@MASKED
def test_hidden_keys_never_show(
    value: float, mask: tuple[bool, tuple[int | None, int | None]], device: torch.device
) -> None:
    """Keys that no row sees may hold anything, and their gradients are 0."""
    inputs = make_inputs(masked(replace(IDENTITY, seqlen_q=20, seqlen_k=150), mask), device)
    clean = run(inputs)
    unseen = (clean.gradients["dv"] == 0).all(-1).all(-1)  # (B, Sk)
    dirty = replace(inputs, k=inputs.k.detach().clone(), v=inputs.v.detach().clone())
    dirty.k[unseen], dirty.v[unseen] = value, value
    found = run(dirty)
    if mask == (False, (None, None)):
        assert not unseen.any()
    elif mask[1] != (None, 5):
        assert unseen.any() or mask == (True, (None, None))
    assert_bit_equal(found.out, clean.out)
    assert_bit_equal(found.lse, clean.lse)
    for name, gradient in found.gradients.items():
        assert gradient.isfinite().all(), name
    assert (found.gradients["dk"][unseen] == 0).all()
    assert (found.gradients["dv"][unseen] == 0).all()


# A few tiny cases of every kernel instance, for the sanitizers.

SANITIZED = [
    Case(
        batch=1, heads_q=2, heads_k=1, dtype=dtype, head_dim=D, head_dim_v=Dv,
        seqlen_q=Sq, seqlen_k=Sk, causal=causal, lse_gradient=causal,
        sinks=torch.float32 if causal else None, **modifiers,
    )
    for modifiers in ({}, {"softcap": 5.0, "alibi": "h", "bias": "bhqk", "bias_hidden": 0.1})
    for dtype in HALVES
    for D, Dv in ((64, None), (128, None), (40, 64))
    for Sq, Sk, causal in ((1, 1, False), (70, 150, True), (150, 33, True), (33, 70, False))
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", SANITIZED, ids=str)
def test_under_sanitizer(case: Case) -> None:
    """`record run --sanitizer` wraps this in compute-sanitizer's tools; without them it is a test
    like others.

    All that a kernel reads comes from a copy or another of our kernels, and the check runs on the
    CPU: the tools, told to look at our kernels alone, miss nothing that was written.
    """
    inputs = make_inputs(case)
    names = ("q", "k", "v", "dout", "dlse", "sinks", "attn_bias", "alibi_slopes")
    tensors = {name: getattr(inputs, name) for name in names}
    there = {name: None if x is None else x.to("cuda") for name, x in tensors.items()}
    found = run(replace(inputs, **there))
    gradients = {name: x.cpu() for name, x in found.gradients.items()}
    hold(inputs, Outcome(found.out.cpu(), found.lse.cpu(), gradients))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_under_load(head_dim: int) -> None:
    """Blocks may take tiles in another order, under load above all: the bits stay."""
    device = torch.device("cuda")
    case = Case(2, 900, 1100, 16, 4, head_dim, dtype=torch.bfloat16, causal=True)
    inputs = make_inputs(case, device)
    load, side = torch.randn(2048, 2048, device=device), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        out, lse = attend(inputs)
        differ = torch.zeros((), dtype=torch.int64, device=device)
        for repeat in range(1000):
            if repeat % 8 == 0:
                with torch.cuda.stream(side):
                    torch.mm(load, load)
            again, lse_again = attend(inputs)
            differ += (again != out).sum() + (lse_again != lse).sum()
    side.synchronize()
    assert differ.item() == 0
