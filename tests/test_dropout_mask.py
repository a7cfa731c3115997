"""The dropout mask: the generator against published vectors, the layout, and its statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flash_ext.philox import drop_threshold, keep_mask, keep_scale, philox4x32

ALL_ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)

# Counter and key, rounds, result: the known-answer vectors that Random123 ships.
KNOWN_ANSWERS = [
    ((0,) * 6, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ((ALL_ONES,) * 6, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ((0,) * 6, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ALL_ONES,) * 6, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def mask(seed: int, heads: slice, rows: slice, cols: slice, dropout_p: float) -> Tensor:
    return keep_mask(torch.tensor([seed]), heads, rows, cols, dropout_p)


def scalar(word: int) -> Tensor:
    return torch.tensor(word, dtype=torch.int64)


@pytest.mark.parametrize(("words", "rounds", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(words: tuple[int, ...], rounds: int, expected: str) -> None:
    c0, c1, c2, c3, k0, k1 = map(scalar, words)
    result = philox4x32((c0, c1, c2, c3), (k0, k1), rounds)
    assert " ".join(f"{int(word):08x}" for word in result) == expected


def test_philox_is_a_bijection_of_the_counter() -> None:
    counters = torch.arange(4096)
    zero = scalar(0)
    words = philox4x32((counters, zero, zero, zero), (scalar(1), scalar(2)))
    assert len(set(zip(*(word.tolist() for word in words), strict=True))) == len(counters)


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1, 0x0123456789ABCDEF])
def test_mask_is_what_the_layout_says(seed: int) -> None:
    """Every entry of some tiles, one at a time, by the formulas of the contract."""
    dropout_p, heads, rows, cols = 0.3, slice(5, 7), slice(30, 50), slice(14, 35)
    keep = mask(seed, heads, rows, cols, dropout_p)
    key = (scalar(seed & ALL_ONES), scalar((seed >> 32) & ALL_ONES))
    expected = torch.zeros_like(keep)
    places = {}  # of a block: (row, column) -> (lane, value)
    for lane, e in itertools.product(range(32), range(8)):
        row = lane // 4 + 8 * ((e >> 1) & 1)
        col = 8 * (e >> 2) + 2 * (lane % 4) + (e & 1)
        places[row, col] = lane, e
    assert len(places) == 256
    for h, i, j in itertools.product(range(5, 7), range(30, 50), range(14, 35)):
        lane, e = places[i % 16, j % 16]
        counter = (scalar(j // 16), scalar(i // 16), scalar(h), scalar(lane))
        word = int(philox4x32(counter, key, rounds=7)[e // 2])
        value = word >> 16 if e % 2 else word & 0xFFFF
        expected[h - 5, i - 30, j - 14] = value >= round(dropout_p * 65536)
    assert torch.equal(keep, expected)


def test_tiles_of_any_shape_cut_one_table() -> None:
    whole = mask(3, slice(0, 6), slice(0, 100), slice(0, 150), 0.4)
    for heads, rows, cols in itertools.product(
        (slice(0, 6), slice(2, 3), slice(4, 6)),
        (slice(0, 1), slice(15, 17), slice(16, 64), slice(99, 100)),
        (slice(0, 150), slice(1, 16), slice(31, 33), slice(149, 150)),
    ):
        assert torch.equal(mask(3, heads, rows, cols, 0.4), whole[heads, rows, cols])


@pytest.mark.parametrize("dropout_p", [0.0, 2**-20, 0.1, 0.17, 0.5, 0.9, 0.99999, 1 - 2**-20])
def test_threshold_and_scale_agree(dropout_p: float) -> None:
    threshold = drop_threshold(dropout_p)
    assert 0 <= threshold <= 65535
    assert abs(threshold / 65536 - dropout_p) <= 2**-16
    assert keep_scale(dropout_p) == pytest.approx(65536 / (65536 - threshold), rel=1e-12)
    keep = mask(1, slice(0, 1), slice(0, 512), slice(0, 512), dropout_p)
    if threshold == 0:
        assert keep.all()


@pytest.mark.parametrize("dropout_p", [0.05, 0.17, 0.5, 0.9])
def test_dropped_share(dropout_p: float) -> None:
    """Of all entries, and of every row, column, head and place in a block, within 5 sigma."""
    keep = mask(11, slice(0, 8), slice(0, 512), slice(0, 512), dropout_p)
    dropped = (~keep).double()
    variance = dropout_p * (1 - dropout_p)
    blocks = dropped.view(8, 32, 16, 32, 16)
    for dims in ((0, 1, 2), (0, 2), (0, 1), (1, 2)):
        share = dropped.mean(dims)
        sigma = (variance / (keep.numel() / share.numel())) ** 0.5
        assert (share - dropout_p).abs().max() < 5 * sigma
    place = blocks.mean((0, 1, 3))  # (16, 16)
    assert (place - dropout_p).abs().max() < 5 * (variance / (8 * 32 * 32)) ** 0.5


def test_neighbours_seeds_and_heads_are_independent() -> None:
    """Correlation of the mask with its own shifts, other heads and other seeds, within 5 sigma."""
    keep = mask(21, slice(0, 4), slice(0, 512), slice(0, 512), 0.5)
    signs = keep.double() * 2 - 1
    other_seeds = [
        mask(s, slice(0, 4), slice(0, 512), slice(0, 512), 0.5) for s in (22, 21 + 2**32)
    ]
    others = [
        signs.roll(1, 1),
        signs.roll(1, 2),
        signs.roll(8, 2),
        signs.roll(16, 1),
        signs.roll(16, 2),
        signs.roll(1, 0),
        signs.transpose(1, 2).roll(1, 0),
        *(other.double() * 2 - 1 for other in other_seeds),
    ]
    for other in others:
        assert abs((signs * other).mean()) < 5 * keep.numel() ** -0.5
