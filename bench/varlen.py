"""Time packed sequences: flash_ext's operators beside PyTorch's FlashAttention-2, no autograd.

    python -m bench.varlen --out varlen.csv
    python -m bench.varlen --head-dims 128 --workloads mixed --tokens 65536

All calls are operators below autograd, on the same tensors, in turn; what the forward pass saves is
computed once. Results are compared with FlashAttention-2's before they are timed. Both get the same
offsets on the device; FlashAttention-2 also needs the longest length on the host, which flash_ext
does not take. Where all lengths are equal, `flash_ext_dense` is the dense call of the same generic
kernels. On a CPU there is no FlashAttention-2 for packed sequences.

    equal-N   all sequences have N tokens
    mixed     lengths from 16 to 8192, their logarithms spread evenly
    one-long  half of all tokens in one sequence, the rest in sequences of 128

A row's B is the number of sequences and its Sq and Sk are the longest length; FLOPs are those of
the true lengths. Exit code 1 if a result is wrong or a call failed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from bench import cli, schema, tables
from bench.check import WHOLE_LIMIT
from bench.kernels import FA2, OURS, WANT, named, worst_error
from bench.providers import Pass
from bench.schema import Cell, Result, Row
from flash_ext import ops, varlen_ops
from flash_ext.testing import forced, timing

PASSES = ("forward", "backward")
DENSE = "flash_ext_dense"


def mixed(tokens: int) -> list[int]:
    """Lengths that add up to `tokens`."""
    source, lengths = random.Random(0), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(2 ** source.uniform(4, 13))))
    return lengths


WORKLOADS: dict[str, Callable[[int], list[int]]] = {
    "equal-128": lambda tokens: [128] * max(1, tokens // 128),
    "equal-1024": lambda tokens: [1024] * max(1, tokens // 1024),
    "equal-8192": lambda tokens: [8192] * max(1, tokens // 8192),
    "mixed": mixed,
    "one-long": lambda tokens: [tokens // 2, *[128] * max(1, tokens // 256)],
}


def flops(cell: Cell, lengths: Sequence[int]) -> float:
    """Those of the sequences, each by the convention of `Cell`."""
    pairs = sum(length * length for length in lengths)
    return cell.flops * pairs / (cell.B * cell.Sq * cell.Sk)


def prepare(cell: Cell, lengths: Sequence[int], device: torch.device) -> dict[str, Pass]:
    """The calls of one cell by provider, on the same random tensors."""
    generator = torch.Generator(device).manual_seed(0)
    rows, dtype = sum(lengths), getattr(torch, cell.dtype)
    q, k, v, dout = (
        torch.randn((rows, heads, cell.D), generator=generator, device=device, dtype=dtype)
        for heads in (cell.Hq, cell.Hk, cell.Hk, cell.Hq)
    )
    offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
    calls = {}
    if device.type == "cuda":
        calls[FA2] = prepare_fa2(cell, offsets, q, k, v, dout)
    calls[OURS] = prepare_ours(cell, offsets, q, k, v, dout)
    if len(set(lengths)) == 1:
        calls[DENSE] = prepare_dense(cell, q, k, v, dout)
    return calls


def prepare_ours(
    cell: Cell, offsets: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Pass:
    settings = (-1, 0 if cell.causal else -1, False, None, 0.0, 0.0, None, None)
    rest = (*settings, None, None, None, None, offsets, offsets, None, None)
    forward = partial(varlen_ops.forward, q, k, v, *rest)
    if cell.pass_name == "forward":
        return named(["out"], forward)
    saved = (dout, None, q, k, v, *forward(), WANT, *rest)
    return named(["dq", "dk", "dv"], partial(varlen_ops.backward, *saved))


def prepare_dense(cell: Cell, *tensors: Tensor) -> Pass:
    q, k, v, dout = (t.unflatten(0, (cell.B, cell.Sq)) for t in tensors)
    window = (-1, 0 if cell.causal else -1)
    forward = partial(ops.forward, q, k, v, *window)

    def packed(call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        return [t.flatten(0, 1) if t.dim() == 4 else t for t in call()]

    if cell.pass_name == "forward":
        return named(["out"], partial(packed, forward))
    saved = (dout, None, q, k, v, *forward(), WANT, *window, False, False)
    return named(["dq", "dk", "dv"], partial(packed, partial(ops.backward, *saved)))


def prepare_fa2(cell: Cell, offsets: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Pass:
    aten: Any = torch.ops.aten
    lengths = (offsets, offsets, cell.Sq, cell.Sk)
    forward = partial(
        aten._flash_attention_forward.default, q, k, v, *lengths, 0.0, cell.causal, False
    )
    if cell.pass_name == "forward":
        return named(["out"], forward)
    out, lse, rng_state, unused, _ = forward()
    saved = (dout, q, k, v, out, lse, *lengths, 0.0, cell.causal, rng_state, unused)
    return named(["dq", "dk", "dv"], partial(aten._flash_attention_backward.default, *saved))


def run_cell(cell: Cell, lengths: Sequence[int], device: torch.device, rounds: int) -> list[Result]:
    """Compare and time everybody in one cell; one result each."""
    try:
        calls = prepare(cell, lengths, device)
        found = {name: call() for name, call in calls.items()}
    except Exception as fault:  # the reason goes to the table
        return [Result(OURS, "failed", cli.in_one_line(fault))]
    first, *_ = calls
    results = {name: Result(name, "ok") for name in calls}
    for name in calls:
        error = worst_error(found[name], found[first])
        if not error <= WHOLE_LIMIT[cell.dtype]:  # NaN too
            results[name] = Result(name, "wrong", f"relative error {error:.2g} against {first}")
    good = {name: call for name, call in calls.items() if results[name].status == "ok"}
    timed = timing.interleaved(good, device=device, rounds=rounds) if good else {}
    for name, t in timed.items():
        results[name] = results[name].timed(t, flops(cell, lengths))
    return list(results.values())


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """TFLOP/s of every cell, and speeds as ratios."""
    cells: dict[tuple[str, Cell], dict[str, Result]] = {}
    for workload, row in rows:
        cells.setdefault((workload, row.cell), {})[row.result.provider] = row.result
    body = []
    for (workload, cell), results in cells.items():
        ours, fa2, dense = (tables.speed(results, name) for name in (OURS, FA2, DENSE))
        ratios = [f"{ours / other:.3f}" if other and ours else "–" for other in (fa2, dense)]
        body.append([cell.pass_name, workload, str(cell.D), cell.mask, str(cell.B), str(cell.Sq),
                     f"{ours:.3g}", *ratios])  # fmt: skip
    header = ["pass", "workload", "D", "mask", "sequences", "longest", OURS, "/ FA2", "/ dense"]
    return tables.render(header, body)


def parser() -> argparse.ArgumentParser:
    p = cli.new_parser("varlen", __doc__)
    p.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    p.add_argument("--head-dims", type=cli.positive, nargs="+", default=[64, 128])
    p.add_argument("--masks", choices=schema.MASKS, nargs="+", default=list(schema.MASKS))
    p.add_argument("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    p.add_argument("--group", type=cli.positive, default=1, help="query heads per key head")
    p.add_argument("--dtype", choices=schema.DTYPES, default="bfloat16")
    cli.add_tokens(p)
    cli.add_run(p, rounds=20, out="varlen.csv")
    p.set_defaults(seqlens=[2])  # of no use here
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    device = cli.start(p, args)
    env = cli.environment(device)
    print(env, flush=True)
    cuda = device.type == "cuda"
    scope: AbstractContextManager[object] = forced(family="sm80") if cuda else nullcontext()
    rows: list[tuple[str, Row]] = []
    with scope:
        for workload in args.workloads:
            lengths = WORKLOADS[workload](args.tokens)
            for pass_name in args.passes:
                for D in args.head_dims:
                    for mask in args.masks:
                        heads, longest = max(args.group, args.hidden // D), max(lengths)
                        cell = Cell(pass_name, args.dtype, mask == "causal", len(lengths), heads,
                                    heads // args.group, longest, longest, D, D)  # fmt: skip
                        found = run_cell(cell, lengths, device, args.rounds)
                        rows += [(workload, Row(env, cell, result)) for result in found]
                        schema.write_csv(args.out, [row for _, row in rows])
    print(f"{args.out}: {len(rows)} rows\n\n{tables.unmeasured([row for _, row in rows])}")
    print(f"TFLOP/s, {args.dtype}, generic kernels\n\n{table(rows)}", end="")
    return 1 if any(row.result.status != "ok" for _, row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
