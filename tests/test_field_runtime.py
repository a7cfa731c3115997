"""Faults that attention kernels had in the field: devices, streams, graphs, tracing, refusals.

The id of a test names a kind of fault; its docstring says in a line what went wrong. Those that
concern numbers are in test_field_cases.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_kit import assert_bit_equal, attend, capture, hold, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext.build import extension
from flash_ext.testing import forced
from flash_ext.testing.cases import MEMORY, Case, Inputs, guarded, make_inputs

SMALL = Case(
    batch=2, seqlen_q=48, seqlen_k=64, heads_q=4, heads_k=2, head_dim=64, dtype=torch.bfloat16
)
LEAVES = ("q", "k", "v")
KIB = 1024


def gradients_of(inputs: Inputs) -> list[Tensor]:
    """out, lse, dq, dk, dv; with all keys in one tile they are the same bits from run to run."""
    found = run(inputs)
    return [found.out, found.lse, *found.gradients.values()]


def assert_all_bit_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    names = [f"result {i}" for i in range(len(expected))]  # of out, lse, dq, dk, dv, dsinks
    for name, a, b in zip(names, found, expected, strict=True):
        assert_bit_equal(a, b, name)


def moved(inputs: Inputs, device: torch.device | str) -> Inputs:
    """The same values on another device."""
    names = ("q", "k", "v", "dout")
    return replace(inputs, **{n: getattr(inputs, n).detach().to(device) for n in names})


# Devices


@pytest.mark.multi_gpu
@pytest.mark.gpu
def test_d21_tensors_on_another_device() -> None:
    """D21: kernels were launched on the current device, not on that of the tensors."""
    inputs = make_inputs(replace(SMALL, causal=True), torch.device("cuda:0"))
    expected = gradients_of(inputs)
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0)
    found = gradients_of(moved(inputs, "cuda:1"))
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in found)
    assert torch.cuda.memory_allocated(0) == before
    assert_all_bit_equal(found, expected)


@pytest.mark.multi_gpu
@pytest.mark.gpu
def test_d21_backward_in_another_thread() -> None:
    """D21: a thread starts on device 0, whatever its tensors are on."""
    inputs = make_inputs(SMALL, torch.device("cuda:0"))
    expected = gradients_of(inputs)
    there = moved(inputs, "cuda:1").requires_grad_()
    out, lse = attend(there)
    found: list[Tensor] = []

    def backward() -> None:
        leaves = [getattr(there, name) for name in LEAVES]
        found.extend(torch.autograd.grad(out, leaves, there.dout))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    torch.cuda.synchronize(1)
    assert_all_bit_equal([out, lse, *found], expected)


@pytest.mark.multi_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v"])
def test_d21_mixed_devices_are_refused(name: str) -> None:
    """D21: an address of one device was given to another."""
    inputs = make_inputs(SMALL, torch.device("cuda:0"))
    with pytest.raises(ValueError, match=rf"{name} is on cuda:1"):
        attend(replace(inputs, **{name: getattr(inputs, name).to("cuda:1")}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_d21_tensor_left_on_the_cpu_is_refused(name: str) -> None:
    """D21: as above, with a tensor that was never moved."""
    inputs = make_inputs(SMALL, torch.device("cuda"))
    with pytest.raises(ValueError, match="is on"):
        attend(replace(inputs, **{name: getattr(inputs, name).cpu()}))
    torch.cuda.synchronize()


# Streams and graphs; replays with other inputs are in test_graphs.py


@pytest.mark.gpu
def test_d22_work_of_a_side_stream() -> None:
    """D22: a launch on the default stream did not wait for its inputs, nor its readers for it."""
    inputs = make_inputs(SMALL, torch.device("cuda"))
    expected = gradients_of(inputs)
    source = inputs.q.detach().clone()
    dout = inputs.dout
    assert dout is not None
    torch.cuda.synchronize()
    for _ in range(30):
        with torch.cuda.stream(torch.cuda.Stream()):
            late = Inputs(*(torch.zeros_like(x) for x in (source, inputs.k, inputs.v, dout)))
            torch.cuda._sleep(1_000_000)
            for mine, value in zip(
                (late.q, late.k, late.v, late.dout), (source, inputs.k, inputs.v, dout), strict=True
            ):
                assert mine is not None
                mine.copy_(value.detach())
            found = [x.clone() for x in gradients_of(late)]
        torch.cuda.synchronize()
        assert_all_bit_equal(found, expected)


@pytest.mark.gpu
def test_d22_gradient_straight_from_a_product() -> None:
    """D22: backward read dout before the matrix product that makes it had ended."""
    inputs = make_inputs(replace(SMALL, seqlen_q=512), torch.device("cuda")).requires_grad_()
    out, _ = attend(inputs)
    big = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    leaves = [getattr(inputs, name) for name in LEAVES]
    results = []
    for wait in (True, False, False, False):
        product = (big @ big) / 64
        dout = product.flatten()[: out.numel()].view_as(out)
        if wait:
            torch.cuda.synchronize()
        results.append(torch.autograd.grad(out, leaves, dout, retain_graph=True))
        torch.cuda.synchronize()
    for found in results[1:]:
        assert_all_bit_equal(found, results[0])


@pytest.mark.gpu
def test_d23_dropout_in_a_graph() -> None:
    """D23: capture failed because the seed was read on the host; replays repeated one mask."""
    inputs = make_inputs(replace(SMALL, dropout_p=0.1), torch.device("cuda"))
    inputs.requires_grad_()
    leaves = [getattr(inputs, name) for name in LEAVES]

    def call() -> list[Tensor]:
        out, _ = attend(inputs)
        return [out, *torch.autograd.grad(out, leaves, inputs.dout)]

    graph, (out, _, _, dv) = capture(call)
    outs = []
    for _ in range(3):
        graph.replay()
        left = (inputs.dout.double() * out.double()).sum()
        right = (dv.double() * inputs.v.detach().double()).sum()
        torch.testing.assert_close(left, right, rtol=2**-7, atol=1.0)
        outs.append(out.clone())
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])


def test_d23_no_dropout_draws_nothing(device: torch.device) -> None:
    """D23: p = 0 moved the random generator on."""
    inputs = make_inputs(SMALL, device)
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    before = state()
    run(inputs)
    assert torch.equal(state(), before)


# Tracing


def facts(x: Tensor) -> tuple[Any, ...]:
    """Shape, strides of dims longer than 1, dtype and device."""
    strides = tuple(s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1)
    return tuple(x.shape), strides, x.dtype, x.device


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("head_dim", [64, 33])
@pytest.mark.parametrize("memory", MEMORY)
def test_d24_fake_results_look_like_real_ones(
    memory: str, head_dim: int, layout: str, device: torch.device
) -> None:
    """D24: traced code was told of other strides or dtypes than those that came."""
    case = replace(SMALL, memory=memory, head_dim=head_dim, layout=layout, sinks=torch.bfloat16)
    for out_dtype in (None, torch.float32):
        inputs = make_inputs(replace(case, out_dtype=out_dtype, lse_gradient=True), device)
        real = gradients_of(inputs)
        names = (*LEAVES, "dout", "dlse", "sinks")
        plain = {name: getattr(inputs, name).detach() for name in names}
        with FakeTensorMode() as mode:
            fakes = {name: mode.from_tensor(x) for name, x in plain.items()}
            fake = gradients_of(replace(inputs, **fakes))
        assert [facts(x) for x in fake] == [facts(x) for x in real]


def test_d24_compiled_call_equals_eager(device: torch.device) -> None:
    """D24: transposed inputs under compile: an assertion on strides, or wrong numbers."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_ext.attention(q * 2, k, v, causal=True, layout="bhsd", return_lse=True)

    for Sq, Sk in ((48, 64), (1, 64), (70, 33)):
        case = replace(SMALL, seqlen_q=Sq, seqlen_k=Sk, memory="transposed", layout="bhsd")
        inputs = make_inputs(case, device).requires_grad_()
        leaves = [getattr(inputs, name) for name in LEAVES]
        out, lse = compiled(*leaves)
        found = torch.autograd.grad(out, leaves, inputs.dout)
        expected_out, expected_lse = attend(replace(inputs, q=inputs.q * 2, causal=True))
        expected = torch.autograd.grad(expected_out, leaves, inputs.dout)
        assert_all_bit_equal([out, lse, *found], [expected_out, expected_lse, *expected])


# dtypes


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_d28_mixed_dtypes(
    autocast: torch.dtype, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """D28: autocast left mixed dtypes, or cast to the wrong one; without it they are an error."""
    inputs = make_inputs(replace(SMALL, dtype=torch.float32), device)
    mixed = {n: getattr(inputs, n).to(dtype) for n, dtype in zip(LEAVES, dtypes, strict=True)}
    low = {name: x.to(autocast) for name, x in mixed.items()}
    dout = inputs.dout
    assert dout is not None
    expected = run(replace(inputs, **low, dout=dout.to(autocast)))
    with torch.autocast(device.type, dtype=autocast):
        found = run(replace(inputs, **mixed, dout=dout.to(autocast)))
    assert found.out.dtype == autocast
    assert_bit_equal(found.out, expected.out)
    for name, x in mixed.items():
        gradient = found.gradients[f"d{name}"]
        assert gradient.dtype == x.dtype
        assert_bit_equal(gradient, expected.gradients[f"d{name}"].to(x.dtype))
    if len(set(dtypes)) > 1:
        with pytest.raises((TypeError, ValueError), match=r"dtype|float"):
            attend(replace(inputs, **mixed))


# The binary and the hardware


def test_d35_extension_may_come_first(tmp_path: Path) -> None:
    """D35: a binary of another torch died with an undefined symbol; this one needs none."""
    module = extension()
    if module is None:
        pytest.skip("flash_ext._C is not built")
    assert module.__file__ is not None
    environment = dict(os.environ, PYTHONPATH=str(Path(module.__file__).parents[1]))
    code = "import flash_ext._C, torch, flash_ext; flash_ext.build_info()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_d36_hardware_without_code(capability: tuple[int, int]) -> None:
    """D36: "no kernel image" at the first launch; now the reasons, before one."""
    if extension() is None:
        pytest.skip("flash_ext._C is not built")
    inputs = make_inputs(SMALL, "cpu")
    plan = flash_ext.explain(inputs.q, inputs.k, inputs.v, capability=capability)
    assert plan.forward.family is None
    with pytest.raises(NotImplementedError, match="8.0 or later"):
        plan.kernel("forward")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_d36_d39_every_card_is_served_or_told(head_dim: int, capability: tuple[int, int]) -> None:
    """D36, D39: code for the card, and a tile that its shared memory holds; else the reasons."""
    if extension() is None:
        pytest.skip("flash_ext._C is not built")
    limit = {80: 163, 90: 227, 100: 227}.get(10 * capability[0] + capability[1], 99) * KIB
    inputs = make_inputs(replace(SMALL, head_dim=head_dim))
    plan = flash_ext.explain(inputs.q, inputs.k, inputs.v, capability=capability)
    for choice in (plan.forward, plan.backward):
        if choice.kernel is None:
            told = " ".join((choice.reason, *choice.refused))
            assert "shared memory" in told or "rebuild" in told or "head dims" in told
        else:
            assert choice.kernel.smem_bytes <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_d39_smaller_shared_memory(head_dim: int, kib: int) -> None:
    """D39: a tile too large for the card failed at launch."""
    inputs = make_inputs(replace(SMALL, head_dim=head_dim, seqlen_q=300, seqlen_k=300), "cuda")
    with forced(smem_limit=kib * KIB):
        plan = flash_ext.explain(inputs.q, inputs.k, inputs.v)
        if None in (plan.forward.family, plan.backward.family):
            with pytest.raises(NotImplementedError, match="shared memory"):
                run(inputs)
            return
        hold(inputs, run(inputs))


# Refusals

REFUSED_ON_CUDA = [
    {"dtype": torch.float32},
    {"dtype": torch.float64},
    {"head_dim": 264},
    {"softcap": 5.0, "alibi": "h", "bias": "bhqk", "dropout_p": 0.1},
    {"head_dim": 192, "head_dim_v": 128},
]


@pytest.mark.gpu
@pytest.mark.parametrize("change", REFUSED_ON_CUDA, ids=str)
def test_d38_no_silent_slow_path(change: dict[str, Any]) -> None:
    """D38: what no kernel serves took the quadratic path silently; it is served or refused."""
    inputs = make_inputs(replace(SMALL, **change), "cuda")
    try:
        plan = flash_ext.explain(inputs.q, inputs.k, inputs.v, **inputs.public())
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            attend(inputs)
        return
    if plan.forward.family is None:
        with pytest.raises(NotImplementedError, match="not served"):
            attend(inputs)
    elif plan.backward.family is None:
        with pytest.raises(NotImplementedError, match="not served"):
            run(inputs)
    else:
        hold(inputs, run(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["contiguous", "strided"])
def test_d38_memory_is_linear(memory: str) -> None:
    """D38: never a table of scores: at twice the length, at most twice the memory."""

    def peak(length: int) -> int:
        case = replace(SMALL, seqlen_q=length, seqlen_k=length, memory=memory, batch=1)
        inputs = make_inputs(case, "cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(inputs)
        return torch.cuda.max_memory_allocated() - before

    peak(256)
    assert peak(16_384) <= 2.1 * peak(8192)
    assert peak(16_384) < 16_384**2  # bytes: less than any table of one head


BAD = {
    "heads that do not divide": {"q": (2, 48, 3, 64)},
    "keys and values of unequal length": {"v": (2, 65, 2, 64)},
    "keys and values of unequal heads": {"v": (2, 64, 1, 64)},
    "head dims that differ": {"k": (2, 64, 2, 72)},
    "batches that differ": {"k": (3, 64, 2, 64), "v": (3, 64, 2, 64)},
    "three dimensions": {"q": (48, 4, 64)},
}


@pytest.mark.parametrize("what", BAD)
def test_d40_shapes_that_contradict(what: str, device: torch.device) -> None:
    """D40: sizes that lie were believed; they are refused before a launch, nothing is written."""
    inputs = make_inputs(SMALL, device)
    shapes = BAD[what]
    with guarded(inputs.q, inputs.k, inputs.v) as inside:
        tensors = dict(zip(LEAVES, inside, strict=True))
        for name, shape in shapes.items():
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        with pytest.raises(ValueError, match=rf"\b[{''.join(shapes)}kv]\b"):
            flash_ext.attention(*tensors.values())
    hold(inputs, run(inputs))  # the process is still good
