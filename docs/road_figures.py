"""Draws the figures of docs/road.md.

    python docs/road_figures.py            # docs/figures/road-*.svg
    python docs/road_figures.py --check    # fails where a figure is not current

Byte counts are those of the kernels in csrc/classic; a test holds them against the formulas of the
benchmarks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"

WRITE, READ, KEEP, IDLE = "#e58db3", "#5fa2cf", "#62b567", "#eeeeee"
WARPS = ("#9ecae1", "#a1d99b", "#fdd0a2", "#dadaeb")
CELL = 26

# What goes to memory and comes back for an element of the table: (label, bytes, written?).
TABLE_BYTES = {
    "three_pass": [
        ("S", 4, True), ("max: S", 4, False), ("sum: S", 4, False), ("normalise: S", 4, False),
        ("P", 2, True), ("P", 2, False),
    ],
    "two_pass": [("S", 4, True), ("max and sum: S", 4, False), ("product: S", 4, False)],
    "fa1 and later": [],
}  # fmt: skip


def text(x: float, y: float, words: str, anchor: str = "start", **more: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    """A rectangle with a word in its middle."""
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        'stroke="#ffffff"/>'
    )
    return shape + (text(x + width / 2, y + height / 2 + 4, words, "middle") if words else "")


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="#333333" fill="none" '
        'marker-end="url(#head)"/>'
    )


def page(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole SVG file."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#333333"/></marker></defs>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        head,
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def weighted_sum() -> str:
    """One row of S, P and O."""
    weights = [0.02, 0.05, 0.53, 0.08, 0.30, 0.02]
    parts = [
        text(486, 59, "scores: q · k"),
        text(486, 141, "softmax: weights, their sum 1"),
        text(486, 225, "out: the rows of v, weighted and summed"),
    ]
    for j, weight in enumerate(weights):
        x = 20 + j * 76
        parts.append(box(x, 40, 70, 30, "#dddddd", f"s{j}"))
        parts.append(arrow(x + 35, 72, x + 35, 116))
        parts.append(f'<rect x="{x}" y="122" width="70" height="30" fill="{READ}" '
                     f'fill-opacity="{0.15 + 0.85 * weight:.2f}"/>')  # fmt: skip
        parts.append(text(x + 35, 141, f"{weight:.2f}", "middle"))
        parts.append(arrow(x + 35, 154, x + 35, 200))
        parts.append(box(x, 206, 70, 30, "#dddddd", f"v{j}"))
    return page(720, 250, "Attention of one query: a weighted sum", parts)


def passes() -> str:
    """Bytes that an element of the table costs, step by step."""
    parts = []
    for row, (name, steps) in enumerate(TABLE_BYTES.items()):
        y, x = 20 + 62 * row, 130
        parts.append(text(120, y + 24, name, "end"))
        for label, count, written in steps:
            parts.append(box(x, y, 26 * count, 36, WRITE if written else READ, label))
            x += 26 * count
        total = sum(count for _, count, _ in steps)
        parts.append(text(x + 8, y + 23, f"{total} bytes" if total else "0 bytes: no table"))
    parts += [box(130, 212, 14, 14, WRITE), text(150, 223, "written"), box(230, 212, 14, 14, READ),
              text(250, 223, "read; a byte is as long everywhere")]  # fmt: skip
    return page(760, 240, "Memory traffic for one element of the score table", parts)


def loops() -> str:
    """The order in which tiles are visited, and what stays on the chip."""
    parts: list[str] = []
    for panel, (title, by_keys) in enumerate((("fa1: K and V outside", True),
                                              ("fa1_swapped: Q outside", False))):  # fmt: skip
        left, top = 70 + panel * 330, 70
        parts.append(text(left, 24, title, font_weight="bold"))
        parts.append(text(left + 2 * CELL, 60, "keys", "middle"))
        parts.append(text(left - 12, top + 2.5 * CELL, "queries", "end"))
        order = [(i, j) for j in range(4) for i in range(5)] if by_keys else [
            (i, j) for i in range(5) for j in range(4)]  # fmt: skip
        for number, (i, j) in enumerate(order, 1):
            now = j == 1 if by_keys else i == 1
            colour = KEEP if now else IDLE
            parts.append(box(left + j * CELL, top + i * CELL, CELL, CELL, colour, str(number)))
        notes = (
            ["green: one round. K and V of it stay;", "Q, O, m, l come and go in every round"]
            if by_keys
            else ["green: one round. Q, O, m, l of it stay;", "K and V come in every round"]
        )
        parts += [text(left, top + 5 * CELL + 22 + 16 * n, note) for n, note in enumerate(notes)]
    return page(680, 260, "The order of tiles", parts)


def warps() -> str:
    """How four warps share one tile of S, and what they must tell each other."""
    parts: list[str] = []
    for panel, columns in enumerate((True, False)):
        left, top, size = 40 + panel * 340, 50, 144
        title = (
            "columns split (fa1 ... sequence_parallel)" if columns else "rows split (split_rows)"
        )
        parts.append(text(left, 24, title, font_weight="bold"))
        parts.append(text(left + size / 2, 44, "keys", "middle"))
        for warp in range(4):
            step = size / 4
            x, y = (left + warp * step, top) if columns else (left, top + warp * step)
            width, height = (step, size) if columns else (size, step)
            parts.append(box(x, y, width, height, WARPS[warp], f"warp {warp}"))
        parts.append(arrow(left + size + 8, top + size / 2, left + size + 44, top + size / 2))
        x = left + size + 52
        if columns:
            parts.append(box(x, top, 84, size, "#f0f0f0"))
            for line, words in enumerate(
                ("4 maxima", "4 sums", "4 products", "by shared", "memory")
            ):
                parts.append(text(x + 42, top + 40 + 18 * line, words, "middle"))
        else:
            for warp in range(4):
                parts.append(box(x, top + warp * size / 4, 84, size / 4, WARPS[warp], "O, m, l"))
        note = "every row needs all four warps" if columns else "every row is one warp's own"
        parts.append(text(left, top + size + 22, note))
    return page(700, 240, "One tile of scores and four warps", parts)


def multiprocessors() -> str:
    """Which multiprocessors work when there are four heads of eight query tiles."""
    parts: list[str] = []
    for panel, (title, blocks) in enumerate((("one block a head", 4),
                                             ("one block a query tile", 32))):  # fmt: skip
        left, top = 30 + panel * 330, 60
        parts.append(text(left, 24, title, font_weight="bold"))
        parts.append(text(left, 44, f"{blocks} blocks on 36 multiprocessors"))
        for number in range(36):
            head = number if blocks == 4 else number // 8
            colour = WARPS[head] if number < blocks else IDLE
            label = f"h{head}" if number < blocks else ""
            x, y = left + number % 9 * 31, top + number // 9 * 31
            parts.append(box(x, y, 31, 31, colour, label))
    return page(640, 200, "Four heads on 36 multiprocessors", parts)


DRAWN: dict[str, Callable[[], str]] = {
    "road-weighted-sum.svg": weighted_sum,
    "road-passes.svg": passes,
    "road-loops.svg": loops,
    "road-warps.svg": warps,
    "road-multiprocessors.svg": multiprocessors,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    stale = []
    for name, draw in DRAWN.items():
        path, drawn = FIGURES / name, draw()
        if options.check:
            if not path.exists() or path.read_text(encoding="utf-8") != drawn:
                stale.append(name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: run python docs/road_figures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
