"""The benchmark tools on a machine without a GPU: formulas, CSV, reports, refusals, a dry run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_kit import CELL, ENVIRONMENT, TINY, TOOLS, without_tools

from bench import (
    attention,
    check,
    kernels,
    matmul,
    memory,
    profile,
    providers,
    report,
    schema,
    tables,
)
from bench.schema import Cell, Result, Row
from flash_ext.testing import timing


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return without_tools(monkeypatch)


def synthetic_rows() -> list[Row]:
    rows = []
    masks, lengths = (False, True), (1024, 4096)
    for pass_name, causal, S in itertools.product(("forward", "backward"), masks, lengths):
        cell = replace(CELL, pass_name=pass_name, causal=causal, Sq=S, Sk=S, B=16384 // S)
        results = [
            Result(name, "ok", "", 0.004, 1e-9 * cell.flops / speed, 1.0, 2.0, 20, speed,
                   matmul_tflops=800.0, matmul_share=speed / 800, extra_mib=extra)
            for name, speed, extra in [("flash_ext", 480.0, 1.0), ("sdpa-flash", 320.0, 1.0),
                                       ("sdpa-cudnn", 600.0, 2.5)]
        ]  # fmt: skip
        results += [Result("fa4", "unavailable", "flash_attn.cute: no such module")]
        rows += [Row(ENVIRONMENT, cell, r) for r in attention.with_best_peer(results)]
    return rows


def test_flops_by_hand() -> None:
    # Two products of 4·16·4096² scores with 128 dims each, two operations per element.
    assert CELL.flops == 4 * 4 * 16 * 4096 * 4096 * 128
    assert replace(CELL, causal=True).flops == CELL.flops / 2
    assert replace(CELL, pass_name="backward").flops == 2.5 * CELL.flops
    assert replace(CELL, pass_name="both").flops == 3.5 * CELL.flops
    assert replace(CELL, D=192).flops == CELL.flops * (192 + 128) / 256
    assert replace(CELL, Hk=2).flops == CELL.flops


@pytest.mark.parametrize(
    ("D", "S", "group", "expected"),
    [(64, 1024, 1, (16, 32, 32)), (128, 16384, 8, (1, 16, 2)), (96, 131072, 1, (1, 21, 21))],
)
def test_cell_conventions(D: int, S: int, group: int, expected: tuple[int, int, int]) -> None:
    cell = schema.make_cell(pass_name="forward", dtype="bfloat16", mask="causal", D=D, S=S,
                            tokens=16384, hidden=2048, group=group)  # fmt: skip
    assert (cell.B, cell.Hq, cell.Hk) == expected
    assert cell.causal
    assert (cell.Sq, cell.Sk, cell.Dv) == (S, S, D)


def test_csv_round_trip(tmp_path: Path) -> None:
    rows = synthetic_rows()
    rows[0] = replace(rows[0], result=replace(rows[0].result, ms=0.125, reason='a "quoted", one'))
    first, second = tmp_path / "deep" / "a.csv", tmp_path / "b.csv"
    schema.write_csv(first, rows)
    read = schema.read_csv(first)
    assert read[0] == rows[0]
    assert [(r.environment, r.cell) for r in read] == [(r.environment, r.cell) for r in rows]
    schema.write_csv(second, read)
    assert first.read_bytes() == second.read_bytes()


def test_csv_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("card,ms\nx,1\n")
    with pytest.raises(ValueError, match=r"a\.csv: got columns \['card', 'ms'\], expected"):
        schema.read_csv(path)
    schema.write_csv(path, synthetic_rows())
    path.write_text(path.read_text() + "cut,off\n")
    with pytest.raises(ValueError, match=r"a\.csv:34: got 2 fields"):
        schema.read_csv(path)
    schema.write_csv(path, synthetic_rows())
    path.write_text(path.read_text().replace(",False,", ",no,", 1))
    with pytest.raises(ValueError, match=r"a\.csv:2: cannot read a field: 'no'"):
        schema.read_csv(path)


def test_best_peer_is_the_fastest_other_one() -> None:
    results = {row.result.provider: row.result for row in synthetic_rows()[:4]}
    assert results["flash_ext"].best_peer == "sdpa-cudnn"
    assert results["flash_ext"].vs_best_peer == pytest.approx(0.8)
    assert results["sdpa-cudnn"].best_peer == "sdpa-flash"
    assert results["fa4"].vs_best_peer is None


def test_tables() -> None:
    rows = synthetic_rows()
    lines = tables.throughput(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [word.strip() for word in lines[2].split("|")[1:-1]] == [
        *("forward", "128", "full", "1024", "16", "16", "480", "320", "600"),
        *("0.80 sdpa-cudnn", "60 %"),
    ]
    ratios = tables.ratios(rows)
    assert ratios.count("1.500") == 4  # geometric mean and least, in two passes
    assert "D128 full S1024" in ratios
    assert tables.unmeasured(rows) == (
        "* fa4, unavailable in 8 cells: flash_attn.cute: no such module\n"
    )


def test_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, out, page = tmp_path / "h200.csv", tmp_path / "results", tmp_path / "page.md"
    schema.write_csv(source, synthetic_rows())
    page.write_text("before\n<!-- begin h200 -->\nold\n<!-- end h200 -->\nafter\n")
    assert report.main([str(source), "--out", str(out), "--into", str(page)]) == 0
    text = (out / "h200.md").read_text()
    assert "A card, with a comma" in text
    assert "csrc digest 0123456789abcdef," in text
    for line in tables.throughput(synthetic_rows()).splitlines():
        assert line in text
    names = {path.name for path in out.glob("*.png")}
    assert names == {
        f"h200-{pass_name}-{figure}.png"
        for pass_name in ("forward", "backward") for figure in ("tflops", "extra_mib")
    }  # fmt: skip
    assert all(f"({name})" in text for name in names)
    inserted = page.read_text()
    assert inserted.startswith("before\n<!-- begin h200 -->\nA card")
    assert inserted.endswith("\n<!-- end h200 -->\nafter\n")
    assert "old" not in inserted

    before = {path: path.read_bytes() for path in [page, *out.iterdir()]}
    assert report.main([str(source), "--out", str(out), "--into", str(page)]) == 0
    assert before == {path: path.read_bytes() for path in [page, *out.iterdir()]}


def test_report_refuses_mixed_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = synthetic_rows()
    rows[0] = replace(rows[0], environment=replace(ENVIRONMENT, card="another"))
    schema.write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(SystemExit) as stop:
        report.main([str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "rows of 2 runs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_insert_needs_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- end a -->\n<!-- begin a -->\n")
    with pytest.raises(ValueError, match="comes before"):
        report.insert(page, "a", "text")
    with pytest.raises(ValueError, match="expected one line '<!-- begin b -->'"):
        report.insert(page, "b", "text")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--providers", "fa9"], "invalid choice: 'fa9'"),
        (["--seqlens", "1k", "0"], "got '0', expected a positive integer"),
        (["--head-dims", "-64"], "got '-64'"),
        (["--seqlens", "1"], "--seqlens: got 1, expected at least 2"),
        (["--hidden", "8"], "hidden: got 8, expected at least the head dim 16"),
        (["--group", "3"], "group: got 3, expected a divisor of the 4 query heads"),
        (["--masks", "window"], "invalid choice: 'window'"),
    ],
)
def test_argument_errors(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_tool: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit) as stop:
        attention.main([*TINY, "--out", str(tmp_path / "a.csv"), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.csv").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is visible")
def test_no_device_is_said_clearly(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (attention, kernels, memory, matmul, profile)
    for main in (command.main for command in commands):
        with pytest.raises(SystemExit):
            main([])
        assert "no CUDA device is visible" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [*TOOLS, "NV_SANITIZER_INJECTION_PORT_BASE"])
def test_timing_is_refused_under_tools(variable: str, no_tool: pytest.MonkeyPatch) -> None:
    assert timing.attached_tool() is None
    no_tool.setenv(variable, "1")
    with pytest.raises(RuntimeError, match=f"timings refused.*{variable}"):
        timing.interleaved({"a": lambda: None}, device=torch.device("cpu"))
    with pytest.raises(SystemExit):
        attention.main(TINY)


def test_timing_is_refused_under_the_torch_profiler(no_tool: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert "PyTorch's profiler" in str(timing.attached_tool())
    assert timing.attached_tool() is None


def test_interleaving_order(no_tool: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = timing.interleaved(calls, device=torch.device("cpu"), rounds=3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert [(name, t.rounds) for name, t in found.items()] == [("a", 3), ("b", 3), ("c", 3)]


def test_quantiles() -> None:
    samples = [5.0, 1.0, 2.0, 4.0, 3.0, 6.0]
    assert timing.Timing.of(samples) == timing.Timing(3.5, 2.0, 5.0, 6)
    assert timing.quantile([7.0], 0.2) == 7.0
    with pytest.raises(ValueError, match="samples"):
        timing.quantile([], 0.5)


def test_graphs_need_a_cuda_device(no_tool: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got cpu, expected a CUDA device"):
        timing.graph_replay([lambda: None], device=torch.device("cpu"))


@pytest.mark.parametrize("causal", [False, True])
def test_slice_oracle(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TABLE_ELEMENTS", 7 * 2 * 40)  # seven rows at a time
    cell = Cell("both", "float32", causal, B=2, Hq=4, Hk=2, Sq=40, Sk=40, D=8, Dv=8)
    x = providers.make_inputs(cell, torch.device("cpu"))
    oracle = check.slice_oracle(x, gradients=True)
    good = providers.PROVIDERS["plain"].prepare("both", x)()
    found = check.errors(good, oracle)
    assert check.complaint(found, "float32") == ""
    for name in ("out", "dq", "dk", "dv"):
        for harm in (float("nan"), 100.0):
            bad = good[name].detach().clone()
            bad[-1, -1, -1, 3] = harm
            found = check.errors({**good, name: bad}, oracle)
            assert check.complaint(found, "float32").startswith(f"{name}: ")


def test_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    code = attention.main([*TINY, "--passes", "forward", "backward", "both", "--group", "2",
                           "--providers", *providers.PROVIDERS, "--out", str(path)])  # fmt: skip
    assert code == 0
    rows = schema.read_csv(path)
    assert len(rows) == 3 * 2 * len(providers.PROVIDERS)
    assert {row.result.status for row in rows} == {"ok", "unavailable"}
    for row in rows:
        ours = row.result.provider in ("flash_ext", "flash_ext_deterministic", "plain")
        assert (row.result.status == "ok") == ours, row
        assert ours or "needs a CUDA device" in row.result.reason
    assert "| forward" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    off = providers.Provider("plain", lambda q, k, v, causal: q + v, lambda cell, device: "")
    no_tool.setitem(providers.PROVIDERS, "plain", off)
    path = tmp_path / "a.csv"
    arguments = ["--passes", "forward", "--providers", "plain", "--out", str(path)]
    assert attention.main([*TINY, *arguments]) == 1
    results = [row.result for row in schema.read_csv(path)]
    assert [(result.status, result.ms) for result in results] == 2 * [("wrong", None)]
    assert "plain wrong: out: relative error" in capsys.readouterr().out
