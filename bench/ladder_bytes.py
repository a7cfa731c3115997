"""What the steps of the ladder should move, as functions of sizes and tiles.

Bytes of one pass. DRAM: what must come from memory and go to it, if an L2 cache keeps what
is read again soon (keys and values of the heads in work), and nothing of a table. L2 to
multiprocessors: what thread blocks read. S is float32, P, q, k, v and out are bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.schema import Cell
from flash_ext.classic import ALGORITHMS, TABLE_ALIGNMENT

WHOLE_TABLE = ("three_pass", "two_pass")
# Bytes of row statistics, maximum and sum, a row: written and read.
STATISTICS = {"three_pass": (8, 12), "two_pass": (8, 8)}
SCORE_READS = {"three_pass": 3, "two_pass": 2}


@dataclass(frozen=True)
class Tile:
    """Query and key rows of a tile."""

    block_m: int
    block_n: int


def tile_of(rung: str, head_dim: int) -> Tile:
    """The tile of a classic algorithm."""
    row = ALGORITHMS[rung]
    return Tile(row.block_m, row.block_n[head_dim])


def standard_elements(cell: Cell) -> int:
    """The textbook's count for standard attention: 4 N d + 4 N^2 elements a head."""
    return cell.B * cell.Hq * (4 * cell.Sq * cell.D + 4 * cell.Sq * cell.Sk)


def compulsory(cell: Cell) -> int:
    """q, k and v read and out written, once."""
    return (
        2
        * cell.B
        * (cell.Hq * cell.Sq * (cell.D + cell.Dv) + cell.Hk * cell.Sk * (cell.D + cell.Dv))
    )


def table_elements(cell: Cell) -> int:
    """Elements of a table in memory, whose rows are padded."""
    cols = -(-cell.Sk // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    return cell.B * cell.Hq * cell.Sq * cols


def dram(rung: str, cell: Cell) -> int:
    """Bytes read from and written to memory in a forward pass, or in both passes."""
    bytes_moved = compulsory(cell) + score_bytes_moved(rung, cell)
    rows = cell.B * cell.Hq * cell.Sq
    fast = rung not in ALGORITHMS and rung != "plain"
    if rung in WHOLE_TABLE:
        bytes_moved += rows * sum(STATISTICS[rung])
    if fast:
        bytes_moved += 4 * rows  # lse
    if cell.pass_name == "both":
        keys = cell.B * cell.Hk * cell.Sk
        # q, k, v and dout read, dq, dk and dv written
        bytes_moved += 2 * (rows * (2 * cell.D + cell.Dv) + keys * 2 * (cell.D + cell.Dv))
        if fast:  # out and lse read, dq in float32 written and read
            bytes_moved += rows * (2 * cell.Dv + 4 + 8 * cell.D)
    return bytes_moved


def score_bytes_moved(rung: str, cell: Cell) -> int:
    """The part of `dram` that is that of tables.

    Plain PyTorch in bfloat16, forward: S written and read, P written and read. Backward: dP
    written; P and dP read and dS written by the softmax; P read for dv, dS for dq and for dk.
    """
    if rung == "plain":
        elements = cell.B * cell.Hq * cell.Sq * cell.Sk
        return 2 * elements * (4 if cell.pass_name == "forward" else 11)
    if rung not in WHOLE_TABLE:
        return 0
    row = ALGORITHMS[rung]
    return table_elements(cell) * (4 * (1 + SCORE_READS[rung]) + 2 * 2 * row.probabilities)


def visits(cell: Cell, tile: Tile) -> Iterator[tuple[int, int, int]]:
    """(query rows, key rows, key tiles) of each query tile, with the keys that it looks at."""
    for first in range(0, cell.Sq, tile.block_m):
        rows = min(tile.block_m, cell.Sq - first)
        keys = cell.Sk
        if cell.causal:
            keys = min(keys, max(0, first + rows + cell.Sk - cell.Sq))
        tiles = -(-keys // tile.block_n)
        yield rows, min(tiles * tile.block_n, cell.Sk), tiles


def l2_to_sm(rung: str, cell: Cell, tile: Tile) -> int:
    """Bytes that thread blocks read from L2."""
    heads, row_bytes = cell.B * cell.Hq, 2 * cell.D
    if rung in WHOLE_TABLE:
        query_tiles = -(-cell.Sq // tile.block_m)
        key_tiles = -(-cell.Sk // tile.block_n)
        scores = row_bytes * (cell.Sq * key_tiles + cell.Sk * query_tiles)
        values = row_bytes * cell.Sk * query_tiles
        table = 4 * SCORE_READS[rung] + 2 * ALGORITHMS[rung].probabilities
        statistics = cell.Sq * STATISTICS[rung][1]
        return heads * (scores + values + statistics) + table_elements(cell) * table
    if rung == "fa1":
        total = 2 * row_bytes * cell.Sk
        for rows, _, key_tiles in visits(cell, tile):
            rounds = max(1, key_tiles)
            total += rows * (rounds * row_bytes + (rounds - 1) * (4 * cell.D + 8))
        return heads * total
    return heads * sum(
        row_bytes * rows + 2 * row_bytes * keys for rows, keys, _ in visits(cell, tile)
    )


def saved_for_backward(cell: Cell, keeps_table: bool) -> int:
    """Bytes between the passes beside q, k and v: P, or out and lse."""
    if keeps_table:
        return 2 * cell.B * cell.Hq * cell.Sq * cell.Sk
    return cell.B * cell.Hq * cell.Sq * (2 * cell.Dv + 4)
