"""Benchmark CSV files -> Markdown tables and PNG plots: one command, nothing typed by hand.

    python -m bench.report bench/results/*.csv --out docs/results

Each NAME.csv becomes NAME.md and NAME-*.png in the output folder. `--into FILE` also replaces the
lines between `<!-- begin NAME -->` and `<!-- end NAME -->` of FILE with the ratio table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import tables
from bench.schema import Cell, Environment, Result, Row, read_csv

COLORS = {
    "flash_ext": "tab:red",
    "flash_ext_generic": "tab:orange",
    "flash_ext_deterministic": "tab:pink",
    "sdpa-flash": "tab:blue",
    "sdpa-cudnn": "tab:green",
    "fa3": "tab:purple",
    "fa4": "tab:brown",
    "plain": "tab:gray",
}
# Memory that follows from a cell alone: label, property of Cell, line.
REFERENCES = (
    ("flash_ext, formula", "workspace_bytes", "k--"),
    ("one score table", "score_table_bytes", "k:"),
)
FIGURES = {"tflops": "TFLOP/s", "extra_mib": "extra memory, MiB"}


def one_environment(rows: Sequence[Row]) -> Environment:
    """The environment of a run.

    Raises:
        ValueError: without rows, or if rows of several runs are mixed: ratios between them would
            compare different moments, cards or builds.
    """
    found = list(dict.fromkeys(row.environment for row in rows))
    if len(found) != 1:
        raise ValueError(f"rows of {len(found)} runs, expected those of one: {found}")
    return found[0]


def origin(environment: Environment) -> str:
    """One line that says where the figures come from."""
    e = environment
    return (
        f"{e.card}, driver {e.driver}, torch {e.torch}, cuDNN {e.cudnn}, flash_ext {e.flash_ext} "
        f"for {e.archs} by nvcc {e.nvcc}, csrc digest {e.digest[:16]}, {e.date}"
    )


def markdown(rows: Sequence[Row], source: str, plots: Sequence[str]) -> str:
    """The whole generated document."""

    def has(figure: str) -> bool:
        return any(getattr(row.result, figure) is not None for row in rows)

    dtypes = ", ".join(sorted({row.cell.dtype for row in rows}))
    rounds = ", ".join(str(n) for n in sorted({r.result.rounds for r in rows if r.result.rounds}))
    parts = [
        f"<!-- Generated from {source} by `python -m bench.report`; do not edit. -->",
        f"# Attention, {dtypes}",
        origin(one_environment(rows)) + ".",
        f"Median of {rounds} rounds; all providers in one process on the same tensors, in turn, "
        "L2 flushed before each call, clocks untouched. FLOPs: forward 4·B·Hq·Sq·Sk·D, half if "
        "causal; backward 2.5 times that, both together 3.5 times."
        + (" The matrix product is timed in turn with each cell." if has("matmul_tflops") else ""),
        "## TFLOP/s",
        tables.throughput(rows).rstrip(),
        "## Ratios over all common cells",
        tables.ratios(rows).rstrip(),
        *[f"![{Path(name).stem}]({name})" for name in plots],
    ]
    if has("extra_mib"):
        parts += [
            "## Peak memory beyond inputs and results, MiB",
            "The formula is flash_ext's: lse forward; delta and dQ backward, all in fp32. Plain "
            "attention keeps several score tables.",
            tables.memory(rows).rstrip(),
        ]
    parts += [
        "## Milliseconds, median (20th–80th percentile)",
        tables.times(rows).rstrip(),
    ]
    missing = tables.unmeasured(rows).rstrip()
    if missing:
        parts += ["## Not measured", missing]
    return "\n\n".join(parts) + "\n"


def plot(rows: Sequence[Row], pass_name: str, figure: str, path: Path) -> None:
    """One figure against sequence length: a row of panels per head dim, a column per mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = {c: r for c, r in tables.by_cell(rows).items() if c.pass_name == pass_name}
    dims = sorted({cell.D for cell in table})
    masks = sorted({cell.mask for cell in table}, reverse=True)
    names = [n for n in tables.providers(rows) if any(_has(r, n, figure) for r in table.values())]
    plots, axes = pyplot.subplots(
        len(dims), len(masks), squeeze=False, sharex=True, sharey="row",
        figsize=(4.5 * len(masks), 3.0 * len(dims) + 1), layout="constrained",
    )  # fmt: skip
    for i, D in enumerate(dims):
        for j, mask in enumerate(masks):
            panel = {c: r for c, r in table.items() if (c.D, c.mask) == (D, mask)}
            _draw(axes[i][j], panel, names, figure)
            axes[i][j].set_title(f"head dim {D}, {mask}", fontsize=10)
    for panel_axes in axes[-1]:
        panel_axes.set_xlabel("sequence length")
    for row_axes in axes:
        row_axes[0].set_ylabel(FIGURES[figure])
        if figure != "extra_mib":
            row_axes[0].set_ylim(bottom=0)  # when every panel that shares the scale is drawn
    handles, labels = axes[0][0].get_legend_handles_labels()
    plots.legend(handles, labels, loc="outside lower center", ncols=2 * len(masks), fontsize=9)
    e = one_environment(rows)
    plots.suptitle(f"{pass_name}, {e.card}, torch {e.torch}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(plots)


def _draw(axes: Any, panel: dict[Cell, dict[str, Result]], names: list[str], what: str) -> None:
    for name in names:
        points = [(c.Sq, getattr(r[name], what)) for c, r in panel.items() if _has(r, name, what)]
        axes.plot(
            [S for S, _ in points], [value for _, value in points], marker="o", markersize=4,
            linestyle="--" if name == "plain" else "-", label=name, color=COLORS.get(name),
        )  # fmt: skip
    lengths = sorted({cell.Sq for cell in panel})
    if what == "extra_mib":
        for label, figure, style in REFERENCES:
            values = {cell.Sq: getattr(cell, figure) / 2**20 for cell in panel}
            axes.plot(lengths, [values[S] for S in lengths], style, label=label, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(S) for S in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if what == "extra_mib":
        axes.set_yscale("log")


def _has(results: dict[str, Result], name: str, figure: str) -> bool:
    return name in results and bool(getattr(results[name], figure))


def _short(S: int) -> str:
    return f"{S // 1024}k" if S % 1024 == 0 else str(S)


def insert(path: Path, name: str, text: str) -> None:
    """Replace the lines between the markers of `name` in a file.

    Raises:
        ValueError: if the file lacks the pair of markers; nothing is written.
    """
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    content = path.read_text(encoding="utf-8")
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{path}: expected one line {begin.strip()!r} and one {end!r}")
    head, rest = content.split(begin)
    if end not in rest:
        raise ValueError(f"{path}: {end!r} comes before {begin.strip()!r}")
    tail = rest.split(end)[1]
    path.write_text(f"{head}{begin}{text.rstrip()}\n{end}{tail}", encoding="utf-8")


def report(source: Path, out: Path) -> str:
    """Write NAME.md and NAME-*.png of one CSV file into `out`; returns the table for `insert`."""
    rows = read_csv(source)
    environment = one_environment(rows)
    measured = [row for row in rows if row.result.status == "ok"]
    names = []
    for pass_name in dict.fromkeys(row.cell.pass_name for row in measured):
        for figure in FIGURES:
            if any(row.cell.pass_name == pass_name and getattr(row.result, figure)
                   for row in measured):  # fmt: skip
                names.append(f"{source.stem}-{pass_name}-{figure}.png")
                plot(measured, pass_name, figure, out / names[-1])
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows, source.name, names)
    (out / f"{source.stem}.md").write_text(text, encoding="utf-8")
    return f"{origin(environment)}.\n\n{tables.ratios(rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("csv", type=Path, nargs="+")
    p.add_argument("--out", type=Path, default=Path("docs/results"))
    p.add_argument("--into", type=Path, help="file with markers that also gets the ratio table")
    args = p.parse_args(argv)
    try:
        for source in args.csv:
            table = report(source, args.out)
            if args.into is not None:
                insert(args.into, source.stem, table)
            print(args.out / f"{source.stem}.md")
    except (OSError, ValueError) as error:
        p.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
