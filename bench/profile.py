"""The hardware's counters of one case, by Nsight Compute.

    python -m bench.profile --provider flash_ext --pass backward --head-dim 128 --seqlen 4k

runs `ncu` on a process that runs the case within the NVTX range `profile_target`, and prints a
table with a column for each kernel. `--report FILE` collects everything for the GUI instead.
`--print-command` prints the `ncu` command and needs no GPU; `--only-run` is what that command
starts: the case without `ncu`, which also suits other tools.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import cli, schema, tables
from bench.providers import PROVIDERS, make_inputs
from bench.schema import Cell

RANGE = "profile_target"
OUR_KERNELS = "regex:^flash_"  # and not what PyTorch launches beside them

# What a number is shown in: name -> (factor, decimals).
UNITS = {
    "us": (1e-3, 1),  # from nanoseconds
    "MiB": (2**-20, 1),
    "KiB": (2**-10, 0),
    "%": (1.0, 1),
    "k": (1e-3, 0),
    "": (1.0, 0),
    "warps": (1.0, 2),
}
STALLS = (
    "selected", "not_selected", "wait", "short_scoreboard", "long_scoreboard", "barrier",
    "math_pipe_throttle", "mio_throttle", "lg_throttle", "dispatch_stall", "no_instruction",
    "branch_resolving", "membar", "sleeping",
)  # fmt: skip
HOPPER_ONLY = "sm__inst_executed_pipe_tensor_op_gmma.sum"
# Nsight Compute's counter -> (what it says, unit)
COUNTERS = {
    "gpu__time_duration.sum": ("time", "us"),
    "launch__grid_size": ("thread blocks", ""),
    "launch__block_size": ("threads a block", ""),
    "launch__registers_per_thread": ("registers a thread", ""),
    "launch__shared_mem_per_block_dynamic": ("shared memory a block", "KiB"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy: warps resident", "%"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("tensor pipe busy", "%"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue slots busy", "%"),
    "smsp__inst_executed.sum": ("instructions of a warp", "k"),
    "sm__inst_executed_pipe_tensor_op_hmma.sum": ("HMMA", "k"),
    HOPPER_ONLY: ("HGMMA", "k"),
    "dram__bytes_read.sum": ("DRAM read", "MiB"),
    "dram__bytes_write.sum": ("DRAM written", "MiB"),
    "lts__t_bytes.sum": ("L2 traffic", "MiB"),
    "l1tex__m_xbar2l1tex_read_bytes.sum": ("L2 to multiprocessors", "MiB"),
    "lts__t_sectors_op_red.sum": ("L2 reductions, sectors of 32 bytes", "k"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": (
        "shared-memory data pipe busy", "%"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("shared-memory wavefronts", "k"),
    "l1tex__data_bank_conflicts_pipe_lsu.sum": ("bank conflicts", "k"),
    **{
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": (
            f"warps per issue: {reason.replace('_', ' ')}", "warps")
        for reason in STALLS
    },
}  # fmt: skip


def find_ncu() -> str | None:
    """Path of ncu from PATH or a CUDA toolkit, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home, "bin")) for home in (*homes, "/usr/local/cuda") if home]
    return shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def ncu_command(ncu: str, cell: Cell, args: argparse.Namespace) -> list[str]:
    """The command that profiles the kernels of the range: counters as CSV, or a full report."""
    case = {
        "--provider": args.provider, "--pass": cell.pass_name, "--head-dim": cell.D,
        "--seqlen": cell.Sq, "--mask": cell.mask, "--tokens": args.tokens,
        "--hidden": args.hidden, "--group": args.group, "--dtype": cell.dtype,
    }  # fmt: skip
    if args.report is None:
        hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
        counters = [name for name in COUNTERS if hopper or name != HOPPER_ONLY]
        what = ["--metrics", ",".join(counters), "--print-units", "base", "--page", "raw", "--csv",
                "--print-kernel-base", "function"]  # fmt: skip
    else:
        what = ["--set", "full", "--import-source", "yes", "--force-overwrite", "-o", args.report]
    which = ["--target-processes", "all", "--nvtx", "--nvtx-include", f"{RANGE}/"]
    if PROVIDERS[args.provider].ours:
        which += ["--kernel-name", OUR_KERNELS]
    words = [str(word) for pair in case.items() for word in pair]
    python = [sys.executable, "-m", "bench.profile", "--only-run"]
    return [ncu, "--clock-control", "none", *which, *what, *python, *words]


def read_counters(
    output: str, names: Iterable[str] = tuple(COUNTERS)
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


def counters_table(kernels: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A column for each kernel; the reasons why warps wait come last, the greatest first."""

    def total(counter: str) -> float:
        return sum(
            found.get(counter, 0.0) * found.get("gpu__time_duration.sum", 1.0)
            for _, found in kernels
        )

    plain = [name for name, (_, unit) in COUNTERS.items() if unit != "warps"]
    stalls = [name for name, (_, unit) in COUNTERS.items() if unit == "warps"]
    body = []
    for counter in plain + sorted(stalls, key=total, reverse=True):
        label, unit = COUNTERS[counter]
        factor, decimals = UNITS[unit]
        figures = [
            f"{found[counter] * factor:,.{decimals}f}" if counter in found else "–"
            for _, found in kernels
        ]
        body.append([f"{label}, {unit}" if unit and unit != "warps" else label, *figures])
    return tables.render(["counter", *(name for name, _ in kernels)], body)


def run_case(cell: Cell, provider: str, warmup: int = 3) -> None:
    """Warm up, then run the case once within the range.

    The range belongs to the thread that opened it, so backward runs in this thread too.
    """
    call = PROVIDERS[provider].prepare(cell.pass_name, make_inputs(cell, torch.device("cuda", 0)))
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(warmup):
            call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(RANGE)
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("profile", __doc__)
    p.add_argument("--provider", choices=PROVIDERS, default="flash_ext")
    p.add_argument("--pass", dest="pass_name", choices=schema.PASSES, default="forward")
    p.add_argument("--head-dim", type=cli.positive, default=128)
    p.add_argument("--seqlen", type=cli.positive, default=4096)
    p.add_argument("--mask", choices=schema.MASKS, default="causal")
    cli.add_tokens(p)
    p.add_argument("--group", type=cli.positive, default=1, help="query heads per key head")
    p.add_argument("--dtype", choices=schema.DTYPES, default="bfloat16")
    p.add_argument("--report", help="collect everything into this report file for the GUI")
    only = p.add_mutually_exclusive_group()
    only.add_argument("--print-command", action="store_true", help="print the command, run nothing")
    only.add_argument("--only-run", action="store_true", help="run the case, without ncu")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    try:
        cell = schema.make_cell(
            pass_name=args.pass_name, dtype=args.dtype, mask=args.mask, D=args.head_dim,
            S=args.seqlen, tokens=args.tokens, hidden=args.hidden, group=args.group,
        )  # fmt: skip
    except ValueError as error:
        p.error(str(error))
    ncu = find_ncu()
    command = ncu_command(ncu or "ncu", cell, args)
    if args.print_command:
        print(shlex.join(command))
        return 0
    if not torch.cuda.is_available():
        p.error("no CUDA device is visible (--print-command needs none)")
    absent = PROVIDERS[args.provider].absent(cell, torch.device("cuda", 0))
    if absent:
        p.error(f"--provider {args.provider}: {absent}")
    if args.only_run:
        run_case(cell, args.provider)
        return 0
    if ncu is None:
        p.error("ncu is not found on PATH or in CUDA_HOME: install Nsight Compute")
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0 or args.report is not None:
        print(done.stdout, end="")
        return done.returncode
    try:
        print(f"\n{cell}, {args.provider}\n\n{counters_table(read_counters(done.stdout))}", end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
