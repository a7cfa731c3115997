"""The ladder's formulas, its reader of counters and its page, on a machine without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_kit import CELL, ENVIRONMENT, without_tools

from bench import ladder, ladder_bytes, ladder_report, ncu, schema
from bench.ladder_bytes import Tile
from bench.schema import Cell, Result, Row
from flash_ext import classic

SQUARE = replace(CELL, B=1, Hq=2, Hk=2, Sq=256, Sk=256, D=64, Dv=64)
N, D, H = 256, 64, 2


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return without_tools(monkeypatch)


def test_memory_bytes() -> None:
    once = H * 4 * N * D * 2
    assert ladder_bytes.compulsory(SQUARE) == once
    assert ladder_bytes.standard_elements(SQUARE) == H * (4 * N * D + 4 * N * N)
    assert ladder_bytes.dram("three_pass", SQUARE) == once + H * (20 * N * N + 20 * N)
    assert ladder_bytes.dram("two_pass", SQUARE) == once + H * (12 * N * N + 16 * N)
    for rung in ("fa1", "pipelined"):
        assert ladder_bytes.dram(rung, SQUARE) == once
    assert ladder_bytes.dram("flash_ext", SQUARE) == once + H * 4 * N  # lse
    padded = replace(SQUARE, Sk=250)
    assert ladder_bytes.table_elements(padded) == H * N * 256
    assert ladder_bytes.score_bytes_moved("fa1", SQUARE) == 0
    assert ladder_bytes.dram("plain", SQUARE) == once + H * 8 * N * N


def test_memory_bytes_of_both_passes() -> None:
    both = replace(SQUARE, pass_name="both")
    tensors = H * N * D * 2 * (4 + 7)  # q, k, v, out; then q, k, v, dout, dq, dk, dv
    assert ladder_bytes.dram("plain", both) == tensors + H * 22 * N * N
    again = H * N * (2 * D + 4 + 8 * D)  # out, lse, dq in float32
    assert ladder_bytes.dram("flash_ext", both) == tensors + H * 4 * N + again


def test_bytes_from_l2() -> None:
    """With tiles of 64 x 128: four of queries, two of keys."""
    tile = ladder_bytes.tile_of("fa1", 64)
    assert tile == Tile(64, 128)
    row = 2 * D
    queries, keys = N * row, N * row
    swapped = H * (queries + 4 * 2 * keys)
    assert ladder_bytes.l2_to_sm("fa1_swapped", SQUARE, tile) == swapped
    fa1 = H * (2 * keys + 2 * queries + N * (4 * D + 8))
    assert ladder_bytes.l2_to_sm("fa1", SQUARE, tile) == fa1
    scores = 2 * queries + 4 * keys
    three = H * (scores + 4 * keys + 12 * N + 14 * N * N)
    assert ladder_bytes.l2_to_sm("three_pass", SQUARE, tile) == three
    two = H * (scores + 4 * keys + 8 * N + 8 * N * N)
    assert ladder_bytes.l2_to_sm("two_pass", SQUARE, tile) == two


def test_causal_tiles_are_counted_as_the_kernels_walk() -> None:
    causal = replace(SQUARE, causal=True)
    assert list(ladder_bytes.visits(causal, Tile(64, 128))) == [
        (64, 128, 1), (64, 128, 1), (64, 256, 2), (64, 256, 2),
    ]  # fmt: skip
    short = replace(causal, Sk=100)  # the first 156 rows see no key
    assert list(ladder_bytes.visits(short, Tile(64, 128))) == [
        (64, 0, 0), (64, 0, 0), (64, 100, 1), (64, 100, 1),
    ]  # fmt: skip
    one_round = 2 * 2 * D * 100 + N * 2 * D
    assert ladder_bytes.l2_to_sm("fa1", short, Tile(64, 128)) == H * one_round


@pytest.mark.parametrize("S", [64, 200, 1024])
@pytest.mark.parametrize("D", [64, 128])
def test_exchanged_loops_read_less_once_there_are_many_tiles(S: int, D: int) -> None:
    cell = replace(SQUARE, Sq=S, Sk=S, D=D, Dv=D)
    tile = ladder_bytes.tile_of("fa1", D)
    fa1, swapped, wide = (
        ladder_bytes.l2_to_sm(rung, cell, ladder_bytes.tile_of(rung, D))
        for rung in ("fa1", "fa1_swapped", "wide_rows")
    )
    assert fa1 >= 3 * 2 * S * D * H  # Q, K and V at least
    assert wide <= swapped
    if tile.block_n >= S:
        assert fa1 == H * 6 * S * D


def test_what_the_backward_pass_needs() -> None:
    assert ladder_bytes.saved_for_backward(SQUARE, keeps_table=True) == H * 2 * N * N
    assert ladder_bytes.saved_for_backward(SQUARE, keeps_table=False) == H * N * (2 * D + 4)


def ncu_output(*kernels: tuple[str, float, float]) -> str:
    names = list(ladder.COUNTERS)
    header = '"ID","Kernel Name",' + ",".join(f'"{name}"' for name in names)
    lines = [
        f'"{i}","{kernel}",' + ",".join([f'"{ns}"', f'"{read}"', *['"10"'] * (len(names) - 2)])
        for i, (kernel, ns, read) in enumerate(kernels)
    ]
    return "\n".join([header, '"",""', *lines])


def test_kernels_are_told_apart_by_markers() -> None:
    output = "==PROF== x\nladder item 0\nladder item 3\n" + ncu_output(
        ("spin_kernel", 1, 0), ("flash_scores", 1000, 50), ("flash_product", 3000, 70),
        ("spin_kernel", 1, 0), ("flash_fa1", 500, 5),
    )  # fmt: skip
    found = ladder.read_items(output)
    assert {number: len(kernels) for number, kernels in found.items()} == {0: 2, 3: 1}
    counted = ladder.summed(found[0], (64, 128))
    assert (counted.kernels, counted.us, counted.dram_read) == (2, 4.0, 120.0)
    assert (counted.dram_written, counted.tensor_busy, counted.blocks) == (20.0, 10.0, 10)
    assert (counted.block_m, counted.block_n) == (64, 128)
    with pytest.raises(ValueError, match="1 steps ran, and kernels of 2 were counted"):
        ladder.read_items(output.replace("ladder item 3\n", ""))
    with pytest.raises(ValueError, match="printed no table"):
        ladder.read_items("nothing")


def test_command_runs_what_is_counted() -> None:
    argv = ["--seqlens", "64", "--counter-seqlens", "1k", "4k", "--counter-batch-heads", "1", "16"]
    command = ladder.ncu_command("ncu", argv)
    assert command[command.index("--nvtx-include") + 1] == f"{ncu.RANGE}/"
    assert command[command.index("--metrics") + 1].split(",") == list(ladder.COUNTERS)
    again = ladder.parser().parse_args(command[command.index("--only-run") :])
    cells = ladder.counted_cells(again)
    forward = [(c.D, c.Sq, c.Hq) for c in cells if c.pass_name == "forward"]
    assert forward == [(D, S, n) for D in (64, 128) for S, n in ((1024, 16), (4096, 16), (1024, 1))]
    todo = ladder.items(cells, list(ladder.RUNGS))
    both = {rung for cell, rung in todo if cell.pass_name == "both"}
    assert both == {"flash_ext_generic", "flash_ext", "plain"}
    assert {rung for _, rung in todo} == set(ladder.RUNGS)


def test_steps_that_cannot_run_say_why() -> None:
    cpu = torch.device("cpu")
    assert ladder.RUNGS["fa1"].absent(SQUARE, cpu) == "needs a CUDA device, not cpu"
    cuda = torch.device("cuda", 0)
    assert ladder.RUNGS["fa1"].absent(replace(SQUARE, pass_name="both"), cuda) == (
        "has no backward pass"
    )


def test_table_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic, "free_bytes", lambda device: 2**30)
    large = replace(SQUARE, Sq=2**14, Sk=2**14)
    cuda = torch.device("cuda", 0)
    assert ladder.RUNGS["three_pass"].absent(large, cuda) == "out of memory: its table takes 3 GiB"
    assert ladder.RUNGS["three_pass"].absent(SQUARE, cuda) == ""
    assert ladder.RUNGS["fa1"].absent(large, cuda) == ""


def test_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    what = ["--rungs", "plain", "fa1", "flash_ext", "--head-dims", "64", "--seqlens", "48"]
    where = ["--device", "cpu", "--batch-heads", "2", "--rounds", "2", "--out", str(path)]
    assert ladder.main([*what, *where]) == 0
    found = [(r.cell.pass_name, r.result.provider, r.result.status) for r in schema.read_csv(path)]
    assert found == [
        ("forward", "plain", "ok"), ("forward", "fa1", "unavailable"),
        ("forward", "flash_ext", "ok"), ("both", "plain", "ok"), ("both", "flash_ext", "ok"),
    ]  # fmt: skip
    assert (
        "fa1, unavailable in forward D64 full S48: needs a CUDA device" in capsys.readouterr().out
    )
    assert not ladder.counters_path(path).exists()


STUB = """#!{python}
import sys
assert "--only-run" in sys.argv
sys.stdout.write({output!r})
sys.exit({code})
"""


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", 1, "may not read the GPU's counters"),
        ("==ERROR== no such option", 2, "ncu ended with 2"),
        ("", 0, "printed no table of counters"),
    ],
)
def test_a_profiler_that_fails_is_one_sentence(
    output: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "ncu"
    stub.write_text(STUB.format(python=sys.executable, output=output, code=code))
    stub.chmod(0o755)
    monkeypatch.setattr(ncu, "find_tool", lambda name: str(stub))
    args = ladder.parser().parse_args([])
    with pytest.raises(ValueError, match=said):
        ladder.count(args, [], ENVIRONMENT)
    monkeypatch.setattr(ncu, "find_tool", lambda name: None)
    with pytest.raises(ValueError, match="ncu is not found"):
        ladder.count(args, [], ENVIRONMENT)


def test_counted_steps_get_their_cell_and_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "ladder item 0\nladder item 1\n" + ncu_output(
        ("spin_kernel", 1, 0), ("softmax_kernel", 1000, 50),
        ("spin_kernel", 1, 0), ("flash_fa1", 500, 5),
    )  # fmt: skip
    stub = tmp_path / "ncu"
    stub.write_text(STUB.format(python=sys.executable, output=output, code=0))
    stub.chmod(0o755)
    monkeypatch.setattr(ncu, "find_tool", lambda name: str(stub))
    args = ladder.parser().parse_args(["--rungs", "plain", "fa1", "--passes", "forward"])
    rows = ladder.count(args, [], ENVIRONMENT)
    assert [(row.rung, row.counted.block_m, row.counted.block_n) for row in rows] == [
        ("plain", 0, 0), ("fa1", 64, 128),
    ]  # fmt: skip
    assert {(row.cell.Sq, row.cell.Hq, row.cell.D) for row in rows} == {(1024, 16, 64)}


def test_what_the_profiler_sees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker, then the step, both within the range; steps that cannot run are passed over."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("marker"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    small = replace(SQUARE, Sq=8, Sk=8)
    both = replace(small, pass_name="both")
    todo = [(small, "fa1"), (small, "plain"), (both, "flash_ext")]
    ladder.run_items(todo, torch.device("cpu"))
    assert seen == 2 * [f"push {ncu.RANGE}", "marker", "pop"]
    assert capsys.readouterr().out == "ladder item 1\nladder item 2\n"


def sample() -> tuple[list[Row], list[ladder.CountedRow]]:
    """Every step in a few cells, with figures that follow the formulas."""
    rows, counted = [], []
    for S in (256, 1024):
        for heads in (1, 16):
            cell = Cell("forward", "bfloat16", False, 1, heads, heads, S, S, 64, 64)
            for number, rung in enumerate(ladder.RUNGS):
                ms = 1e-6 * S * S * heads / (number + 1)
                rows.append(Row(ENVIRONMENT, cell, Result(
                    rung, "ok", error=0.0, ms=ms, ms_p20=ms, ms_p80=ms, rounds=2,
                    tflops=1e-9 * cell.flops / ms, extra_mib=1.0,
                )))  # fmt: skip
                tile = (64, 128) if rung in classic.ALGORITHMS else (0, 0)
                found = ladder.summed([dict.fromkeys(ladder.COUNTERS, 50.0)], tile)
                row = ladder.CountedRow(ENVIRONMENT, cell, rung, found)
                l2, dram = ladder_report.l2_formula(row), ladder_report.dram_formula(row)
                found = replace(found, l2_to_sm=1.2 * (l2 or 1), dram_read=float(dram or 1),
                                dram_written=0.0)  # fmt: skip
                counted.append(replace(row, counted=found))
    return rows, counted


def test_page_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, counted = sample()
    source = tmp_path / "ladder.csv"
    schema.write_csv(source, rows)
    ladder.write_counted(ladder.counters_path(source), counted)
    again = ladder.read_counted(ladder.counters_path(source))
    assert [(r.cell, r.rung, r.counted.blocks) for r in again] == [
        (r.cell, r.rung, r.counted.blocks) for r in counted
    ]
    assert ladder_report.main([str(source), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "ladder.md").read_text()
    plots = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert plots == {
        f"ladder-{name}.png" for name in ("steps", "time", "memory", "dram", "l2", "busy")
    }
    assert all(f"]({name})" in page for name in plots)
    assert "A card, with a comma" in page
    assert "(2.00x)" in page  # three_pass over plain
    assert "* forward D64 full S1024 H16, fa1: L2 to SM 1.20 of the formula" in page
    assert "DRAM 1.00" not in page
    schema.write_csv(source, rows)
    ladder.counters_path(source).write_text("a,b\n")
    with pytest.raises(SystemExit):
        ladder_report.main([str(source), "--out", str(tmp_path / "out")])
