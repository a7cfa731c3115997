"""The test kernels of `csrc/ptx` compile for sm_90a as they should; needs nvcc and no GPU."""

from __future__ import annotations

import re

import pytest
import torch
from ptx_kit import SOURCES, Built, build_all, find_nvcc, slab_image

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not found")
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def complaints(built: Built) -> list[str]:
    """Serialised products (C75xx) and kernels that keep registers in memory."""
    said = [line for line in built.report.splitlines() if re.search(r"\(C75\d\d\)", line)]
    return [*said, *(f"{name}: {use}" for name, use in built.uses().items() if use != CLEAN)]


@needs_nvcc
@pytest.mark.parametrize("name", SOURCES)
def test_no_serialised_product_and_no_spill(name: str) -> None:
    built = build_all()[name]
    assert built.uses(), built.report
    assert not complaints(built)


def test_complaints_are_seen() -> None:
    report = (
        "ptxas info    : (C7519) warpgroup.arrive is injected\n"
        "ptxas info    : Function properties for bad\n"
        "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        f"ptxas info    : Function properties for good\n    {CLEAN}\n"
    )
    assert [line.split()[0] for line in complaints(Built(library=None, report=report))] == [
        "ptxas",
        "bad:",
    ]


@pytest.mark.parametrize("slab", [64, 32])
def test_image_places_every_chunk_once(slab: int) -> None:
    """The layout of the images against the address bits that the hardware combines."""
    rows, cols = 16, 96
    x = torch.arange(rows * cols, dtype=torch.int16).view(rows, cols)
    image = slab_image(x, slab)
    line = 2 * slab  # bytes
    mask = 7 if slab == 64 else 3
    for row in range(rows):
        for col in range(cols):
            address = (col // slab * rows + row) * line + col % slab * 2
            address ^= (address >> 7 & mask) << 4
            assert image[address // 2] == x[row, col]
