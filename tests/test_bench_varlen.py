"""The benchmark of packed sequences on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_kit import without_tools

from bench import schema, varlen
from bench.kernels import OURS
from bench.schema import Cell

DRY = ["--device", "cpu", "--dtype", "float32", "--head-dims", "16", "--tokens", "600",
       "--hidden", "64", "--rounds", "2"]  # fmt: skip


@pytest.mark.parametrize("workload", ["equal-128", "one-long"])
def test_dry_run(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    without_tools(monkeypatch)
    path = tmp_path / "a.csv"
    assert varlen.main([*DRY, "--group", "2", "--workloads", workload, "--out", str(path)]) == 0
    rows = schema.read_csv(path)
    providers = [OURS, varlen.DENSE] if workload == "equal-128" else [OURS]
    assert [row.result.provider for row in rows] == providers * 4
    assert {row.result.status for row in rows} == {"ok"}
    assert capsys.readouterr().out.count(f"| {workload} ") == 4


def test_flops_are_those_of_the_sequences() -> None:
    cell = Cell("forward", "bfloat16", True, B=2, Hq=4, Hk=2, Sq=30, Sk=30, D=8, Dv=8)
    parts = [Cell(*("forward", "bfloat16", True, 1, 4, 2, S, S, 8, 8)).flops for S in (10, 30)]
    assert varlen.flops(cell, [10, 30]) == pytest.approx(sum(parts))


@pytest.mark.parametrize("tokens", [1, 100, 16384])
def test_mixed_lengths(tokens: int) -> None:
    lengths = varlen.mixed(tokens)
    assert sum(lengths) == tokens
    assert all(1 <= length <= 8192 for length in lengths)
