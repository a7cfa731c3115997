"""docs/road.md: its figures, and its numbers against the kernels and the formulas."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_kit import CELL

from bench import ladder_bytes
from flash_ext.classic import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("road.md", "road.zh.md")
)


@pytest.fixture
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("road_figures", ROOT / "docs/road_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["road_figures"] = module
    spec.loader.exec_module(module)
    return module


def test_figures_are_current(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert figures.main(["--check"]) == 0, "run: python docs/road_figures.py"
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    assert figures.main(["--check"]) == 1
    assert figures.main([]) == 0
    assert figures.main(["--check"]) == 0


def test_figure_of_passes_is_the_formula(figures: ModuleType) -> None:
    for name in ladder_bytes.WHOLE_TABLE:
        drawn = sum(count for _, count, _ in figures.TABLE_BYTES[name])
        table = CELL.B * CELL.Hq * CELL.Sq * CELL.Sk
        assert ladder_bytes.score_bytes_moved(name, CELL) // table == drawn
        assert f"{drawn} bytes" in ENGLISH
        assert f"{drawn} 字节" in CHINESE


def test_both_languages_have_the_same_content() -> None:
    """The same sections, figures, commands, formulas' lines and rows of tables."""

    def shape(text: str) -> list[object]:
        levels = re.findall(r"^(#+) ", text, flags=re.MULTILINE)
        pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
        commands = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        rows = [line.count("|") for line in text.splitlines() if line.startswith("|")]
        formulas = sum(line.startswith("    ") for line in text.splitlines())
        points = sum(line.startswith("* ") for line in text.splitlines())
        return [levels, pictures, commands, rows, formulas, points]

    assert shape(ENGLISH) == shape(CHINESE)
    names = [set(re.findall(r"`([^`\n]+)`", text)) for text in (ENGLISH, CHINESE)]
    assert names[0] - names[1] == names[1] - names[0] == set()
    assert set(ALGORITHMS) <= names[0]


def test_tile_sizes_are_those_of_the_page() -> None:
    """B_c = M / 4d and B_r = min(M / 4d, d) with M = 32,768."""
    row = ALGORITHMS["fa1"]
    for d in (64, 128):
        assert row.block_n[d] == 32768 // (4 * d)
        assert row.block_m == min(32768 // (4 * d), d)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_shared_memory_is_that_of_the_tiles(page: str) -> None:
    def kib(rung: str, d: int) -> float:
        row = ALGORITHMS[rung]
        stages = 2 if rung == "pipelined" else 1
        tiles = 2 * d * (row.block_m + 2 * stages * row.block_n[d])
        exchange = 4 * (4 * 64 * (32 + 8) + 2 * 4 * 64 + 2 * 64)
        return (tiles + exchange * (rung == "fa1")) / 1024

    for rung in ("fa1", "split_rows", "wide_rows", "pipelined"):
        (line,) = (x for x in page.splitlines() if re.match(rf"\| `{rung}`[^|]*\| [\d.]+ \|", x))
        assert [float(cell) for cell in line.split("|")[2:4]] == [kib(rung, 64), kib(rung, 128)]


def test_overflow_in_fp16_is_as_the_page_says() -> None:
    x = torch.tensor([12.0, 11.0, 3.0], dtype=torch.float16)
    unsafe, safe = x.exp(), (x - x.max()).exp()
    assert unsafe.tolist()[:2] == [float("inf"), 59872]
    assert (unsafe / unsafe.sum())[0].isnan()
    assert "inf, 59872, 20.1     exp / sum:  nan, 0, 0" in ENGLISH
    assert [round(p, 3) for p in (safe / safe.sum()).tolist()] == [0.731, 0.269, 0.0]
