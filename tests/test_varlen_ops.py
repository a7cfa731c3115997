"""What the CUDA operators of packed sequences hand to a kernel.

They run here on CPU tensors, with a kernel that computes by the reference and insists on what the
binding insists on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from varlen_kit import ALL, EVERYTHING, MIXED, PLAIN, USED, Lengths, Packed, pack

from flash_ext import build, dispatch, ops, varlen_ops, varlen_reference
from flash_ext.dispatch import Hardware, Kernel, Plan
from flash_ext.problem import Problem
from flash_ext.testing.cases import Case
from flash_ext.varlen_problem import Packing

ROW = {
    "family": "sm80", "dtype": "float16", "head_dim": 64, "block_m": 128, "block_n": 64,
    "threads": 128, "stages": 2, "smem_bytes": 98304, "splits_groups": True,
}  # fmt: skip
HALF = replace(PLAIN, dtype=torch.float16)
Modifiers = tuple[float, Tensor | None, Tensor | None, int, Tensor | None] | None


class FakeExtension:
    """Kernels that compute by the reference; keeps arguments of the last call."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def forward(
        self, kernel: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        sinks: Tensor | None, scale: float, left: int, right: int, bhsd: bool, modifiers: Modifiers,
        packing: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        self.last = {"kernel": kernel, "packing": packing}
        self._insist(bhsd, packing, q, k, v, out)
        assert lse.shape == (1, q.shape[2], q.shape[1])
        result = varlen_reference.forward(
            q[0], k[0], v[0], Packing(*packing), sinks=sinks, out_dtype=out.dtype,
            **self._named(scale, left, right, modifiers),
        )  # fmt: skip
        for target, values in zip((out[0], lse[0]), result, strict=True):
            target.copy_(values)

    def backward(
        self, kernel: int, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, delta: Tensor, dq_accum: Tensor | None, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, scale: float, left: int, right: int, bhsd: bool,
        dq_turns: Tensor | None, splits: int, dk_accum: Tensor | None, dv_accum: Tensor | None,
        modifiers: Modifiers, dbias: Tensor | None, dbias_fixed: Tensor | None,
        packing: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        self.last = {"kernel": kernel, "packing": packing, "dq_turns": dq_turns}
        self.last |= {"dbias_fixed": dbias_fixed}
        self._insist(bhsd, packing, q, k, v, out, dout)
        assert (splits, dk_accum, dv_accum) == (1, None, None)
        assert (dq is None) == (dq_accum is None)
        assert dq_accum is None or dq_accum.shape == (*lse.shape, -(-q.shape[-1] // 16) * 16)
        gradients = varlen_reference.backward(
            dout[0], None if dlse is None else dlse[0], q[0], k[0], v[0], out[0], lse[0],
            Packing(*packing), want_dbias=dbias is not None,
            **self._named(scale, left, right, modifiers),
        )  # fmt: skip
        rows = torch.where(out == 0, 0, dout.float() * out).sum(-1).transpose(1, 2)
        delta.copy_(rows - (0 if dlse is None else dlse))
        for target, values in zip((dq, dk, dv, dbias), gradients, strict=False):
            if target is not None:
                (target if target is dbias else target[0]).copy_(values)

    def _named(self, scale: float, left: int, right: int, modifiers: Modifiers) -> dict[str, Any]:
        found = {"softmax_scale": scale, "window_left": left, "window_right": right}
        if modifiers is None:
            return found
        softcap, slopes, bias, threshold, seed = modifiers
        return found | {
            "softcap": softcap, "alibi_slopes": slopes, "attn_bias": bias, "seed": seed,
            "dropout_p": threshold / 65536,
        }  # fmt: skip

    def _insist(self, bhsd: bool, packing: tuple[Tensor | None, ...], *tensors: Tensor) -> None:
        assert not bhsd
        for x in packing:
            assert x is None or (x.is_contiguous() and x.dtype == torch.int32 and x.dim() == 1)
        for x in tensors:
            assert x.dim() == 4
            assert x.shape[0] == 1
            assert x.shape[-1] % 8 == 0
            assert x.stride(-1) == 1


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeExtension]:
    """A build with a dense, a packed and a full kernel for each pass."""
    kinds = (("lean", False), ("lean", True), ("full", True))
    rows = [
        {**ROW, "pass": pass_, "features": features, "packed": packed}
        for pass_ in dispatch.PASSES
        for features, packed in kinds
    ]
    kernels = [Kernel.of({**row, "index": index}) for index, row in enumerate(rows)]

    def plan_on(device: torch.device, problem: Problem) -> Plan:
        hardware = Hardware((8, 0), 163 * 1024, 108)
        return dispatch.plan(problem, kernels, ("80",), hardware, dispatch.in_force)

    fake = FakeExtension()
    monkeypatch.setattr(build, "extension", lambda: fake)
    monkeypatch.setattr(ops, "plan_on", plan_on)
    varlen_ops._launches.clear()
    yield fake
    varlen_ops._launches.clear()


def arguments(
    packed: Packed, case: Case, deterministic: bool | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """q, k and v, and what follows them."""
    leaves = {name: x.detach() for name, x in packed.leaves.items()}
    left, right = (-1 if limit is None else limit for limit in case.window_size)
    packing = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    rest = (
        *(left, 0 if case.causal else right, deterministic, case.softmax_scale, case.softcap),
        *(case.dropout_p, None, None, leaves.get("attn_bias"), leaves.get("sinks")),
        packed.others["alibi_slopes"],
        torch.tensor([99]) if case.dropout_p else None,
        *(packed.others[name] for name in packing),
    )
    return tuple(leaves[name] for name in ("q", "k", "v")), rest


@pytest.mark.parametrize("lengths", ALL.values(), ids=ALL)
@pytest.mark.parametrize("case", [PLAIN, replace(EVERYTHING, bias="bhqk")], ids=["lean", "full"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_results_are_those_of_the_reference(
    out_dtype: torch.dtype | None, deterministic: bool, case: Case, lengths: Lengths,
    extension: FakeExtension,
) -> None:  # fmt: skip
    """Head dims 8 and 6: v, out and dout are padded, and what comes back is not."""
    case = replace(case, dtype=torch.float16)
    packed = pack(lengths, case)
    tensors, rest = arguments(packed, case, deterministic)
    want = (True, True, True, "attn_bias" in packed.leaves, "sinks" in packed.leaves)
    found, expected = (
        (*results, *backward(packed.dout, packed.dlse, *tensors, *results, want, *rest))
        for backward, results in (
            (varlen_ops._backward_cuda, varlen_ops._forward_cuda(*tensors, *rest, out_dtype)),
            (varlen_ops._backward_cpu, varlen_ops._forward_cpu(*tensors, *rest, out_dtype)),
        )
    )
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.numel() == 0 or x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=1e-2, atol=2e-3)
    assert extension.last["kernel"] == (5 if case.softcap else 4)


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_turns_and_rising_offsets(deterministic: bool | None, extension: FakeExtension) -> None:
    packed = pack(USED, HALF)
    tensors, rest = arguments(packed, HALF, deterministic)
    out, lse = varlen_ops._forward_cuda(*tensors, *rest)
    assert extension.last["kernel"] == 1
    varlen_ops._backward_cuda(
        packed.dout, None, *tensors, out, lse, (True,) * 3 + (False,) * 2, *rest
    )
    turns = extension.last["dq_turns"]
    assert (turns is None) == (not deterministic)
    if turns is not None:
        rows, sequences = tensors[0].shape[0], len(USED)
        assert turns.shape == (1 + 4 * (rows // 128 + sequences + 1) * 4,)
        assert not turns.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_of_bias_gradients_in_fixed_point(
    deterministic: bool, extension: FakeExtension
) -> None:
    case = replace(HALF, bias="hqk")
    packed = pack(MIXED, case)
    tensors, rest = arguments(packed, case, deterministic)
    out, lse = varlen_ops._forward_cuda(*tensors, *rest)
    varlen_ops._backward_cuda(packed.dout, None, *tensors, out, lse, (True,) * 4 + (False,), *rest)
    fixed = extension.last["dbias_fixed"]
    assert (fixed is not None) == deterministic
    if fixed is not None:
        assert (fixed.shape, fixed.dtype) == (
            (1 + packed.leaves["attn_bias"].numel(),),
            torch.int64,
        )
        assert not fixed.any()


def test_absent_gradients_take_no_workspace(extension: FakeExtension) -> None:
    packed = pack(MIXED, HALF)
    tensors, rest = arguments(packed, HALF, False)
    out, lse = varlen_ops._forward_cuda(*tensors, *rest)
    want = (False, True, False, False, False)
    found = varlen_ops._backward_cuda(packed.dout, None, *tensors, out, lse, want, *rest)
    assert [x.numel() > 0 for x in found] == list(want)
