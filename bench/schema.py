"""What one benchmark row says, and the one CSV layout that every benchmark writes.

A row is an `Environment` (card, driver, versions: the same for a whole run), a `Cell` (the problem)
and a `Result` (one provider's figures). FLOPs count the two products of attention, the half of
them if causal; the backward pass counts 2.5 times the forward pass, both together 3.5 times.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flash_ext.testing.timing import Timing

T = TypeVar("T")

PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # FLOPs in forward passes
MASKS = ("full", "causal")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes

# Rows of one run that compete with flash_ext for "best peer".
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa3", "fa4")


@dataclass(frozen=True)
class Environment:
    """Where the figures come from; `digest` is that of the csrc/ flash_ext was built from."""

    date: str
    card: str
    driver: str
    torch: str
    cudnn: str
    flash_ext: str
    archs: str
    nvcc: str
    digest: str


@dataclass(frozen=True)
class Cell:
    """One problem: q (B,Sq,Hq,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), timed in one pass."""

    pass_name: str
    dtype: str
    causal: bool
    B: int
    Hq: int
    Hk: int
    Sq: int
    Sk: int
    D: int
    Dv: int

    @property
    def flops(self) -> float:
        """Floating-point operations of the pass, by the convention every comparison uses."""
        table = self.B * self.Hq * self.Sq * self.Sk
        forward = 2 * table * (self.D + self.Dv) * (0.5 if self.causal else 1.0)
        return PASSES[self.pass_name] * forward

    @property
    def score_table_bytes(self) -> int:
        """One table of scores, (B, Hq, Sq, Sk) in the cell's dtype."""
        return self.B * self.Hq * self.Sq * self.Sk * DTYPES[self.dtype]

    @property
    def workspace_bytes(self) -> int:
        """What flash_ext needs at most beyond inputs and results on CUDA, all of it fp32.

        Forward: lse (B, Hq, Sq). Backward: delta, of the same size, and dQ (B, Hq, Sq, D rounded up
        to 16); with grouped heads, where keys are few for the GPU, also dK (B, Hk, Sk, D rounded
        up) and dV. Both: all together. Hopper's backward kernels need more for dQ, unless its rows
        and columns are whole tiles.
        """
        rows = self.B * self.Hq * self.Sq
        if self.pass_name == "forward":
            return 4 * rows
        D, Dv = (-(-columns // 16) * 16 for columns in (self.D, self.Dv))
        split = self.B * self.Hk * self.Sk * (D + Dv) if self.Hk < self.Hq else 0
        return 4 * (rows * ((1 if self.pass_name == "backward" else 2) + D) + split)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        return f"{self.pass_name} D{self.D} {self.mask} S{self.Sq}"


@dataclass(frozen=True)
class Result:
    """One provider in one cell; figures are None unless `status` is "ok".

    status: "ok", "unavailable", "failed" or "wrong"; `reason` says why it is not "ok".
    error: largest relative error (Frobenius norm) of any result on the slice that was checked.
    ms, ms_p20, ms_p80: milliseconds of the pass, median and percentiles over `rounds`.
    best_peer, vs_best_peer: the fastest other implementation, and this one's speed over its.
    matmul_tflops, matmul_share: a matrix product of the same dtype timed in turn with the cell.
    extra_mib: peak memory beyond inputs and results.
    """

    provider: str
    status: str
    reason: str = ""
    error: float | None = None
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    rounds: int | None = None
    tflops: float | None = None
    best_peer: str = ""
    vs_best_peer: float | None = None
    matmul_tflops: float | None = None
    matmul_share: float | None = None
    extra_mib: float | None = None

    def timed(self, t: Timing, flops: float) -> Result:
        """The same with its times, for a pass of so many FLOPs."""
        tflops = 1e-9 * flops / t.median
        return replace(
            self, ms=t.median, ms_p20=t.p20, ms_p80=t.p80, rounds=t.rounds, tflops=tflops
        )


@dataclass(frozen=True)
class Row:
    environment: Environment
    cell: Cell
    result: Result


COLUMNS = [field.name for part in (Environment, Cell, Result) for field in fields(part)]
_PARSERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "bool": lambda text: {"True": True, "False": False}[text],
    "float": float,
    "float | None": lambda text: float(text) if text else None,
    "int | None": lambda text: int(text) if text else None,
}


def make_cell(
    *, pass_name: str, dtype: str, mask: str, D: int, S: int, tokens: int, hidden: int, group: int
) -> Cell:
    """The cell of the table conventions: B = tokens/S (at least 1), Hq = hidden/D, Hk = Hq/group.

    Raises:
        ValueError: if hidden has no whole head of D, or group does not divide the heads.
    """
    heads = hidden // D
    if heads < 1:
        raise ValueError(f"hidden: got {hidden}, expected at least the head dim {D}")
    if heads % group:
        raise ValueError(f"group: got {group}, expected a divisor of the {heads} query heads")
    return Cell(
        pass_name=pass_name, dtype=dtype, causal=mask == "causal", B=max(1, tokens // S),
        Hq=heads, Hk=heads // group, Sq=S, Sk=S, D=D, Dv=D,
    )  # fmt: skip


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with a header line; floats keep six digits, None is an empty field."""
    lines = ({**asdict(row.environment), **asdict(row.cell), **asdict(row.result)} for row in rows)
    write_lines(path, COLUMNS, ({name: _text(x) for name, x in line.items()} for line in lines))


def read_csv(path: Path) -> list[Row]:
    """Read what `write_csv` wrote.

    Raises:
        ValueError: see `read_lines`.
    """

    def row(line: Mapping[str, str]) -> Row:
        return Row(*(parsed(part, line) for part in (Environment, Cell, Result)))

    return read_lines(path, COLUMNS, row)


def write_lines(path: Path, columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> None:
    """Write a header and a line for each mapping; what it lacks is an empty field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_lines(
    path: Path, columns: Sequence[str], parse: Callable[[Mapping[str, str]], T]
) -> list[T]:
    """What `parse` makes of each line of a file with these columns.

    Raises:
        ValueError: if the header is another, a line is cut or a field unreadable; names the line.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    if not lines or lines[0] != list(columns):
        got = lines[0] if lines else []
        raise ValueError(f"{path}: got columns {got}, expected {list(columns)}")
    found = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(columns):
            raise ValueError(f"{path}:{number}: got {len(line)} fields, expected {len(columns)}")
        try:
            found.append(parse(dict(zip(columns, line, strict=True))))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}:{number}: cannot read a field: {error}") from error
    return found


def parsed(part: Any, values: Mapping[str, str]) -> Any:
    """A dataclass from the texts of a line."""
    return part(**{f.name: _PARSERS[str(f.type)](values[f.name]) for f in fields(part)})


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
