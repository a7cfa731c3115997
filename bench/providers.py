"""The implementations that are compared, each behind the same call.

A provider computes attention on q (B,Sq,Hq,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv) and returns
(B,Sq,Hq,Dv). `Provider.prepare` turns it into the call that one pass times, and `Provider.absent`
says why it cannot serve a cell. A peer's package is imported when a cell first asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_ext
from bench.schema import Cell
from flash_ext.testing import forced

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Pass = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Inputs:
    """Leaves q, k, v that require gradients, and the gradient of the output."""

    q: Tensor  # (B, Sq, Hq, D)
    k: Tensor  # (B, Sk, Hk, D)
    v: Tensor  # (B, Sk, Hk, Dv)
    dout: Tensor  # (B, Sq, Hq, Dv)
    causal: bool


def make_inputs(cell: Cell, device: torch.device, seed: int = 0) -> Inputs:
    """Standard normal inputs of the cell's shape and dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, cell.dtype)

    def normal(S: int, H: int, D: int) -> Tensor:
        return torch.randn(cell.B, S, H, D, generator=generator, device=device, dtype=dtype)

    return Inputs(
        q=normal(cell.Sq, cell.Hq, cell.D).requires_grad_(),
        k=normal(cell.Sk, cell.Hk, cell.D).requires_grad_(),
        v=normal(cell.Sk, cell.Hk, cell.Dv).requires_grad_(),
        dout=normal(cell.Sq, cell.Hq, cell.Dv),
        causal=cell.causal,
    )


@dataclass(frozen=True)
class Provider:
    """One implementation.

    attend: (q, k, v, causal) -> out, differentiable if the provider has a backward pass.
    absent: (cell, device) -> the reason why the cell cannot be run, empty if it can.
    scope: entered around every forward and backward call.
    ours: belongs to flash_ext, so a failure of it is a failure of the run.
    """

    name: str
    attend: Attend
    absent: Callable[[Cell, torch.device], str]
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    ours: bool = False

    def prepare(self, pass_name: str, x: Inputs) -> Pass:
        """The call that one pass times; it returns its results by name.

        "forward" runs without gradients. "backward" differentiates a graph made here once and
        kept, the same for every provider. "both" makes the graph and differentiates it.
        """
        leaves = (x.q, x.k, x.v)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self.scope():
                return self.attend(q, k, v, x.causal)

        def gradients(out: Tensor, keep: bool) -> dict[str, Tensor]:
            with self.scope():
                grads = torch.autograd.grad(out, leaves, x.dout, retain_graph=keep)
            return dict(zip(("dq", "dk", "dv"), grads, strict=True))

        if pass_name == "forward":
            q, k, v = (leaf.detach() for leaf in leaves)
            return lambda: {"out": forward(q, k, v)}
        if pass_name == "backward":
            out = forward(*leaves)
            return lambda: gradients(out, keep=True)

        def both() -> dict[str, Tensor]:
            out = forward(*leaves)
            return {"out": out.detach(), **gradients(out, keep=False)}

        return both


def _flash_ext(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_ext.attention(q, k, v, causal=causal)


def _flash_ext_deterministic(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_ext.attention(q, k, v, causal=causal, deterministic=True)


def _generic_family() -> AbstractContextManager[object]:
    return forced(family="sm80")


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, S, D), no copy
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return attend


def _first_result(module: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        result = import_module(module).flash_attn_func(q, k, v, causal=causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return attend


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, S, D)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)  # (B, Hq, Sq, Sk)
    if causal:
        Sq, Sk = scores.shape[2:]
        hidden = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).triu(1 + Sk - Sq)
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


@cache
def missing(module: str) -> str:
    """Why a module cannot be imported, in one line; empty if it can."""
    try:
        import_module(module)
    except Exception as error:  # a peer's wheel may fail in any way
        lines = str(error).strip().splitlines() or [""]
        return f"{module}: {type(error).__name__}: {lines[0]}"
    return ""


def _never_absent(cell: Cell, device: torch.device) -> str:
    return ""


def _absent_sixteen_bit_cuda(cell: Cell, device: torch.device) -> str:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    return "" if cell.dtype in ("float16", "bfloat16") else f"does not take {cell.dtype}"


def _absent_fa3(cell: Cell, device: torch.device) -> str:
    reason = _absent_sixteen_bit_cuda(cell, device)
    if reason:
        return reason
    if cell.pass_name != "forward":
        return "this build of FA3 has no backward pass"
    if cell.dtype != "bfloat16":
        return f"this build of FA3 does not take {cell.dtype}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "needs compute capability 9.0"
    return missing("fa3_fwd_interface")


def _absent_fa4(cell: Cell, device: torch.device) -> str:
    return _absent_sixteen_bit_cuda(cell, device) or missing("flash_attn.cute")


def _absent_plain(cell: Cell, device: torch.device) -> str:
    """Plain attention keeps several score tables: leave it out where they crowd out the rest."""
    cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 4 * 2**30
    tables = 3 if cell.pass_name == "forward" else 6
    element = getattr(torch, cell.dtype).itemsize
    needed = tables * cell.B * cell.Hq * cell.Sq * cell.Sk * element
    if needed <= memory // 2:
        return ""
    return f"its score tables need {needed / 2**30:.0f} GiB of {memory / 2**30:.0f}"


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("flash_ext", _flash_ext, _never_absent, ours=True),
        Provider(
            "flash_ext_generic", _flash_ext, _absent_sixteen_bit_cuda, _generic_family, ours=True
        ),
        Provider("flash_ext_deterministic", _flash_ext_deterministic, _never_absent, ours=True),
        Provider("sdpa-flash", _sdpa(SDPBackend.FLASH_ATTENTION), _absent_sixteen_bit_cuda),
        Provider("sdpa-cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), _absent_sixteen_bit_cuda),
        Provider("fa3", _first_result("fa3_fwd_interface"), _absent_fa3),
        Provider("fa4", _first_result("flash_attn.cute"), _absent_fa4),
        Provider("plain", _plain, _absent_plain),
    )
}
DEFAULT = [name for name in PROVIDERS if name != "flash_ext_deterministic"]
