"""Choosing, compiling and comparing tiles of the Hopper kernels, on a machine without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_kit import CELL, ENVIRONMENT, without_tools
from torch import Tensor

from bench import autotune
from bench.autotune import Built, Candidate
from bench.matmul import find_nvcc
from bench.providers import Inputs
from bench.schema import Result, Row
from flash_ext.testing import gates

ROW = Candidate(128, 128, 128, 2, 2, ("false",))
CONFIG = """\
template <typename T, int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_, int kQStages_{more}>
struct ForwardConfig {{
}};

template <typename T>
struct Tiles<T, 64> {{
  using Forward = ForwardConfig<T, 64, 192, 128, 4, 2{value}>;
}};

template <typename T>
struct Tiles<T, 256> {{
  using Forward = ForwardConfig<T, 256, 128, 80, 2, 1{value}>;
}};
"""
NO_NVCC = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not found")


def test_rows_are_those_of_the_config() -> None:
    rows = autotune.present_rows(CONFIG.format(more="", value=""))
    assert rows == {64: Candidate(64, 192, 128, 4, 2), 256: Candidate(256, 128, 80, 2, 1)}
    rows = autotune.present_rows(CONFIG.format(more=", bool kTurns_", value=", true"))
    assert rows[64].others == ("true",)
    instances = (autotune.CSRC / "sm90" / "inst").glob("fwd_hdim*.cu")
    built = {int(path.stem.removeprefix("fwd_hdim")) for path in instances}
    assert set(autotune.present_rows(autotune.CONFIG.read_text(encoding="utf-8"))) == built


@pytest.mark.parametrize("old", ["kStages_", "struct ForwardConfig", "using Forward"])
def test_config_that_is_not_understood(old: str) -> None:
    text = CONFIG.format(more="", value="").replace(old, "other")
    with pytest.raises(ValueError, match="got"):
        autotune.present_rows(text)


def test_the_present_rows_may_fit() -> None:
    for row in autotune.present_rows(autotune.CONFIG.read_text(encoding="utf-8")).values():
        assert row.fits(), row
        assert autotune.neighbours(row, 2, 1)[0] == row
        assert len(autotune.neighbours(row, 2, 1)) > 1


def test_neighbours_differ_little_and_fit() -> None:
    one, two = (autotune.neighbours(ROW, changes, key_steps=3) for changes in (1, 2))
    assert one[0] == two[0] == ROW
    assert set(one) < set(two)
    assert len(set(two)) == len(two)
    assert replace(ROW, block_n=160) in one
    assert replace(ROW, block_n=176, q_stages=1) in two
    assert replace(ROW, block_n=176) not in two, "shared memory"
    assert replace(ROW, stages=1) not in two
    assert replace(ROW, block_m=192, block_n=80) in two
    assert replace(ROW, block_m=192, block_n=112) not in two, "registers of three consumers"
    for candidate in two:
        assert candidate.smem_bytes <= 227 * 1024
        changed = sum(a != b for a, b in zip(candidate.sizes, ROW.sizes, strict=True))
        assert changed <= 2


def test_limits_of_a_candidate() -> None:
    assert ROW.smem_bytes == (2 * 32 + 4 * 32) * 1024 + 1024
    assert ROW.registers == 64 + 64 + 32 + autotune.OTHER_REGISTERS
    assert {64, 128, 256} <= autotune.wgmma_columns()
    for misfit in ({"block_m": 64}, {"block_m": 256}, {"block_n": 72}, {"q_stages": 0}):
        assert not replace(ROW, **misfit).fits()


def test_source_of_a_candidate() -> None:
    source = replace(ROW, others=("true",)).source("float16")
    assert "ForwardConfig<__half, 128, 128, 128, 2, 2, true>;" in source
    assert "{{" not in source
    assert set(autotune.ELEMENTS) <= set(gates.MANGLED)


@NO_NVCC
def test_candidates_are_compiled_and_judged(tmp_path: Path) -> None:
    """One that fits, one whose registers cannot, one that a static assertion refuses."""
    large = Candidate(256, 192, 48, 2, 1, ROW.others)
    odd = replace(ROW, block_n=72)
    small = replace(ROW, head_dim=64, block_n=64)
    nvcc = find_nvcc()
    assert nvcc is not None
    built = autotune.build(nvcc, tmp_path, "bfloat16", [small, large, odd], jobs=2)
    assert [one.candidate for one in built] == [small, large, odd]
    assert (built[0].fault, built[0].smem_bytes) == ("", small.smem_bytes)
    assert callable(autotune.load(built[0].library))
    assert re.search("registers|serialised", built[1].fault)
    assert "P V takes 16 keys a step" in built[2].fault


def test_reports_are_judged() -> None:
    head = "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
    frame = "    0 bytes stack frame, {0} bytes spill stores, {0} bytes spill loads\n"
    used = "ptxas info    : Used 168 registers, used 1 barriers\n"
    good = head + frame.format(0) + used
    assert autotune.report_fault(good) == ""
    assert autotune.report_fault(head + frame.format(8) + used) == "16 bytes of registers spill"
    said = "ptxas info    : (C7519) warpgroup.arrive is injected\n"
    assert autotune.report_fault(said + said + good) == "serialised: C7519"


def forward(harm: float) -> autotune.Forward:
    """A candidate that multiplies attention by a factor."""

    def call(x: Inputs, out: Tensor) -> None:
        q, k, v = (t.detach().transpose(1, 2) for t in (x.q, x.k, x.v))
        attend = torch.nn.functional.scaled_dot_product_attention
        out.copy_(harm * attend(q, k, v, is_causal=x.causal).transpose(1, 2))

    return call


def test_a_cell_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_tools(monkeypatch)
    cell = replace(CELL, dtype="float32", B=1, Hq=2, Hk=2, Sq=48, Sk=48, D=16, Dv=16, causal=True)

    def broken(x: Inputs, out: Tensor) -> None:
        raise RuntimeError("an illegal address")

    forwards = {"good": forward(1.0), "bad": forward(1.01), "nan": forward(float("nan"))}
    results = autotune.run_cell(cell, forwards, torch.device("cpu"), rounds=2)
    assert [(r.provider, r.status, r.ms is None) for r in results] == [
        ("good", "ok", False), ("bad", "wrong", True), ("nan", "wrong", True)
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="D 16, third: RuntimeError: an illegal address"):
        autotune.run_cell(cell, {"third": broken}, torch.device("cpu"), rounds=1)


def test_table_is_sorted() -> None:
    wide, spilled, wrong = (replace(ROW, block_n=n) for n in (160, 144, 96))
    built = [Built(one, Path(), smem_bytes=one.smem_bytes) for one in (ROW, wide, wrong)]
    built.append(Built(spilled, Path(), "16 bytes of registers spill"))
    rows = []
    for S in (1024, 4096):
        cell = replace(CELL, Sq=S, Sk=S)
        rows += [Row(ENVIRONMENT, cell, Result(str(one), "ok", tflops=speed))
                 for one, speed in ((ROW, 600.0), (wide, 660.0))]  # fmt: skip
        rows.append(Row(ENVIRONMENT, cell, Result(str(wrong), "wrong")))
    rows.append(Row(ENVIRONMENT, replace(CELL, D=64), Result(str(ROW), "ok", tflops=1.0)))
    lines = autotune.table(ROW, built, rows).splitlines()
    found = [[word.strip() for word in line.split("|")[1:-1]] for line in lines]
    assert found[0] == ["D 128", "KiB", "full 1024", "full 4096", "geomean", "over present",
                        "remark"]  # fmt: skip
    assert found[2:] == [
        [str(wide), "225", "660", "660", "660.0", "1.100", ""],
        [str(ROW), "193", "600", "600", "600.0", "1.000", "present"],
        [str(wrong), "161", "–", "–", "–", "–", "wrong"],
        [str(spilled), "–", "–", "–", "–", "–", "16 bytes of registers spill"],
    ]
    assert "–" in autotune.table(ROW, built, [])


@NO_NVCC
def test_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles, times nothing, shows the table."""
    without_tools(monkeypatch)
    monkeypatch.setattr(autotune, "neighbours", lambda row, *_: [row])
    assert autotune.main(["--device", "cpu", "--head-dims", "64"]) == 0
    assert "present" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--head-dims", "40"], ["--dtype", "float32"]])
def test_arguments_that_nothing_serves(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        autotune.main(["--device", "cpu", *arguments])
    assert "expected" in capsys.readouterr().err
