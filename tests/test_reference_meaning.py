"""What attention means at its edges: identities, rows without keys, huge scores, NaN and Inf.

Everything here has a known answer, so no oracle is needed. The names D01, D02, ... are those of
field cases: inputs on which public attention kernels were once wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference_kit import FLOATS, MINUS_INF, SMALL, assert_equal, backward, forward, hold, run
from torch import Tensor

from flash_ext.testing.cases import Case, Inputs, make_inputs, poison_allocator

NAN, INF = float("nan"), float("inf")
MODIFIED = Case(
    seqlen_q=90,
    seqlen_k=110,
    heads_q=4,
    heads_k=2,
    head_dim=16,
    dtype=torch.float64,
    causal=True,
    window_size=(70, None),
    alibi="bh",
    bias="hqk",
    bias_hidden=0.2,
    sinks=torch.float64,
    dropout_p=0.3,
)


def seen(inputs: Inputs) -> Tensor:
    """Which key each query sees by window and causality, (Sq, Sk)."""
    private = inputs.private()
    seqlen_q, seqlen_k = inputs.q.shape[1], inputs.k.shape[1]
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q) + seqlen_k - seqlen_q)[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if private["window_left"] >= 0:
        visible &= distance >= -private["window_left"]
    if private["window_right"] >= 0:
        visible &= distance <= private["window_right"]
    return visible


def test_adjoint_in_v() -> None:
    """sum(dout * out) = sum(dv * v), whatever the modifiers and the dropout mask."""
    inputs = make_inputs(replace(MODIFIED, softcap=2.0, lse_gradient=True))
    values = run(inputs, **SMALL)
    torch.testing.assert_close((inputs.dout * values["out"]).sum(), (values["dv"] * inputs.v).sum())


def test_balance_of_q_and_k() -> None:
    """sum(dq * q) = sum(dk * k) for each key head: scores depend on q.k only."""
    inputs = make_inputs(replace(MODIFIED, softcap=2.0, lse_gradient=True))
    values = run(inputs, **SMALL)
    by_q = (values["dq"] * inputs.q).sum((1, 3)).view(2, 2, 2).sum(-1)
    torch.testing.assert_close(by_q, (values["dk"] * inputs.k).sum((1, 3)))


@pytest.mark.parametrize("size", [100.0, 300.0, 1e4])
def test_shifting_every_key_moves_lse_only(size: float) -> None:
    inputs = make_inputs(replace(MODIFIED, sinks=None))
    shift = torch.randn(16, dtype=torch.float64) * size
    first, second = run(inputs), run(replace(inputs, k=inputs.k + shift))
    moved = (inputs.q @ shift).transpose(1, 2) / 4  # scale 1 / sqrt(16)
    torch.testing.assert_close(second["lse"] - first["lse"], moved, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(second["out"], first["out"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(second["dv"], first["dv"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_of_one_give_one(dtype: torch.dtype) -> None:
    """D41: at any length; 0 in rows without keys."""
    inputs = make_inputs(Case(batch=1, seqlen_q=70, seqlen_k=3000, dtype=dtype, window_size=(9, 2)))
    inputs.v.fill_(1)
    out, _ = forward(inputs)
    low = dtype in (torch.float16, torch.bfloat16)
    assert (out - 1).abs().max() <= torch.finfo(dtype).eps * (0.5 if low else 4)
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=50, dtype=dtype, causal=True))
    inputs.v.fill_(1)
    out, _ = forward(inputs, **SMALL)
    assert not out[:, :20].any()
    assert (out[:, 20:] - 1).abs().max() <= torch.finfo(dtype).eps * (0.5 if low else 4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_one_key(dtype: torch.dtype, causal: bool) -> None:
    """out is v bit for bit, and dq and dk are rounding; D04: with large inputs, too."""
    for magnitude in (1.0, 3.0, 10.0):
        case = Case(seqlen_q=76, seqlen_k=1, heads_q=5, heads_k=1, dtype=dtype, magnitude=magnitude)
        inputs = make_inputs(replace(case, causal=causal))
        values = hold(inputs)
        out = values["out"][:, -1:]  # the row that sees the key even with causal
        assert torch.equal(out, inputs.v.expand_as(out))
        bound = (inputs.dout.abs() @ inputs.v.abs().double().mT.to(dtype)).max() * magnitude * 5
        assert values["dq"].abs().max() <= 2**-18 * bound


def test_permuted_keys() -> None:
    inputs = make_inputs(Case(dtype=torch.float64))
    order = torch.randperm(128)
    first = run(inputs, **SMALL)
    second = run(replace(inputs, k=inputs.k[:, order], v=inputs.v[:, order]), **SMALL)
    torch.testing.assert_close(second["out"], first["out"])
    torch.testing.assert_close(second["dk"], first["dk"][:, order])


@pytest.mark.parametrize("seqlens", [(1, 300), (2, 5), (5, 2), (128, 129), (129, 128), (300, 1)])
@pytest.mark.parametrize("window", [(None, None), (0, None), (3, None), (64, None)])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_keys(
    seqlens: tuple[int, int], window: tuple[int | None, int | None], causal: bool
) -> None:
    """D29, D30: one-hot values read which keys each row sees, bottom-right aligned."""
    seqlen_q, seqlen_k = seqlens
    case = Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=1, heads_k=1, causal=causal)
    inputs = make_inputs(replace(case, window_size=window, head_dim=8))
    inputs.v = torch.eye(seqlen_k)[None, :, None]
    out, lse = forward(inputs, **SMALL)
    assert torch.equal(out[0, :, 0] > 0, seen(inputs))
    assert torch.equal(lse[0, 0] > MINUS_INF, seen(inputs).any(-1))


def test_spellings_of_causal() -> None:
    """D30: causal, a right window of 0, and windows as long as the sequence are one mask."""
    inputs = make_inputs(Case(seqlen_q=100, seqlen_k=100, dtype=torch.float64))
    expected = run(replace(inputs, causal=True))
    for causal, window in (
        *((True, w) for w in [(-1, 0), (-1, -1), (-1, 50), (99, None), (10**9, 10**9)]),
        *((False, w) for w in [(-1, 0), (None, 0), (100, 0), (99, 0), (10**9, 0)]),
    ):
        assert_equal(expected, run(replace(inputs, causal=causal, window_size=window)))
    itself = forward(replace(inputs, causal=True, window_size=(0, 0)))
    assert torch.equal(itself[0], inputs.v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(204, 102, None), (5, 2, None), (129, 128, None), (300, 1, None), (129, 33, (32, 64))],
)
def test_rows_without_keys(
    dtype: torch.dtype, sizes: tuple[int, int, tuple[int, int] | None]
) -> None:
    """D03: out 0, lse -inf, and nothing in any gradient, not even of an infinite dout."""
    seqlen_q, seqlen_k, window = sizes
    case = Case(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_k=2, head_dim=16, dtype=dtype
    )
    case = replace(
        case, causal=window is None, window_size=window or (None, None), lse_gradient=True
    )
    inputs = make_inputs(case)
    values = hold(inputs, **SMALL)
    empty = ~seen(inputs).any(-1)
    assert empty.any()
    assert not values["out"][:, empty].any()
    assert not values["dq"][:, empty].any()
    assert (values["lse"][..., empty] == MINUS_INF).all()
    for strange in (INF, NAN):
        inputs.dout[:, empty] = strange
        inputs.dlse[..., empty] = strange
        assert_equal(backward(inputs, values["out"], values["lse"], **SMALL), gradients(values))


def gradients(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name.startswith("d")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rows_emptied_by_a_bias(dtype: torch.dtype) -> None:
    """-inf masks: its gradient is 0, and a row of it sees no key; bool False does the same."""
    inputs = make_inputs(
        Case(seqlen_q=40, seqlen_k=70, heads_q=4, heads_k=2, dtype=dtype, bias="hqk")
    )
    assert inputs.attn_bias is not None
    inputs.attn_bias[:, 1, 10:20] = MINUS_INF
    inputs.attn_bias[..., 30:45] = MINUS_INF
    values = hold(inputs, **SMALL)
    assert not values["out"][:, 10:20, 1].any()
    assert (values["lse"][:, 1, 10:20] == MINUS_INF).all()
    assert not values["dbias"][inputs.attn_bias == MINUS_INF].any()
    mask = replace(inputs, attn_bias=inputs.attn_bias != MINUS_INF)
    zeros = torch.zeros_like(inputs.attn_bias).masked_fill_(~mask.attn_bias, MINUS_INF)
    by_bias = run(replace(inputs, attn_bias=zeros), **SMALL)
    del by_bias["dbias"]
    assert_equal(by_bias, run(mask, **SMALL))


def test_low_rank_bias_and_its_gradient() -> None:
    """A bias of fewer than four dims broadcasts from the right; its gradient has its shape."""
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=torch.float64))
    for shape in ((40, 70), (70,), (2, 1, 70), (1, 1), ()):
        inputs.attn_bias = torch.randn(shape, dtype=torch.float64)
        full = replace(inputs, attn_bias=inputs.attn_bias.expand(2, 2, 40, 70))
        values, expected = run(inputs, **SMALL), run(full, **SMALL)
        summed = expected["dbias"].sum_to_size(shape)
        torch.testing.assert_close(values["dbias"], summed, atol=1e-12, rtol=1e-9)
        assert torch.equal(values["dq"], expected["dq"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sink", [MINUS_INF, -100.0, 0.5, 100.0])
@pytest.mark.parametrize("seqlen_k", [0, 1, 100])
def test_sinks(dtype: torch.dtype, sink: float, seqlen_k: int) -> None:
    """D42: a sink joins the denominator; alone it is the lse; -inf is no sink."""
    case = Case(seqlen_q=110, seqlen_k=seqlen_k, heads_q=4, heads_k=2, dtype=dtype, causal=True)
    inputs = make_inputs(replace(case, sinks=torch.float32, lse_gradient=True))
    assert inputs.sinks is not None
    inputs.sinks.fill_(sink)
    values = hold(inputs, **SMALL)
    without = run(replace(inputs, sinks=None), **SMALL)
    empty = ~seen(inputs).any(-1)
    assert (values["lse"][..., empty] == sink).all()
    torch.testing.assert_close(values["lse"], torch.logaddexp(without["lse"], inputs.sinks[0]))
    if sink == MINUS_INF:
        assert not values.pop("dsinks").any()
        assert_equal(values, without)


def test_infinite_gradient_of_a_row_that_only_sees_its_sink() -> None:
    inputs = make_inputs(Case(seqlen_q=20, seqlen_k=10, causal=True, sinks=torch.float32))
    values = run(inputs)
    inputs.dout[:, :10] = INF
    assert_equal(backward(inputs, values["out"], values["lse"]), gradients(values))


@pytest.mark.parametrize("level", [-1e4, -6e4, -2.4e5])
@pytest.mark.parametrize("seqlen_k", [1, 64])
def test_all_scores_far_below_zero(level: float, seqlen_k: int) -> None:
    """D01: no finite number stands for minus infinity. Key 0 is 5000 above the others."""
    case = Case(batch=1, seqlen_q=20, seqlen_k=seqlen_k, heads_q=16, heads_k=1, head_dim=128)
    inputs = make_inputs(replace(case, dtype=torch.bfloat16))
    inputs.q.fill_(1)
    inputs.k.fill_(level / 128)
    inputs.k[:, 0] = (level + 5000) / 128
    values = hold(inputs)
    out = values["out"]
    assert torch.equal(out, inputs.v[:, :1].expand_as(out))
    top = inputs.k[0, 0, 0].double().sum() * 128**-0.5
    torch.testing.assert_close(values["lse"], torch.full_like(values["lse"], top.item()))
    total = inputs.dout.double().sum((1, 2))
    torch.testing.assert_close(values["dv"][:, 0, 0].double(), total, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [5.0, 15.0, 50.0])
def test_softcap_saturates(dtype: torch.dtype, softcap: float) -> None:
    """D02: scores from a tenth of the cap to 200 times it; saturated scores pass no gradient."""
    for ratio in (0.1, 1.0, 20.0, 200.0):
        inputs = make_inputs(Case(seqlen_q=64, softcap=softcap, dtype=dtype, magnitude=0.5))
        inputs.q *= 4 * softcap * ratio / 5
        hold(inputs, **SMALL)
    inputs.q.fill_(300)
    inputs.k.copy_(inputs.k.sign())
    inputs.k[..., ::2] = inputs.k[..., 1::2]
    values = run(inputs, **SMALL)
    assert all(value.isfinite().all() for value in values.values())


def test_softcap_value() -> None:
    inputs = make_inputs(Case(batch=1, seqlen_q=1, seqlen_k=1, head_dim=1, softcap=50.0))
    inputs.q.fill_(10)
    inputs.k.fill_(1)
    assert forward(inputs)[1].flatten()[0] == pytest.approx(9.8688, abs=1e-4)


def test_alibi_value() -> None:
    """D34: -slope * |i + Sk - Sq - j| in the scores, read from lse with one visible key."""
    for seqlen_q, seqlen_k in ((5, 9), (9, 5), (1, 7)):
        case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=6, heads_k=2, dtype=torch.float64)
        inputs = make_inputs(replace(case, alibi="bh"))
        assert inputs.alibi_slopes is not None
        plain = replace(inputs, alibi_slopes=None)
        for j in range(seqlen_k):
            mask = torch.arange(seqlen_k) == j
            lse = forward(replace(inputs, attn_bias=mask))[1]
            distance = (torch.arange(seqlen_q) + seqlen_k - seqlen_q - j).abs()
            bias = -inputs.alibi_slopes[..., None].double() * distance
            torch.testing.assert_close(lse, forward(replace(plain, attn_bias=mask))[1] + bias)


@pytest.mark.parametrize("head_dim", [8, 33, 40, 59, 63, 72, 80, 111, 120, 250])
def test_head_dims(head_dim: int) -> None:
    """D25: the default scale is that of the true head dim."""
    case = Case(seqlen_q=40, seqlen_k=50, head_dim=head_dim, dtype=torch.bfloat16)
    hold(make_inputs(case))
    hold(make_inputs(replace(case, head_dim_v=17)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lse_gradient(dtype: torch.dtype) -> None:
    """D18: a loss on lse alone has no dv, and an unused lse changes no bit."""
    case = Case(seqlen_q=128, seqlen_k=200, heads_q=4, heads_k=2, dtype=dtype, causal=True)
    inputs = make_inputs(replace(case, softcap=3.0, alibi="h", lse_gradient=True))
    hold(inputs)
    assert inputs.dout is not None
    assert inputs.dlse is not None
    alone = hold(replace(inputs, dout=torch.zeros_like(inputs.dout)))
    assert not alone["dv"].any()
    assert alone["dq"].any()
    zero = run(replace(inputs, dlse=torch.zeros_like(inputs.dlse)))
    assert_equal(run(replace(inputs, dlse=None)), zero)


@pytest.mark.parametrize("logit", [1e4, 1e6, 1e20, 1e30])
def test_huge_logits(logit: float) -> None:
    """One key wins whatever the size of the scores; gradients stay finite."""
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, head_dim=16, causal=True))
    inputs.q *= logit
    values = run(inputs, **SMALL)
    assert all(value.isfinite().all() for value in values.values())
    scores = (inputs.q.transpose(1, 2) @ inputs.k.transpose(1, 2).mT).masked_fill_(
        ~seen(inputs), MINUS_INF
    )
    first, second = scores.double().topk(2).values.unbind(-1)
    clear = (first - second > 1000).transpose(1, 2)
    winners = inputs.v.transpose(1, 2).gather(2, scores.argmax(-1, True).expand(-1, -1, -1, 16))
    assert clear.any()
    assert torch.equal(values["out"][clear], winners.transpose(1, 2)[clear])


POISONS = [NAN, INF, -INF]
HIDING = {
    "window": {"window_size": (11, 7)},
    "causal": {"causal": True},
    "mask": {"bias": "k", "bias_dtype": torch.bool},
    "bias": {"bias": "k"},
    "everything": {
        "causal": True,
        "window_size": (40, None),
        "bias": "k",
        "softcap": 2.0,
        "alibi": "h",
        "sinks": torch.float32,
        "dropout_p": 0.2,
        "lse_gradient": True,
    },
}


def hide(inputs: Inputs, key: int) -> None:
    if inputs.attn_bias is not None:
        inputs.attn_bias[..., key] = False if inputs.attn_bias.dtype == torch.bool else MINUS_INF


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("hiding", HIDING)
def test_keys_that_no_row_sees(hiding: str, poison: float) -> None:
    """Nothing of them reaches a result: hidden by a mask, or out of every row's reach."""
    case = Case(seqlen_q=40, seqlen_k=120, heads_q=4, heads_k=2, head_dim=16, **HIDING[hiding])
    inputs = make_inputs(case)
    hide(inputs, 100)
    visible = seen(inputs).any(0)
    if inputs.attn_bias is not None:
        visible[100] = False
    unseen = ~visible
    assert unseen.any() or hiding == "causal"
    inputs.k[:, unseen], inputs.v[:, unseen] = 0, 0
    clean = hold(inputs, **SMALL)
    inputs.k[:, unseen], inputs.v[:, unseen] = poison, poison
    poison_allocator()
    values = run(inputs, **SMALL)
    assert_equal(clean, values)
    assert not values["dk"][:, unseen].any()
    assert not values["dv"][:, unseen].any()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_poison_reaches_those_who_see_it_only(where: str, hiding: str, poison: float) -> None:
    """One element that is not finite: rows that do not see it keep every bit.

    Of k and v at key j: the rows that see j are lost, and no other. Of q and dout at row i: that
    row. A gradient of a key is lost if a lost row sees the key.
    """
    case = Case(seqlen_q=120, seqlen_k=130, heads_q=2, heads_k=2, head_dim=16, **HIDING[hiding])
    inputs = make_inputs(case)
    hide(inputs, 3)
    visible = seen(inputs)
    if inputs.attn_bias is not None:
        visible[:, 3] = False
    clean = run(inputs, **SMALL)
    place = 60
    getattr(inputs, where)[1, place, 1, 5] = poison
    values = run(inputs, **SMALL)

    lost_rows = torch.zeros(120, dtype=torch.bool)
    if where in ("k", "v"):
        lost_rows = visible[:, place]
    else:
        lost_rows[place] = True
    lost_keys = visible[lost_rows].any(0)
    assert lost_rows.any()

    for name in ("out", "dq", "dk", "dv"):
        lost = lost_rows if name in ("out", "dq") else lost_keys
        kept = torch.ones(2, len(lost), 2, dtype=torch.bool)
        kept[1, lost, 1] = False
        assert torch.equal(values[name][kept], clean[name][kept]), name
    if where != "dout" and poison != poison:  # a NaN is not swallowed either
        assert values["out"][1, lost_rows, 1].isnan().any(-1).all()
    if poison != poison:
        assert values["dq"][1, lost_rows, 1].isnan().all()
        assert values["dk"][1, lost_keys, 1].isnan().any(-1).all()
