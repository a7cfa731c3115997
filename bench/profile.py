"""One case for Nsight Compute, inside the NVTX range `profile_target`.

    python -m bench.profile --provider flash_ext --pass backward --head-dim 128 --seqlen 4k

prints the `ncu` command that profiles the case, then runs the case once; under `ncu` it only runs.
`--print-command` stops after printing and needs no GPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import schema
from bench.attention import positive
from bench.providers import PROVIDERS, make_inputs
from bench.schema import Cell
from flash_ext.testing import timing

RANGE = "profile_target"
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
)


def ncu_command(cell: Cell, args: argparse.Namespace) -> list[str]:
    """The command that profiles the kernels of the range: counters as CSV, or a full report."""
    case = {
        "--provider": args.provider, "--pass": cell.pass_name, "--head-dim": cell.D,
        "--seqlen": cell.Sq, "--mask": cell.mask, "--tokens": args.tokens,
        "--hidden": args.hidden, "--group": args.group, "--dtype": cell.dtype,
    }  # fmt: skip
    if args.report is None:
        what = ["--metrics", ",".join(METRICS), "--print-units", "base", "--page", "raw", "--csv"]
    else:
        what = ["--set", "full", "--import-source", "yes", "--force-overwrite", "-o", args.report]
    nvtx = ["--nvtx", "--nvtx-include", f"{RANGE}/"]
    words = [str(word) for pair in case.items() for word in pair]
    python = [sys.executable, "-m", "bench.profile"]
    return ["ncu", "--clock-control", "none", *nvtx, *what, *python, *words]


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
    p = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--provider", choices=PROVIDERS, default="flash_ext")
    p.add_argument("--pass", dest="pass_name", choices=schema.PASSES, default="forward")
    p.add_argument("--head-dim", type=positive, default=128)
    p.add_argument("--seqlen", type=positive, default=4096)
    p.add_argument("--mask", choices=schema.MASKS, default="causal")
    p.add_argument("--tokens", type=positive, default=16384)
    p.add_argument("--hidden", type=positive, default=2048)
    p.add_argument("--group", type=positive, default=1)
    p.add_argument("--dtype", choices=schema.DTYPES, default="bfloat16")
    p.add_argument("--report", help="collect everything into this report file for the GUI")
    p.add_argument("--print-command", action="store_true", help="print the command, run nothing")
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
    if args.print_command or timing.attached_tool() is None:
        print(shlex.join(ncu_command(cell, args)), flush=True)
    if args.print_command:
        return 0
    if not torch.cuda.is_available():
        p.error("no CUDA device is visible (--print-command needs none)")
    absent = PROVIDERS[args.provider].absent(cell, torch.device("cuda", 0))
    if absent:
        p.error(f"--provider {args.provider}: {absent}")
    run_case(cell, args.provider)
    return 0


if __name__ == "__main__":
    sys.exit(main())
