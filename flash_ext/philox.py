"""The dropout mask: which entries of the probability table are kept.

Philox4x32 is a counter-based generator (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011): a keyed bijection of four 32-bit words. Any entry of the table can be
drawn alone, in any order, on any device: the mask depends on nothing but the seed,
batch * Hq + head, row and column.

The table of one (batch, head) is cut into absolute blocks of 16 x 16 entries. Block (I, J) takes 32
calls, one for each lane of a warp, with

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (J, I, batch * Hq + head, lane)

A call yields eight 16-bit values e = 0..7: word 0 low half, word 0 high half, word 1 low half, ...
They belong to the entries that the lane holds of two neighbouring m16n8 accumulators:

    row = lane // 4 + 8 * ((e >> 1) & 1)        column = 8 * (e >> 2) + 2 * (lane % 4) + (e & 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
LANES = 32
ROUNDS = 7

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Words:
    """Four random 32-bit words per counter.

    All words are int64 tensors with values in [0, 2**32) that broadcast against each other.
    A product of two words may wrap around 2**63: its 64 bits are still the right ones.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _LOW_32) ^ c1 ^ k0
        c1 = product1 & _LOW_32
        c2 = ((product0 >> 32) & _LOW_32) ^ c3 ^ k1
        c3 = product0 & _LOW_32
        k0 = (k0 + _KEY_STEPS[0]) & _LOW_32
        k1 = (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0, c1, c2, c3


def drop_threshold(dropout_p: float) -> int:
    """The 16-bit value below which an entry is dropped: p in steps of 2**-16."""
    return min(round(dropout_p * 65536), 65535)


def keep_scale(dropout_p: float) -> float:
    """Factor of the kept entries, 1 / (1 - p) for the p that the 16-bit threshold realises."""
    return 1.0 / (1.0 - drop_threshold(dropout_p) / 65536)


def keep_mask(
    seed: Tensor, batch_heads: slice, rows: slice, cols: slice, dropout_p: float
) -> Tensor:
    """The mask of one tile: bool (batch_heads, rows, cols), True where the entry is kept.

    seed is an int64 tensor of one element; batch_heads counts batch * Hq + head. The slices have
    explicit bounds and need not be aligned to anything.
    """
    device = seed.device
    first_row, first_col = rows.start // BLOCK, cols.start // BLOCK
    block_rows = torch.arange(first_row, -(-rows.stop // BLOCK), device=device)
    block_cols = torch.arange(first_col, -(-cols.stop // BLOCK), device=device)
    heads = torch.arange(batch_heads.start, batch_heads.stop, device=device)
    lanes = torch.arange(LANES, device=device)

    seed = seed.reshape(())
    words = philox4x32(
        (
            block_cols[:, None],  # (J, 1)
            block_rows[:, None, None],  # (I, 1, 1)
            heads[:, None, None, None] & _LOW_32,  # (heads, 1, 1, 1)
            lanes,  # (32,)
        ),
        (seed & _LOW_32, (seed >> 32) & _LOW_32),
    )
    word = torch.stack(words, dim=-1)  # (heads, I, J, lane, word)
    values = torch.stack((word & 0xFFFF, word >> 16), dim=-1)  # (heads, I, J, lane, word, half)

    # lane = (lane // 4, lane % 4), word = (column half, row half) of the 16 x 16 block.
    split = (values >= drop_threshold(dropout_p)).unflatten(3, (8, 4)).unflatten(5, (2, 2))
    table = split.permute(0, 1, 6, 3, 2, 5, 4, 7)  # (heads, I, row half, 8, J, column half, 4, 2)
    keep = table.reshape(len(heads), len(block_rows) * BLOCK, len(block_cols) * BLOCK)

    row0, col0 = first_row * BLOCK, first_col * BLOCK
    return keep[:, rows.start - row0 : rows.stop - row0, cols.start - col0 : cols.stop - col0]
