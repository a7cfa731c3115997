"""From raw scores q.k to what the softmax sees: soft cap, ALiBi, bias and masks of one tile.

A tile holds the scores of a block of queries against a block of keys for every head of a few batch
entries: (B, Hk, G * M, N). The order of the modifiers is that of the public contract:

    scale * q.k  ->  softcap * tanh(. / softcap)  ->  + ALiBi  ->  + bias  ->  masks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from flash_ext.tiles import Tiling, blocks, take

MINUS_INF = float("-inf")


@dataclass(frozen=True)
class Scores:
    """Everything that happens to a score between the first matrix product and the softmax.

    Query i sits at key position i + Sk - Sq (bottom-right alignment) and sees the keys from
    window_left before it to window_right after it, both inclusive; -1 is no limit.
    """

    tiling: Tiling
    window_left: int
    window_right: int
    softcap: float
    slopes: Tensor | None  # ALiBi, (B|1, Hk, G, 1, 1)
    bias: Tensor | None  # (B|1, Hk|1, G|1, Sq|1, Sk|1): floating and added, or bool, True is seen

    @classmethod
    def of(
        cls,
        tiling: Tiling,
        window_left: int,
        window_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        attn_bias: Tensor | None,
    ) -> Scores:
        """From slopes (Hq,) or (B, Hq), and a bias that broadcasts to (B, Hq, Sq, Sk)."""
        slopes = bias = None
        if alibi_slopes is not None:
            per_batch = alibi_slopes[(None,) * (2 - alibi_slopes.dim())].to(tiling.dtype)
            slopes = tiling.by_group(per_batch, 1)[..., None, None]
        if attn_bias is not None:
            bias = tiling.by_group(attn_bias[(None,) * (4 - attn_bias.dim())], 1)
        return cls(tiling, window_left, window_right, softcap, slopes, bias)

    @property
    def _shift(self) -> int:
        return self.tiling.seqlen_k - self.tiling.seqlen_q

    def key_blocks(self, rows: slice, size: int) -> Iterator[slice]:
        """The blocks of keys that some of the rows see: the window as loop bounds."""
        start, stop = 0, self.tiling.seqlen_k
        if self.window_left >= 0:
            start = max(start, rows.start + self._shift - self.window_left)
        if self.window_right >= 0:
            stop = min(stop, rows.stop + self._shift + self.window_right)
        return blocks(start, stop, size)

    def query_blocks(self, cols: slice, size: int) -> Iterator[slice]:
        """The blocks of queries that see some of the columns."""
        start, stop = 0, self.tiling.seqlen_q
        if self.window_right >= 0:
            start = max(start, cols.start - self._shift - self.window_right)
        if self.window_left >= 0:
            stop = min(stop, cols.stop - self._shift + self.window_left)
        return blocks(start, stop, size)

    def cap(self, scores: Tensor) -> Tensor:
        """Soft cap, in place."""
        return scores.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap > 0 else scores

    def cap_slope(self, capped: Tensor) -> Tensor | None:
        """Derivative of the soft cap, from its result; None where it is 1 everywhere."""
        return 1 - (capped / self.softcap).square_() if self.softcap > 0 else None

    def add_biases(self, scores: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        """ALiBi and the additive bias, in place."""
        table = self.tiling.by_row(scores, rows)  # (B, Hk, G, M, N)
        if self.slopes is not None:
            distance = self._key_minus_query(rows, cols).abs_().to(scores.dtype)
            table.addcmul_(take(self.slopes, 0, batch), distance, value=-1)
        if self.bias is not None and self.bias.dtype != torch.bool:
            table.add_(self._tile_of(self.bias, batch, rows, cols))
        return scores

    def hidden(self, batch: slice, rows: slice, cols: slice) -> Tensor | None:
        """Which scores of the tile are masked, bool (B|1, Hk|1, G * M, N); None if none is.

        The window is looked at only in tiles that its edges cross.
        """
        masks: list[Tensor] = []
        last_key_of_first_row = rows.start + self._shift + self.window_right
        if self.window_right >= 0 and cols.stop - 1 > last_key_of_first_row:
            masks.append(self._key_minus_query(rows, cols) > self.window_right)
        first_key_of_last_row = rows.stop - 1 + self._shift - self.window_left
        if self.window_left >= 0 and cols.start < first_key_of_last_row:
            masks.append(self._key_minus_query(rows, cols) < -self.window_left)
        if self.bias is not None:
            bias = self._tile_of(self.bias, batch, rows, cols)
            masked = bias.logical_not() if bias.dtype == torch.bool else bias == MINUS_INF
            if masked.any():
                masks.append(masked)
        if not masks:
            return None
        mask = reduce(torch.logical_or, masks)
        mask = mask[(None,) * (5 - mask.dim())]  # (B|1, Hk|1, G|1, M|1, N|1)
        rows_and_cols = (self.tiling.group, rows.stop - rows.start, cols.stop - cols.start)
        return mask.expand(*mask.shape[:2], *rows_and_cols).flatten(2, 3)

    def zero_bias_gradient(self) -> Tensor:
        """Accumulator of the bias gradient, of the bias's own size."""
        assert self.bias is not None
        return torch.zeros(self.bias.shape, dtype=self.tiling.dtype, device=self.tiling.device)

    def add_bias_gradient(
        self, dbias: Tensor, dscores: Tensor, batch: slice, rows: slice, cols: slice
    ) -> None:
        """Add a tile's gradient, summed over the dims in which the bias is broadcast."""
        tile = self._tile_of(dbias, batch, rows, cols)
        tile += self.tiling.by_row(dscores, rows).sum_to_size(tile.shape)

    def _tile_of(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        return take(take(take(bias, 0, batch), 3, rows), 4, cols)

    def _key_minus_query(self, rows: slice, cols: slice) -> Tensor:
        """Key position less query position, int64 (M, N)."""
        device = self.tiling.device
        queries = torch.arange(rows.start + self._shift, rows.stop + self._shift, device=device)
        return torch.arange(cols.start, cols.stop, device=device) - queries[:, None]
