"""How recorded runs split their tests into shards.

A test belongs to the shard that the hash of its id names: the same on every machine, whatever else
is selected.
"""

from __future__ import annotations

import hashlib


def shard_of(test_id: str, shards: int) -> int:
    """The shard, from 1 to `shards`, that runs this test."""
    return int.from_bytes(hashlib.sha256(test_id.encode()).digest()[:8], "big") % shards + 1


def parse_shard(text: str) -> tuple[int, int]:
    """`"2/3"` as (2, 3)."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise ValueError(f"shard: expected i/n such as 1/2, got {text!r}") from None
    if not 1 <= index <= count:
        raise ValueError(f"shard: expected 1 <= i <= n, got {text!r}")
    return index, count
