"""The road to FlashAttention, step by step: time, memory, and the bytes that the hardware counts.

    python -m bench.ladder --out bench/results/ladder.csv
    python -m bench.ladder_report bench/results/ladder.csv --out docs/results

Times go to the file of --out, as `bench.attention` takes them: every step checked against fp64
attention, all of them in one process on the same tensors, in turn. Then one run under Nsight
Compute counts, for a smaller grid (--counter-seqlens at the last of --counter-batch-heads, and
the first of them at every --counter-batch-heads), what goes to NAME-counters.csv beside it.
`--skip counters` or `--skip times` leaves one of the two out. One batch entry; batch times heads
is the number of heads.

    plain                      PyTorch operations; of the pass `both` the one that saves P
    three_pass ... pipelined   flash_ext.classic.attention, see there
    flash_ext_generic          the package's kernels for every GPU
    flash_ext                  what the package chooses

Of the pass `both` only those are run that have a backward pass. Exit code 1 if a result is wrong,
if a step failed, or if the counters cannot be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

import flash_ext
from bench import cli, ladder_bytes, ncu, schema, tables
from bench.attention import run_cell
from bench.providers import PROVIDERS, Provider, make_inputs
from bench.schema import Cell, Environment, Row
from flash_ext import classic

PASSES = ("forward", "both")
MARKER = "spin_kernel"  # of torch.cuda._sleep: one before each step under Nsight Compute
ITEM = "ladder item"
COUNTERS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_to_sm",
    "lts__t_bytes.sum": "l2_traffic",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor_busy",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed": "sm_busy",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank_conflicts",
    "launch__grid_size": "blocks",
}
SHARES = ("tensor_busy", "occupancy", "sm_busy")


@dataclass(frozen=True)
class Counted:
    """What the hardware counted of one step, all its kernels together.

    us: time under the profiler, microseconds. dram_read, dram_written, l2_to_sm: bytes.
    l2_traffic: bytes in both directions, on both sides of L2.
    tensor_busy, occupancy, sm_busy: percent, weighted by time. blocks: of the longest kernel.
    block_m, block_n: the tile; 0 for `plain`.
    """

    kernels: int
    us: float
    dram_read: float
    dram_written: float
    l2_to_sm: float
    l2_traffic: float
    tensor_busy: float
    occupancy: float
    sm_busy: float
    bank_conflicts: float
    blocks: int
    block_m: int
    block_n: int


@dataclass(frozen=True)
class CountedRow:
    environment: Environment
    cell: Cell
    rung: str
    counted: Counted


def _classic(name: str) -> Provider:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return classic.attention(q, k, v, algorithm=name, causal=causal)

    def absent(cell: Cell, device: torch.device) -> str:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        if cell.pass_name != "forward":
            return "has no backward pass"
        if classic.ALGORITHMS[name].table_bytes:
            table = (1, 1, 1, ladder_bytes.table_elements(cell))
            try:
                classic.check_fits(name, table, int(0.9 * classic.free_bytes(device)))
            except torch.OutOfMemoryError:
                gib = classic.ALGORITHMS[name].table_bytes * table[3] / 2**30
                return f"{tables.OUT_OF_MEMORY}: its table takes {gib:.0f} GiB"
        return ""

    return Provider(name, attend, absent, ours=True)


WITH_BACKWARD = ("plain", "flash_ext_generic", "flash_ext")
RUNGS = {
    "plain": PROVIDERS["plain"],
    **{name: _classic(name) for name in classic.ALGORITHMS},
    **{name: PROVIDERS[name] for name in WITH_BACKWARD[1:]},
}


def cell_of(pass_name: str, mask: str, D: int, S: int, heads: int) -> Cell:
    return Cell(
        pass_name, "bfloat16", mask == "causal", B=1, Hq=heads, Hk=heads, Sq=S, Sk=S, D=D, Dv=D
    )


def timed_cells(args: argparse.Namespace) -> list[Cell]:
    return [
        cell_of(pass_name, mask, D, S, heads)
        for pass_name in args.passes for D in args.head_dims for mask in args.masks
        for heads in args.batch_heads for S in args.seqlens
    ]  # fmt: skip


def counted_cells(args: argparse.Namespace) -> list[Cell]:
    """Every length at the most heads, and the shortest length at every number of heads."""
    heads, lengths = args.counter_batch_heads, args.counter_seqlens
    sizes = [*((S, heads[-1]) for S in lengths), *((lengths[0], n) for n in heads[:-1])]
    return [
        cell_of(pass_name, mask, D, S, n)
        for pass_name in args.passes for D in args.head_dims for mask in args.masks
        for S, n in sizes
    ]  # fmt: skip


def items(cells: Sequence[Cell], rungs: Sequence[str]) -> list[tuple[Cell, str]]:
    """What is counted, in order; of the pass both only what has a backward pass."""
    return [
        (cell, rung)
        for cell in cells
        for rung in rungs
        if cell.pass_name == "forward" or rung in WITH_BACKWARD
    ]


def run_items(todo: Sequence[tuple[Cell, str]], device: torch.device) -> None:
    """Under Nsight Compute: each step once within the range, after a marker, and say which ran."""
    for number, (cell, rung) in enumerate(todo):
        if RUNGS[rung].absent(cell, device):
            continue
        call = RUNGS[rung].prepare(cell.pass_name, make_inputs(cell, device))
        with torch.autograd.set_multithreading_enabled(False):  # the range is this thread's
            call()
            torch.cuda.synchronize(device)
            torch.cuda.nvtx.range_push(ncu.RANGE)
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize(device)
            torch.cuda.nvtx.range_pop()
        print(f"{ITEM} {number}", flush=True)
        del call
        torch.cuda.empty_cache()


def ncu_command(tool: str, argv: Sequence[str]) -> list[str]:
    """The command that counts what `--only-run` with the same arguments runs."""
    return [
        tool, "--clock-control", "none", "--target-processes", "all",
        "--nvtx", "--nvtx-include", f"{ncu.RANGE}/", "--metrics", ",".join(COUNTERS),
        "--print-units", "base", "--page", "raw", "--csv", "--print-kernel-base", "function",
        sys.executable, "-m", "bench.ladder", "--only-run", *argv,
    ]  # fmt: skip


def read_items(output: str) -> dict[int, list[dict[str, float]]]:
    """Number of each step that ran -> the counters of its kernels.

    Raises:
        ValueError: no table, or not one marker for each step.
    """
    kernels = ncu.read_counters(output, COUNTERS)
    found: list[list[dict[str, float]]] = []
    for name, counters in kernels:
        if MARKER in name:
            found.append([])
        elif found:
            found[-1].append(counters)
    numbers = [int(n) for n in re.findall(rf"^{ITEM} (\d+)$", output, flags=re.MULTILINE)]
    if len(numbers) != len(found) or not all(found):
        raise ValueError(f"{len(numbers)} steps ran, and kernels of {len(found)} were counted")
    return dict(zip(numbers, found, strict=True))


def summed(kernels: Sequence[Mapping[str, float]], tile: tuple[int, int]) -> Counted:
    """One step from its kernels."""
    named = [{COUNTERS[name]: value for name, value in kernel.items()} for kernel in kernels]

    def total(name: str, weight: Callable[[Mapping[str, float]], float] = lambda _: 1.0) -> float:
        return sum(kernel.get(name, 0.0) * weight(kernel) for kernel in named)

    time = total("us") or 1.0
    longest = max(named, key=lambda kernel: kernel.get("us", 0.0))
    shares = {name: total(name, lambda kernel: kernel.get("us", 0.0)) / time for name in SHARES}
    return Counted(
        kernels=len(named), us=1e-3 * time, dram_read=total("dram_read"),
        dram_written=total("dram_written"), l2_to_sm=total("l2_to_sm"),
        l2_traffic=total("l2_traffic"), **shares,
        bank_conflicts=total("bank_conflicts"), blocks=int(longest.get("blocks", 0)),
        block_m=tile[0], block_n=tile[1],
    )  # fmt: skip


def tile_of(cell: Cell, rung: str) -> tuple[int, int]:
    """The tile that a step has on this GPU; (0, 0) for plain."""
    if rung in classic.ALGORITHMS:
        tile = ladder_bytes.tile_of(rung, cell.D)
        return tile.block_m, tile.block_n
    if rung == "plain":
        return 0, 0
    x = torch.empty((cell.B, cell.Sq, cell.Hq, cell.D), dtype=torch.bfloat16, device="meta")
    with RUNGS[rung].scope():
        return flash_ext.explain(x, x, x, causal=cell.causal).forward.tile or (0, 0)


def counters_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-counters.csv")


_PARTS = (Environment, Cell, Counted)
COLUMNS = [*(f.name for part in _PARTS[:2] for f in fields(part)), "rung",
           *(f.name for f in fields(Counted))]  # fmt: skip


def write_counted(path: Path, rows: Sequence[CountedRow]) -> None:
    """All rows at once: there is no file unless everything was counted."""
    lines = (
        {**asdict(row.environment), **asdict(row.cell), "rung": row.rung, **asdict(row.counted)}
        for row in rows
    )
    schema.write_lines(path, COLUMNS, lines)


def read_counted(path: Path) -> list[CountedRow]:
    """Read what `write_counted` wrote.

    Raises:
        ValueError: if the header is another or a field is unreadable.
    """

    def row(line: Mapping[str, str]) -> CountedRow:
        environment, cell, counted = (schema.parsed(part, line) for part in _PARTS)
        return CountedRow(environment, cell, line["rung"], counted)

    return schema.read_lines(path, COLUMNS, row)


def count(args: argparse.Namespace, argv: Sequence[str], env: Environment) -> list[CountedRow]:
    """Run Nsight Compute on this program.

    Raises:
        ValueError: it is absent, failed, or may not read the counters.
    """
    tool = ncu.find_tool("ncu")
    if tool is None:
        raise ValueError("ncu is not found on PATH or in CUDA_HOME: install Nsight Compute")
    output = ncu.run(ncu_command(tool, argv))
    todo = items(counted_cells(args), args.rungs)
    return [
        CountedRow(env, *todo[number], summed(kernels, tile_of(*todo[number])))
        for number, kernels in read_items(output).items()
    ]


def measure(args: argparse.Namespace, device: torch.device, env: Environment) -> list[Row]:
    """Times and memory of every cell, written after each."""
    rows: list[Row] = []
    for cell in cli.progress(timed_cells(args)):
        asked = [RUNGS[rung] for _, rung in items([cell], args.rungs)]
        rows += [Row(env, cell, result) for result in run_cell(cell, asked, device, args.rounds)]
        schema.write_csv(args.out, rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("ladder", __doc__)
    p.add_argument("--rungs", choices=RUNGS, nargs="+", default=list(RUNGS))
    p.add_argument("--head-dims", type=cli.positive, nargs="+", default=[64, 128])
    p.add_argument("--masks", choices=schema.MASKS, nargs="+", default=["full"])
    p.add_argument("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    p.add_argument("--seqlens", type=cli.positive, nargs="+",
                   default=[64, 256, 1024, 4096, 16384])  # fmt: skip
    p.add_argument("--batch-heads", type=cli.positive, nargs="+", default=[4, 16, 64])
    p.add_argument("--counter-seqlens", type=cli.positive, nargs="+", default=[1024, 4096])
    p.add_argument("--counter-batch-heads", type=cli.positive, nargs="+", default=[1, 4, 16])
    p.add_argument("--skip", choices=("times", "counters"), help="leave one of the two out")
    p.add_argument("--only-run", action="store_true", help="run what is counted, without ncu")
    cli.add_run(p, rounds=10, out="ladder.csv")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    argv = sys.argv[1:] if argv is None else argv
    args = p.parse_args(argv)
    if args.only_run:
        if not torch.cuda.is_available():
            p.error("--only-run: no CUDA device is visible")
        run_items(items(counted_cells(args), args.rungs), torch.device("cuda", 0))
        return 0
    device = cli.start(p, args)
    env = cli.environment(device)
    print(env, flush=True)
    bad: list[str] = []
    if args.skip != "times":
        rows = measure(args, device, env)
        print(f"{args.out}: {len(rows)} rows\n\n{tables.unmeasured(rows)}")
        print(f"Milliseconds\n\n{tables.times(rows)}", end="")
        bad = [
            f"{row.cell}: {row.result.provider} {row.result.status}: {row.result.reason}"
            for row in rows
            if row.result.status == "wrong"
            or (row.result.status == "failed" and RUNGS[row.result.provider].ours)
        ]
    if args.skip != "counters" and device.type == "cuda":
        try:
            counted = count(args, argv, env)
        except ValueError as error:
            print(f"no counters: {error}", file=sys.stderr)
            return 1
        write_counted(counters_path(args.out), counted)
        print(f"{counters_path(args.out)}: {len(counted)} rows")
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
