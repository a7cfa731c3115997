"""Nsight Compute: the commands that count, and what the hardware counted of every kernel.

A profile is a report file, which the GUI opens, and a CSV file with a line for each kernel: the
environment, the cell, the provider, the kernel's name, and the counters under ncu's own names and
in its base units (nanoseconds, bytes, percent).
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bench import schema, tables
from bench.schema import Cell, Environment

RANGE = "profile_target"  # the NVTX range within which kernels are profiled
TIME = "gpu__time_duration.sum"
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
TENSOR_BUSY = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
HOPPER_ONLY = "sm__inst_executed_pipe_tensor_op_gmma.sum"
PIPE = "sm__inst_executed_pipe_{}.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
MOST_STALLS = 3  # reasons in the table

# What a number is shown in: name -> (factor, decimals).
UNITS = {
    "us": (1e-3, 1),  # from nanoseconds
    "MiB": (2**-20, 1),
    "KiB": (2**-10, 0),
    "%": (1.0, 0),
    "k": (1e-3, 0),
    "": (1.0, 0),
}
# The table's columns: Nsight Compute's counter -> (what it says, unit)
SHOWN = {
    TIME: ("time", "us"),
    DRAM_READ: ("DRAM read", "MiB"),
    DRAM_WRITTEN: ("DRAM written", "MiB"),
    "l1tex__m_xbar2l1tex_read_bytes.sum": ("L2 to SM", "MiB"),
    TENSOR_BUSY: ("tensor", "%"),
    PIPE.format("fma"): ("fma", "%"),
    PIPE.format("alu"): ("alu", "%"),
    PIPE.format("xu"): ("exp2", "%"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": (
        "shared", "%"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue", "%"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("warps", "%"),
    "l1tex__data_bank_conflicts_pipe_lsu.sum": ("bank conflicts", "k"),
    "launch__registers_per_thread": ("registers", ""),
    "launch__shared_mem_per_block_dynamic": ("shared", "KiB"),
    "launch__grid_size": ("blocks", ""),
    "launch__block_size": ("threads", ""),
}  # fmt: skip
STALLS = {
    STALL.format(reason): reason.replace("_", " ")
    for reason in (
        "not_selected", "wait", "short_scoreboard", "long_scoreboard", "barrier",
        "math_pipe_throttle", "mio_throttle", "lg_throttle", "dispatch_stall", "no_instruction",
        "branch_resolving", "membar", "sleeping",
    )
}  # fmt: skip
COUNTERS = (
    *SHOWN,
    "smsp__inst_executed.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    HOPPER_ONLY,
    "lts__t_bytes.sum",
    "lts__t_sectors_op_red.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    *STALLS,
)
FROM_SECTIONS = [PIPE.format(pipe) for pipe in ("fma", "alu", "xu")]  # where the full set has them


@dataclass(frozen=True)
class Kernel:
    """One kernel of a case; `counters` lacks those that this GPU does not have."""

    environment: Environment
    cell: Cell
    provider: str
    name: str
    counters: Mapping[str, float]


def find_tool(name: str) -> str | None:
    """Path of ncu or nsys from PATH or a CUDA toolkit, or None."""
    homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home, "bin")) for home in (*homes, "/usr/local/cuda") if home]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def run(command: Sequence[str], report: Path | None = None) -> str:
    """What a profiler and the program under it print.

    Raises:
        ValueError: it failed, may not read the counters, or did not write the report.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout:
        raise ValueError(
            "this user may not read the GPU's counters: an administrator has to allow it "
            "(NVreg_RestrictProfilingToAdminUsers=0), or ncu has to run as root"
        )
    tool, end = Path(command[0]).name, done.stdout[-2000:].strip()
    if done.returncode != 0:
        raise ValueError(f"{tool} ended with {done.returncode}:\n{end}")
    if report is not None and not report.exists():
        raise ValueError(f"{tool} wrote no report:\n{end}")
    return done.stdout


def count_command(
    ncu: str, report: Path, program: Sequence[str], kernels: str, hopper: bool
) -> list[str]:
    """Profile what `program` launches within the range, if its name matches `kernels`.

    kernels: "regex:..." or a name; empty for all. hopper: the GPU has wgmma.
    """
    metrics = [name for name in COUNTERS
               if name not in FROM_SECTIONS and (hopper or name != HOPPER_ONLY)]  # fmt: skip
    return [
        ncu, "--clock-control", "none", "--target-processes", "all",
        "--nvtx", "--nvtx-include", f"{RANGE}/", *(["--kernel-name", kernels] if kernels else []),
        "--set", "full", "--metrics", ",".join(metrics), "--import-source", "yes",
        "--force-overwrite", "-o", str(report), *program,
    ]  # fmt: skip


def read_command(ncu: str, report: Path) -> list[str]:
    """Print a report as CSV, a line for each kernel."""
    return [ncu, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base",
            "--print-kernel-base", "function"]  # fmt: skip


def read_counters(
    output: str, names: Iterable[str] = COUNTERS
) -> list[tuple[str, dict[str, float]]]:
    """Name and counters of every kernel in what ncu printed.

    Raises:
        ValueError: there is no table in it, or no kernel in the table.
    """
    lines = output.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID",')]
    if not starts:
        raise ValueError(f"ncu printed no table of counters:\n{output.strip()}")
    header, _, *body = csv.reader(lines[starts[0] :])  # the second line holds units
    kernels = []
    for line in body:
        if len(line) != len(header):
            continue
        values = dict(zip(header, line, strict=True))
        found = {}
        for name in names:
            try:
                found[name] = float(values.get(name, "").replace(",", ""))
            except ValueError:
                continue  # "n/a", or a counter that this GPU lacks
        kernels.append((values["Kernel Name"], found))
    if not kernels:
        raise ValueError(f"no kernel ran within the range {RANGE}:\n{output.strip()}")
    return kernels


def kernels_table(kernels: Sequence[Kernel]) -> str:
    """A line for each kernel; last, in warps per issued instruction, why the most warps wait."""

    def shown(found: Mapping[str, float], counter: str) -> str:
        factor, decimals = UNITS[SHOWN[counter][1]]
        return f"{found[counter] * factor:,.{decimals}f}" if counter in found else "–"

    def stalls(found: Mapping[str, float]) -> str:
        waits = sorted(((found.get(name, 0.0), name) for name in STALLS), reverse=True)
        return ", ".join(f"{STALLS[name]} {n:.2f}" for n, name in waits[:MOST_STALLS] if n)

    header = ["kernel", *(f"{label} {unit}".rstrip() for label, unit in SHOWN.values()), "stalls"]
    body = [
        [k.name, *(shown(k.counters, counter) for counter in SHOWN), stalls(k.counters) or "–"]
        for k in kernels
    ]
    return tables.render(header, body)


_CASE = [*(f.name for part in (Environment, Cell) for f in fields(part)), "provider", "kernel"]
_COLUMNS = [*_CASE, *COUNTERS]


def write_kernels(path: Path, kernels: Sequence[Kernel]) -> None:
    """A line for each kernel; a counter that is absent is an empty field."""
    lines = (
        {
            **asdict(k.environment), **asdict(k.cell), "provider": k.provider, "kernel": k.name,
            **k.counters,
        }
        for k in kernels
    )  # fmt: skip
    schema.write_lines(path, _COLUMNS, lines)


def read_kernels(path: Path) -> list[Kernel]:
    """Read what `write_kernels` wrote.

    Raises:
        ValueError: if the header is another or a field is unreadable.
    """

    def kernel(line: Mapping[str, str]) -> Kernel:
        counters = {name: float(line[name]) for name in COUNTERS if line[name]}
        environment, cell = (schema.parsed(part, line) for part in (Environment, Cell))
        return Kernel(environment, cell, line["provider"], line["kernel"], counters)

    return schema.read_lines(path, _COLUMNS, kernel)
