"""What a call asks for: its arguments checked, and their facts as one immutable value.

Nothing here reads tensor data, and nothing compares sequence lengths except with each other, so
that traced code can run the checks without a guard on a length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

WindowSize: TypeAlias = tuple[int | None, int | None]
Capability: TypeAlias = tuple[int, int]

LAYOUTS = {"bshd": ("B", "S", "H", "D"), "bhsd": ("B", "H", "S", "D")}
CUDA_DTYPES = (torch.float16, torch.bfloat16)
AUTOCAST_DTYPES = (*CUDA_DTYPES, torch.float32)
CPU_DTYPES = (*AUTOCAST_DTYPES, torch.float64)
NO_WINDOW: WindowSize = (None, None)


@dataclass(frozen=True, slots=True)
class Problem:
    """Facts of one attention call, for both passes. No tensors, no tile sizes.

    With varlen, B is the number of sequences, and Sq and Sk count the packed rows of all of them.
    """

    B: int
    Sq: int
    Sk: int
    Hq: int
    Hk: int
    D: int
    Dv: int
    dtype: torch.dtype  # of q, k and v
    out_dtype: torch.dtype
    window: tuple[int, int]  # inclusive (left, right), -1 is no limit; causal is right = 0
    modifiers: tuple[str, ...]  # arguments that only kernels with all features serve
    deterministic: bool | None  # of the backward pass; None: forward only
    varlen: bool = False

    @property
    def table(self) -> tuple[int, int, int, int]:
        """Shape of the table of scores."""
        return self.B, self.Hq, self.Sq, self.Sk

    def __str__(self) -> str:
        left, right = (None if limit < 0 else limit for limit in self.window)
        dtype = name_of(self.dtype)
        if self.out_dtype != self.dtype:
            dtype += f" with {name_of(self.out_dtype)} out"
        batch = "" if self.varlen else f"{self.B}, "
        facts = [
            f"q ({batch}{self.Sq}, {self.Hq}, {self.D})",
            f"k ({batch}{self.Sk}, {self.Hk}, {self.D})",
            f"v ({batch}{self.Sk}, {self.Hk}, {self.Dv})",
            *[f"{self.B} packed sequences"] * self.varlen,
            dtype,
            f"window ({left}, {right})",
            *self.modifiers,
        ]
        return ", ".join(facts + ["deterministic"] * bool(self.deterministic))


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def shape_of(x: Tensor) -> str:
    return str(tuple(x.shape))


# Plain arguments


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")


def window_limits(causal: bool, window_size: WindowSize) -> tuple[int, int]:
    """(left, right) with -1 for no limit; causal caps the right side at 0.

    Raises:
        TypeError, ValueError: not a pair of ints or None, or a negative limit other than -1.
    """
    if causal is not False and causal is not True:
        check_flag("causal", causal)
    if window_size == NO_WINDOW:
        return (-1, 0) if causal else (-1, -1)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window_size!r}")
    limits = []
    for side, limit in zip(("left", "right"), window_size, strict=True):
        if limit is None:
            limit = -1
        if not isinstance(limit, int):
            raise TypeError(f"window_size: {side} must be an int or None, got {limit!r}")
        if limit < -1:
            raise ValueError(
                f"window_size: {side} is {limit}, expected a count of keys, or -1 or None for "
                "no limit"
            )
        limits.append(limit)
    left, right = limits
    return left, 0 if causal else right


def check_is_dtype(name: str, value: object) -> None:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or None, got {value!r}")


def check_scale(softmax_scale: float) -> None:
    check_number("softmax_scale", softmax_scale)
    if not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}, expected a finite number")


def check_softcap(softcap: float) -> None:
    check_number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}, expected 0 (none) or a finite positive number")


def check_dropout(dropout_p: float) -> None:
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}, expected a probability in [0, 1)")


def check_layout(layout: str) -> None:
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}, expected 'bshd' or 'bhsd'")


def check_capability(capability: Capability) -> None:
    if not (
        isinstance(capability, tuple)
        and len(capability) == 2
        and all(isinstance(number, int) for number in capability)
    ):
        raise TypeError(f"capability must be a pair of ints such as (9, 0), got {capability!r}")


# Tensor arguments


def check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def check_out_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    """out is q's dtype, or the dtype in which partial results are merged."""
    if out_dtype is None or out_dtype == dtype:
        return
    if out_dtype != torch.float32 or dtype == torch.float64:
        wider = "" if dtype == torch.float64 else " or torch.float32"
        raise ValueError(f"out_dtype is {out_dtype}, expected None, q's {dtype}{wider}")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    bhsd: bool,
    device_type: str,
    autocast: torch.dtype | None = None,
) -> tuple[int, int, int, int, int, int, int]:
    """Check types, shapes, dtypes and devices of all tensors.

    Args:
        device_type: what the call runs on; "cuda" allows fewer dtypes than "cpu" and "meta".
        autocast: the dtype that q, k and v will be cast to, see `cast_dtype`.

    Returns:
        B, Sq, Sk, Hq, Hk, D, Dv.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    check_dtypes(q, k, v, device_type, autocast)
    layout = LAYOUTS["bhsd" if bhsd else "bshd"]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            dims = ", ".join(layout)
            raise ValueError(f"{name} has shape {shape_of(x)}, expected 4 dimensions ({dims})")
        check_device(name, x, q.device)
    s, h = layout.index("S"), layout.index("H")
    B, Sq, Hq, D = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    Sk, Hk, Dv = k.shape[s], k.shape[h], v.shape[3]
    for name, x, sizes in (
        ("k", k, (("B", 0, B), ("D", 3, D))),
        ("v", v, (("B", 0, B), ("S", s, Sk), ("H", h, Hk))),
    ):
        for letter, dim, size in sizes:
            if x.shape[dim] != size:
                like = f"k {shape_of(k)}" if letter in "SH" else f"q {shape_of(q)}"
                raise ValueError(
                    f"{name} has shape {shape_of(x)}: its {letter} is {x.shape[dim]}, "
                    f"expected {size} as in {like}"
                )
    if D < 1 or Dv < 1:
        name, x = ("v", v) if D else ("q", q)
        raise ValueError(f"{name} has shape {shape_of(x)}, expected a head dim of at least 1")
    if Hk < 1 or Hq % Hk:
        raise ValueError(
            f"q has {Hq} heads and k has {Hk}, expected the heads of q to be a multiple of those "
            f"of k (layout {'bhsd' if bhsd else 'bshd'!r})"
        )
    if attn_bias is not None:
        _check_bias(attn_bias, q.device, (B, Hq, Sq, Sk))
    check_head_modifiers(alibi_slopes, sinks, q.device, B, Hq)
    return B, Sq, Sk, Hq, Hk, D, Dv


def cast_dtype(dtype: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """The dtype an input has after autocast, which leaves float64 alone."""
    return dtype if autocast is None or dtype not in AUTOCAST_DTYPES else autocast


def check_dtypes(
    q: Tensor, k: Tensor, v: Tensor, device_type: str, autocast: torch.dtype | None
) -> None:
    allowed = CUDA_DTYPES if device_type == "cuda" else CPU_DTYPES
    expected = cast_dtype(q.dtype, autocast)
    for name, x in (("q", q), ("k", k), ("v", v)):
        dtype = cast_dtype(x.dtype, autocast)
        if dtype not in allowed:
            names = ", ".join(map(name_of, allowed))
            raise TypeError(f"{name} is {name_of(dtype)}, expected one of {names} on {device_type}")
        if dtype != expected:
            raise TypeError(
                f"{name} is {name_of(dtype)}, expected {name_of(expected)}, the dtype of q "
                "(only autocast mixes dtypes)"
            )


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected {device}, the device of q")


def check_bias_dtype(attn_bias: Tensor, device: torch.device) -> None:
    check_device("attn_bias", attn_bias, device)
    if attn_bias.dtype not in (*CPU_DTYPES, torch.bool):
        raise TypeError(
            f"attn_bias is {name_of(attn_bias.dtype)}, expected a floating dtype (added) or bool "
            "(True may attend)"
        )


def _check_bias(attn_bias: Tensor, device: torch.device, table: tuple[int, ...]) -> None:
    check_bias_dtype(attn_bias, device)
    rank = attn_bias.dim()
    sizes = zip(attn_bias.shape, table[max(4 - rank, 0) :], strict=False)
    if rank > 4 or any(size != 1 and size != full for size, full in sizes):
        raise ValueError(
            f"attn_bias has shape {shape_of(attn_bias)}, expected one that broadcasts to "
            f"(B, Hq, Sq, Sk) = {table}"
        )


def check_head_modifiers(
    alibi_slopes: Tensor | None, sinks: Tensor | None, device: torch.device, B: int, Hq: int
) -> None:
    """The modifiers with a number for each query head."""
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, device, B, Hq)
    if sinks is not None:
        _check_sinks(sinks, device, Hq)


def is_broadcast(attn_bias: Tensor, table: tuple[int, ...]) -> bool:
    """Whether an element of a checked bias is added to more than one score."""
    return tuple(attn_bias.shape) != table[4 - attn_bias.dim() :] or any(
        size != 1 for size in table[: 4 - attn_bias.dim()]
    )


def _check_slopes(alibi_slopes: Tensor, device: torch.device, B: int, Hq: int) -> None:
    check_device("alibi_slopes", alibi_slopes, device)
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes is {name_of(alibi_slopes.dtype)}, expected float32")
    if alibi_slopes.shape != (Hq,) and alibi_slopes.shape != (B, Hq):
        raise ValueError(
            f"alibi_slopes has shape {shape_of(alibi_slopes)}, expected (Hq,) = ({Hq},) or "
            f"(B, Hq) = ({B}, {Hq})"
        )


def _check_sinks(sinks: Tensor, device: torch.device, Hq: int) -> None:
    check_device("sinks", sinks, device)
    if sinks.dtype not in CPU_DTYPES:
        raise TypeError(f"sinks is {name_of(sinks.dtype)}, expected a floating dtype")
    if sinks.shape != (Hq,):
        raise ValueError(f"sinks has shape {shape_of(sinks)}, expected (Hq,) = ({Hq},)")


def of_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
    deterministic: bool | None,
    bhsd: bool,
    *,
    device_type: str,
    autocast: torch.dtype | None = None,
) -> Problem:
    """The Problem of checked tensors; arguments and errors as in `check_inputs`."""
    sizes = check_inputs(
        *(q, k, v, attn_bias, alibi_slopes, sinks),
        bhsd=bhsd,
        device_type=device_type,
        autocast=autocast,
    )
    dtype = cast_dtype(q.dtype, autocast)
    check_out_dtype(dtype, out_dtype)
    return Problem(
        *sizes,
        dtype=dtype,
        out_dtype=out_dtype or dtype,
        window=(window_left, window_right),
        modifiers=modifiers_of(softcap, alibi_slopes, attn_bias, dropout_p),
        deterministic=deterministic,
    )


def modifiers_of(
    softcap: float, alibi_slopes: Tensor | None, attn_bias: Tensor | None, dropout_p: float
) -> tuple[str, ...]:
    """Names of the arguments given that only kernels with all features serve."""
    asked = {
        "softcap": softcap > 0,
        "alibi_slopes": alibi_slopes is not None,
        "attn_bias": attn_bias is not None,
        "dropout_p": dropout_p > 0,
    }
    return tuple(name for name, present in asked.items() if present)
