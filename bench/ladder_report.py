"""The ladder's CSV files -> a Markdown page and PNG plots, nothing typed by hand.

    python -m bench.ladder_report bench/results/ladder.csv --out docs/results

NAME.csv holds times and memory, NAME-counters.csv beside it, if it is there, what the hardware
counted. They become NAME.md and NAME-*.png in the output folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import ladder_bytes, tables
from bench.ladder import RUNGS, CountedRow, counters_path, read_counted
from bench.ladder_bytes import Tile
from bench.report import one_environment, origin
from bench.schema import Cell, Environment, Result, Row, read_csv

MIB = 2**20
LARGE_TABLE = 2**30  # bytes: from here on a table's DRAM traffic is held against its formula
COLUMNS = ("three_pass", "two_pass", "fa1", "fa1_swapped", "sequence_parallel")  # split columns
SERIAL, PARALLEL = "fa1_swapped", "sequence_parallel"

Panels = list[tuple[str, Callable[[Any], None]]]  # title, and what draws on axes
Timed = dict[Cell, dict[str, Result]]
Counts = dict[Cell, dict[str, CountedRow]]


def dram_formula(row: CountedRow) -> int:
    """Bytes that a step should exchange with memory."""
    return ladder_bytes.dram(row.rung, row.cell)


def l2_formula(row: CountedRow) -> int | None:
    """Bytes that its thread blocks should read from L2."""
    if row.cell.pass_name != "forward" or not row.counted.block_m:
        return None
    tile = Tile(row.counted.block_m, row.counted.block_n)
    return ladder_bytes.l2_to_sm(row.rung, row.cell, tile)


def times_table(timed: Timed, pass_name: str) -> str:
    """Milliseconds of each step, and how much faster it is than the one before."""
    cells = [cell for cell in timed if cell.pass_name == pass_name]
    body = []
    before: dict[Cell, float] = {}
    for rung in RUNGS:
        line = []
        for cell in cells:
            result = timed[cell].get(rung)
            if result is None or result.ms is None:
                line.append("–")
                continue
            gain = f" ({before[cell] / result.ms:.2f}x)" if cell in before else ""
            before[cell] = result.ms
            line.append(f"{result.ms:.3g}{gain}")
        if any(text != "–" for text in line):
            body.append([rung, *line])
    header = ["step", *(f"H{cell.Hq} S{cell.Sq}" for cell in cells)]
    return tables.render(header, body) if body else ""


def memory_table(timed: Timed, pass_name: str) -> str:
    """MiB beyond inputs and results."""
    cells = [cell for cell in timed if cell.pass_name == pass_name]
    body = []
    for rung in RUNGS:
        found = [timed[cell].get(rung) for cell in cells]
        line = ["–" if r is None or r.extra_mib is None else f"{r.extra_mib:.1f}" for r in found]
        if any(text != "–" for text in line):
            body.append([rung, *line])
    if body and pass_name == "both":
        for label, keeps_table in (("P, formula", True), ("out and lse, formula", False)):
            kept = (ladder_bytes.saved_for_backward(cell, keeps_table) / MIB for cell in cells)
            body.append([f"kept: {label}", *(f"{value:.1f}" for value in kept)])
    header = ["step", *(f"H{cell.Hq} S{cell.Sq}" for cell in cells)]
    return tables.render(header, body) if body else ""


def counters_table(counts: Mapping[str, CountedRow]) -> str:
    """One cell: a line for each step, bytes beside their formulas and the ratio."""

    def beside(measured: float, formula: int | None) -> list[str]:
        if not formula:
            return [f"{measured / MIB:.1f}", "–", "–"]
        return [f"{measured / MIB:.1f}", f"{formula / MIB:.1f}", f"{measured / formula:.2f}"]

    body = []
    for rung, row in counts.items():
        c = row.counted
        body.append([
            rung, str(c.kernels), f"{c.us:.1f}",
            *beside(c.dram_read + c.dram_written, dram_formula(row)),
            *beside(c.l2_to_sm, l2_formula(row)), f"{c.l2_traffic / MIB:.1f}",
            f"{c.tensor_busy:.0f}", f"{c.sm_busy:.0f}", f"{c.occupancy:.0f}", str(c.blocks),
            f"{c.bank_conflicts:.3g}",
        ])  # fmt: skip
    header = ["step", "kernels", "us", "DRAM MiB", "formula", "ratio", "L2 to SM MiB", "formula",
              "ratio", "L2 all MiB", "tensor %", "SMs busy %", "warps %", "blocks",
              "bank conflicts"]  # fmt: skip
    return tables.render(header, body)


def limits(counts: Counts) -> str:
    """Where a byte count is further than 15 % from its formula, of those that are held to it."""
    lines = []
    for cell, rows in counts.items():
        for rung, row in rows.items():
            c, dram, l2 = row.counted, dram_formula(row), l2_formula(row)
            table = ladder_bytes.score_bytes_moved(rung, cell)
            if cell.pass_name == "forward" and (table >= LARGE_TABLE or not table):
                ratio = (c.dram_read + c.dram_written) / dram
                if abs(ratio - 1) > 0.15:
                    lines.append(f"* {cell} H{cell.Hq}, {rung}: DRAM {ratio:.2f} of the formula")
            if l2 and abs(c.l2_to_sm / l2 - 1) > 0.15:
                lines.append(
                    f"* {cell} H{cell.Hq}, {rung}: L2 to SM {c.l2_to_sm / l2:.2f} of the formula"
                )
    return "\n".join(lines) or "None."


def markdown(
    environment: Environment,
    timed: Timed,
    rows: Sequence[Row],
    counts: Counts,
    plots: Sequence[str],
) -> str:
    """The whole generated page."""
    parts = [
        "<!-- Generated by `python -m bench.ladder_report`; do not edit. -->",
        "# The road to FlashAttention, measured",
        origin(environment) + ".",
        "One batch entry, H heads, bfloat16. Times: median, all steps in one process on the same "
        "tensors, in turn, L2 flushed before each call, clocks untouched; in brackets, how much "
        "faster a step is than the one before it. What each step is: "
        "[the road](../road.md).",
        *[f"![{Path(name).stem}]({name})" for name in plots],
    ]
    for pass_name in dict.fromkeys(cell.pass_name for cell in timed):
        for group in dict.fromkeys((c.D, c.mask) for c in timed if c.pass_name == pass_name):
            part = {c: r for c, r in timed.items() if (c.D, c.mask) == group}
            title = f"{pass_name}, head dim {group[0]}, {group[1]}"
            for heading, table in (
                (f"## Milliseconds: {title}", times_table(part, pass_name)),
                (f"## MiB beyond inputs and results: {title}", memory_table(part, pass_name)),
            ):
                if table:
                    parts += [heading, table.rstrip()]
    missing = tables.unmeasured(rows).rstrip()
    if missing:
        parts += ["## Not measured", missing]
    if counts:
        parts += [
            "## What the hardware counted",
            "By Nsight Compute, one call, all kernels of a step together. DRAM is what is read and "
            "written. The formulas are those of `bench/ladder_bytes.py`; shares are weighted by "
            "time.",
        ]
        for cell, found in counts.items():
            parts += [f"### {cell}, H{cell.Hq}", counters_table(found).rstrip()]
        parts += [
            "## Further than 15 % from the formula",
            "DRAM of tables is held to it from 1 GiB of table traffic on. What a kernel writes "
            "last may lie in L2 when the counters stop, so small outputs are not counted in full; "
            "a formula knows nothing of what L2 cannot keep.",
            limits(counts),
        ]
    return "\n\n".join(parts) + "\n"


def by_cell(rows: Sequence[CountedRow]) -> Counts:
    found: Counts = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.rung] = row
    return found


# --- Plots ---------------------------------------------------------------------------------------


def draw(path: Path, panels: Panels, title: str) -> None:
    """A figure with a panel for each (title, function that draws on axes)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), squeeze=False, figsize=(5.5 * len(panels), 4.6), layout="constrained"
    )
    for place, (heading, paint) in zip(axes[0], panels, strict=True):
        paint(place)
        place.set_title(heading, fontsize=10)
        place.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=3 * len(panels), fontsize=7
        )
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def lines_by_length(
    values: Mapping[str, Mapping[int, float]], label: str, dashed: Mapping[str, Mapping[int, float]]
) -> Callable[[Any], None]:
    """A line a step against sequence length, both axes logarithmic; formulas dashed."""

    def paint(axes: Any) -> None:
        for number, (rung, points) in enumerate(values.items()):
            color = f"C{number % 10}"
            style = "-" if number < 10 else "-."
            axes.plot(list(points), list(points.values()), style, marker="o", markersize=3,
                      color=color, label=rung)  # fmt: skip
            formula = dashed.get(rung, {})
            axes.plot(list(formula), list(formula.values()), ":", color=color, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="sequence length", ylabel=label)

    return paint


def timed_panels(timed: Timed, figure: str, label: str) -> Panels:
    """A panel a head dim: forward, full mask where it was run, at the most heads in common."""
    panels: Panels = []
    forward = {c: r for c, r in timed.items() if c.pass_name == "forward"}
    for D, mask in dict.fromkeys((c.D, c.mask) for c in forward):
        heads = sorted({c.Hq for c in forward if (c.D, c.mask) == (D, mask)})
        chosen = heads[len(heads) // 2]
        values: dict[str, dict[int, float]] = {}
        for cell, results in forward.items():
            if (cell.D, cell.mask, cell.Hq) != (D, mask, chosen):
                continue
            for rung in RUNGS:
                value = getattr(results[rung], figure) if rung in results else None
                if value:
                    values.setdefault(rung, {})[cell.Sq] = value
        panels.append((f"head dim {D}, {mask}, {chosen} heads", lines_by_length(values, label, {})))
    return panels


def counted_panels(
    counts: Counts,
    measured: Callable[[CountedRow], float],
    formula: Callable[[CountedRow], int | None],
    label: str,
) -> Panels:
    """Bytes against length, a panel a head dim, at the most heads; formulas dotted."""
    panels: Panels = []
    forward = {c: r for c, r in counts.items() if c.pass_name == "forward"}
    for D, mask in dict.fromkeys((c.D, c.mask) for c in forward):
        heads = max(c.Hq for c in forward)
        values: dict[str, dict[int, float]] = {}
        dashed: dict[str, dict[int, float]] = {}
        for cell, rows in sorted(forward.items(), key=lambda item: item[0].Sq):
            if (cell.D, cell.mask, cell.Hq) != (D, mask, heads):
                continue
            for rung, row in rows.items():
                values.setdefault(rung, {})[cell.Sq] = measured(row) / MIB
                bytes_moved = formula(row)
                if bytes_moved:
                    dashed.setdefault(rung, {})[cell.Sq] = bytes_moved / MIB
        title = f"head dim {D}, {mask}, {heads} heads; dotted: formula"
        panels.append((title, lines_by_length(values, label, dashed)))
    return panels


def busy_panels(counts: Counts) -> Panels:
    """Multiprocessors busy against the number of heads, with and without blocks along q."""
    panels: Panels = []
    forward = {c: r for c, r in counts.items() if c.pass_name == "forward"}
    for D, mask in dict.fromkeys((c.D, c.mask) for c in forward):
        cells = [c for c in forward if (c.D, c.mask) == (D, mask)]
        length = min(c.Sq for c in cells)
        same = sorted((c for c in cells if c.Sq == length), key=lambda c: c.Hq)

        def paint(axes: Any, same: Sequence[Cell] = same) -> None:
            for rung in (SERIAL, PARALLEL):
                points = [(c.Hq, forward[c][rung].counted.sm_busy) for c in same
                          if rung in forward[c]]  # fmt: skip
                axes.plot([n for n, _ in points], [b for _, b in points], marker="o", label=rung)
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 105)
            axes.set(xlabel="batch x heads", ylabel="multiprocessors busy, % of the time")

        panels.append((f"head dim {D}, {mask}, S {length}", paint))
    return panels


def stair_panels(timed: Timed) -> Panels:
    """TFLOP/s of every step, a panel a head dim: columns split over warps, then rows."""
    panels: Panels = []
    forward = {c: r for c, r in timed.items() if c.pass_name == "forward"}
    for D, mask in dict.fromkeys((c.D, c.mask) for c in forward):
        cells = [c for c in forward if (c.D, c.mask) == (D, mask)]
        heads = sorted({c.Hq for c in cells})
        lengths = sorted({c.Sq for c in cells})
        shown = (heads[len(heads) // 2], lengths[3 * len(lengths) // 4])
        cell = next(c for c in cells if (c.Hq, c.Sq) == shown)
        speeds = {r: tables.speed(forward[cell], r) for r in RUNGS if r in forward[cell]}

        def paint(axes: Any, speeds: Mapping[str, float] = speeds) -> None:
            colors = ["tab:gray" if rung in COLUMNS else "tab:red" for rung in speeds]
            axes.barh(list(speeds), list(speeds.values()), color=colors)
            axes.invert_yaxis()
            axes.set_xlabel("TFLOP/s")

        panels.append((f"head dim {D}, {mask}, {cell.Hq} heads, S {cell.Sq}", paint))
    return panels


def report(source: Path, out: Path) -> Path:
    """Write the page and its plots; the path of the page."""
    rows = read_csv(source)
    environment = one_environment(rows)
    timed = tables.by_cell(rows)
    path = counters_path(source)
    counted = read_counted(path) if path.exists() else []
    counts = by_cell(counted)
    figures = {
        "steps": (stair_panels(timed), "every step: gray, columns split over warps or a table"),
        "time": (timed_panels(timed, "ms", "ms"), "time"),
        "memory": (timed_panels(timed, "extra_mib", "MiB"), "memory beyond inputs and results"),
    }
    if counts:
        figures |= {
            "dram": (counted_panels(counts, lambda r: r.counted.dram_read + r.counted.dram_written,
                                    dram_formula, "DRAM, MiB"), "bytes to and from memory"),
            "l2": (counted_panels(counts, lambda r: r.counted.l2_to_sm, l2_formula,
                                  "L2 to multiprocessors, MiB"), "bytes from L2"),
            "busy": (busy_panels(counts), "one block a head, and one a query tile"),
        }  # fmt: skip
    names = []
    for name, (panels, title) in figures.items():
        if panels:
            names.append(f"{source.stem}-{name}.png")
            draw(out / names[-1], panels, f"{title}, {environment.card}")
    page = out / f"{source.stem}.md"
    page.write_text(markdown(environment, timed, rows, counts, names), encoding="utf-8")
    return page


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.ladder_report", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("csv", type=Path)
    p.add_argument("--out", type=Path, default=Path("docs/results"))
    args = p.parse_args(argv)
    try:
        print(report(args.csv, args.out))
    except (OSError, ValueError) as error:
        p.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
