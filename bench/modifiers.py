"""What each modifier of flash_ext.attention costs: the plain call beside calls with one modifier.

    python -m bench.modifiers --out modifiers.csv
    python -m bench.modifiers --head-dims 128 --seqlens 16k --modifiers softcap window dropout

All calls run inside flash_ext.testing.forced(family="sm80"), so that lean and full kernels of one
family, the generic one, are compared whatever the card; `explain` tells which kernel serves which
arguments. The calls of a cell get the same q, k, v and dout in one process and take turns. They are
checked to be finite, no more: whether a modifier is right is for the tests to say.

    softcap        30
    alibi          slopes float32 (Hq,), 2^(-8 (h + 1) / Hq)
    sinks          (Hq,); backward: with its gradient
    window         1024 keys per query (--window): causal all before it, full half of them
    dropout        0.1; forward: with the draw of the seed
    mask           bool (1, 1, Sq, Sk), a tenth hidden at random
    bias-11        (1, 1, Sq, Sk) in the dtype of q, no gradient
    bias-1h        (1, Hq, Sq, Sk), no gradient
    bias-grad-11   (1, 1, Sq, Sk) with its gradient, added up over batch and heads; backward only
    bias-grad-1h   (1, Hq, Sq, Sk) with its gradient, added up over the batch; backward only
    bias-grad-bh   (B, Hq, Sq, Sk) with its gradient, of the same size; backward only
    deterministic  backward only

FLOPs of the window are those of the pairs that it leaves visible, so its ratio is time per visible
pair; its last table has more lengths (--window-seqlens), where time per pair should stay. What does
not fit the memory is listed. Exit code 1 if a call failed or a result is not finite.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

import flash_ext
from bench import cli, schema, tables
from bench.providers import Inputs, Pass, make_inputs
from bench.schema import Cell, Result, Row
from flash_ext.testing import forced, timing

PASSES = ("forward", "backward")
PLAIN, WINDOW = "flash_ext_generic", "window"

Options = dict[str, Any]  # of flash_ext.attention


def window_limits(causal: bool, keys: int) -> tuple[int, int]:
    """(left, right) of a window of `keys` keys, the query's own included."""
    return (keys - 1, 0) if causal else (keys // 2, keys - 1 - keys // 2)


def visible_share(cell: Cell, keys: int) -> float:
    """Pairs of query and key that the window leaves visible, as a share of the plain call's."""

    def pairs(left: int, right: int) -> int:
        last = cell.Sk - 1
        return sum(min(i + right, last) - max(i - left, 0) + 1 for i in range(cell.Sq))

    plain = pairs(cell.Sk, 0 if cell.causal else cell.Sk)
    return pairs(*window_limits(cell.causal, keys)) / plain


def slopes(heads: int, device: torch.device) -> Tensor:
    """(Hq,) float32, a geometric sequence that ends at 2^-8."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)


def normal(x: Inputs, *shape: int, gradient: bool = False) -> Tensor:
    """Standard normal values in the dtype of q."""
    generator = torch.Generator(x.q.device).manual_seed(1)
    values = torch.randn(shape, generator=generator, device=x.q.device, dtype=x.q.dtype)
    return values.requires_grad_(gradient)


def bias(batch: bool, heads: bool, gradient: bool) -> Callable[[Inputs, int], Options]:
    """An attn_bias with or without the dimensions B and Hq."""

    def options(x: Inputs, keys: int) -> Options:
        B, Sq, Hq, _ = x.q.shape
        shape = (B if batch else 1, Hq if heads else 1, Sq, x.k.shape[1])
        return {"attn_bias": normal(x, *shape, gradient=gradient)}

    return options


def mask(x: Inputs, keys: int) -> Options:
    return {"attn_bias": normal(x, 1, 1, x.q.shape[1], x.k.shape[1]) > -1.28}


# name -> arguments, from the inputs and the keys in the window. The call that needs most memory is
# the last, so that what is missing shows before anything is timed.
MODIFIERS: dict[str, Callable[[Inputs, int], Options]] = {
    "softcap": lambda x, keys: {"softcap": 30.0},
    "alibi": lambda x, keys: {"alibi_slopes": slopes(x.q.shape[2], x.q.device)},
    "sinks": lambda x, keys: {"sinks": normal(x, x.q.shape[2], gradient=True)},
    WINDOW: lambda x, keys: {"window_size": window_limits(x.causal, keys)},
    "dropout": lambda x, keys: {"dropout_p": 0.1},
    "mask": mask,
    "deterministic": lambda x, keys: {"deterministic": True},
    "bias-11": bias(False, False, gradient=False),
    "bias-1h": bias(False, True, gradient=False),
    "bias-grad-11": bias(False, False, gradient=True),
    "bias-grad-1h": bias(False, True, gradient=True),
    "bias-grad-bh": bias(True, True, gradient=True),
}
BACKWARD_ONLY = ("deterministic", "bias-grad-11", "bias-grad-1h", "bias-grad-bh")


def prepare(pass_name: str, x: Inputs, options: Options) -> Pass:
    """The call that one pass times; backward differentiates a graph made here and kept."""

    def forward() -> Tensor:
        return flash_ext.attention(x.q, x.k, x.v, causal=x.causal, **options)

    if pass_name == "forward":

        def without_gradients() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"out": forward()}

        return without_gradients
    leaves = {"q": x.q, "k": x.k, "v": x.v}
    leaves |= {n: t for n, t in options.items() if isinstance(t, Tensor) and t.requires_grad}
    out = forward()

    def gradients() -> dict[str, Tensor]:
        found = torch.autograd.grad(out, list(leaves.values()), x.dout, retain_graph=True)
        return {f"d{name}": t for name, t in zip(leaves, found, strict=True)}

    return gradients


def not_finite(found: dict[str, Tensor]) -> list[str]:
    """Names of the results with an infinity or a NaN, without a copy of them."""
    return [n for n, t in found.items() if not t.sum(dtype=torch.float32).isfinite()]


def run_cell(
    cell: Cell, names: Sequence[str], keys: int, device: torch.device, rounds: int
) -> list[Result]:
    """Time the plain call and those with one of the modifiers `names`; one result each."""
    x = make_inputs(cell, device)
    calls: dict[str, Pass] = {}
    results: dict[str, Result] = {}
    asked = [n for n in names if cell.pass_name == "backward" or n not in BACKWARD_ONLY]
    for name in (PLAIN, *asked):
        try:
            options = MODIFIERS[name](x, keys) if name != PLAIN else {}
            call = prepare(cell.pass_name, x, options)
            wrong = not_finite(call())
        except torch.OutOfMemoryError:
            reason = f"{tables.OUT_OF_MEMORY} with the other calls' tensors at hand"
            results[name] = Result(name, "unavailable", reason)
            continue
        except Exception as fault:  # the reason goes to the table
            results[name] = Result(name, "failed", cli.in_one_line(fault))
            continue
        if wrong:
            results[name] = Result(name, "wrong", f"not finite: {', '.join(wrong)}")
        else:
            calls[name] = call
            results[name] = Result(name, "ok")
    timed = timing.interleaved(calls, device=device, rounds=rounds) if calls else {}
    for name, t in timed.items():
        share = visible_share(cell, keys) if name == WINDOW else 1.0
        results[name] = results[name].timed(t, share * cell.flops)
    return list(results.values())


def ratio(results: dict[str, Result], name: str) -> float:
    """Time per visible pair over the plain call's; 0 where either has no figure."""
    speed = tables.speed(results, name)
    return tables.speed(results, PLAIN) / speed if speed else 0.0


def costs_table(rows: Sequence[Row]) -> str:
    """A table per pass: for each modifier and cell, TFLOP/s and time over the plain call's."""
    table = tables.by_cell(rows)
    parts = []
    for pass_name in PASSES:
        cells = {cell: found for cell, found in table.items() if cell.pass_name == pass_name}
        body = []
        for name in (PLAIN, *MODIFIERS):
            figures = [
                f"{tables.speed(r, name):.3g} ({ratio(r, name):.2f})" if ratio(r, name) else "–"
                for r in cells.values()
            ]
            if any(name in results for results in cells.values()):
                body.append([name, *figures])
        if body:
            header = [pass_name, *(f"D{cell.D} {cell.mask} S{cell.Sq}" for cell in cells)]
            parts.append(tables.render(header, body))
    return "\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """Per pass and modifier: time over the plain call's, geometric mean and most."""
    groups: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
    for cell, results in tables.by_cell(rows).items():
        for name in MODIFIERS:
            if ratio(results, name):
                groups.setdefault((cell.pass_name, name), []).append((ratio(results, name), cell))
    body = []
    for (pass_name, name), found in groups.items():
        most, where = max(found, key=lambda pair: pair[0])
        mean = tables.geometric_mean([value for value, _ in found])
        body.append([pass_name, name, f"{mean:.3f}", f"{most:.3f}",
                     f"D{where.D} {where.mask} S{where.Sq}", str(len(found))])  # fmt: skip
    header = ["pass", "modifier", "geomean", "most", "where", "cells"]
    return tables.render(header, body) if body else ""


def window_table(rows: Sequence[Row]) -> str:
    """The window at each length: its time per visible pair over the plain call's, and over its own
    at the shortest length, where 1 means that time is proportional to the window."""
    shortest: dict[tuple[str, int, bool], float] = {}
    body = []
    for cell, results in tables.by_cell(rows).items():
        if not ratio(results, WINDOW):
            continue
        plain, window = results[PLAIN], results[WINDOW]
        speed = tables.speed(results, WINDOW)
        first = shortest.setdefault((cell.pass_name, cell.D, cell.causal), speed)
        time = (window.ms or math.nan) / (plain.ms or math.nan)
        body.append([
            *tables.cell_columns(cell), f"{plain.ms:.3g}", f"{window.ms:.3g}",
            f"{time / ratio(results, WINDOW):.3f}", f"{time:.3f}",
            f"{ratio(results, WINDOW):.3f}", f"{first / speed:.3f}",
        ])  # fmt: skip
    header = ["pass", "D", "mask", "S", "B", "heads", "plain ms", "window ms", "visible share",
              "time", "per pair", "per pair, of the shortest S"]  # fmt: skip
    return tables.render(header, body) if body else ""


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("modifiers", __doc__)
    cli.add_grid(p, PASSES, PASSES)
    cli.add_tokens(p)
    p.set_defaults(seqlens=[4096])
    p.add_argument("--modifiers", choices=MODIFIERS, nargs="+", default=list(MODIFIERS))
    p.add_argument("--window", type=cli.positive, default=1024, help="keys that a query sees")
    p.add_argument("--window-seqlens", type=cli.positive, nargs="*", default=[4096, 8192, 16384],
                   help="lengths at which the window alone is timed beside the plain call, where "
                   "--seqlens has them not; none: no such lengths")  # fmt: skip
    cli.add_run(p, rounds=20, out="modifiers.csv")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    device = cli.start(p, args)
    more = sorted(set(args.window_seqlens) - set(args.seqlens)) if WINDOW in args.modifiers else []
    try:
        cells = cli.grid(args)
        windows = cli.grid(argparse.Namespace(**{**vars(args), "seqlens": more}))
    except ValueError as error:
        p.error(str(error))
    env = cli.environment(device)
    print(env, flush=True)
    names = [name for name in MODIFIERS if name in args.modifiers]  # the largest last
    cuda = device.type == "cuda"
    scope: AbstractContextManager[object] = forced(family="sm80") if cuda else nullcontext()
    rows: list[Row] = []
    with scope:
        for cell in cli.progress([*cells, *windows]):
            asked = [WINDOW] if cell in windows else names
            found = run_cell(cell, asked, args.window, device, args.rounds)
            rows += [Row(env, cell, result) for result in found]
            schema.write_csv(args.out, rows)
    print(f"{args.out}: {len(rows)} rows\n\n{tables.unmeasured(rows)}")
    grid_rows = [row for row in rows if row.cell not in windows]
    parts = [costs_table(grid_rows), summary(grid_rows), window_table(rows)]
    kernels = 'generic kernels (forced(family="sm80"))' if cuda else "CPU, a dry run"
    print(f"TFLOP/s (time over the plain call's; window: per visible pair), {args.dtype}, "
          f"{kernels}\n")  # fmt: skip
    print("\n".join(part for part in parts if part), end="")
    return 1 if any(row.result.status in ("failed", "wrong") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
