"""Benchmark rows -> Markdown tables, for the terminal and for the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from bench.schema import MASKS, PASSES, PEERS, Cell, Result, Row

Figure = Callable[[Result], str]

OUT_OF_MEMORY = "out of memory"  # the beginning of such a reason


def render(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """An aligned Markdown table; the first column is text, the others are flush right."""
    body = [list(line) for line in body]
    widths = [max(3, *(len(line[i]) for line in [header, *body])) for i in range(len(header))]

    def joined(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([joined(header), joined(rule), *(joined(line) for line in body)]) + "\n"


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[str, Result]]:
    """cell -> provider -> result, in the order pass, D, mask, S; the last row of a pair counts."""
    table: dict[Cell, dict[str, Result]] = {}
    for row in rows:
        table.setdefault(row.cell, {})[row.result.provider] = row.result
    return dict(sorted(table.items(), key=lambda item: _order(item[0])))


def providers(rows: Iterable[Row]) -> list[str]:
    """Names of the providers with at least one figure, in order of appearance."""
    return list(dict.fromkeys(r.result.provider for r in rows if r.result.status == "ok"))


def throughput(rows: Sequence[Row]) -> str:
    """TFLOP/s of every provider, with flash_ext's ratio to its best peer and share of a matmul."""
    names = providers(rows)
    header = ["pass", "D", "mask", "S", "B", "heads", *names, "vs best peer", "of matmul"]
    body = []
    for cell, results in by_cell(rows).items():
        main = results.get("flash_ext") or Result("flash_ext", "unavailable")
        ratio = "–" if main.vs_best_peer is None else f"{main.vs_best_peer:.2f} {main.best_peer}"
        share = "–" if main.matmul_share is None else f"{100 * main.matmul_share:.0f} %"
        figures = [_figure(results.get(name), _tflops) for name in names]
        body.append([*cell_columns(cell), *figures, ratio, share])
    return render(header, body)


def memory(rows: Sequence[Row]) -> str:
    """Peak memory beyond inputs and results, MiB, beside what it should be and the score table."""
    names = providers(rows)
    body = [
        [*cell_columns(cell), *(_figure(results.get(name), _extra) for name in names),
         f"{cell.workspace_bytes / 2**20:.1f}", f"{cell.score_table_bytes / 2**20:.0f}"]
        for cell, results in by_cell(rows).items()
    ]  # fmt: skip
    header = ["pass", "D", "mask", "S", "B", "heads", *names, "formula", "one score table"]
    return render(header, body)


def times(rows: Sequence[Row]) -> str:
    """Milliseconds, median (20th to 80th percentile)."""
    names = providers(rows)
    body = [
        [*cell_columns(cell), *(_figure(results.get(name), _ms) for name in names)]
        for cell, results in by_cell(rows).items()
    ]
    return render(["pass", "D", "mask", "S", "B", "heads", *names], body)


def ratios(rows: Sequence[Row]) -> str:
    """Per pass: each flash_ext provider's speed over each other one's, over all common cells."""
    table = by_cell(rows)
    ours = [name for name in providers(rows) if name.startswith("flash_ext")]
    others = [name for name in providers(rows) if name in PEERS or name in ("plain", *ours[1:])]
    body = []
    for pass_name in PASSES:
        for ours_name in ours:
            for other in others:
                found = [
                    (speed(results, ours_name) / speed(results, other), cell)
                    for cell, results in table.items()
                    if cell.pass_name == pass_name
                    and ours_name != other
                    and speed(results, ours_name) * speed(results, other) > 0
                ]
                if found:
                    least, where = min(found, key=lambda pair: pair[0])
                    mean = geometric_mean([ratio for ratio, _ in found])
                    label = f"D{where.D} {where.mask} S{where.Sq}"
                    body.append(
                        [pass_name, ours_name, other, f"{mean:.3f}", f"{least:.3f}", label,
                         str(len(found))]
                    )  # fmt: skip
    return (
        ""
        if not body
        else render(["pass", "provider", "against", "geomean", "least", "where", "cells"], body)
    )


def unmeasured(rows: Sequence[Row]) -> str:
    """Which cells have no figure, and why; empty if all have one."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.result.status != "ok":
            key = (row.result.provider, row.result.status, row.result.reason)
            groups.setdefault(key, []).append(str(row.cell))
    lines = [
        f"* {provider}, {status} in {_brief(cells)}: {reason}"
        for (provider, status, reason), cells in groups.items()
    ]
    return "\n".join(lines) + "\n" if lines else ""


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def speed(results: dict[str, Result], provider: str) -> float:
    """TFLOP/s, 0 where there is no figure."""
    result = results.get(provider)
    return (result.tflops or 0.0) if result is not None else 0.0


def _order(cell: Cell) -> tuple[object, ...]:
    return (list(PASSES).index(cell.pass_name), cell.D, MASKS.index(cell.mask), cell.Sq,
            cell.B, cell.Hq, cell.Hk, cell.dtype)  # fmt: skip


def cell_columns(cell: Cell) -> list[str]:
    heads = str(cell.Hq) if cell.Hq == cell.Hk else f"{cell.Hq}/{cell.Hk}"
    return [cell.pass_name, str(cell.D), cell.mask, str(cell.Sq), str(cell.B), heads]


def _figure(result: Result | None, figure: Figure) -> str:
    if result is None or result.status == "ok":
        return "–" if result is None else figure(result)
    if result.reason.startswith(OUT_OF_MEMORY):
        return OUT_OF_MEMORY
    return "–" if result.status == "unavailable" else result.status


def _tflops(result: Result) -> str:
    tflops = result.tflops or 0.0
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _extra(result: Result) -> str:
    return "–" if result.extra_mib is None else f"{result.extra_mib:.1f}"


def _ms(result: Result) -> str:
    return f"{result.ms:.3g} ({result.ms_p20:.3g}–{result.ms_p80:.3g})"


def _brief(cells: Sequence[str]) -> str:
    return ", ".join(cells) if len(cells) <= 4 else f"{len(cells)} cells"
