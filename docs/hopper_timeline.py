"""Draws the schedule of the Hopper forward pass and prints its cycle budget.

    python docs/hopper_timeline.py            # docs/figures/hopper-forward.svg, and the budget
    python docs/hopper_timeline.py --check    # fails where the figure is not current

The figure is a model, no trace: roles, rings of buffers and waits are those of
csrc/sm90/forward_kernel.cuh, how long each step takes is given below, in clocks. The tensor cores
serve products in the order in which they were issued.
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "figures" / "hopper-forward.svg"
CONFIG = ROOT / "csrc" / "sm90" / "config.h"

ROWS = 64  # of a consumer: the M of wgmma
TENSOR_FLOP = 4096  # a clock and multiprocessor, 16-bit wgmma
EXPONENTIALS = 16  # a clock and multiprocessor
ISSUES = 128  # threads' instructions a clock and multiprocessor
SMEM_BYTES = 128  # a clock and multiprocessor
SOFTMAX_ISSUES = 3.5  # a score: multiply-add, exp2, sum, half a conversion


# --- The budget ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A row of the table of tiles."""

    head_dim: int
    block_m: int
    block_n: int
    stages: int
    q_stages: int
    q_in_registers: bool = False

    @property
    def consumers(self) -> int:
        return self.block_m // ROWS

    @property
    def tensor_clocks(self) -> float:
        """Both products of one key tile."""
        return 4 * self.block_m * self.block_n * self.head_dim / TENSOR_FLOP

    @property
    def exp_clocks(self) -> float:
        return self.block_m * self.block_n / EXPONENTIALS

    @property
    def issue_clocks(self) -> float:
        return self.block_m * self.block_n * SOFTMAX_ISSUES / ISSUES

    @property
    def smem_clocks(self) -> float:
        """Operands that wgmma reads, and K and V that TMA writes.

        A step over 16 columns reads 16 columns of B, and for Q Kᵀ 64 x 16 of A unless Q is in
        registers; each consumer for itself. P comes from registers.
        """
        a_rows = 0 if self.q_in_registers else ROWS
        s = self.head_dim // 16 * 32 * (a_rows + self.block_n)
        o = self.block_n // 16 * 32 * self.head_dim
        written = 4 * self.block_n * self.head_dim
        return (self.consumers * (s + o) + written) / SMEM_BYTES

    @property
    def l2_bytes(self) -> float:
        """Bytes of K and V a clock of the tensor cores."""
        return 4 * self.block_n * self.head_dim / self.tensor_clocks


def tiles() -> list[Tile]:
    """The rows of config.h."""
    pattern = r"Forward = ForwardConfig<T, ([\d, ]+), (true|false)>"
    found = re.findall(pattern, CONFIG.read_text(encoding="utf-8"))
    return [Tile(*map(int, row.split(",")), in_registers == "true") for row, in_registers in found]


def budget_lines() -> list[str]:
    """The rows of the table of the page."""
    return [
        f"| {t.head_dim} | {t.block_m} x {t.block_n} | {t.tensor_clocks:.0f} | {t.exp_clocks:.0f} "
        f"| {t.issue_clocks:.0f} | {t.smem_clocks:.0f} | {t.l2_bytes:.1f} |"
        for t in tiles()
    ]


# --- The model -----------------------------------------------------------------------------------

MODEL = Tile(128, 128, 128, 2, 2, q_in_registers=True)
KEY_TILES = (3, 3)  # of each tile of queries
QK = PV = 512  # 8 steps of 64 clocks
FIRST_SOFTMAX = 1300  # looks for the maximum
SOFTMAX = 1000  # guesses it
FINISH = 350  # O / l, lse, O to shared memory
LOAD = 512  # 32 KiB at 64 bytes a clock
LATENCY = 540  # of L2
STORE = 450  # 64 rows of O, until shared memory is free again
ISSUE = 40  # of one load


@dataclass
class Event:
    """Something that happens once `needed` parties have come to it."""

    needed: int = 1
    done: bool = False
    waiters: list[Actor] = field(default_factory=list)


# What a role yields: a clock to go on at, or an event to wait for.
Actor = Generator["int | Event", int, None]


@dataclass(frozen=True)
class Block:
    """A bar of the figure."""

    lane: str
    kind: str
    label: str
    tile: int
    start: int
    end: int


class Model:
    """The roles of one thread block, advanced in the order of time."""

    def __init__(self) -> None:
        self.now = 0
        self.blocks: list[Block] = []
        self.events: dict[tuple[object, ...], Event] = {}
        self.queue: list[tuple[int, int, Actor]] = []
        self.serial = 0
        self.tensor_free = 0
        self.link_free = 0

    def run(self) -> list[Block]:
        roles = [self.producer()]
        for consumer in range(MODEL.consumers):
            roles += [self.consumer(consumer), self.storer(consumer)]
        for role in roles:
            self.at(0, role)
        while self.queue:
            self.now, _, role = heapq.heappop(self.queue)
            wish = next(role, None)
            if isinstance(wish, int):
                self.at(wish, role)
            elif wish is not None and wish.done:
                self.at(self.now, role)
            elif wish is not None:
                wish.waiters.append(role)
        return self.blocks

    def at(self, clock: int, role: Actor) -> None:
        self.serial += 1
        heapq.heappush(self.queue, (clock, self.serial, role))

    def event(self, *name: object, needed: int = 1) -> Event:
        return self.events.setdefault(name, Event(needed))

    def come(self, event: Event) -> None:
        event.needed -= 1
        if event.needed == 0:
            event.done = True
            for role in event.waiters:
                self.at(self.now, role)

    def fire(self, clock: int, event: Event) -> None:
        """Come to an event at a later clock."""

        def later() -> Actor:
            yield clock
            self.come(event)

        self.at(self.now, later())

    def empty(self, ring: str, index: int) -> Event:
        return self.event(ring, "empty", index, needed=MODEL.consumers)

    def draw(self, lane: str, kind: str, label: str, tile: int, start: int, end: int) -> None:
        self.blocks.append(Block(lane, kind, label, tile, start, end))

    def load(self, ring: str, stages: int, index: int, tile: int) -> Actor:
        if index >= stages:
            yield self.empty(ring, index - stages)
        start = max(self.now, self.link_free)
        self.link_free = start + LOAD
        self.draw("producer", "load", ring, tile, start, start + LOAD)
        self.fire(start + LOAD + LATENCY, self.event(ring, "full", index))
        yield self.now + ISSUE

    def producer(self) -> Actor:
        first = 0  # key tile of this query tile in the rings
        for tile, count in enumerate(KEY_TILES):
            yield from self.load("K", MODEL.stages, first, tile)
            yield from self.load("Q", MODEL.q_stages, tile, tile)
            for i in range(first, first + count - 1):
                yield from self.load("K", MODEL.stages, i + 1, tile)
                yield from self.load("V", MODEL.stages, i, tile)
            yield from self.load("V", MODEL.stages, first + count - 1, tile)
            first += count

    def product(self, consumer: int, kind: str, clocks: int, tile: int) -> Event:
        """Issues a product; the event is its end."""
        start = max(self.now, self.tensor_free)
        self.tensor_free = start + clocks
        self.draw(f"products {consumer}", kind, kind, tile, start, start + clocks)
        done = Event()
        self.fire(start + clocks, done)
        return done

    def work(self, consumer: int, kind: str, clocks: int, tile: int) -> Actor:
        self.draw(f"consumer {consumer}", kind, kind, tile, self.now, self.now + clocks)
        yield self.now + clocks

    def consumer(self, me: int) -> Actor:
        first = 0
        for tile, count in enumerate(KEY_TILES):
            yield self.event("Q", "full", tile)
            yield self.event("K", "full", first)
            yield self.product(me, "QK", QK, tile)
            self.come(self.empty("K", first))
            yield from self.work(me, "softmax", FIRST_SOFTMAX, tile)
            for i in range(first, first + count - 1):
                yield self.event("K", "full", i + 1)
                s = self.product(me, "QK", QK, tile)
                yield self.event("V", "full", i)
                o = self.product(me, "PV", PV, tile)
                yield s
                self.come(self.empty("K", i + 1))
                yield from self.work(me, "softmax", SOFTMAX, tile)
                yield o
                self.come(self.empty("V", i))
            last = first + count - 1
            yield self.event("V", "full", last)
            yield self.product(me, "PV", PV, tile)
            self.come(self.empty("V", last))
            yield from self.work(me, "finish", FINISH, tile)
            self.come(self.event("O", me, tile))
            first += count

    def storer(self, me: int) -> Actor:
        for tile in range(len(KEY_TILES)):
            yield self.event("O", me, tile)
            self.draw(f"storer {me}", "store", "O", tile, self.now, self.now + STORE)
            yield self.now + STORE
            self.come(self.empty("Q", tile))


# --- The figure ----------------------------------------------------------------------------------

LANES = {
    "producer": "producer: TMA loads",
    "products 0": "consumer 0: products",
    "consumer 0": "softmax, finish",
    "products 1": "consumer 1: products",
    "consumer 1": "softmax, finish",
    "storer 0": "storer 0: TMA stores",
    "storer 1": "storer 1",
}
COLOURS = {  # of the first and the second tile of queries
    "load": ("#b8c4d0", "#8fa3b8"),
    "QK": ("#9ecae1", "#5fa2cf"),
    "PV": ("#a1d99b", "#62b567"),
    "softmax": ("#fdd0a2", "#f5a75c"),
    "finish": ("#dadaeb", "#aaa6d3"),
    "store": ("#f7c6d9", "#e58db3"),
}
LEFT, TOP, LANE, BAR, SCALE, TICK = 150, 34, 30, 22, 0.085, 1000


def svg(blocks: list[Block]) -> str:
    """The figure as text."""
    end = max(block.end for block in blocks)
    width, bottom = LEFT + round(end * SCALE) + 20, TOP + LANE * len(LANES)
    tops = {lane: TOP + LANE * i for i, lane in enumerate(LANES)}

    def x(clock: int) -> float:
        return round(LEFT + clock * SCALE, 1)

    def lines() -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 40}" '
            f'width="{width}" height="{bottom + 40}" font-family="sans-serif" font-size="11">'
        )
        yield "<title>Schedule of the Hopper forward pass at head dim 128: a model</title>"
        yield f'<rect width="{width}" height="{bottom + 40}" fill="#ffffff"/>'
        yield (
            f'<text x="{LEFT}" y="20">D {MODEL.head_dim}, tiles of {MODEL.block_m} queries x '
            f"{MODEL.block_n} keys, {KEY_TILES[0]} key tiles each; darker: the next tile of "
            "queries. A model, no trace.</text>"
        )
        for clock in range(0, end + 1, TICK):
            yield f'<path d="M{x(clock)} {TOP}V{bottom}" stroke="#dddddd"/>'
            yield f'<text x="{x(clock)}" y="{bottom + 16}" text-anchor="middle">{clock}</text>'
        yield f'<text x="{LEFT}" y="{bottom + 33}">clocks</text>'
        for lane, name in LANES.items():
            yield (f'<text x="{LEFT - 8}" y="{tops[lane] + 16}" text-anchor="end">{name}</text>')
        for block in blocks:
            left, right = x(block.start), x(block.end)
            y = tops[block.lane]
            yield (
                f'<rect x="{left}" y="{y}" width="{right - left:.1f}" height="{BAR}" '
                f'fill="{COLOURS[block.kind][block.tile % 2]}" stroke="#ffffff"/>'
            )
            middle = round((left + right) / 2, 1)
            yield f'<text x="{middle}" y="{y + 15}" text-anchor="middle">{block.label}</text>'
        yield "</svg>"

    return "\n".join(lines()) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    text = svg(Model().run())
    if options.check:
        if FIGURE.exists() and FIGURE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{FIGURE} is not current; run: python docs/hopper_timeline.py", file=sys.stderr)
        return 1
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(text, encoding="utf-8")
    print("\n".join(budget_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
