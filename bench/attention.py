"""Time attention of flash_ext beside its peers, in one process, on the same tensors.

    python -m bench.attention --out results.csv

Every cell is checked against fp64 attention before it is timed; the providers, and a matrix
product that shows what the card gives at that moment, take turns. Rows go to a CSV file after
every cell; a short table comes last. Exit code 1 if a result is wrong or flash_ext failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import cli, schema, tables
from bench.check import complaint, errors, slice_oracle
from bench.providers import DEFAULT, PROVIDERS, Pass, Provider, make_inputs
from bench.schema import Cell, Result, Row
from flash_ext.testing import timing

MATMUL = "matmul"
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}


def run_cell(
    cell: Cell, providers: Sequence[Provider], device: torch.device, rounds: int
) -> list[Result]:
    """Check, weigh and time every provider in one cell; one result each, in their order."""
    x = make_inputs(cell, device)
    oracle = slice_oracle(x, gradients=cell.pass_name != "forward")
    calls: dict[str, Pass] = {}
    results: dict[str, Result] = {}
    for provider in providers:
        absent = provider.absent(cell, device)
        if absent:
            results[provider.name] = Result(provider.name, "unavailable", absent)
            continue
        try:
            call = provider.prepare(cell.pass_name, x)
            found = errors(call(), oracle)
            wrong = complaint(found, cell.dtype)
            worst = max(error.whole for error in found.values())
            results[provider.name] = Result(
                provider.name, "wrong" if wrong else "ok", wrong, error=worst,
                extra_mib=None if wrong else extra_memory(call, device),
            )  # fmt: skip
            if not wrong:
                calls[provider.name] = call
        except Exception as error:  # peers fail in their own ways; the reason goes to the table
            if provider.ours:
                traceback.print_exc()
            results[provider.name] = Result(provider.name, "failed", cli.in_one_line(error))
    del oracle
    size = MATMUL_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device, dtype=x.q.dtype).unbind(0)
    timed = timing.interleaved(
        {**calls, MATMUL: lambda: a @ b}, device=device, rounds=rounds, warmup=3
    )
    matmul_tflops = 2e-9 * size**3 / timed[MATMUL].median
    for name in calls:
        result = results[name].timed(timed[name], cell.flops)
        assert result.tflops is not None
        share = result.tflops / matmul_tflops
        results[name] = replace(result, matmul_tflops=matmul_tflops, matmul_share=share)
    return with_best_peer(list(results.values()))


def with_best_peer(results: Sequence[Result]) -> list[Result]:
    """Fill in the fastest peer other than the provider itself, and the ratio to it."""
    filled = []
    for result in results:
        others = [r for r in results if r.provider in schema.PEERS and r.tflops]
        others = [r for r in others if r.provider != result.provider]
        best = max(others, key=lambda r: r.tflops or 0.0, default=None)
        if best is not None and best.tflops and result.tflops:
            ratio = result.tflops / best.tflops
            result = replace(result, best_peer=best.provider, vs_best_peer=ratio)
        filled.append(result)
    return filled


def extra_memory(call: Pass, device: torch.device) -> float | None:
    """MiB the call needs at its peak beyond what it returns; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    results = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    returned = sum(t.numel() * t.element_size() for t in results.values())
    return max(0, peak - before - returned) / 2**20


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("attention", __doc__)
    cli.add_grid(p, list(schema.PASSES), ["forward", "backward"])
    cli.add_tokens(p)
    p.add_argument("--providers", choices=PROVIDERS, nargs="+", default=DEFAULT)
    cli.add_run(p, rounds=20, out="attention.csv")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    device = cli.start(p, args)
    try:
        cells = cli.grid(args)
    except ValueError as error:
        p.error(str(error))
    providers = [PROVIDERS[name] for name in args.providers]
    env = cli.environment(device)
    print(env, flush=True)
    rows: list[Row] = []
    for cell in cli.progress(cells):
        rows += [Row(env, cell, r) for r in run_cell(cell, providers, device, args.rounds)]
        schema.write_csv(args.out, rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"{args.out}: {len(rows)} rows\n\n{tables.unmeasured(rows)}")
    print(f"TFLOP/s, {args.dtype}\n\n{tables.throughput(rows)}\n{tables.ratios(rows)}", end="")
    bad = [r for r in rows if r.result.status == "wrong" or
           (r.result.status == "failed" and PROVIDERS[r.result.provider].ours)]  # fmt: skip
    for row in bad:
        print(f"{row.cell}: {row.result.provider} {row.result.status}: {row.result.reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
