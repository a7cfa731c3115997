"""Fixtures of all tests: where tensors live, and what needs hardware."""

from __future__ import annotations

import pytest
import torch

GPUS = torch.cuda.device_count()
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if GPUS else [])]
NEEDED = {"gpu": 1, "multi_gpu": 2}  # CUDA devices by marker


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test's tensors live: the CPU and, if there is one, a GPU (marker `gpu`)."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, count in NEEDED.items():
            if item.get_closest_marker(marker) and count > GPUS:
                noun = "device" if count == 1 else "devices"
                item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA {noun}"))
