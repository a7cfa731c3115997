"""What the benchmark commands have in common: arguments, cells, checks at the start, progress."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import flash_ext
from bench import schema
from bench.schema import Cell, Environment
from flash_ext import build
from flash_ext.testing import timing
from flash_ext.testing.machine import driver_version


def positive(text: str) -> int:
    """A positive integer; 4k is 4096."""
    number, unit = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer such as 4k")
    return int(number) * unit


def new_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m bench.{command}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_grid(p: argparse.ArgumentParser, passes: Sequence[str], default: Sequence[str]) -> None:
    """Arguments of a grid of cells; `passes` may be asked for, `default` are those run."""
    p.add_argument("--head-dims", type=positive, nargs="+", default=[64, 128])
    p.add_argument("--seqlens", type=positive, nargs="+", default=[1024, 4096, 16384])
    p.add_argument("--masks", choices=schema.MASKS, nargs="+", default=list(schema.MASKS))
    p.add_argument("--passes", choices=passes, nargs="+", default=list(default))
    p.add_argument("--group", type=positive, default=1, help="query heads per key head")
    p.add_argument("--dtype", choices=schema.DTYPES, default="bfloat16")


def add_tokens(p: argparse.ArgumentParser) -> None:
    """Arguments of cells with a fixed number of tokens and channels."""
    p.add_argument("--tokens", type=positive, default=16384, help="batch = tokens / seqlen")
    p.add_argument("--hidden", type=positive, default=2048, help="heads = hidden / head dim")


def add_run(p: argparse.ArgumentParser, rounds: int, out: str) -> None:
    """Arguments of a timed run."""
    p.add_argument("--rounds", type=positive, default=rounds)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                   help="cpu: a dry run, its figures mean nothing")  # fmt: skip
    p.add_argument("--out", type=Path, default=Path("bench/results/tmp") / out)


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells of `add_grid` and `add_tokens`."""
    return [
        schema.make_cell(
            pass_name=pass_name, dtype=args.dtype, mask=mask, D=D, S=S,
            tokens=args.tokens, hidden=args.hidden, group=args.group,
        )
        for pass_name in args.passes for D in args.head_dims
        for mask in args.masks for S in args.seqlens
    ]  # fmt: skip


def start(p: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """The device of a timed run; ends the program if nothing could be measured there."""
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: no CUDA device is visible (--device cpu makes a dry run)")
    if min(args.seqlens) < 2:
        p.error("--seqlens: got 1, expected at least 2 (with one key dq and dk are zero)")
    try:
        timing.refuse_attached_tool()
    except RuntimeError as error:
        p.error(str(error))
    return torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")


def use_extension(path: Path) -> None:
    """Run the kernels of another build in this process, in place of the installed ones.

    Raises:
        ImportError: the file is no extension, of another Python or of another version.
        RuntimeError: the installed one has already been asked for.
    """
    if build._load.cache_info().currsize:
        raise RuntimeError(f"{path}: the installed extension is already in use")
    name = f"{flash_ext.__name__}._C"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not the file of a Python extension")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where flash_ext looks first
    spec.loader.exec_module(module)
    if build.extension() is not module:
        raise ImportError(build.missing_reason())


def environment(device: torch.device) -> Environment:
    """The card, the driver and the versions in this process."""
    info = flash_ext.build_info()
    cuda = device.type == "cuda"
    return Environment(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        card=torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        driver=driver_version() if cuda else "none",
        torch=torch.__version__,
        cudnn=str(torch.backends.cudnn.version()) if cuda else "none",
        flash_ext=info.version,
        archs=";".join(info.archs) or "none",
        nvcc=info.nvcc or "none",
        digest=info.digests.get("csrc", "none"),
    )


def progress(cells: Sequence[Cell]) -> Iterable[Cell]:
    """The cells under a progress bar, or bare where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return cells
    bar: Iterable[Cell] = tqdm(cells, unit="cell", mininterval=2, file=sys.stderr)
    return bar


def in_one_line(error: Exception) -> str:
    """Type and first line of an error, for a table."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
