"""The drop-in: signatures of the `flash_attn` package, values and gradients of flash_ext."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import flash_attn, philox
from flash_ext.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

HALF = torch.float16
MINUS_INF = float("-inf")
TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {  # of the package, version 2
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "left": {"window_size": (4, -1)},
    "list": {"window_size": [3, 0]},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi_by_batch": {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES, 3 * SLOPES))},
    "dropout": {"dropout_p": 0.4},
    "deterministic": {"deterministic": True},
    "all": {
        "dropout_p": 0.2, "softmax_scale": 0.4, "window_size": (9, 1), "softcap": 3.0,
        "alibi_slopes": SLOPES, "deterministic": True,
    },
}  # fmt: skip
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
DENSE = {"q": (3, 13, 4, 16), "k": (3, 17, 2, 16), "v": (3, 17, 2, 16)}
SEQLENS_Q, SEQLENS_K = (5, 0, 9), (7, 3, 8)


def normal(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """fp16 on CUDA, fp64 on the CPU; a leaf."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    dtype = HALF if device.type == "cuda" else torch.float64
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def dense(device: torch.device) -> list[Tensor]:
    return [normal(*shape, device=device, seed=i) for i, shape in enumerate(DENSE.values())]


def offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def require_varlen(device: torch.device) -> None:
    if device.type == "cuda":
        q = torch.empty(4, 1, 16, dtype=HALF, device=device)
        at = offsets((4,), device)
        plan = flash_ext.explain(q, q, q, cu_seqlens_q=at, cu_seqlens_k=at)
        if plan.forward.family is None:
            pytest.skip("no kernel reads packed sequences")


def on(device: torch.device, change: dict[str, Any]) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in change.items()}


def of_attention(change: dict[str, Any]) -> dict[str, Any]:
    """The same for `attention`, whose deterministic=None is the drop-in's False."""
    return {**change, "deterministic": change.get("deterministic")}


def run(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return function(*given, **options)


def hold_same(found: Any, expected: Any, leaves: list[Tensor]) -> None:
    """out and lse, and the gradients of both together, bit by bit."""
    gradients = []
    for out, lse in (found, expected):
        douts = [torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(x) for x in (out, lse)]
        gradients.append(torch.autograd.grad([out, lse], leaves, douts))
    for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# Signatures


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_the_package(name: str) -> None:
    expected: dict[str, Any] = {}
    exec(f"def function({SIGNATURES[name]}): ...", expected)
    found = inspect.signature(getattr(flash_attn, name)).parameters.values()
    wanted = inspect.signature(expected["function"]).parameters.values()
    assert [(p.name, p.default, p.kind) for p in found] == [
        (p.name, p.default, p.kind) for p in wanted
    ]


def test_public_names_are_those_of_the_package() -> None:
    assert set(flash_attn.__all__) == set(SIGNATURES)


def test_opt_in() -> None:
    """`import flash_ext` does not bring it in, and it claims no name outside the package."""
    code = (
        "import sys, flash_ext; assert 'flash_ext.flash_attn' not in sys.modules;"
        "import flash_ext.flash_attn; assert 'flash_attn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [n for n in SIGNATURES if n != "flash_attn_with_kvcache"])
def test_every_argument_arrives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positional, in the package's order."""
    seen: dict[str, Any] = {}

    def record(*tensors: Tensor, **given: Any) -> tuple[Tensor, None]:
        seen.update(given, tensors=tensors)
        return tensors[0], None

    monkeypatch.setattr(flash_attn, "attention", record)
    monkeypatch.setattr(flash_attn, "attention_varlen", record)
    packed = torch.arange(3.0).reshape(3, 1, 1)
    packed = packed[None] if "varlen" in name else packed[None, None]
    parts = packed.unbind(-3)
    lengths: tuple[Any, ...] = ("cu_q", "cu_k", 11, 12) if "varlen" in name else ()
    if "qkvpacked" in name:
        tensors, lengths = (packed,), ("cu", 11) if lengths else ()
    elif "kvpacked" in name:
        tensors = (parts[0], packed.narrow(-3, 1, 2))
    else:
        tensors = parts
    slopes = torch.ones(1)
    tail = (0.0, 0.7, True, (3, 4), 5.0, slopes, True, True)
    result = getattr(flash_attn, name)(*tensors, *lengths, *tail)
    assert result[1:] == (None, None) and torch.equal(result[0], parts[0])
    assert all(torch.equal(a, b) for a, b in zip(seen.pop("tensors"), parts, strict=True))
    expected = {
        "dropout_p": 0.0, "softmax_scale": 0.7, "causal": True, "window_size": (3, 4),
        "softcap": 5.0, "alibi_slopes": slopes, "deterministic": True, "return_lse": True,
    }  # fmt: skip
    if "varlen" in name:
        both = "qkvpacked" in name
        expected |= {
            "cu_seqlens_q": "cu" if both else "cu_q", "cu_seqlens_k": "cu" if both else "cu_k",
            "max_seqlen_q": 11, "max_seqlen_k": 11 if both else 12,
        }  # fmt: skip
    assert seen == expected


# Values and gradients


@each_change
def test_dense(change: dict[str, Any], device: torch.device) -> None:
    change = on(device, {"deterministic": True, **change})
    leaves = dense(device)
    expected = run(flash_ext.attention, *leaves, return_lse=True, **of_attention(change))
    out, lse, probabilities = run(flash_attn_func, *leaves, return_attn_probs=True, **change)
    assert (probabilities is not None) == ("dropout_p" in change)
    hold_same((out, lse), expected, leaves)
    assert torch.equal(run(flash_attn_func, *leaves, **change), out)


def test_dense_against_plain_softmax() -> None:
    """Bottom-right causal with more keys than queries, grouped heads."""
    q, k, v = (x.detach() for x in dense(torch.device("cpu")))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
    future = torch.arange(17) > torch.arange(13)[:, None] + 4
    p = scores.masked_fill(future, MINUS_INF).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), expected)


@each_change
def test_qkvpacked(change: dict[str, Any], device: torch.device) -> None:
    change = on(device, {"deterministic": True, **change})
    qkv = normal(3, 13, 3, 4, 16, device=device)
    expected = run(flash_ext.attention, *qkv.unbind(2), return_lse=True, **of_attention(change))
    found = run(flash_attn_qkvpacked_func, qkv, return_attn_probs=True, **change)
    hold_same(found[:2], expected, [qkv])


@each_change
def test_kvpacked(change: dict[str, Any], device: torch.device) -> None:
    change = on(device, {"deterministic": True, **change})
    q, kv = normal(3, 13, 4, 16, device=device), normal(3, 17, 2, 2, 16, device=device)
    expected = run(flash_ext.attention, q, *kv.unbind(2), return_lse=True, **of_attention(change))
    found = run(flash_attn_kvpacked_func, q, kv, return_attn_probs=True, **change)
    hold_same(found[:2], expected, [q, kv])


def test_gradient_of_packed_is_that_of_its_parts() -> None:
    """Each part of qkv gets the gradient of a call with three tensors of their own."""
    qkv = normal(2, 9, 3, 4, 16, device=torch.device("cpu"))
    parts = [x.detach().clone().requires_grad_() for x in qkv.unbind(2)]
    flash_attn_qkvpacked_func(qkv, causal=True).square().sum().backward()
    flash_attn_func(*parts, causal=True).square().sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape
    assert torch.equal(qkv.grad, torch.stack([x.grad for x in parts], 2))


@each_change
@pytest.mark.parametrize("packed", ["", "kvpacked", "qkvpacked"])
def test_varlen(packed: str, change: dict[str, Any], device: torch.device) -> None:
    require_varlen(device)
    change = on(device, {"deterministic": True, **change})
    at_q, at_k = offsets(SEQLENS_Q, device), offsets(SEQLENS_K, device)
    leaves = [normal(14, 4, 16, device=device), normal(18, 2, 2, 16, device=device)]
    longest = (9, 8)
    parts = (leaves[0], *leaves[1].unbind(1))
    function: Callable[..., Any] = flash_attn_varlen_func
    given: tuple[Any, ...] = (*parts, at_q, at_k, *longest)
    if packed == "kvpacked":
        function, given = flash_attn_varlen_kvpacked_func, (*leaves, at_q, at_k, *longest)
    elif packed:
        leaves, at_k, longest = [normal(14, 3, 4, 16, device=device)], at_q, (9, 9)
        parts = leaves[0].unbind(1)
        function, given = flash_attn_varlen_qkvpacked_func, (*leaves, at_q, 9)
    expected = run(
        flash_ext.attention_varlen,
        *parts,
        cu_seqlens_q=at_q,
        cu_seqlens_k=at_k,
        return_lse=True,
        **of_attention(change),
    )
    out, lse, probabilities = run(function, *given, return_attn_probs=True, **change)
    assert (probabilities is not None) == ("dropout_p" in change)
    hold_same((out, lse), expected, leaves)
    assert torch.equal(run(function, *given, **change), out)


def test_compiled_in_one_graph() -> None:
    qkv = normal(2, 9, 3, 4, 16, device=torch.device("cpu"))

    def function(x: Tensor) -> Any:
        return flash_attn_qkvpacked_func(x, causal=True, return_attn_probs=True)[:2]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    hold_same(compiled(qkv), function(qkv), [qkv])


def test_row_without_keys_has_lse_minus_inf() -> None:
    q, k, v = (x[:, :n] for x, n in zip(dense(torch.device("cpu")), (5, 3, 3), strict=True))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[..., :2] == MINUS_INF).all() and lse[..., 2:].isfinite().all()
    assert not out[:, :2].any()


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_false_follows_the_global_setting(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool | None] = []
    monkeypatch.setattr(flash_attn, "attention", lambda *_, **g: seen.append(g["deterministic"]))
    flash_attn_func(*dense(torch.device("cpu")), deterministic=asked)
    assert seen == [True if asked else None]


# S_dmask


DROPPED = {
    "plain": {},
    "causal_scale": {"causal": True, "softmax_scale": -0.4},
    "alibi_softcap": {"alibi_slopes": SLOPES, "softcap": 2.0},
    "alibi_by_batch": CHANGES["alibi_by_batch"],
    "window": {"window_size": (3, 1)},
}
each_dropped = pytest.mark.parametrize("change", DROPPED.values(), ids=DROPPED)


def near(device: torch.device) -> dict[str, float]:
    """Kernels round probabilities to fp16 on their way to v."""
    return {"rtol": 1e-7, "atol": 4e-3 if device.type == "cuda" else 1e-7}


def out_of(probabilities: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """(B, Hq, Sq, Sk), (B, Sk, Hk, D) -> (B, Sq, Hq, D): what is kept, scaled up, times v."""
    kept = probabilities.clamp(min=0) * philox.keep_scale(dropout_p)
    group = probabilities.shape[1] // v.shape[2]
    return torch.einsum("bhij,bjhd->bihd", kept, v.to(kept.dtype).repeat_interleave(group, 2))


@each_dropped
def test_s_dmask_rebuilds_out(change: dict[str, Any], device: torch.device) -> None:
    q, k, v = dense(device)
    change = on(device, {**change, "dropout_p": 0.3})
    out, lse, probabilities = run(flash_attn_func, q, k, v, return_attn_probs=True, **change)
    assert probabilities.shape == (3, 4, 13, 17)
    assert probabilities.dtype == lse.dtype
    assert not probabilities.requires_grad
    rows = probabilities.abs().sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), **near(device))
    assert 0.2 < (probabilities < 0).sum() / (probabilities != 0).sum() < 0.4
    torch.testing.assert_close(out_of(probabilities, v, 0.3).to(out.dtype), out, **near(device))


@each_dropped
@pytest.mark.parametrize("longest", [(9, 8), (12, 11), (None, None)])
def test_s_dmask_of_packed_sequences_rebuilds_out(
    change: dict[str, Any], longest: tuple[int | None, int | None], device: torch.device
) -> None:
    require_varlen(device)
    at_q, at_k = offsets(SEQLENS_Q, device), offsets(SEQLENS_K, device)
    q, k, v = (normal(n, h, 16, device=device) for n, h in ((14, 4), (18, 2), (18, 2)))
    change = on(device, {**change, "dropout_p": 0.3, "return_attn_probs": True})
    out, _, probabilities = run(flash_attn_varlen_func, q, k, v, at_q, at_k, *longest, **change)
    assert probabilities.shape == (3, 4, longest[0] or 9, longest[1] or 8)
    starts_q, starts_k = at_q.tolist(), at_k.tolist()
    for b, (Sq, Sk) in enumerate(zip(SEQLENS_Q, SEQLENS_K, strict=True)):
        table = probabilities[b : b + 1, :, :Sq, :Sk]
        assert table.count_nonzero() == probabilities[b].count_nonzero()
        rebuilt = out_of(table, v[None, starts_k[b] : starts_k[b + 1]], 0.3)[0]
        expected = out[starts_q[b] : starts_q[b + 1]]
        torch.testing.assert_close(rebuilt.to(out.dtype), expected, **near(device))


def test_s_dmask_under_autocast() -> None:
    q, k, v = (x.detach().float() for x in dense(torch.device("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, found = run(flash_attn_func, q, k, v, 0.3, return_attn_probs=True)
    halves = (x.bfloat16() for x in (q, k, v))
    expected = run(flash_attn_func, *halves, 0.3, return_attn_probs=True)
    assert all(torch.equal(a, b) for a, b in zip((out, lse, found), expected, strict=True))


def test_s_dmask_leaves_the_generator_as_a_call_without_it() -> None:
    leaves, after = dense(torch.device("cpu")), []
    for asked in (False, True):
        run(flash_attn_func, *leaves, 0.3, return_attn_probs=asked)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


# Errors


def test_kv_cache_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="no KV cache"):
        flash_attn_with_kvcache(*dense(torch.device("cpu")))


def test_block_table_is_refused() -> None:
    at = offsets((4,), torch.device("cpu"))
    q = torch.zeros(4, 1, 16)
    with pytest.raises(NotImplementedError, match="block_table is given, expected None"):
        flash_attn_varlen_func(q, q, q, at, at, 4, 4, block_table=torch.zeros(1, 1).int())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0"),
        ({"dropout_p": -0.1, "return_attn_probs": True}, ValueError, "dropout_p is -0.1"),
        ({"dropout_p": None, "return_attn_probs": True}, TypeError, "dropout_p must be a float"),
        ({"softmax_scale": "a"}, TypeError, "softmax_scale must be a float"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: left is -2"),
        ({"window_size": 4}, TypeError, "window_size must be a pair"),
        ({"window_size": torch.tensor([3, 4])}, TypeError, "window_size must be a pair"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"alibi_slopes": SLOPES.double()}, TypeError, "alibi_slopes is float64"),
        ({"alibi_slopes": SLOPES.clone().requires_grad_()}, ValueError, "alibi_slopes requires"),
        ({"deterministic": None}, TypeError, "deterministic must be True or False"),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs must be True or False"),
    ],
)
@pytest.mark.parametrize("varlen", [False, True])
def test_bad_argument_is_named(
    varlen: bool, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = dense(torch.device("cpu"))
    with pytest.raises(error, match=message):
        if varlen:
            at_q, at_k = (offsets((n,), q.device) for n in (13, 17))
            flash_attn_varlen_func(q[0], k[0], v[0], at_q, at_k, 13, 17, **change)
        else:
            flash_attn_func(q, k, v, **change)


@pytest.mark.parametrize("probs", [False, True])
def test_no_tensor_is_named(probs: bool) -> None:
    q, k, _ = dense(torch.device("cpu"))
    with pytest.raises(TypeError, match="v must be a torch.Tensor, got NoneType"):
        flash_attn_func(q, k, None, 0.1, return_attn_probs=probs)


@pytest.mark.parametrize(
    ("function", "others", "shape", "dims"),
    [
        (flash_attn_qkvpacked_func, (), (2, 5, 2, 4, 8), "qkv .* expected (B, S, 3, H, D)"),
        (flash_attn_qkvpacked_func, (), (2, 5, 3, 8), "qkv .* expected (B, S, 3, H, D)"),
        (flash_attn_kvpacked_func, ("q",), (2, 5, 3, 4, 8), "kv .* expected (B, Sk, 2, Hk, D)"),
        (
            *(flash_attn_varlen_qkvpacked_func, (), (5, 2, 4, 8)),
            "qkv .* expected (T, 3, H, D)",
        ),
        (
            *(flash_attn_varlen_kvpacked_func, ("q",), (1, 5, 2, 4, 8)),
            "kv .* expected (Tk, 2, Hk, D)",
        ),
    ],
)
def test_shape_of_packed_is_checked(
    function: Callable[..., Any], others: tuple[str, ...], shape: tuple[int, ...], dims: str
) -> None:
    at = offsets((5,), torch.device("cpu"))
    lengths = {flash_attn_varlen_qkvpacked_func: (at, 5)}.get(function, (at, at, 5, 5))
    given = [torch.zeros(2, 5, 4, 8) for _ in others]
    given += [torch.zeros(shape), *(lengths if "varlen" in function.__name__ else ())]
    pattern = dims.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=pattern):
        function(*given)


def test_packed_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match="qkv must be a torch.Tensor, got list"):
        flash_attn_qkvpacked_func([1])  # type: ignore[arg-type]
