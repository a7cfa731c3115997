"""The tolerance rule can fail, and does not fail what rounds as it must.

An ideal kernel, which rounds P, dS and its results and nothing else, has to pass. Each fault that
kernels are known for has to be caught, however small the row that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_ext.testing import numeric
from flash_ext.testing.cases import Case, Inputs, guarded, make_inputs, pairwise
from flash_ext.testing.oracle import Result, accumulator, lowp, oracle

LOW = (torch.float16, torch.bfloat16)
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
BASE = Case(
    batch=2, seqlen_q=96, seqlen_k=128, heads_q=4, heads_k=2, head_dim=32, lse_gradient=True
)

Values = dict[str, Tensor]


def delivered(inputs: Inputs, result: Result) -> Values:
    """A result in the dtypes and shapes that an implementation returns."""
    values = {n: v.to(inputs.q.dtype) for n, v in result.values.items()}
    values["out"] = result.values["out"].to(inputs.out_dtype or inputs.q.dtype)
    values["lse"] = result.values["lse"].to(accumulator(inputs.q.dtype)).squeeze(-1)
    if inputs.layout == "bshd":
        for name in ("out", "dq", "dk", "dv"):
            values[name] = values[name].transpose(1, 2)
    if inputs.attn_bias is not None and "dbias" in values:
        values["dbias"] = result.values["dbias"].to(inputs.attn_bias.dtype)
    if inputs.sinks is not None:
        values["dsinks"] = result.values["dsinks"].flatten().to(inputs.sinks.dtype)
    return values


def hold(inputs: Inputs, values: Values) -> dict[str, float]:
    gradients = {name: values.get(name) for name in GRADIENTS}
    return numeric.check(inputs, values["out"], values["lse"], **gradients)


IDEAL = pairwise(
    BASE,
    dtype=[*LOW, torch.float32, torch.float64],
    magnitude=[1.0, 3.0, 30.0],
    causal=[False, True],
    softcap=[0.0, 5.0],
    alibi=[None, "bh"],
    bias=[None, "bhqk", "hqk", "k"],
    bias_hidden=[0.0, 0.3],
    sinks=[None, torch.float32, torch.bfloat16],
    dropout_p=[0.0, 0.2],
    seqlen_q=[1, 40, 96, 200],
    seqlen_k=[1, 64, 130],
    head_dim_v=[16, 32],
    layout=["bshd", "bhsd"],
    window_size=[(None, None), (20, 10)],
)


@pytest.mark.parametrize("case", IDEAL, ids=str)
def test_ideal_kernel_passes(case: Case) -> None:
    for seed in range(2):
        inputs = make_inputs(replace(case, seed=seed))
        ratios = hold(inputs, delivered(inputs, lowp(inputs, "tiled")))
        assert all(0 <= ratio <= 1 for ratio in ratios.values())


def wrong_scale(inputs: Inputs) -> Values:
    """1/sqrt(D) of a padded head dim."""
    return ideal(replace(inputs, softmax_scale=(inputs.q.shape[-1] + 2) ** -0.5))


def shifted_causal(inputs: Inputs) -> Values:
    """Mask off by one."""
    return ideal(replace(inputs, causal=False, window_size=(None, 1)))


def top_left_causal(inputs: Inputs) -> Values:
    """Query i sees keys up to i, although Sk > Sq."""
    mask = torch.ones(inputs.q.shape[1], inputs.k.shape[1], dtype=torch.bool).tril()
    return ideal(replace(inputs, causal=False, attn_bias=mask))


def last_key_lost(inputs: Inputs) -> Values:
    mask = torch.arange(inputs.k.shape[1]) < inputs.k.shape[1] - 1
    return ideal(replace(inputs, attn_bias=mask))


def ideal(inputs: Inputs) -> Values:
    return delivered(inputs, lowp(inputs, "tiled"))


def damaged(change: Callable[[Inputs, Values], None]) -> Callable[[Inputs], Values]:
    """An ideal result with something done to it."""

    def implementation(inputs: Inputs) -> Values:
        values = {name: value.clone() for name, value in ideal(inputs).items()}
        change(inputs, values)
        return values

    return implementation


def one_row_scaled(name: str, factor: float) -> Callable[[Inputs], Values]:
    """A row of one head is off by a few percent, in a corner."""

    def change(inputs: Inputs, values: Values) -> None:
        values[name][1, -1, -1] *= factor

    return damaged(change)


def one_small_row_zero(inputs: Inputs, values: Values) -> None:
    """The row with the smallest maximum, so that a global maximum does not see it."""
    out = values["out"]
    smallest = out[0, :, 0].abs().amax(-1).argmin()
    out[0, smallest, 0] = 0


def swapped_heads(inputs: Inputs, values: Values) -> None:
    """Query head h reads key head h % Hk, not h // (Hq / Hk)."""
    wrong = replace(inputs, q=inputs.q[:, :, [0, 2, 1, 3]])
    values["out"] = ideal(wrong)["out"][:, :, [0, 2, 1, 3]]


def base_two_lse(inputs: Inputs, values: Values) -> None:
    values["lse"] *= 1.4426950408889634


def rounded_lse(inputs: Inputs, values: Values) -> None:
    """lse kept in 16 bits on the way."""
    values["lse"] = values["lse"].bfloat16().float()


def without_delta(inputs: Inputs, values: Values) -> None:
    """dS = P * dP: the delta term is missing, as if O were 0."""
    q, k, v, dout = (x.transpose(1, 2).float() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - values["lse"][..., None])
    ds = p * (dout @ v.mT + inputs.dlse[..., None])
    values["dq"] = (ds @ k * scale).transpose(1, 2).to(inputs.q.dtype)


def nan_in_one_place(inputs: Inputs, values: Values) -> None:
    values["dk"][0, 3, 1, 5] = float("nan")


def zeroed_sink_gradient(inputs: Inputs, values: Values) -> None:
    values["dsinks"][2] = 0


def doubled_bias_gradient(inputs: Inputs, values: Values) -> None:
    values["dbias"][0, 1] *= 2


def no_lse_gradient(inputs: Inputs) -> Values:
    return ideal(inputs) | {"dq": ideal(replace(inputs, dlse=None))["dq"]}


CAUSAL = replace(BASE, causal=True)
FAULTS: dict[str, tuple[Case, str, Callable[[Inputs], Values]]] = {
    "wrong scale": (BASE, "out|lse", wrong_scale),
    "mask off by one": (CAUSAL, "out", shifted_causal),
    "top-left mask": (CAUSAL, "out", top_left_causal),
    "last key lost": (BASE, "out", last_key_lost),
    "row of out +5 %": (BASE, "out", one_row_scaled("out", 1.05)),
    "row of dq +25 %": (BASE, "dq", one_row_scaled("dq", 1.25)),
    "row of dk +25 %": (BASE, "dk", one_row_scaled("dk", 1.25)),
    "row of dv +5 %": (BASE, "dv", one_row_scaled("dv", 1.05)),
    "smallest row lost": (BASE, "out", damaged(one_small_row_zero)),
    "heads mapped wrongly": (BASE, "out", damaged(swapped_heads)),
    "lse in base 2": (BASE, "lse", damaged(base_two_lse)),
    "lse rounded": (BASE, "lse", damaged(rounded_lse)),
    "no delta": (BASE, "dq", damaged(without_delta)),
    "no lse gradient": (BASE, "dq", no_lse_gradient),
    "NaN": (BASE, "dk", damaged(nan_in_one_place)),
    "sink gradient": (replace(BASE, sinks=torch.float32), "dsinks", damaged(zeroed_sink_gradient)),
    "bias gradient": (replace(BASE, bias="hqk"), "dbias", damaged(doubled_bias_gradient)),
}


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, dtype: torch.dtype) -> None:
    case, where, implementation = FAULTS[fault]
    inputs = make_inputs(replace(case, dtype=dtype))
    hold(inputs, ideal(inputs))
    with pytest.raises(AssertionError, match=rf"^({where}):"):
        hold(inputs, implementation(inputs))


def test_wrong_shape_and_dtype_are_caught() -> None:
    inputs = make_inputs(replace(BASE, dtype=torch.bfloat16))
    values = ideal(inputs)
    with pytest.raises(AssertionError, match="out: dtype"):
        hold(inputs, values | {"out": values["out"].float()})
    with pytest.raises(AssertionError, match="lse: dtype"):
        hold(inputs, values | {"lse": values["lse"].bfloat16()})
    with pytest.raises(AssertionError, match="out: shape"):
        hold(inputs, values | {"out": values["out"][:, 1:]})
    with pytest.raises(AssertionError, match="dq: "):
        hold(inputs, values | {"dq": values["dk"]})


def test_large_logits_take_the_tiled_yardstick() -> None:
    """Where rounding a score to bf16 shifts it by whole units, plain PyTorch allows anything."""
    inputs = make_inputs(replace(BASE, dtype=torch.bfloat16, magnitude=30.0))
    exact = oracle(inputs)
    assert exact.noise > numeric.NOISE
    plain, chosen = lowp(inputs), numeric.yardstick(inputs, exact)

    def worst(result: Result) -> float:
        return (result.values["out"] - exact.values["out"]).abs().max().item()

    assert worst(plain) > 10 * worst(chosen)


def test_oracle_knows_rows_without_keys() -> None:
    case = replace(BASE, seqlen_q=40, seqlen_k=20, causal=True, dtype=torch.float64)
    exact = oracle(make_inputs(case)).values
    assert (exact["lse"][:, :, :20] == float("-inf")).all()
    assert not exact["out"][:, :, :20].any()
    assert not exact["dq"][:, :, :20].any()
    assert all(exact[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


def test_oracle_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(BASE, batch=3, bias="hqk", sinks=torch.float32, dropout_p=0.2, alibi="bh")
    inputs = make_inputs(case)
    whole = oracle(inputs)
    monkeypatch.setattr("flash_ext.testing.oracle.TABLE_ELEMENTS", {"cpu": 1})
    pieces = oracle(inputs)
    for name, value in whole.values.items():
        torch.testing.assert_close(value, pieces.values[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(whole.floors[name], pieces.floors[name], rtol=1e-10, atol=1e-12)


def test_pairwise_has_every_pair() -> None:
    axes = {
        "head_dim": [8, 16, 24],
        "causal": [False, True],
        "batch": [1, 2, 3],
        "softcap": [0.0, 1.0],
    }
    cases = pairwise(BASE, **axes)
    assert len(cases) < 20
    for a in axes:
        for b in axes:
            seen = {(getattr(case, a), getattr(case, b)) for case in cases}
            assert a == b or len(seen) == len(axes[a]) * len(axes[b])
    assert len(set(map(str, cases))) == len(cases)


def test_guard_zones_see_a_write() -> None:
    x = torch.zeros(5, 3, dtype=torch.float16)
    with guarded(x) as (copy,):
        assert torch.equal(copy, x)
    with pytest.raises(AssertionError, match="offset 30"), guarded(x) as (copy,):
        torch.as_strided(copy, (1,), (1,), copy.storage_offset() + 15).fill_(1)
    with pytest.raises(AssertionError, match="overwritten"), guarded(x) as (copy,):
        copy[0, 0] = 1
    with guarded(x, unchanged=False) as (copy,):
        copy[0, 0] = 1
