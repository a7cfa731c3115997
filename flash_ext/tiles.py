"""How the reference cuts tensors into tiles: which heads, batch entries and rows go together.

A tile of queries holds the G = Hq / Hk heads that share a key head as further rows, G * M of them,
so that grouped heads cost one matrix product per key head and keys are never expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext.philox import keep_mask, keep_scale

TILE_ELEMENTS = 2**20  # batch entries are taken together up to this many scores in a tile


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Blocks of `size` that cover [start, stop); they begin at multiples of `size`."""
    for begin in range(start - start % size, stop if start < stop else 0, size):
        yield slice(begin, min(begin + size, stop))


def block_size(seqlen: int, longest: int) -> int:
    """Short sequences take small blocks, of which a causal mask skips more."""
    return 128 if seqlen <= 1024 else longest


def take(table: Tensor, dim: int, index: slice) -> Tensor:
    """A slice of a dimension, or all of it where it has size 1 and broadcasts."""
    if table.shape[dim] == 1:
        return table
    return table.narrow(dim, index.start, index.stop - index.start)


@dataclass(frozen=True)
class Tiling:
    """Sizes of one call, and the way from the caller's layout to tiles and back."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    group: int  # G query heads per key head
    bhsd: bool
    first_batch: int  # number of the first batch entry, for the dropout mask
    dtype: torch.dtype  # of the computation: fp64 for fp64 inputs, else fp32
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, bhsd: bool, first_batch: int = 0) -> Tiling:
        """From q (B, Sq, Hq, D) and k (B, Sk, Hk, D), or heads first with bhsd."""
        head, seq = (1, 2) if bhsd else (2, 1)
        heads_q, heads_k = q.shape[head], k.shape[head]
        return cls(
            batch=q.shape[0],
            seqlen_q=q.shape[seq],
            seqlen_k=k.shape[seq],
            heads_q=heads_q,
            heads_k=heads_k,
            group=heads_q // heads_k if heads_k else 1,
            bhsd=bhsd,
            first_batch=first_batch,
            dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
            device=q.device,
        )

    def by_head(self, x: Tensor) -> Tensor:
        """View of a tensor in the caller's layout as (B, Hk, G, S, D); G is 1 for keys."""
        heads_first = x if self.bhsd else x.transpose(1, 2)
        group = 1 if heads_first.shape[1] == self.heads_k else self.group
        return heads_first.unflatten(1, (self.heads_k, group))

    def by_group(self, x: Tensor, dim: int) -> Tensor:
        """View of a tensor with a dim of Hq heads, or of 1 that broadcasts, with (Hk, G) there."""
        return (
            x.unsqueeze(dim) if x.shape[dim] == 1 else x.unflatten(dim, (self.heads_k, self.group))
        )

    def batches(self, block_m: int, block_n: int) -> Iterator[slice]:
        """Batch entries to compute together: enough for efficiency, few enough for the cache."""
        tile = self.heads_q * min(block_m, self.seqlen_q) * min(block_n, self.seqlen_k)
        return blocks(0, self.batch, max(1, TILE_ELEMENTS // max(tile, 1)))

    def load(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of (B, Hk, G, S, D) as a matrix per key head, (B, Hk, G * M, D), to compute with."""
        return x[:, :, :, rows].to(self.dtype).flatten(2, 3).contiguous()

    def column(self, x: Tensor, rows: slice) -> Tensor:
        """One number per row: (B, Hk, G, S) or what broadcasts to it, as (B, Hk, G * M, 1)."""
        tile = take(x, 3, rows).to(self.dtype)
        length = rows.stop - rows.start
        return tile.expand(*tile.shape[:3], length).flatten(2, 3).unsqueeze(-1)

    def by_row(self, x: Tensor, rows: slice) -> Tensor:
        """View of a tile (B, Hk, G * M, N) as (B, Hk, G, M, N)."""
        return x.unflatten(2, (self.group, rows.stop - rows.start))

    def dropout_factor(
        self, seed: Tensor | None, batch: slice, rows: slice, cols: slice, dropout_p: float
    ) -> Tensor:
        """0 for dropped entries of a tile, 1 / (1 - p) for kept ones: (B, Hk, G * M, N)."""
        if seed is None:
            raise ValueError(f"seed is None, but dropout_p is {dropout_p}: a seed is needed")
        first, last = self.first_batch + batch.start, self.first_batch + batch.stop
        batch_heads = slice(first * self.heads_q, last * self.heads_q)
        keep = keep_mask(seed, batch_heads, rows, cols, dropout_p).to(self.dtype)
        shape = (batch.stop - batch.start, self.heads_k, self.group * keep.shape[1], keep.shape[2])
        return keep.mul_(keep_scale(dropout_p)).view(shape)
