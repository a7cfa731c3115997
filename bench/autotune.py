"""Forward tiles of the Hopper kernels: every one in csrc/sm90/config.h against its neighbours.

    python -m bench.autotune --head-dims 128

A neighbour differs from the row in kBlockM, kBlockN, kStages or kQStages, in at most `--changes` of
them and in kBlockN by up to `--key-steps` times 16 keys, as far as shared memory, registers and the
products in csrc/ptx/wgmma.h go. Each is compiled with nvcc into a small shared library; one that
spills registers, or whose products ptxas serialises (C75xx), is out. The others are compared with
PyTorch's FlashAttention-2, as relative errors of the whole, and timed in turn in one process. The
table is sorted by the geometric mean over all cells. `--device cpu` compiles and times nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TypeVar

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from bench import cli, kernels, schema, tables
from bench.check import WHOLE_LIMIT
from bench.matmul import CSRC, find_nvcc
from bench.providers import Inputs, make_inputs
from bench.schema import Cell, Environment, Result, Row
from flash_ext.testing import gates, timing

CONFIG = CSRC / "sm90" / "config.h"
PARAMETERS = ("kHeadDim", "kBlockM", "kBlockN", "kStages", "kQStages")
WARPGROUP_ROWS = 64
CONSUMERS = (2, 3)  # warpgroups, as config.h allows them
LEAST_REGISTERS = 24  # of the producer's threads
OTHER_REGISTERS = 24  # of a consumer, beside S, P and O: an estimate, ptxas has the last word
BARRIER_BYTES = 1024  # barriers and tiles, rounded up to the alignment of the buffers
KEY_STEP = 16  # keys
REASON = 80  # columns of the table

HOST_SOURCES = ("common/error.cpp", "common/device.cpp", "common/tensor_map.cpp",
                "sm90/tile_counters.cu")  # fmt: skip
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-gencode=arch=compute_90a,code=sm_90a", "-lineinfo",
         "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart", "static",
         f"-I{CSRC}"]  # fmt: skip
ELEMENTS = {"bfloat16": "__nv_bfloat16", "float16": "__half"}

# Tensors are (B, S, H, D), contiguous.
SOURCE = """\
#include "sm90/launch.cuh"

using Config = flash_ext::sm90::ForwardConfig<{arguments}>;

extern "C" __attribute__((visibility("default"))) int smem_bytes() {{
  return sizeof(Config::SharedStorage);
}}

extern "C" __attribute__((visibility("default"))) const char* explain(int error) {{
  return flash_ext::error_text(error);
}}

extern "C" __attribute__((visibility("default"))) int forward(
    void* q, void* k, void* v, void* out, int64_t batch, int64_t seqlen_q, int64_t seqlen_k,
    int heads_q, int heads_k, float scale, int causal, void* stream) {{
  constexpr int D = Config::kHeadDim;
  const auto view = [](void* data, int64_t seqlen, int64_t heads) {{
    return flash_ext::View{{data, seqlen * heads * D, heads * D, D}};
  }};
  flash_ext::ForwardParams params{{}};
  params.shape = {{batch, seqlen_q, seqlen_k, heads_q, heads_k, D, D}};
  params.window = {{-1, causal ? 0 : -1}};
  params.dtype = params.out_dtype = flash_ext::kDType<Config::Element>;
  params.softmax_scale = scale;
  params.q = view(q, seqlen_q, heads_q);
  params.k = view(k, seqlen_k, heads_k);
  params.v = view(v, seqlen_k, heads_k);
  params.out = view(out, seqlen_q, heads_q);
  return flash_ext::sm90::launch_forward<Config>(params, stream);
}}
"""

Forward = Callable[[Inputs, Tensor], None]  # writes the tensor
T = TypeVar("T")


@lru_cache(maxsize=1)
def wgmma_columns() -> frozenset[int]:
    """Columns of B that a product may have, so keys of a tile: what csrc/ptx/wgmma.h defines."""
    text = (CSRC / "ptx" / "wgmma.h").read_text(encoding="utf-8")
    found = re.findall(r"^FLASH_EXT_WGMMA_TYPES\((\d+),", text, flags=re.MULTILINE)
    return frozenset(map(int, found))


@dataclass(frozen=True)
class Candidate:
    """Arguments of ForwardConfig after the element type."""

    head_dim: int
    block_m: int  # query rows of a tile
    block_n: int  # key rows of a tile
    stages: int  # K and V tiles in shared memory
    q_stages: int  # Q tiles in shared memory
    others: tuple[str, ...] = ()  # further arguments, which stay those of the row

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.stages} stages, {self.q_stages} Q"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What neighbours differ in."""
        return self.block_m, self.block_n, self.stages, self.q_stages

    def source(self, dtype: str) -> str:
        """The translation unit of its library."""
        sizes = map(str, (self.head_dim, *self.sizes))
        arguments = ", ".join([ELEMENTS[dtype], *sizes, *self.others])
        return SOURCE.format(arguments=arguments)

    @property
    def smem_bytes(self) -> int:
        """Of a block: Q, K, V, and what goes with them."""
        rows = self.q_stages * self.block_m + 2 * self.stages * self.block_n
        return 2 * rows * self.head_dim + BARRIER_BYTES

    @property
    def registers(self) -> int:
        """Of a consumer's thread, about: S and O in fp32, P in 16 bits, and the rest."""
        return self.block_n // 2 + self.head_dim // 2 + self.block_n // 4 + OTHER_REGISTERS

    def fits(self) -> bool:
        """Whether shared memory and registers may do."""
        consumers = self.block_m // WARPGROUP_ROWS
        if self.block_m % WARPGROUP_ROWS or consumers not in CONSUMERS:
            return False
        spare = gates.REGISTER_FILE // gates.WARPGROUP - LEAST_REGISTERS
        return (
            self.registers <= min(spare // consumers, gates.REGISTERS)
            and self.smem_bytes <= gates.smem_limit("sm_90a")
            and self.block_n in wgmma_columns()
            and self.stages >= 2
            and self.q_stages >= 1
        )


def present_rows(text: str) -> dict[int, Candidate]:
    """Head dim -> the row of a text of config.h.

    Raises:
        ValueError: the text has no ForwardConfig of the known parameters, or no rows.
    """
    declared = re.search(r"template <typename T, ([^>]*)>\s*struct ForwardConfig\b", text)
    names = re.findall(r"\w+ (\w+?)_?(?:,|$)", declared[1]) if declared else []
    if tuple(names[: len(PARAMETERS)]) != PARAMETERS:
        raise ValueError(f"ForwardConfig: got parameters {names}, expected {list(PARAMETERS)}")
    rows = {}
    for arguments in re.findall(r"using Forward = ForwardConfig<T, ([^>]*)>;", text):
        words = re.split(r",\s*", arguments)
        head_dim, block_m, block_n, stages, q_stages = map(int, words[: len(PARAMETERS)])
        others = tuple(words[len(PARAMETERS) :])
        rows[head_dim] = Candidate(head_dim, block_m, block_n, stages, q_stages, others)
    if not rows:
        raise ValueError("config.h: got no row `using Forward = ForwardConfig<T, ...>`")
    return rows


def neighbours(row: Candidate, changes: int, key_steps: int) -> list[Candidate]:
    """The row itself, and what differs from it in at most `changes` parameters and may fit."""
    choices = product(
        sorted({row.block_m, *(WARPGROUP_ROWS * n for n in CONSUMERS)}),
        [row.block_n + KEY_STEP * step for step in range(-key_steps, key_steps + 1)],
        [row.stages - 1, row.stages, row.stages + 1],
        [1, 2],
    )
    found = [row]
    for sizes in choices:
        changed = sum(one != other for one, other in zip(sizes, row.sizes, strict=True))
        candidate = Candidate(row.head_dim, *sizes, row.others)
        if 1 <= changed <= changes and candidate.fits():
            found.append(candidate)
    return found


@dataclass(frozen=True)
class Built:
    """A candidate's library, or why there is none."""

    candidate: Candidate
    library: Path
    fault: str = ""
    smem_bytes: int = 0  # that a block asks for


def run_nvcc(arguments: Sequence[str | Path]) -> str:
    """What nvcc says.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed:\n{done.stdout.strip()}")
    return done.stdout


def compile_host(nvcc: str, folder: Path) -> list[Path]:
    """Objects that every library needs."""
    objects = []
    for name in HOST_SOURCES:
        objects.append(folder / f"{Path(name).stem}.o")
        run_nvcc([nvcc, *FLAGS, "-c", CSRC / name, "-o", objects[-1]])
    return objects


def compile_candidate(
    nvcc: str, folder: Path, objects: Sequence[Path], dtype: str, candidate: Candidate
) -> Built:
    """Compile a candidate; a report that no kernel of this project may have makes it unfit."""
    stem = "_".join(map(str, (candidate.head_dim, *candidate.sizes)))
    source, library = folder / f"forward_{stem}.cu", folder / f"forward_{stem}.so"
    source.write_text(candidate.source(dtype), encoding="utf-8")
    try:
        report = run_nvcc([nvcc, *FLAGS, "-shared", "-o", library, source, *objects])
    except RuntimeError as error:
        first = re.search(r"\b(?:error|fatal)\b[\s:]*(.*)", str(error))
        return Built(candidate, library, first[1][:REASON] if first else "nvcc failed")
    smem_bytes = int(ctypes.CDLL(str(library)).smem_bytes())
    return Built(candidate, library, report_fault(report), smem_bytes)


def report_fault(report: str) -> str:
    """What in ptxas's report makes a kernel unfit; empty if nothing does."""
    serialised = [re.search(r"C75\d\d", line) for line in gates.warnings(report)]
    if serialised:
        return "serialised: " + ", ".join(sorted({found[0] for found in serialised if found}))
    faults = [fault for usage in gates.usages(report) for fault in gates.usage_faults(usage)]
    return re.sub(r"^.*: ", "", faults[0]) if faults else ""


def load(library: Path) -> Forward:
    """The forward pass of a compiled library, on the current stream."""
    loaded = ctypes.CDLL(str(library))
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.forward.argtypes = [*[pointer] * 4, *[long] * 3, integer, integer, ctypes.c_float,
                               integer, pointer]  # fmt: skip
    loaded.explain.restype = ctypes.c_char_p

    def forward(x: Inputs, out: Tensor) -> None:
        B, Sq, Hq, D = x.q.shape
        tensors = (t.data_ptr() for t in (x.q, x.k, x.v, out))
        stream = torch.cuda.current_stream(out.device).cuda_stream
        error = loaded.forward(*tensors, B, Sq, x.k.shape[1], Hq, x.k.shape[2], D**-0.5,
                               int(x.causal), stream)  # fmt: skip
        if error:
            raise RuntimeError(f"the launch failed: {loaded.explain(error).decode()}")

    return forward


def run_cell(
    cell: Cell, forwards: dict[str, Forward], device: torch.device, rounds: int
) -> list[Result]:
    """Check and time every candidate in one cell.

    Raises:
        RuntimeError: one cannot be launched or fails; others cannot be relied on after that.
    """
    x = make_inputs(cell, device)
    expected = kernels.prepare_fa2("forward", x)()
    limit = WHOLE_LIMIT[cell.dtype]
    calls: dict[str, timing.Call] = {}
    results: dict[str, Result] = {}
    for name, forward in forwards.items():
        out = torch.full_like(expected["out"], float("nan")).contiguous()
        try:
            forward(x, out)
            error = kernels.worst_error({"out": out}, expected)
        except RuntimeError as fault:
            raise RuntimeError(f"D {cell.D}, {name}: {cli.in_one_line(fault)}") from fault
        results[name] = Result(name, "ok", error=error)
        if error <= limit:  # not so for NaN
            calls[name] = partial(forward, x, out)
        else:
            reason = f"relative error {error:.2g}, limit {limit:.2g}"
            results[name] = Result(name, "wrong", reason, error=error)
    timed = timing.interleaved(calls, device=device, rounds=rounds) if calls else {}
    for name, t in timed.items():
        results[name] = results[name].timed(t, cell.flops)
    return list(results.values())


def table(row: Candidate, candidates: Sequence[Built], rows: Sequence[Row]) -> str:
    """Candidates of a head dim, the fastest first: TFLOP/s, and the speed over the row's own."""
    cells = {cell: found for cell, found in tables.by_cell(rows).items() if row.head_dim == cell.D}
    means = {}
    for built in candidates:
        speeds = [tables.speed(found, str(built.candidate)) for found in cells.values()]
        if speeds and min(speeds) > 0:
            means[built.candidate] = tables.geometric_mean(speeds)
    body = []
    for built in sorted(candidates, key=lambda built: -means.get(built.candidate, 0.0)):
        candidate, name = built.candidate, str(built.candidate)
        speeds = [tables.speed(found, name) for found in cells.values()]
        mean = means.get(candidate)
        known = mean and row in means
        wrong = any(found[name].status == "wrong" for found in cells.values() if name in found)
        remark = built.fault or ("wrong" if wrong else "present" if candidate == row else "")
        body.append([
            name, f"{built.smem_bytes / 1024:.0f}" if built.smem_bytes else "–",
            *(f"{speed:.0f}" if speed else "–" for speed in speeds),
            f"{mean:.1f}" if mean else "–",
            f"{mean / means[row]:.3f}" if mean and known else "–",
            remark,
        ])  # fmt: skip
    columns = [f"{cell.mask} {cell.Sq}" for cell in cells]
    header = [f"D {row.head_dim}", "KiB", *columns, "geomean", "over present", "remark"]
    return tables.render(header, body)


def progress(tasks: Sequence[Future[T]], unit: str) -> Iterator[T]:
    """Results in order, under a progress bar where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from (task.result() for task in tasks)
    else:
        for task in tqdm(tasks, unit=unit, mininterval=2, file=sys.stderr):
            yield task.result()


def build(
    nvcc: str, folder: Path, dtype: str, wanted: Sequence[Candidate], jobs: int
) -> list[Built]:
    """Compile in parallel.

    Raises:
        RuntimeError: what all have in common does not compile.
    """
    objects = compile_host(nvcc, folder)
    compiled = partial(compile_candidate, nvcc, folder, objects, dtype)
    with ThreadPoolExecutor(jobs) as pool:
        return list(progress([pool.submit(compiled, one) for one in wanted], "tile"))


def measure(
    args: argparse.Namespace, env: Environment, built: Sequence[Built], device: torch.device
) -> list[Row]:
    """Time what was built; the rows, also written to the CSV file."""
    rows: list[Row] = []
    loaded = [(one.candidate, load(one.library)) for one in built if not one.fault]
    for cell in cli.progress(cli.grid(args)):
        forwards = {str(one): forward for one, forward in loaded if one.head_dim == cell.D}
        rows += [Row(env, cell, found) for found in run_cell(cell, forwards, device, args.rounds)]
        schema.write_csv(args.out, rows)
    return rows


def parser(head_dims: Sequence[int]) -> argparse.ArgumentParser:
    p = cli.new_parser("autotune", __doc__)
    cli.add_grid(p, ("forward",), ("forward",))
    p.set_defaults(head_dims=list(head_dims))
    cli.add_tokens(p)
    p.add_argument("--changes", type=cli.positive, default=2, help="parameters that may differ")
    p.add_argument("--key-steps", type=cli.positive, default=3, help="16 keys each, both ways")
    p.add_argument("--jobs", type=cli.positive, default=len(os.sched_getaffinity(0)))
    cli.add_run(p, rounds=10, out="autotune.csv")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    present = present_rows(CONFIG.read_text(encoding="utf-8"))
    p = parser(tuple(present))
    args = p.parse_args(argv)
    if missing := [D for D in args.head_dims if D not in present]:
        p.error(f"--head-dims: got {missing}, expected some of {list(present)}")
    if args.dtype not in ELEMENTS:
        p.error(f"--dtype: got {args.dtype}, expected one of {list(ELEMENTS)}")
    device = cli.start(p, args)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        p.error("the Hopper kernels need compute capability 9.0")
    nvcc = find_nvcc()
    if nvcc is None:
        p.error("nvcc is not found by FLASH_EXT_NVCC, CUDA_HOME, CUDA_PATH or PATH")
    wanted = [
        c for D in args.head_dims for c in neighbours(present[D], args.changes, args.key_steps)
    ]
    env = cli.environment(device)
    print(f"{env}\n{len(wanted)} tiles", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = build(nvcc, Path(folder), args.dtype, wanted, args.jobs)
            rows = measure(args, env, built, device) if device.type == "cuda" else []
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    for D in args.head_dims:
        mine = [one for one in built if one.candidate.head_dim == D]
        print(f"\n{table(present[D], mine, rows)}", end="")
    return 1 if any(row.result.status == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
