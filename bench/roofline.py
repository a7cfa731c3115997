"""Where measured kernels stand under the card's roofs: a table and a plot.

    python -m bench.roofline bench/results/tmp/profile/*.csv --out roofline.png

The CSV files are those of bench.profile. A kernel stands at its FLOPs over the DRAM bytes that the
hardware counted (S. Williams et al., "Roofline", Commun. ACM 52, 2009) and at its FLOPs over its
time. FLOPs are the case's, by the convention of every table here; a case of several kernels divides
them as the kernels kept the tensor cores busy, and a kernel without tensor cores is left out.
The roofs were measured on the card (docs/hopper.md, section 1); for another card give --roofs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: import from the root instead
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import cli, tables
from bench.ncu import DRAM_READ, DRAM_WRITTEN, TENSOR_BUSY, TIME, Kernel, read_kernels
from bench.schema import Cell


@dataclass(frozen=True)
class Roofs:
    """What a card gives. tensor: TFLOP/s by how they are asked for. dram: TB/s."""

    tensor: dict[str, float]
    dram: float

    def at(self, intensity: float) -> float:
        """TFLOP/s that so many FLOPs a byte allow."""
        return min(max(self.tensor.values()), intensity * self.dram)


ROOFS = {
    "NVIDIA H200": Roofs({"wgmma, sustained": 868.0, "mma.sync, two thirds of it": 579.0}, 4.66),
}


@dataclass(frozen=True)
class Point:
    """One kernel. intensity: FLOPs a DRAM byte."""

    provider: str
    cell: Cell
    kernel: str
    intensity: float
    tflops: float

    def __str__(self) -> str:
        return f"{self.provider} {self.cell}: {self.kernel}"


def points(kernels: Sequence[Kernel]) -> list[Point]:
    """The kernels that use tensor cores, in the order in which they ran.

    Raises:
        ValueError: there is none with the counters that a roofline needs.
    """
    cases: dict[tuple[object, ...], list[tuple[Kernel, float]]] = {}
    for k in kernels:
        work = k.counters.get(TENSOR_BUSY, 0.0) * k.counters.get(TIME, 0.0)
        cases.setdefault((k.environment, k.cell, k.provider), []).append((k, work))
    found = []
    for case in cases.values():
        whole = sum(work for _, work in case)
        for k, work in case:
            moved = k.counters.get(DRAM_READ, 0.0) + k.counters.get(DRAM_WRITTEN, 0.0)
            if work and moved:
                flops = k.cell.flops * work / whole
                tflops = 1e-3 * flops / k.counters[TIME]  # FLOPs a nanosecond
                found.append(Point(k.provider, k.cell, k.name, flops / moved, tflops))
    if not found:
        raise ValueError(
            f"none of {len(kernels)} kernels has DRAM bytes and a busy tensor pipe, expected one"
        )
    return found


def roofs_of(kernels: Sequence[Kernel], given: Sequence[float] | None) -> Roofs:
    """The measured roofs of the kernels' card, or those that were given, TFLOP/s and TB/s.

    Raises:
        ValueError: kernels of several cards, or a card without measured roofs.
    """
    cards = {k.environment.card for k in kernels}
    if len(cards) > 1:
        raise ValueError(f"kernels of {len(cards)} cards, expected one: {', '.join(sorted(cards))}")
    if given:
        return Roofs({"tensor cores": given[0]}, given[1])
    (card,) = cards or {"no card"}
    if card not in ROOFS:
        raise ValueError(f"no measured roofs of {card}, expected {', '.join(ROOFS)}, or --roofs")
    return ROOFS[card]


def points_table(found: Sequence[Point], roofs: Roofs) -> str:
    """A line for each kernel, and its share of what its intensity allows."""
    body = [
        [p.provider, *tables.cell_columns(p.cell), p.kernel, f"{p.intensity:,.0f}",
         f"{p.tflops:.0f}", f"{100 * p.tflops / roofs.at(p.intensity):.0f} %"]
        for p in found
    ]  # fmt: skip
    header = ["provider", "pass", "D", "mask", "S", "B", "heads", "kernel", "FLOP/byte", "TFLOP/s",
              "of its roof"]  # fmt: skip
    return tables.render(header, body)


def plot(found: Sequence[Point], roofs: Roofs, card: str, path: Path) -> None:
    """TFLOP/s against FLOPs a byte, both logarithmic, below the roofs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 6), layout="constrained")
    most = max(roofs.tensor.values())
    left = min(1.0, *(0.5 * p.intensity for p in found))
    right = max(2e4, *(2 * p.intensity for p in found))
    for number, (name, rate) in enumerate(roofs.tensor.items()):
        label = f"{name}, {rate:.0f} TFLOP/s"
        style = "k-" if number == 0 else "k--"
        axes.plot([rate / roofs.dram, right], [rate, rate], style, linewidth=1, label=label)
    axes.plot([left, most / roofs.dram], [left * roofs.dram, most], "k", linewidth=1,
              label=f"DRAM, {roofs.dram} TB/s")  # fmt: skip
    for number, p in enumerate(found):
        axes.plot(p.intensity, p.tflops, "osD^v"[number // 10 % 5], color=f"C{number % 10}",
                  label=str(p))  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOP a DRAM byte", ylabel="TFLOP/s",
             xlim=(left, right), title=f"{card}, counted by Nsight Compute")  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    p = cli.new_parser("roofline", __doc__)
    p.add_argument("csv", type=Path, nargs="+")
    p.add_argument("--out", type=Path, default=Path("bench/results/tmp/roofline.png"))
    p.add_argument("--roofs", type=float, nargs=2, metavar=("TFLOPS", "TBPS"),
                   help="of the tensor cores and of DRAM, for another card")  # fmt: skip
    args = p.parse_args(argv)
    if args.roofs and min(args.roofs) <= 0:
        p.error(f"--roofs: got {args.roofs}, expected positive numbers")
    try:
        kernels = [kernel for path in args.csv for kernel in read_kernels(path)]
        roofs, found = roofs_of(kernels, args.roofs), points(kernels)
        plot(found, roofs, kernels[0].environment.card, args.out)
    except (OSError, ValueError) as error:
        p.error(str(error))
    print(f"{points_table(found, roofs)}\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
