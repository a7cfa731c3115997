"""What the tests of the benchmark tools share; importing it skips where there are no benchmarks."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Last, so that an installed flash_ext stays the one under test.
sys.path.append(str(Path(__file__).resolve().parents[1]))
if find_spec("bench") is None:
    pytest.skip("the benchmarks are not part of this installation", allow_module_level=True)

from bench.schema import Cell, Environment
from flash_ext.testing import timing

ENVIRONMENT = Environment(
    date="2026-01-02 03:04 UTC", card="A card, with a comma", driver="1.2", torch="2.11",
    cudnn="91900", flash_ext="0.1", archs="80;90a", nvcc="13.0", digest="0123456789abcdef0123",
)  # fmt: skip
CELL = Cell("forward", "bfloat16", False, B=4, Hq=16, Hk=16, Sq=4096, Sk=4096, D=128, Dv=128)
TINY = ["--device", "cpu", "--dtype", "float32", "--head-dims", "16", "--seqlens", "48",
        "--tokens", "96", "--hidden", "64", "--rounds", "2"]  # fmt: skip
TOOLS = [*timing.TOOL_VARIABLES, "CUDA_LAUNCH_BLOCKING"]


def without_tools(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that no profiler or sanitizer has touched, whatever runs these tests."""
    for name in {*TOOLS, *(n for n in os.environ if n.startswith(tuple(TOOLS)))}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
