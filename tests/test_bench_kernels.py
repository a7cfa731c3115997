"""The benchmarks of kernels, memory and the plain product on a machine without a GPU."""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench_kit import CELL, ENVIRONMENT, TINY, without_tools

from bench import cli, kernels, matmul, memory, schema, tables
from bench.providers import Inputs, Pass
from bench.schema import Result, Row


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return without_tools(monkeypatch)


def test_kernels_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    assert kernels.main([*TINY, "--group", "2", "--out", str(path)]) == 0
    rows = schema.read_csv(path)
    found = [(row.cell.pass_name, row.result.provider) for row in rows if row.cell.causal]
    backward = ["sdpa-flash", "flash_ext", "flash_ext_deterministic"]
    assert found == [("forward", name) for name in backward[:2]] + [
        ("backward", name) for name in backward
    ]
    assert {(row.result.status, row.result.rounds) for row in rows} == {("ok", 2)}
    assert [row.result.error for row in rows if row.result.provider == "sdpa-flash"] == 4 * [0.0]
    assert "| backward |  16 | causal |  48 |   2 |   4/2 |" in capsys.readouterr().out


def test_a_wrong_kernel_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    prepare = kernels.prepare_ours
    for harm, shown in ((1.01, "0.01"), (float("nan"), "nan")):

        def harmed(deterministic: bool, pass_name: str, x: Inputs, harm: float = harm) -> Pass:
            call = prepare(deterministic, pass_name, x)
            return lambda: {name: harm * result for name, result in call().items()}

        no_tool.setattr(kernels, "prepare_ours", harmed)
        path = tmp_path / "a.csv"
        arguments = ["--passes", "forward", "--masks", "full", "--out", str(path)]
        assert kernels.main([*TINY, *arguments]) == 1
        results = [row.result for row in schema.read_csv(path)]
        assert [(r.status, r.ms is None) for r in results] == [("ok", False), ("wrong", True)]
        message = f"flash_ext, wrong in forward D16 full S48: relative error {shown} against"
        assert message in capsys.readouterr().out


def test_kernel_tables() -> None:
    rows = []
    for pass_name, S, ratio, cost in (
        ("forward", 1024, 1.1, 1.0), ("backward", 1024, 0.5, 3.0),
        ("backward", 4096, 0.8, 1.2), ("backward", 16384, 1.25, 1.5),
    ):  # fmt: skip
        cell = replace(CELL, pass_name=pass_name, Sq=S, Sk=S)
        speeds = {"sdpa-flash": 300.0, "flash_ext": 300 * ratio}
        if pass_name == "backward":
            speeds["flash_ext_deterministic"] = 300 * ratio / cost
        rows += [Row(ENVIRONMENT, cell, Result(n, "ok", tflops=s)) for n, s in speeds.items()]
    cells = kernels.cells_table(rows).splitlines()
    assert [word.strip() for word in cells[4].split("|")[1:-1]] == [
        *("backward", "128", "full", "4096", "4", "16", "240", "300", "0.800", "0.667"),
    ]
    assert "| 0.500 | full S1024 |     3 |" in kernels.summary(rows).replace("   0.500", " 0.500")
    assert "0.794" in kernels.summary(rows)  # (0.5 * 0.8 * 1.25) ** (1 / 3)
    *_, whole = kernels.determinism(rows).splitlines()
    assert [word.strip() for word in whole.split("|")[1:-1]] == ["all", "1.342", "1.500", "2"]
    assert kernels.determinism(rows[:2]) == ""


OTHER_BUILD = """
def build_info():
    return {"version": VERSION, "archs": ["80"], "nvcc": "1", "flags": "", "head_dims": [64],
            "digests": {"csrc": "another"}}
def kernels():
    return []
"""


def use_extension(path: Path, before: str = "") -> str:
    code = (
        "import sys; from pathlib import Path; import flash_ext; from bench import cli\n"
        f"{before}\ncli.use_extension(Path({str(path)!r})); print(flash_ext.build_info().digests)"
    )
    root = Path(cli.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_extension_of_another_build(tmp_path: Path) -> None:
    path = tmp_path / "other.py"  # stands for a shared library: found and loaded the same way
    path.write_text(OTHER_BUILD.replace("VERSION", repr(cli.flash_ext.__version__)))
    assert use_extension(path) == "{'csrc': 'another'}\n"
    assert "already in use" in use_extension(path, before="flash_ext.build_info()")
    path.write_text(OTHER_BUILD.replace("VERSION", "'0.0'"))
    assert "ImportError" in use_extension(path)
    assert "is of version 0.0" in use_extension(path)
    assert "not the file of a Python extension" in use_extension(tmp_path / "other.txt")


def test_memory_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    where = ["--device", "cpu", "--dtype", "float32", "--rounds", "1", "--out", str(path)]
    what = ["--head-dims", "16", "--seqlens", "32", "64", "--heads", "4", "--group", "2"]
    assert memory.main([*where, *what]) == 0
    cells = {row.cell for row in schema.read_csv(path)}
    assert {(c.pass_name, c.B, c.Hq, c.Hk, c.Sq, c.causal) for c in cells} == {
        (pass_name, 1, 4, 2, S, True) for pass_name in ("forward", "both") for S in (32, 64)
    }
    assert "MiB beyond inputs and results" in capsys.readouterr().out


def test_memory_that_ran_out_is_explained() -> None:
    long = replace(CELL, B=1, Hq=8, Sq=131072, Sk=131072)
    failed = Result("plain", "failed", "OutOfMemoryError: CUDA out of memory. Tried to allocate")
    reason = "out of memory: one score table takes 256 GiB, and it keeps several"
    assert memory.explained(long, failed).reason == reason
    rows = [Row(ENVIRONMENT, CELL, Result("plain", "ok", extra_mib=1.0))]
    rows += [Row(ENVIRONMENT, long, memory.explained(long, failed))]
    assert tables.memory(rows).splitlines()[3].split("|")[7:10] == [
        *(" out of memory ", "     4.0 ", "          262144 ")
    ]
    other = Result("plain", "failed", "RuntimeError: no")
    assert memory.explained(long, other) == other


def test_memory_beyond_the_formula_is_noticed() -> None:
    found = (("flash_ext", 1.0), ("flash_ext", 1.1), ("plain", 99.0))
    rows = [Row(ENVIRONMENT, CELL, Result(name, "ok", extra_mib=extra)) for name, extra in found]
    assert list(memory.excesses(rows)) == [
        "forward D128 full S4096: flash_ext needs 1.1 MiB, formula 1.0"
    ]


def test_matmul_tiles() -> None:
    tile = matmul.Tile.of("128x256x64x3")
    assert (tile, str(tile)) == (matmul.Tile(128, 256, 64, 3), "128x256x64x3")
    assert tile.smem_bytes == 3 * 2 * (128 + 256) * 64
    assert tile.unfit((256, 512, 64)) == ""
    assert (
        tile.unfit((256, 512, 96)) == "K: got 96, expected a multiple of 64 for tile 128x256x64x3"
    )
    assert [matmul.architecture(c) for c in ((8, 6), (9, 0))] == ["sm_86", "sm_90a"]
    for text in ("128x256x64", "96x256x64x3", "128x256x64x1", "0x256x64x3", "128x256x16x3"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}', expected"):
            matmul.Tile.of(text)


def test_matmul_compiles_without_spills(tmp_path: Path) -> None:
    nvcc = matmul.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found")
    library = tmp_path / "a.so"
    usage = matmul.compile_tile(nvcc, matmul.TILES[0], "sm_90a", library)
    assert 128 < usage.registers <= 255  # 128 hold the warp's part of C
    assert ctypes.CDLL(str(library)).matmul


def test_memory_by_hand() -> None:
    rows = 4 * 16 * 4096
    assert CELL.score_table_bytes == rows * 4096 * 2
    assert replace(CELL, dtype="float32").score_table_bytes == rows * 4096 * 4
    assert CELL.workspace_bytes == 4 * rows  # lse
    assert replace(CELL, pass_name="backward").workspace_bytes == 4 * rows * (1 + 128)  # delta, dQ
    assert replace(CELL, pass_name="both", D=72).workspace_bytes == 4 * rows * (2 + 80)
    grouped = replace(CELL, pass_name="backward", Hk=1, Dv=72)  # at most: dK and dV as well
    assert grouped.workspace_bytes == 4 * rows * (1 + 128) + 4 * grouped.B * grouped.Sk * (128 + 80)
