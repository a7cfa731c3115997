"""python -m flash_ext: what it prints, and that its exit code tells the truth."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import flash_ext
from flash_ext import __main__ as command
from flash_ext import build

Main = Callable[[], tuple[int, str]]
FEW = {title: command.CASES[title] for title in ("full", "softcap")}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """main() on the CPU: its exit code and what it printed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call() -> tuple[int, str]:
        code = command.main([])
        return code, capsys.readouterr().out

    return call


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith(start)]


def test_everything_agrees(run: Main) -> None:
    code, text = run()
    assert code == 0
    assert f"flash_ext {flash_ext.__version__}" in text
    assert torch.__version__ in text
    assert len(lines(text, "ok")) == len(command.CASES) * len(command.DTYPES["cpu"])
    assert len(lines(text, "forward")) == len(command.EXPLAINED)
    assert not lines(text, "FAILED")
    assert "CUDA is not checked" in text


@pytest.mark.parametrize("wrong", ["out", "dq"])
def test_wrong_result_fails(wrong: str, run: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value, or the gradients of a right value."""
    attention = flash_ext.attention

    def slightly_off(q, k, v, **arguments):  # type: ignore[no-untyped-def]
        out, lse = attention(q, k, v, **arguments)
        off = out * 1.05
        return off if wrong == "out" else off - (off - out).detach(), lse

    monkeypatch.setattr(command, "CASES", FEW)
    monkeypatch.setattr(flash_ext, "attention", slightly_off)
    code, text = run()
    assert code == 1
    failed = lines(text, "FAILED")
    assert len(failed) == len(FEW) * len(command.DTYPES["cpu"]) + 1
    assert f"cpu float32  full: AssertionError: {wrong}: row" in failed[0]


def test_error_in_one_case_fails_and_the_others_run(
    run: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = command.check

    def breaks(case, device):  # type: ignore[no-untyped-def]
        if case.softcap:
            raise RuntimeError("no such kernel image")
        return check(case, device)

    monkeypatch.setattr(command, "CASES", FEW)
    monkeypatch.setattr(command, "check", breaks)
    code, text = run()
    assert code == 1
    assert "softcap: RuntimeError: no such kernel image" in text
    assert len(lines(text, "ok")) == len(command.DTYPES["cpu"])


def test_extension_that_does_not_load_fails(run: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("flash_ext")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(build, "extension", lambda: None)
    monkeypatch.setattr(build, "missing_reason", lambda: "libstdc++ is too old")
    code, text = run()
    assert code == 1
    assert "libstdc++ is too old" in text


def test_timings_name_both_and_both_passes() -> None:
    rows = list(command.timings(torch.device("cpu"), [(1, 64, 2, 16)]))
    assert len(rows) == 4
    assert all("flash_ext" in row and "sdpa" in row for row in rows)


def test_timings_are_refused_under_a_profiler() -> None:
    with torch.profiler.profile():
        assert list(command.timings(torch.device("cpu"))) == [
            "not timed: PyTorch's profiler is running"
        ]


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--fast"])
    assert stopped.value.code == 2


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    called = [sys.executable, "-m", "flash_ext"]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " cuda bfloat16" in done.stdout
    assert "TFLOP/s" in done.stdout
