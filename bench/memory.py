"""Extra memory against sequence length, up to lengths whose score table no card holds.

    python -m bench.memory --out memory.csv
    python -m bench.report memory.csv --out docs/results

One batch entry, 8 heads. Extra is the peak during one call beyond inputs and results; the pass
`both` counts what the forward pass saves for the backward pass, too. Beside it stand what flash_ext
should need by the formula, one table of scores, and times. Plain attention is not tried where one
table of scores is larger than the card. Exit code 1 if a result is wrong, or if flash_ext failed or
needs more than its formula.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import cli, schema, tables
from bench.attention import run_cell
from bench.providers import PROVIDERS
from bench.schema import Cell, Result, Row

LENGTHS = [2**power for power in range(12, 18)]  # 4k ... 128k
EXACT = ("flash_ext", "flash_ext_generic")  # what the formula is for
SLACK = 1.01  # beside it: what an allocation is rounded up by


def table_exceeds_card(cell: Cell, device: torch.device) -> str:
    """Why plain attention need not be tried; empty if it may be."""
    if device.type != "cuda":
        return ""
    memory = torch.cuda.get_device_properties(device).total_memory
    if cell.score_table_bytes <= memory:
        return ""
    return f"{tables.OUT_OF_MEMORY}: {table_text(cell)}, the card has {memory / 2**30:.0f} GiB"


def table_text(cell: Cell) -> str:
    return f"one score table takes {cell.score_table_bytes / 2**30:.0f} GiB"


def explained(cell: Cell, result: Result) -> Result:
    """The same result; where memory ran out, with what plain attention would have needed."""
    if result.status == "failed" and result.reason.startswith("OutOfMemoryError"):
        reason = f"{tables.OUT_OF_MEMORY}: {table_text(cell)}, and it keeps several"
        return replace(result, reason=reason)
    return result


def grid(args: argparse.Namespace) -> list[Cell]:
    return [
        schema.make_cell(
            pass_name=pass_name, dtype=args.dtype, mask=mask, D=D, S=S,
            tokens=args.batch * S, hidden=args.heads * D, group=args.group,
        )
        for pass_name in args.passes for D in args.head_dims
        for mask in args.masks for S in args.seqlens
    ]  # fmt: skip


def excesses(rows: Sequence[Row]) -> Iterator[str]:
    """Where flash_ext needs more than its formula."""
    for row in rows:
        extra, formula = row.result.extra_mib, row.cell.workspace_bytes / 2**20
        if row.result.provider in EXACT and extra is not None and extra > SLACK * formula:
            yield f"{row.cell}: {row.result.provider} needs {extra:.1f} MiB, formula {formula:.1f}"


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("memory", __doc__)
    cli.add_grid(p, list(schema.PASSES), ["forward", "both"])
    p.set_defaults(seqlens=LENGTHS, masks=["causal"])
    p.add_argument("--batch", type=cli.positive, default=1)
    p.add_argument("--heads", type=cli.positive, default=8, help="query heads")
    p.add_argument("--providers", choices=PROVIDERS, nargs="+",
                   default=["flash_ext", "sdpa-flash", "plain"])  # fmt: skip
    cli.add_run(p, rounds=5, out="memory.csv")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    device = cli.start(p, args)
    try:
        cells = grid(args)
    except ValueError as error:
        p.error(str(error))
    known = {**PROVIDERS, "plain": replace(PROVIDERS["plain"], absent=table_exceeds_card)}
    providers = [known[name] for name in args.providers]
    env = cli.environment(device)
    print(env, flush=True)
    rows: list[Row] = []
    for cell in cli.progress(cells):
        results = run_cell(cell, providers, device, args.rounds)
        rows += [Row(env, cell, explained(cell, result)) for result in results]
        schema.write_csv(args.out, rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"{args.out}: {len(rows)} rows\n\n{tables.unmeasured(rows)}")
    print(f"MiB beyond inputs and results\n\n{tables.memory(rows)}")
    print(f"Milliseconds\n\n{tables.times(rows)}", end="")
    bad = [
        f"{row.cell}: {row.result.provider} {row.result.status}: {row.result.reason}"
        for row in rows
        if row.result.status == "wrong"
        or (row.result.status == "failed" and known[row.result.provider].ours)
    ]
    bad += excesses(rows)
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
