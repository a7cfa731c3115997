"""Bad arguments: an error before any launch that names the argument, what came, what was expected.

Data-dependent faults do not exist for dense attention. Every case is refused by `attention` and by
`explain`, on CPU and on meta tensors, and leaves its arguments as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flash_ext
from flash_ext.testing import forced

B, Sq, Sk, Hq, Hk, D, Dv = 2, 5, 7, 4, 2, 8, 6
half, float32 = torch.float16, torch.float32


def arguments(device: str) -> dict[str, Any]:
    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=half)

    return {"q": new(B, Sq, Hq, D), "k": new(B, Sk, Hk, D), "v": new(B, Sk, Hk, Dv)}


class Bad(NamedTuple):
    """Arguments to put in place of good ones, made for the device of the others."""

    change: Callable[[str], dict[str, Any]]
    error: type[Exception]
    message: str  # regular expression


def tensor(name: str, *shape: int, dtype: torch.dtype = half) -> Callable[[str], dict[str, Any]]:
    return lambda device: {name: torch.zeros(shape, dtype=dtype, device=device)}


def value(**change: Any) -> Callable[[str], dict[str, Any]]:
    return lambda device: change


BAD = {
    # Types
    "q_list": Bad(value(q=[0.0]), TypeError, "q must be a torch.Tensor, got list"),
    "k_none": Bad(value(k=None), TypeError, "k must be a torch.Tensor, got NoneType"),
    "v_number": Bad(value(v=1.0), TypeError, "v must be a torch.Tensor, got float"),
    "bias_list": Bad(value(attn_bias=[0.0]), TypeError, "attn_bias must be a .*Tensor, got list"),
    "slopes_list": Bad(value(alibi_slopes=[0.1]), TypeError, "alibi_slopes must be .* got list"),
    "sinks_float": Bad(value(sinks=0.5), TypeError, "sinks must be a torch.Tensor, got float"),
    "causal_int": Bad(value(causal=1), TypeError, "causal must be True or False, got 1"),
    "lse_string": Bad(value(return_lse="y"), TypeError, "return_lse must be .* got 'y'"),
    "deterministic_int": Bad(value(deterministic=0), TypeError, "deterministic must be .* got 0"),
    "scale_string": Bad(value(softmax_scale="1"), TypeError, "softmax_scale must be .* got str"),
    "scale_tensor": Bad(tensor("softmax_scale", 1), TypeError, "softmax_scale must .* got Tensor"),
    "softcap_none": Bad(value(softcap=None), TypeError, "softcap must be a float, got NoneType"),
    "dropout_string": Bad(value(dropout_p="0"), TypeError, "dropout_p must be a float, got str"),
    "out_dtype_string": Bad(value(out_dtype="fp32"), TypeError, "out_dtype must be .* got 'fp32'"),
    "window_int": Bad(value(window_size=4), TypeError, "window_size must be a pair .* got 4"),
    "window_triple": Bad(value(window_size=(1, 2, 3)), TypeError, r"window_size .* got \(1, 2, 3"),
    "window_float": Bad(value(window_size=(1.5, 0)), TypeError, "window_size: left .* got 1.5"),
    # Dtypes
    "q_int": Bad(
        tensor("q", B, Sq, Hq, D, dtype=torch.int32), TypeError, "q is int32, expected one of float"
    ),
    "q_fp8": Bad(
        tensor("q", B, Sq, Hq, D, dtype=torch.float8_e4m3fn), TypeError, "q is float8_e4m3fn, exp"
    ),
    "k_mixed": Bad(
        tensor("k", B, Sk, Hk, D, dtype=torch.bfloat16),
        TypeError,
        "k is bfloat16, expected float16, the dtype of q",
    ),
    "v_mixed": Bad(tensor("v", B, Sk, Hk, Dv, dtype=float32), TypeError, "v is float32, expected"),
    "bias_int": Bad(
        tensor("attn_bias", Sq, Sk, dtype=torch.int64), TypeError, "attn_bias is int64, expected a"
    ),
    "slopes_half": Bad(
        tensor("alibi_slopes", Hq), TypeError, "alibi_slopes is float16, expected float32"
    ),
    "sinks_int": Bad(
        tensor("sinks", Hq, dtype=torch.int8), TypeError, "sinks is int8, expected a floating"
    ),
    # Shapes
    "q_rank": Bad(
        tensor("q", Sq, Hq, D), ValueError, r"q has shape \(5, 4, 8\), expected 4 dimensions"
    ),
    "k_rank": Bad(tensor("k", 1, B, Sk, Hk, D), ValueError, "k has shape .*expected 4 dimensions"),
    "k_batch": Bad(
        tensor("k", 3, Sk, Hk, D), ValueError, r"k has shape \(3, 7, 2, 8\): its B is 3, expected 2"
    ),
    "v_batch": Bad(tensor("v", 1, Sk, Hk, Dv), ValueError, "v has .*: its B is 1, expected 2"),
    "k_head_dim": Bad(
        tensor("k", B, Sk, Hk, 9), ValueError, r"its D is 9, expected 8 as in q \(2, 5, 4, 8\)"
    ),
    "v_length": Bad(
        tensor("v", B, 6, Hk, Dv), ValueError, r"its S is 6, expected 7 as in k \(2, 7, 2, 8\)"
    ),
    "v_heads": Bad(tensor("v", B, Sk, 4, Dv), ValueError, "v has .*: its H is 4, expected 2"),
    "heads": Bad(tensor("q", B, Sq, 3, D), ValueError, "q has 3 heads and k has 2, expected"),
    "no_key_heads": Bad(
        lambda device: tensor("k", B, Sk, 0, D)(device) | tensor("v", B, Sk, 0, Dv)(device),
        ValueError,
        "q has 4 heads and k has 0",
    ),
    "no_head_dim": Bad(
        lambda device: tensor("q", B, Sq, Hq, 0)(device) | tensor("k", B, Sk, Hk, 0)(device),
        ValueError,
        "q has shape .*, expected a head dim of at least 1",
    ),
    "no_v_head_dim": Bad(tensor("v", B, Sk, Hk, 0), ValueError, "v has shape .* at least 1"),
    "bias_shape": Bad(
        tensor("attn_bias", Sq, Sk + 1),
        ValueError,
        r"attn_bias has shape \(5, 8\), expected .* \(B, Hq, Sq, Sk\) = \(2, 4, 5, 7\)",
    ),
    "bias_key_heads": Bad(tensor("attn_bias", B, Hk, Sq, Sk), ValueError, "attn_bias has shape"),
    "bias_rank": Bad(tensor("attn_bias", 1, B, Hq, Sq, Sk), ValueError, "attn_bias has shape"),
    "slopes_shape": Bad(
        tensor("alibi_slopes", Hk, dtype=float32), ValueError, r"alibi_slopes has shape \(2,\), exp"
    ),
    "slopes_batch": Bad(
        tensor("alibi_slopes", 1, Hq, dtype=float32), ValueError, r"\(B, Hq\) = \(2, 4\)"
    ),
    "sinks_shape": Bad(tensor("sinks", Hk), ValueError, r"sinks has shape \(2,\), .* = \(4,\)"),
    # Values
    "scale_nan": Bad(value(softmax_scale=float("nan")), ValueError, "softmax_scale is nan"),
    "scale_inf": Bad(value(softmax_scale=float("inf")), ValueError, "softmax_scale is inf"),
    "softcap_negative": Bad(value(softcap=-1.0), ValueError, "softcap is -1.0, expected 0"),
    "softcap_nan": Bad(value(softcap=float("nan")), ValueError, "softcap is nan"),
    "dropout_one": Bad(value(dropout_p=1.0), ValueError, r"dropout_p is 1.0, expected .*\[0, 1\)"),
    "dropout_negative": Bad(value(dropout_p=-0.1), ValueError, "dropout_p is -0.1"),
    "window_negative": Bad(value(window_size=(-2, 0)), ValueError, "window_size: left is -2"),
    "window_right": Bad(value(window_size=(3, -5)), ValueError, "window_size: right is -5"),
    "layout": Bad(value(layout="sbhd"), ValueError, "layout is 'sbhd', expected 'bshd' or 'bhsd'"),
    "layout_unhashable": Bad(value(layout=["bshd"]), ValueError, r"layout is \['bshd'\]"),
    "layout_swapped": Bad(value(layout="bhsd"), ValueError, "its S is|heads"),
    "out_dtype": Bad(
        value(out_dtype=torch.bfloat16), ValueError, "out_dtype is torch.bfloat16, expected None"
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", BAD)
def test_attention_refuses(name: str, where: str) -> None:
    change, error, message = BAD[name]
    given = {**arguments(where), **change(where)}
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    versions = {name: x._version for name, x in tensors.items()}
    with pytest.raises(error, match=message):
        flash_ext.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert versions == {name: x._version for name, x in tensors.items()}


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", BAD)
def test_explain_refuses_alike(name: str, where: str) -> None:
    change, error, message = BAD[name]
    given = {**arguments(where), **change(where)}
    with pytest.raises(error, match=message):
        flash_ext.explain(
            given.pop("q"), given.pop("k"), given.pop("v"), **given, capability=(9, 0)
        )


@pytest.mark.parametrize("name", ["q_list", "k_mixed", "v_length", "bias_shape", "sinks_shape"])
def test_recorded_calls_refuse_alike(name: str) -> None:
    """The same errors where an input requires a gradient."""
    change, error, message = BAD[name]
    given = {**arguments("cpu"), **change("cpu")}
    given["v"].requires_grad_()
    with pytest.raises(error, match=message):
        flash_ext.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("name", ["k", "v", "attn_bias", "alibi_slopes", "sinks"])
def test_devices_do_not_mix(name: str) -> None:
    extra = {
        "attn_bias": torch.zeros(Sq, Sk),
        "alibi_slopes": torch.zeros(Hq),
        "sinks": torch.zeros(Hq),
    }
    given = arguments("cpu") | ({name: extra[name]} if name in extra else {})
    flash_ext.attention(**given)
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta, expected cpu, the device of q"):
        flash_ext.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_fp64_has_fp64_results_only() -> None:
    q, k, v = (x.double() for x in arguments("cpu").values())
    with pytest.raises(ValueError, match="out_dtype is torch.float32, expected None, q's .*64$"):
        flash_ext.attention(q, k, v, out_dtype=float32)
    assert flash_ext.attention(q, k, v, out_dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("dtype", [float32, torch.float64])
def test_cuda_takes_halves_only(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in arguments("meta").values())
    with pytest.raises(TypeError, match="q is float.*, expected one of float16, bfloat16 on cuda"):
        flash_ext.explain(q, k, v, capability=(9, 0))


def test_alibi_slopes_have_no_gradient() -> None:
    given = arguments("cpu")
    slopes = torch.zeros(Hq, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        flash_ext.attention(**given, alibi_slopes=slopes)
    with torch.no_grad():
        flash_ext.attention(**given, alibi_slopes=slopes)


def test_modifiers_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        flash_ext.attention(*arguments("cpu").values(), True)  # type: ignore[call-arg]


def test_meta_needs_a_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"capability is None, expected one such as \(9, 0\)"):
        flash_ext.explain(**arguments("meta"))


@pytest.mark.parametrize("capability", [90, (9,), "9.0", (9.0, 0)])
def test_capability_is_a_pair_of_ints(capability: Any) -> None:
    with pytest.raises(TypeError, match="capability must be a pair of ints such as"):
        flash_ext.explain(**arguments("meta"), capability=capability)


def test_functorch_is_refused() -> None:
    q, k, v = (x.float() for x in arguments("cpu").values())
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: flash_ext.attention(x, k, v).sum())(q)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "forced needs a family, a smem_limit or both"),
        ({"family": "sm70"}, "family is 'sm70', expected one of"),
        ({"smem_limit": 0}, "smem_limit is 0, expected a positive number"),
    ],
)
def test_forced_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), forced(**given):
        pass


def test_forced_refuses_cpu_tensors() -> None:
    given = arguments("cpu")
    with forced(family="sm80"):
        with pytest.raises(NotImplementedError, match="forced .*sm80.* only the reference runs"):
            flash_ext.attention(**given)
        with pytest.raises(NotImplementedError, match="only the reference runs"):
            flash_ext.explain(**given)
    flash_ext.attention(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD)
def test_process_lives_on(name: str) -> None:
    """After a refused call on CUDA the next one works, in the same process."""
    change, error, message = BAD[name]
    given = {**arguments("cuda"), **change("cuda")}
    with pytest.raises(error, match=message):
        flash_ext.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    good = arguments("cuda")
    good["v"].fill_(1)
    assert torch.equal(flash_ext.attention(**good)[..., 0], torch.ones(B, Sq, Hq).half().cuda())


@pytest.mark.gpu
def test_unserved_calls_say_why() -> None:
    """A combination without a kernel: the reasons that explain gives, before any launch."""
    given = arguments("cuda")
    given["q"], given["k"] = (x.new_zeros(*x.shape[:-1], 600) for x in (given["q"], given["k"]))
    plan = flash_ext.explain(**given)
    assert plan.family is None
    with pytest.raises(NotImplementedError) as caught:
        flash_ext.attention(**given)
    assert plan.forward.reason in str(caught.value)
    for tensor_ in given.values():
        assert not tensor_.any()
