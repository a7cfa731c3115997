"""Problems to test and to measure on: a case names one, make_inputs draws its tensors.

Also here: memory layouts that callers use, poisoned allocator memory, and guard zones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

GUARD_BYTES = 4096
GUARD_BYTE = 0xFF  # bytes of ones are a NaN in every floating dtype, so a read beyond the end shows


@dataclass(frozen=True)
class Case:
    """One problem, by sizes and modifiers. str() of it is a readable pytest id."""

    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # dims of the slopes: "h" or "bh"
    bias: str | None = None  # dims of attn_bias that are not broadcast, in the order "bhqk"
    bias_dtype: torch.dtype | None = None  # None: dtype; torch.bool: a mask
    bias_hidden: float = 0.0  # share of the bias that is -inf, or False
    sinks: torch.dtype | None = None  # dtype of the sinks; None: no sinks
    dropout_p: float = 0.0
    out_dtype: torch.dtype | None = None
    lse_gradient: bool = False
    layout: str = "bshd"
    memory: str | tuple[str, str, str] = "contiguous"  # of q, k and v: keys of MEMORY
    magnitude: float = 1.0  # q and k are normal with this standard deviation
    seed: int = 0

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, torch.dtype):
                return str(value).removeprefix("torch.")
            return "_".join(map(text, value)) if isinstance(value, tuple) else str(value)

        sizes = f"B{self.batch}-S{self.seqlen_q}x{self.seqlen_k}-H{self.heads_q}x{self.heads_k}"
        head_dims = f"D{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v else "")
        parts = [sizes, head_dims, text(self.dtype)]
        for f in fields(self)[8:]:
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f.name if value is True else f"{f.name}_{text(value)}")
        return "-".join(parts)


@dataclass
class Inputs:
    """The tensors of one call with its arguments, under the names of the public function."""

    q: Tensor  # (B, Sq, Hq, D); heads before the sequence where layout is "bhsd"
    k: Tensor  # (B, Sk, Hk, D)
    v: Tensor  # (B, Sk, Hk, Dv)
    dout: Tensor | None = None  # as out
    dlse: Tensor | None = None  # (B, Hq, Sq)
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None  # int64 (1,), of the dropout mask
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    out_dtype: torch.dtype | None = None
    layout: str = "bshd"
    differentiable: tuple[str, ...] = field(default=("q", "k", "v", "attn_bias", "sinks"))

    def public(self) -> dict[str, Any]:
        """Keyword arguments of flash_ext.attention, which draws a seed of its own."""
        names = (
            "attn_bias alibi_slopes sinks causal window_size softmax_scale softcap dropout_p "
            "out_dtype layout"
        )
        return {name: getattr(self, name) for name in names.split()}

    def private(self) -> dict[str, Any]:
        """Keyword arguments of the operators and of the reference, without out_dtype."""
        left, right = (-1 if limit is None else limit for limit in self.window_size)
        if self.causal:
            right = 0
        scale = self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        names = "attn_bias alibi_slopes sinks seed softcap dropout_p"
        return {
            **{name: getattr(self, name) for name in names.split()},
            "softmax_scale": scale,
            "window_left": left,
            "window_right": right,
            "bhsd": self.layout == "bhsd",
        }

    def leaves(self) -> dict[str, Tensor]:
        """The inputs that a gradient exists for, by name."""
        tensors = {name: getattr(self, name) for name in self.differentiable}
        return {n: t for n, t in tensors.items() if t is not None and t.is_floating_point()}

    def requires_grad_(self) -> Inputs:
        """Make every leaf ask for its gradient."""
        for leaf in self.leaves().values():
            leaf.requires_grad_()
        return self


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Fresh tensors for a case, the same for the same case and kind of device."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def sequence(length: int, heads: int, dim: int) -> Tensor:
        inner = (heads, length) if case.layout == "bhsd" else (length, heads)
        return normal(case.batch, *inner, dim)

    dim_v = case.head_dim_v or case.head_dim
    memory = (case.memory,) * 3 if isinstance(case.memory, str) else case.memory
    head = 1 if case.layout == "bhsd" else 2
    q = sequence(case.seqlen_q, case.heads_q, case.head_dim) * case.magnitude
    k = sequence(case.seqlen_k, case.heads_k, case.head_dim) * case.magnitude
    v = sequence(case.seqlen_k, case.heads_k, dim_v)
    q, k, v = (MEMORY[m](x, head) for m, x in zip(memory, (q, k, v), strict=True))

    dout = sequence(case.seqlen_q, case.heads_q, dim_v).to(case.out_dtype or case.dtype)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    lse_shape = (case.batch, case.heads_q, case.seqlen_q)
    dlse = normal(*lse_shape, dtype=lse_dtype) if case.lse_gradient else None

    slopes = None
    if case.alibi is not None:
        shape = (case.batch, case.heads_q) if case.alibi == "bh" else (case.heads_q,)
        slopes = torch.rand(shape, generator=generator, device=device) * 0.3
    sinks = None if case.sinks is None else normal(case.heads_q, dtype=case.sinks)
    seed = None
    if case.dropout_p > 0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=device)

    return Inputs(
        q=q,
        k=k,
        v=v,
        dout=dout,
        dlse=dlse,
        attn_bias=_make_bias(case, generator),
        alibi_slopes=slopes,
        sinks=sinks,
        seed=seed,
        causal=case.causal,
        window_size=case.window_size,
        softmax_scale=case.softmax_scale,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        out_dtype=case.out_dtype,
        layout=case.layout,
    )


def _make_bias(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.bias is None:
        return None
    sizes = zip("bhqk", (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k), strict=True)
    shape = tuple(size if dim in case.bias else 1 for dim, size in sizes)
    device = generator.device
    hidden = torch.rand(shape, generator=generator, device=device) < case.bias_hidden
    dtype = case.bias_dtype or case.dtype
    if dtype == torch.bool:
        return ~hidden
    bias = torch.randn(shape, generator=generator, device=device).to(dtype)
    return bias.masked_fill_(hidden, float("-inf"))


def pairwise(base: Case, seed: int = 0, **axes: Sequence[Any]) -> list[Case]:
    """Few cases in which every pair of values of any two axes occurs.

    Greedy: each new case starts from a pair that has not occurred and fills the other axes with
    the values that bring the most new pairs; ties are broken by the seed.
    """
    rng = random.Random(seed)
    values = {name: list(enumerate(choices)) for name, choices in axes.items()}
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(axes, 2)
        for i, _ in values[a]
        for j, _ in values[b]
    }

    def pairs(name: str, index: int, chosen: dict[str, int]) -> set[Any]:
        found = (tuple(sorted(((name, index), other), key=order)) for other in chosen.items())
        return missing.intersection(found)

    names = list(axes)

    def order(entry: tuple[str, int]) -> int:
        return names.index(entry[0])

    cases = []
    while missing:
        chosen = dict(rng.choice(sorted(missing)))
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                options = [index for index, _ in values[name]]
                rng.shuffle(options)
                chosen[name] = max(options, key=lambda i: len(pairs(name, i, chosen)))
        missing -= set(itertools.combinations(sorted(chosen.items(), key=order), 2))
        cases.append(replace(base, **{n: axes[n][i] for n, i in chosen.items()}))
    return cases


def _contiguous(x: Tensor, head: int) -> Tensor:
    return x.contiguous()


def _transposed(x: Tensor, head: int) -> Tensor:
    """Memory with heads and sequence exchanged."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _packed(x: Tensor, head: int) -> Tensor:
    """A slice of a packed qkv, (B, S, 3, H, D) or (B, H, 3, S, D)."""
    packed = x.new_full((*x.shape[:2], 3, *x.shape[2:]), float("nan"))
    packed[:, :, 1] = x
    return packed[:, :, 1]


def _strided(x: Tensor, head: int) -> Tensor:
    """Every second element of the last dim."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


def _offset(x: Tensor, head: int) -> Tensor:
    """One element past an aligned address."""
    flat = x.new_full((x.numel() + 1,), float("nan"))
    return flat[1:].view(x.shape).copy_(x)


def _heads_expanded(x: Tensor, head: int) -> Tensor:
    """The first head for all of them, stride 0."""
    return x.narrow(head, 0, min(1, x.shape[head])).expand_as(x)


def _batch_expanded(x: Tensor, head: int) -> Tensor:
    """The first batch entry for all of them, stride 0."""
    return x[:1].expand_as(x)


MEMORY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "packed": _packed,
    "strided": _strided,
    "offset": _offset,
    "heads_expanded": _heads_expanded,
    "batch_expanded": _batch_expanded,
}


def poison_allocator(device: torch.device | str = "cpu", num_bytes: int = 2**28) -> None:
    """Leave NaN behind in the memory that the allocator hands out next."""
    if torch.device(device).type == "cuda":
        torch.full((num_bytes // 4,), float("nan"), device=device)
        return
    sizes = [2**power for power in range(4, 21)]
    blocks = [torch.full((size,), float("nan")) for size in sizes for _ in range(8)]
    del blocks


@contextmanager
def guarded(*tensors: Tensor, unchanged: bool = True) -> Iterator[list[Tensor]]:
    """Contiguous copies that lie between guard zones; checked on leaving.

    Raises:
        AssertionError: a guard zone was written to, or (with unchanged) a copy was.
    """
    buffers, copies = [], []
    for x in tensors:
        num_bytes = x.numel() * x.element_size()
        buffer = torch.full(
            (GUARD_BYTES + num_bytes + GUARD_BYTES,), GUARD_BYTE, dtype=torch.uint8, device=x.device
        )
        inside = buffer[GUARD_BYTES : GUARD_BYTES + num_bytes]
        copies.append(inside.view(x.dtype).view(x.shape).copy_(x))
        buffers.append(buffer)
    before = [buffer.clone() for buffer in buffers]
    yield copies
    for index, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        wrong = (buffer != old).nonzero().flatten() - GUARD_BYTES
        inside_bytes = buffer.numel() - 2 * GUARD_BYTES
        if not unchanged:
            wrong = wrong[(wrong < 0) | (wrong >= inside_bytes)]
        if wrong.numel():
            raise AssertionError(
                f"tensor {index} of {inside_bytes} bytes: {wrong.numel()} bytes were overwritten, "
                f"the first at offset {wrong[0].item()}"
            )
