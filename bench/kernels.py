"""Time the kernels alone: one build's operators beside PyTorch's FlashAttention-2, no autograd.

    python -m bench.kernels --head-dims 64 128 --seqlens 1k 4k 16k --out kernels.csv
    python -m bench.kernels --extension other/_C.cpython-312-x86_64-linux-gnu.so

Both are called as operators below autograd, on the same tensors, in turn; what the forward pass
saves is computed once. Each call is one pass with its results and workspaces allocated, the
counters of a deterministic backward pass cleared included. Results are compared with
FlashAttention-2's before they are timed; the last tables sum up. Exit code 1 if one is wrong or
failed.

`--extension` runs the kernels of another build, to compare two builds in two processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from bench import cli, schema, tables
from bench.attention import with_best_peer
from bench.check import WHOLE_LIMIT
from bench.providers import Inputs, Pass, make_inputs
from bench.schema import Cell, Result, Row
from flash_ext import ops
from flash_ext.testing import timing

PASSES = ("forward", "backward")
OURS, DETERMINISTIC, FA2 = "flash_ext", "flash_ext_deterministic", "sdpa-flash"
LONG = 4096  # from this length on, the cost of determinism is summed up
WANT = [True, True, True, False, False]  # dq, dk, dv; no bias, no sinks

Prepare = Callable[[str, Inputs], Pass]


def named(names: Sequence[str], call: Callable[[], Sequence[Tensor]]) -> Pass:
    return lambda: dict(zip(names, call(), strict=False))


def prepare_ours(deterministic: bool, pass_name: str, x: Inputs) -> Pass:
    """The operators of flash_ext, `deterministic` or not."""
    window = (-1, 0 if x.causal else -1)
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    if pass_name == "forward":
        return named(["out"], partial(ops.forward, q, k, v, *window))
    out, lse = ops.forward(q, k, v, *window)
    saved = (x.dout, None, q, k, v, out, lse)
    return named(["dq", "dk", "dv"],
                 partial(ops.backward, *saved, WANT, *window, False, deterministic))  # fmt: skip


def prepare_fa2(pass_name: str, x: Inputs) -> Pass:
    """PyTorch's own FlashAttention-2 kernels; on a CPU its tiled CPU kernels."""
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    if not q.is_cuda:
        return prepare_cpu_peer(pass_name, q, k, v, x)
    aten: Any = torch.ops.aten
    lengths = (None, None, q.shape[1], k.shape[1])  # fixed lengths: no cumulative ones
    forward = partial(
        aten._flash_attention_forward.default, q, k, v, *lengths, 0.0, x.causal, False
    )
    if pass_name == "forward":
        return named(["out"], forward)
    out, lse, rng_state, unused, _ = forward()
    saved = (x.dout, q, k, v, out, lse, *lengths, 0.0, x.causal, rng_state, unused)
    return named(["dq", "dk", "dv"], partial(aten._flash_attention_backward.default, *saved))


def prepare_cpu_peer(pass_name: str, q: Tensor, k: Tensor, v: Tensor, x: Inputs) -> Pass:
    """What a dry run on a CPU has for FlashAttention-2."""
    aten: Any = torch.ops.aten
    group = q.shape[2] // k.shape[2]
    q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, x.dout))  # (B, H, S, D)
    forward = partial(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        q, *(t.repeat_interleave(group, 1) for t in (k, v)), 0.0, x.causal,
    )  # fmt: skip
    if pass_name == "forward":
        return lambda: {"out": forward()[0].transpose(1, 2)}
    saved = (*forward.args[:3], *forward(), 0.0, x.causal)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def gradients() -> dict[str, Tensor]:
        dq, dk, dv = (t.transpose(1, 2) for t in backward(dout, *saved))  # (B, S, Hq, D)
        dk, dv = (t.unflatten(2, (-1, group)).sum(3) for t in (dk, dv))
        return {"dq": dq, "dk": dk, "dv": dv}

    return gradients


def contestants(pass_name: str) -> dict[str, Prepare]:
    """Who takes part in a pass. The first is what the others' results are compared with."""
    ours: dict[str, Prepare] = {FA2: prepare_fa2, OURS: partial(prepare_ours, False)}
    if pass_name == "backward":
        ours[DETERMINISTIC] = partial(prepare_ours, True)
    return ours


def worst_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest relative error (Frobenius norm) of any result; NaN if there is one."""
    gaps = [
        (found[name].double() - expected[name].double()).norm() / expected[name].double().norm()
        for name in expected
    ]
    return torch.stack(gaps).max().item()


def run_cell(cell: Cell, device: torch.device, rounds: int) -> list[Result]:
    """Compare and time everybody in one cell; one result each."""
    x = make_inputs(cell, device)
    calls: dict[str, Pass] = {}
    results: dict[str, Result] = {}
    expected: Mapping[str, Tensor] | None = None
    limit = WHOLE_LIMIT[cell.dtype]
    for name, prepare in contestants(cell.pass_name).items():
        try:
            call = prepare(cell.pass_name, x)
            found = call()
            expected = expected or found
            error = worst_error(found, expected)
        except Exception as fault:  # the reason goes to the table
            results[name] = Result(name, "failed", cli.in_one_line(fault))
            if name == FA2:
                break  # there is nothing to compare with
            continue
        if error <= limit:  # not so for NaN
            calls[name] = call
            results[name] = Result(name, "ok", error=error)
        else:
            reason = f"relative error {error:.2g} against {FA2}, limit {limit:.2g}"
            results[name] = Result(name, "wrong", reason, error=error)
    timed = timing.interleaved(calls, device=device, rounds=rounds) if calls else {}
    for name, t in timed.items():
        results[name] = results[name].timed(t, cell.flops)
    return with_best_peer(list(results.values()))


def cells_table(rows: Sequence[Row]) -> str:
    """TFLOP/s of every cell, and speeds as ratios to FlashAttention-2."""
    header = ["pass", "D", "mask", "S", "B", "heads", OURS, "FA2", "ratio", "deterministic ratio"]
    body = []
    for cell, results in tables.by_cell(rows).items():
        ours, fixed, fa2 = (tables.speed(results, name) for name in (OURS, DETERMINISTIC, FA2))
        figures = [f"{speed:.3g}" if speed else "–" for speed in (ours, fa2)]
        ratios = [f"{speed / fa2:.3f}" if speed and fa2 else "–" for speed in (ours, fixed)]
        body.append([*tables.cell_columns(cell), *figures, *ratios])
    return tables.render(header, body)


def summary(rows: Sequence[Row]) -> str:
    """Per pass and head dim: speed over FlashAttention-2, geometric mean and least."""
    groups: dict[tuple[str, int, str], list[tuple[float, Cell]]] = {}
    for cell, results in tables.by_cell(rows).items():
        fa2 = tables.speed(results, FA2)
        for name in (OURS, DETERMINISTIC):
            speed = tables.speed(results, name)
            if speed and fa2:
                found = groups.setdefault((cell.pass_name, cell.D, name), [])
                found.append((speed / fa2, cell))
    body = []
    for (pass_name, D, name), found in groups.items():
        least, where = min(found, key=lambda pair: pair[0])
        mean = tables.geometric_mean([ratio for ratio, _ in found])
        body.append([pass_name, str(D), name, f"{mean:.3f}", f"{least:.3f}",
                     f"{where.mask} S{where.Sq}", str(len(found))])  # fmt: skip
    header = ["pass", "D", "provider", "geomean", "least", "where", "cells"]
    return tables.render(header, body) if body else ""


def determinism(rows: Sequence[Row]) -> str:
    """Time of deterministic gradients over that of others, at long lengths; geometric mean."""
    costs: dict[str, list[float]] = {}
    for cell, results in tables.by_cell(rows).items():
        ours, fixed = (tables.speed(results, name) for name in (OURS, DETERMINISTIC))
        if ours and fixed and cell.Sq >= LONG:
            for group in (str(cell.D), "all"):
                costs.setdefault(group, []).append(ours / fixed)
    body = [
        [D, f"{tables.geometric_mean(found):.3f}", f"{max(found):.3f}", str(len(found))]
        for D, found in sorted(costs.items(), key=lambda item: (item[0] == "all", item[0].zfill(4)))
    ]
    header = ["D", f"deterministic time, S >= {LONG}", "most", "cells"]
    return tables.render(header, body) if body else ""


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("kernels", __doc__)
    cli.add_grid(p, PASSES, PASSES)
    cli.add_tokens(p)
    p.add_argument("--extension", type=Path, help="file of another build of flash_ext._C")
    cli.add_run(p, rounds=20, out="kernels.csv")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    device = cli.start(p, args)
    try:
        cells = cli.grid(args)
        if args.extension is not None:
            cli.use_extension(args.extension)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        p.error(str(error))
    env = cli.environment(device)
    print(env, flush=True)
    rows: list[Row] = []
    for cell in cli.progress(cells):
        rows += [Row(env, cell, result) for result in run_cell(cell, device, args.rounds)]
        schema.write_csv(args.out, rows)
    print(f"{args.out}: {len(rows)} rows\n\n{tables.unmeasured(rows)}")
    parts = [cells_table(rows), summary(rows), determinism(rows)]
    print(f"TFLOP/s, {args.dtype}\n\n" + "\n".join(part for part in parts if part), end="")
    return 1 if any(row.result.status != "ok" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
