"""The binding on CUDA: stream, device, capture, and a process that stays usable after errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from binding_kit import BAD_TENSORS, Arguments, make_call, outputs, run

pytestmark = pytest.mark.gpu
PASSES = pytest.mark.parametrize("which", ["forward", "backward"])


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def run_fresh(which: str, call: Arguments) -> list[torch.Tensor]:
    """Copies of what the call writes over NaN."""
    for output in outputs(which, call):
        output.fill_(torch.nan)
    run(which, call)
    return [output.clone() for output in outputs(which, call)]


def result(which: str, call: Arguments) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    found = run_fresh(which, call)
    torch.cuda.synchronize()
    assert not any(t.isnan().any() for t in found)
    return found


@PASSES
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.multi_gpu)])
def test_current_stream(which: str, device: str) -> None:
    """q is written late on a side stream: a launch on any other stream would read zeros."""
    call = make_call(which, device)
    expected = result(which, call)
    q = call["q"].clone()
    call["q"].zero_()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(50_000_000)
        call["q"].copy_(q)
        found = run_fresh(which, call)
    torch.cuda.synchronize(device)
    assert same(found, expected)


@PASSES
def test_allocates_nothing(which: str) -> None:
    call = make_call(which, "cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run(which, call)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@PASSES
def test_errors_leave_everything_as_it_was(which: str) -> None:
    call = make_call(which, "cuda", Hq=4, Hk=2)
    result(which, call)
    tensors = {name: t.clone() for name, t in call.items() if isinstance(t, torch.Tensor)}
    for case_pass, name, change, error, says in BAD_TENSORS:
        if case_pass == which:
            with pytest.raises(error, match=rf"^{name}: .*{says}"):
                run(which, call | {name: change(call[name])})
    torch.cuda.synchronize()
    assert all(torch.equal(call[name], t) for name, t in tensors.items())
    result(which, call)


@PASSES
def test_layouts_agree(which: str) -> None:
    call = make_call(which, "cuda", Hq=4, Hk=4)
    expected = result(which, call)
    swapped: Arguments = {"bhsd": True}
    for name in {"q", "k", "v", "out", "dout"} & set(call):
        swapped[name] = call[name].transpose(1, 2)
    for name in {"dq", "dk", "dv"} & set(call):
        swapped[name] = call[name].transpose(1, 2).contiguous()
    found = result(which, call | swapped)
    back = [t.transpose(1, 2) if t.ndim == 4 else t for t in found]
    assert same(back, expected)


@PASSES
def test_strides_that_mean_nothing_or_zero(which: str) -> None:
    """Strides of dims of length 1 are arbitrary; an expanded tensor has strides of 0."""
    call = make_call(which, "cuda", B=1, Sq=1, Hq=4, Hk=4)
    for name in ("k", "v"):
        call[name] = call[name][:, :, :1].expand(-1, -1, 4, -1)
    q, stretched = call["q"], dict(call)
    stretched["q"] = q.as_strided(q.shape, (7, 3, q.stride(2), 1))
    call |= {name: call[name].contiguous() for name in ("k", "v")}
    assert same(result(which, stretched), result(which, call))


def test_no_keys() -> None:
    call = make_call("backward", "cuda", Sk=0)
    torch.cuda.synchronize()
    assert (call["out"] == 0).all()
    assert (call["lse"] == -torch.inf).all()
    delta, dq, *_ = result("backward", call)
    assert (delta == 0).all()
    assert (dq == 0).all()


@pytest.mark.parametrize("sizes", [{"Sq": 0}, {"Hq": 0}], ids=str)
def test_no_queries(sizes: dict[str, int]) -> None:
    *_, dk, dv = result("backward", make_call("backward", "cuda", **sizes))
    assert dk.numel() > 0
    assert (dk == 0).all()
    assert (dv == 0).all()


def run_script(body: str) -> str:
    """Standard output of a fresh process in which the binding has not been called."""
    script = "import torch\nfrom binding_kit import make, run\n" + textwrap.dedent(body)
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_first_call_may_be_captured() -> None:
    run_script("""
        call = make("forward", "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run("forward", call)
        graph.replay()
        replayed = call["out"].clone()
        run("forward", call)
        torch.cuda.synchronize()
        assert torch.equal(replayed, call["out"])
    """)


def test_cuda_error_is_raised_with_the_shape() -> None:
    """A failed assertion of an earlier kernel makes every later launch of the process fail."""
    found = run_script("""
        call = make("forward", "cuda")
        run("forward", call)
        torch._assert_async(torch.zeros(1, device="cuda"))
        for attempt in (torch.cuda.synchronize, lambda: run("forward", call)):
            try:
                attempt()
            except RuntimeError as error:
                print(str(error).splitlines()[0])
    """)
    text = found.splitlines()[-1]
    assert text.startswith("forward kernel ")
    assert "failed on cuda:0 for B=2 Sq=24 Sk=40 Hq=4 Hk=2 D=64 Dv=64: " in text


# --- on two GPUs ----------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@PASSES
@pytest.mark.parametrize("current", [0, 1])
def test_device_of_the_tensors(which: str, current: int) -> None:
    expected = result(which, make_call(which, "cuda:0"))
    call = make_call(which, "cuda:1")
    with torch.cuda.device(current):
        found = run_fresh(which, call)
        assert torch.cuda.current_device() == current
        assert torch.zeros(1, device="cuda").device.index == current
    torch.cuda.synchronize(1)
    assert same(found, expected)
    with torch.cuda.device(current):
        assert same(result(which, make_call(which, "cuda:0")), expected)
        assert torch.cuda.current_device() == current


@pytest.mark.multi_gpu
@PASSES
def test_thread_of_another_device(which: str) -> None:
    call = make_call(which, "cuda:1")
    expected = result(which, call)
    devices: list[int] = []
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(run_fresh(which, call))
        devices.append(torch.cuda.current_device())

    with torch.cuda.device(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize(1)
    assert devices == [0]
    assert same(found, expected)


@pytest.mark.multi_gpu
@PASSES
def test_tensors_of_two_devices(which: str) -> None:
    call = make_call(which, "cuda:0")
    with pytest.raises(ValueError, match=r"^v: device cuda:0 of q was expected, got cuda:1$"):
        run(which, call | {"v": call["v"].to("cuda:1")})
    result(which, call)
