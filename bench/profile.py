"""One case of one provider under a profiler.

    python -m bench.profile flash_ext backward D128 causal S4k
    python -m bench.profile sdpa-flash D64 S16k --timeline torch

The first asks Nsight Compute for the hardware's counters. It prints a line for each kernel and
writes PREFIX.csv, which bench.roofline reads, and PREFIX.ncu-rep for the GUI. `--timeline nsys`
has Nsight Systems record when each call and kernel runs (PREFIX.nsys-rep), `--timeline torch` has
PyTorch's profiler do so (PREFIX.json, for chrome://tracing or Perfetto). Files appear once they are
complete; exit code 1 if the profiler failed or may not read the counters.

A case is words in any order, each in place of an option: a provider (or a step of the road, such as
fa1), a pass, a mask, a dtype, and D64 or S4k for the head dim and the sequence length.

`--print-command` prints the command that starts the profiler and needs no GPU; `--only-run` is what
that command starts: the case, warmed up and run once within the NVTX range `profile_target`, which
also suits other tools.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import cli, ladder, ncu, providers, schema
from bench.ncu import RANGE, Kernel
from bench.schema import Cell

PROVIDERS = {**providers.PROVIDERS, **ladder.RUNGS}
OUR_KERNELS = "regex:^flash_"  # and not what PyTorch launches beside them
WARMUP = 3
INSTALL = {"ncu": "Nsight Compute", "nsys": "Nsight Systems, or use --timeline torch"}
ENDINGS = {"ncu": ("csv", "ncu-rep"), "nsys": ("nsys-rep",), "torch": ("json",)}
WORDS: tuple[tuple[str, Any], ...] = (
    ("provider", PROVIDERS),
    ("pass_name", schema.PASSES),
    ("mask", schema.MASKS),
    ("dtype", schema.DTYPES),
)
NUMBERS = {"D": "head_dim", "S": "seqlen"}


def case_word(text: str) -> tuple[str, object]:
    """The option that a word of a case stands for, and its value."""
    for option, names in WORDS:
        if text in names:
            return option, text
    if text[:1] in NUMBERS:
        return NUMBERS[text[0]], cli.positive(text[1:])
    expected = ", ".join(name for _, names in WORDS for name in names)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected D64, S4k or one of {expected}")


class _SetOptions(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None
    ) -> None:
        for name, value in values or ():
            setattr(namespace, name, value)


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("profile", __doc__)
    p.add_argument("case", type=case_word, nargs="*", action=_SetOptions)
    p.add_argument("--provider", choices=PROVIDERS, default="flash_ext")
    p.add_argument("--pass", dest="pass_name", choices=schema.PASSES, default="forward")
    p.add_argument("--head-dim", type=cli.positive, default=128)
    p.add_argument("--seqlen", type=cli.positive, default=4096)
    p.add_argument("--mask", choices=schema.MASKS, default="causal")
    cli.add_tokens(p)
    p.add_argument("--group", type=cli.positive, default=1, help="query heads per key head")
    p.add_argument("--dtype", choices=schema.DTYPES, default="bfloat16")
    p.add_argument("--timeline", choices=("nsys", "torch"), help="when, in place of how much")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                   help="cpu: with --timeline torch only")  # fmt: skip
    p.add_argument("--out", type=Path, metavar="PREFIX", help="by default "
                   "bench/results/tmp/profile/ and the name of the case")  # fmt: skip
    only = p.add_mutually_exclusive_group()
    only.add_argument("--print-command", action="store_true", help="print the command, run nothing")
    only.add_argument("--only-run", action="store_true", help="run the case, without a profiler")
    return p


def prefix(cell: Cell, provider: str) -> Path:
    """Where the files of a case go."""
    c = cell
    heads = f"H{c.Hq}" if c.Hq == c.Hk else f"H{c.Hq}of{c.Hk}"
    name = f"{provider}-{c.pass_name}-{c.dtype}-{c.mask}-B{c.B}-{heads}-S{c.Sq}-D{c.D}"
    return Path("bench/results/tmp/profile") / name


def beside(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.name}.{ending}")


@contextmanager
def complete(out: Path) -> Iterator[Path]:
    """A prefix whose files become those of `out` once the block has ended without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".profile-") as folder:
        yield Path(folder, out.name)
        for file in sorted(Path(folder).iterdir()):
            file.replace(out.parent / file.name)


def case_command(cell: Cell, args: argparse.Namespace) -> list[str]:
    """What runs under Nsight."""
    case = {
        "--provider": args.provider, "--pass": cell.pass_name, "--head-dim": cell.D,
        "--seqlen": cell.Sq, "--mask": cell.mask, "--tokens": args.tokens,
        "--hidden": args.hidden, "--group": args.group, "--dtype": cell.dtype,
    }  # fmt: skip
    words = [str(word) for pair in case.items() for word in pair]
    return [sys.executable, "-m", "bench.profile", "--only-run", *words]


def command(tool: str, cell: Cell, args: argparse.Namespace, out: Path) -> list[str]:
    """The command that profiles the case; `tool` is ncu, or nsys with --timeline."""
    program = case_command(cell, args)
    if args.timeline == "nsys":
        return [tool, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                "--force-overwrite=true", f"--output={out}", *program]  # fmt: skip
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    kernels = OUR_KERNELS if PROVIDERS[args.provider].ours else ""
    return ncu.count_command(tool, beside(out, "ncu-rep"), program, kernels, hopper)


def count(tool: str, cell: Cell, args: argparse.Namespace, out: Path) -> list[Kernel]:
    """The kernels that Nsight Compute counts, written to OUT.ncu-rep and OUT.csv.

    Raises:
        ValueError: it failed, may not read the counters, or saw no kernel.
    """
    report = beside(out, "ncu-rep")
    ncu.run(command(tool, cell, args, out), report)
    environment = cli.environment(torch.device("cuda", 0))
    kernels = [
        Kernel(environment, cell, args.provider, name, counters)
        for name, counters in ncu.read_counters(ncu.run(ncu.read_command(tool, report)))
    ]
    ncu.write_kernels(beside(out, "csv"), kernels)
    return kernels


@contextmanager
def chrome_trace(device: torch.device, path: Path) -> Iterator[None]:
    """Record the block with PyTorch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        torch.profiler.profile(activities=activities) as found,
        torch.profiler.record_function(RANGE),
    ):
        yield
    found.export_chrome_trace(str(path))


def run_case(
    cell: Cell, provider: str, device: torch.device, recorded: AbstractContextManager[None]
) -> None:
    """Warm up, then run the case once within `recorded`.

    A range belongs to the thread that opened it, so backward runs in this thread too.
    """
    call = PROVIDERS[provider].prepare(cell.pass_name, providers.make_inputs(cell, device))

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARMUP):
            call()
        synchronize()
        with recorded:
            call()
            synchronize()


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
    in_process = args.timeline == "torch"
    if args.device == "cpu" and not in_process:
        p.error("--device cpu: the Nsight tools need a CUDA device (--timeline torch needs none)")
    if in_process and args.print_command:
        p.error("--print-command: --timeline torch starts no other program")
    if args.only_run and (args.timeline or args.out):
        p.error("--only-run: got --timeline or --out, but no profiler runs and no file is written")
    name = args.timeline or "ncu"
    tool = None if in_process else ncu.find_tool(name)
    out = args.out or prefix(cell, args.provider)
    if args.print_command:
        print(shlex.join(command(tool or name, cell, args, out)))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("no CUDA device is visible (--print-command needs none)")
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", 0)
    absent = PROVIDERS[args.provider].absent(cell, device)
    if absent:
        p.error(f"--provider {args.provider}: {absent}")
    if args.only_run:
        run_case(cell, args.provider, device, torch.cuda.nvtx.range(RANGE))
        return 0
    if tool is None and not in_process:
        p.error(f"{name} is not found on PATH or in CUDA_HOME: install {INSTALL[name]}")
    try:
        with complete(out) as unfinished:
            if tool is None:
                trace = chrome_trace(device, beside(unfinished, "json"))
                run_case(cell, args.provider, device, trace)
            elif args.timeline == "nsys":
                report = beside(unfinished, "nsys-rep")
                ncu.run(command(tool, cell, args, unfinished), report)
            else:
                kernels = count(tool, cell, args, unfinished)
                print(f"{cell}, {args.provider}\n\n{ncu.kernels_table(kernels)}")
    except (OSError, ValueError) as error:
        print(f"no profile: {error}", file=sys.stderr)
        return 1
    print("\n".join(str(beside(out, ending)) for ending in ENDINGS[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
