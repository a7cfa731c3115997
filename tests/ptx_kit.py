"""Compiles the kernels of `tests/ptx` and lays out shared memory as they expect it."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SOURCES = ("products", "sync", "tma", "wgmma")  # tests/ptx/*.cu
HOST = [CSRC / "common" / name for name in ("error.cpp", "tensor_map.cpp")]
FLAGS = [
    *("-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror,-fPIC"),
    *("-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-shared", "-cudart", "static"),
]
JOBS = 2
POISON = -1  # as bits: NaN in both 16-bit types


def find_nvcc() -> str | None:
    """nvcc by FLASH_EXT_NVCC, CUDA_HOME, CUDA_PATH or PATH."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", "")]
    named = os.environ.get("FLASH_EXT_NVCC")
    return shutil.which(named) if named else shutil.which("nvcc", path=os.pathsep.join(folders))


@dataclass(frozen=True)
class Built:
    """A shared library of test kernels and what ptxas said about them."""

    library: Path
    report: str

    def uses(self) -> dict[str, str]:
        """Stack and spills by kernel."""
        pattern = r"Function properties for (\S+)\n\s*(.*)"
        return dict(re.findall(pattern, self.report))


@lru_cache(maxsize=1)
def build_all() -> dict[str, Built]:
    """Every library by name, compiled once in a process."""
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc is not found"
    folder = Path(tempfile.mkdtemp(prefix="ptx_tests_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def build(name: str) -> Built:
        library = folder / f"{name}.so"
        source = ROOT / "tests" / "ptx" / f"{name}.cu"
        command = [nvcc, *FLAGS, f"-I{CSRC}", "-o", *map(str, [library, source, *HOST])]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        return Built(library, done.stdout)

    with ThreadPoolExecutor(JOBS) as pool:
        return dict(zip(SOURCES, pool.map(build, SOURCES), strict=True))


class Kernels:
    """The functions of one library; each launches, waits and raises what went wrong."""

    def __init__(self, name: str) -> None:
        self.library = ctypes.CDLL(str(build_all()[name].library))
        self.library.explain.restype = ctypes.c_char_p

    def code(self, function: str, *args: Any) -> int:
        """The error code of a call: tensors go as pointers, sequences as arrays of int64."""
        kept = [as_argument(arg) for arg in args]  # arrays live until the call has ended
        torch.cuda.synchronize()
        return int(getattr(self.library, function)(*kept))

    def call(self, function: str, *args: Any) -> None:
        error = self.code(function, *args)
        said = self.library.explain(error).decode() if error else ""
        assert error == 0, f"{function}: error {error}: {said}"


class TensorMapShape(ctypes.Structure):
    """`flash_ext::TensorMapShape`: innermost dimension first."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("box", ctypes.c_int32 * 4),
    )


def map_shape(x: Tensor, box: Sequence[int]) -> TensorMapShape:
    """The shape of a map over a (B, S, H, D) tensor in the order D, S, H, B."""
    order = (3, 1, 2, 0)
    sizes, strides = ([f[i] for i in order] for f in (x.shape, x.stride()))
    arrays = (ctypes.c_int64 * 4)(*sizes), (ctypes.c_int64 * 4)(*strides)
    return TensorMapShape(*arrays, (ctypes.c_int32 * 4)(*box))


def as_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    if isinstance(value, tuple):  # coordinates
        return (ctypes.c_int32 * len(value))(*value)
    if isinstance(value, list):  # sizes
        return (ctypes.c_int64 * len(value))(*value)
    return ctypes.c_int(value)


def slab_image(x: Tensor, slab_cols: int) -> Tensor:
    """The bits of a (rows, columns) tile of 16-bit elements in the order of shared memory.

    [slab][row][chunk of 8 columns], chunk c of row r at place c ^ (r % 8) in slabs of 64 columns
    and c ^ (r / 2 % 4) in slabs of 32. Columns that fill up the last slab are NaN. Shape
    (slabs * rows * slab_cols,), int16.
    """
    rows, cols = x.shape
    missing = -cols % slab_cols
    bits = torch.nn.functional.pad(x.contiguous().view(torch.int16), (0, missing), value=POISON)
    chunks = bits.view(rows, -1, slab_cols // 8, 8).transpose(0, 1)  # (slabs, rows, chunks, 8)
    row = torch.arange(rows, device=x.device)[:, None]
    key = row % 8 if slab_cols == 64 else row // 2 % 4
    place = torch.arange(slab_cols // 8, device=x.device)[None] ^ key  # (rows, chunks)
    return chunks.gather(2, place[None, :, :, None].expand(chunks.shape)).flatten()
