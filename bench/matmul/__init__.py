"""What mma.sync gives without attention around it: a matrix product of the project's own.

    python -m bench.matmul

Compiles `matmul.cu`, which is made of the same pieces as the generic attention kernels, with nvcc
for the visible GPU, checks C = A Bᵀ in bf16 against `torch.matmul` and times both in turn. The best
tile is the ceiling that the generic kernels are measured by; cuBLAS uses what the GPU has beyond
mma.sync. Tiles are rows of A x rows of B x columns x stages; on 132 multiprocessors
`--shape 8448 8192 8192` fills every wave of tiles of 128 x 256.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import cli, tables
from flash_ext.testing import gates, timing

SOURCE = Path(__file__).with_name("matmul.cu")
CSRC = SOURCE.parents[2] / "csrc"
CUBLAS = "torch.matmul"
LIMIT = 1e-2  # relative error (Frobenius norm): both round a sum in fp32 to bf16


@dataclass(frozen=True)
class Tile:
    """A tile of C, rows of A by rows of B, made from `block_k` columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    stages: int  # tiles of A and B in shared memory

    @classmethod
    def of(cls, text: str) -> Tile:
        """The tile of a text such as 128x256x64x3."""
        parts = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
        tile = cls(*map(int, parts.groups())) if parts else None
        if tile is None or tile.block_m % 64 or tile.block_n % 64 or tile.block_k % 32:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected multiples of 64, 64 and 32 and a number of stages, such "
                "as 128x256x64x3"
            )
        if 0 in (tile.block_m, tile.block_n, tile.block_k) or tile.stages < 2:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected a tile and two stages or more"
            )
        return tile

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}x{self.stages}"

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: the stages, or C on its way out, in 16 bits."""
        stage = 2 * (self.block_m + self.block_n) * self.block_k
        return max(self.stages * stage, 2 * self.block_m * self.block_n)

    def unfit(self, shape: Sequence[int]) -> str:
        """Why a product of (M, N, K) is not whole tiles; empty if it is."""
        steps = (self.block_m, self.block_n, self.block_k)
        for name, size, step in zip("MNK", shape, steps, strict=True):
            if size % step:
                return f"{name}: got {size}, expected a multiple of {step} for tile {self}"
        return ""


TILES = [Tile(128, 256, 64, 3), Tile(256, 128, 64, 3), Tile(128, 256, 32, 4), Tile(128, 128, 32, 4)]


def find_nvcc() -> str | None:
    """Path of nvcc by FLASH_EXT_NVCC, CUDA_HOME, CUDA_PATH or PATH, or None."""
    named = os.environ.get("FLASH_EXT_NVCC")
    if named:
        return shutil.which(named)
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [*(str(Path(home, "bin")) for home in homes if home), os.environ.get("PATH", "")]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def architecture(capability: tuple[int, int]) -> str:
    """What nvcc calls a compute capability; 9.0 is sm_90a, as for the attention kernels."""
    return "sm_{}{}".format(*capability) + ("a" if capability == (9, 0) else "")


def compile_tile(nvcc: str, tile: Tile, arch: str, library: Path) -> gates.Usage:
    """Compile the kernel of a tile into a shared library; what ptxas says of its registers.

    Raises:
        RuntimeError: nvcc failed, or registers spill.
    """
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    defines = [f"-D{name}={size}" for name, size in {**sizes, "STAGES": tile.stages}.items()]
    command = [
        nvcc, "-std=c++17", "-O3", f"-arch={arch}", "-lineinfo", "-Xptxas", "-v", *defines,
        "-I", str(CSRC), "-cudart", "static", "-shared", "-Xcompiler", "-fPIC",
        "-o", str(library), str(SOURCE),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed for tile {tile}:\n{done.stderr.strip()}")
    usage = next(gates.usages(done.stdout + done.stderr))
    if usage.spills:
        raise RuntimeError(f"tile {tile}: {usage.spills} bytes of registers spill")
    return usage


def product(library: Path) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The function (A, B, C) of a compiled tile: C = A Bᵀ on the current stream."""
    loaded = ctypes.CDLL(str(library))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    loaded.matmul.argtypes = [*[pointer] * 3, *[integer] * 3, pointer]
    loaded.error_text.restype = ctypes.c_char_p

    def multiply(a: Tensor, b: Tensor, c: Tensor) -> None:
        stream = torch.cuda.current_stream(a.device).cuda_stream
        addresses = (t.data_ptr() for t in (a, b, c))
        error = loaded.matmul(*addresses, a.shape[0], b.shape[0], a.shape[1], stream)
        if error:
            raise RuntimeError(f"the launch failed: {loaded.error_text(error).decode()}")

    return multiply


def measure(
    tiles: Sequence[Tile], nvcc: str, shape: Sequence[int], device: torch.device, rounds: int
) -> str:
    """Compile, check and time; the table.

    Raises:
        RuntimeError: a tile does not compile, cannot be launched or is wrong.
    """
    M, N, K = shape
    like = {"device": device, "dtype": torch.bfloat16}
    a, b = torch.randn(M, K, **like), torch.randn(N, K, **like)
    expected = a @ b.T
    calls: dict[str, timing.Call] = {CUBLAS: lambda: torch.matmul(a, b.T)}
    registers = {}
    arch = architecture(torch.cuda.get_device_capability(device))
    with tempfile.TemporaryDirectory() as folder:
        for tile in tiles:
            library = Path(folder, f"{tile}.so")
            registers[str(tile)] = compile_tile(nvcc, tile, arch, library).registers
            multiply, c = product(library), torch.full((M, N), float("nan"), **like)
            multiply(a, b, c)
            error = ((c.double() - expected.double()).norm() / expected.double().norm()).item()
            if not error <= LIMIT:
                raise RuntimeError(f"tile {tile}: relative error {error:.2g}, limit {LIMIT}")
            calls[str(tile)] = partial(multiply, a, b, c)
        timed = timing.interleaved(calls, device=device, rounds=rounds)
    speeds = {name: 2e-9 * M * N * K / t.median for name, t in timed.items()}
    body = [
        [name, str(registers.get(name, "–")), f"{timed[name].median:.3f}", f"{speed:.0f}",
         f"{100 * speed / speeds[CUBLAS]:.0f} %"]
        for name, speed in sorted(speeds.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    return tables.render(["product", "registers", "ms", "TFLOP/s", "of torch.matmul"], body)


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("matmul", __doc__)
    p.add_argument("--shape", type=cli.positive, nargs=3, metavar=("M", "N", "K"),
                   default=[8192, 8192, 8192])  # fmt: skip
    p.add_argument("--tiles", type=Tile.of, nargs="+", default=TILES)
    p.add_argument("--rounds", type=cli.positive, default=20)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    for tile in args.tiles:
        if tile.unfit(args.shape):
            p.error(tile.unfit(args.shape))
    if not torch.cuda.is_available():
        p.error("no CUDA device is visible")
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: nvcc is not found by FLASH_EXT_NVCC, CUDA_HOME, CUDA_PATH or PATH")
        return 0
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {nvcc}", flush=True)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    tiles = [tile for tile in args.tiles if tile.smem_bytes <= limit]
    for tile in args.tiles:
        if tile not in tiles:
            print(f"tile {tile} left out: {tile.smem_bytes} bytes of shared memory of {limit}")
    try:
        timing.refuse_attached_tool()
        table = measure(tiles, nvcc, args.shape, device, args.rounds)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print("{} x {} x {}, bf16\n".format(*args.shape))
    print(table, end="")
    return 0
