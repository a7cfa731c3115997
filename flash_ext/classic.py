"""The road to FlashAttention: the algorithms before it and between its versions, a kernel each.

They are for learning and for measuring. `flash_ext.attention` is faster than any of them and does
more. Their extension is one of its own: without it everything else works.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from flash_ext import build, problem

__all__ = ["attention"]

HEAD_DIMS = (64, 128)
TABLE_ALIGNMENT = 8  # elements that a row of a table is padded to


@dataclass(frozen=True)
class Algorithm:
    """A step of the ladder: its tiles, and what it keeps in memory beside q, k, v and out."""

    block_m: int = 64  # query rows of a tile
    block_n: dict[int, int] = field(default_factory=lambda: {64: 128, 128: 64})  # keys, by D
    scores: bool = False  # (B, Hq, Sq, Sk rounded up to 8) float32
    probabilities: bool = False  # the same in bfloat16
    row_statistics: bool = False  # maximum and sum of each row, (B, Hq, Sq) float32
    accumulator: bool = False  # out between two rounds, (B, Hq, Sq, D) float32

    @property
    def table_bytes(self) -> int:
        """Bytes in memory for an element of the table."""
        return 4 * self.scores + 2 * self.probabilities


_WIDE = Algorithm(block_m=128, block_n={64: 96, 128: 48})
ALGORITHMS = {
    "three_pass": Algorithm(scores=True, probabilities=True, row_statistics=True),
    "two_pass": Algorithm(scores=True, row_statistics=True),
    "fa1": Algorithm(row_statistics=True, accumulator=True),
    "fa1_swapped": Algorithm(),
    "sequence_parallel": Algorithm(),
    "split_rows": Algorithm(),
    "unnormalised": Algorithm(),
    "lazy_rescale": Algorithm(),
    "wide_rows": _WIDE,
    "pipelined": _WIDE,
}


def attention(q: Tensor, k: Tensor, v: Tensor, *, algorithm: str, causal: bool = False) -> Tensor:
    """Exact attention by one of the classic algorithms: forward only, bfloat16, on CUDA.

    In the order of the ladder, each with what it changes:

    * `three_pass`: standard attention with a safe softmax. Scores and probabilities go to memory,
      and the scores come back for the row maximum, for the row sum and to be normalised.
    * `two_pass`: maximum and sum in one pass (Milakov and Gimelshein, arXiv:1805.02867, algorithm
      3), probabilities made where they are multiplied. The scores still go to memory.
    * `fa1`: FlashAttention (Dao et al., arXiv:2205.14135, algorithm 1): no table in memory. Tiles
      of k and v outside, of q inside; out and its row statistics are read and written each round.
      One thread block a head; warps split the keys of a tile.
    * `fa1_swapped`: the loops exchanged; out stays on the chip.
    * `sequence_parallel`: one thread block a tile of queries (Dao, arXiv:2307.08691, section 3.2).
    * `split_rows`: warps split the queries of a tile (section 3.3).
    * `unnormalised`: out is divided by the row sum once, at the end (section 3.1).
    * `lazy_rescale`: out follows the maximum only when that has grown by a factor of 256.
    * `wide_rows`: 32 rows a warp.
    * `pipelined`: the next tile of k and v is loaded beside the present one.

    Extra memory: `three_pass` 6 bytes and `two_pass` 4 bytes for each pair of query and key, `fa1`
    out in float32, all three two floats a row; the others none.

    Args:
        q: (B, Sq, Hq, D) bfloat16 on CUDA, D 64 or 128. What is not laid out in rows at multiples
            of 16 bytes is copied once.
        k: (B, Sk, Hk, D), Hq a multiple of Hk.
        v: (B, Sk, Hk, D).
        algorithm: one of the names above.
        causal: query i sees no key behind its own position, i + Sk - Sq. A row that sees no key has
            out 0.

    Returns:
        out (B, Sq, Hq, D), bfloat16, contiguous. Scores are scaled by 1 / sqrt(D).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value. The
            message names the argument, what came and what was expected.
        NotImplementedError: an input requires a gradient, or the kernels are not installed.
        torch.OutOfMemoryError: the table is larger than the memory that is free.
    """
    row = _check(q, k, v, algorithm, causal)
    B, Sq, Hq, D = q.shape
    Sk = k.shape[1]
    out = q.new_empty((B, Sq, Hq, D))
    if out.numel() == 0 or Sk == 0:
        return out.zero_()
    q, k, v = (_in_rows(x) for x in (q, k, v))
    table = (B, Hq, Sq, -(-Sk // TABLE_ALIGNMENT) * TABLE_ALIGNMENT)
    if row.table_bytes:
        check_fits(algorithm, table, free_bytes(q.device))
    extension = _extension()

    def kept(wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return q.new_empty(shape, dtype=dtype) if wanted else None

    extension.forward(
        list(ALGORITHMS).index(algorithm), q, k, v, out, D**-0.5, causal,
        kept(row.scores, *table), kept(row.probabilities, *table, dtype=torch.bfloat16),
        kept(row.row_statistics, B, Hq, Sq), kept(row.row_statistics, B, Hq, Sq),
        kept(row.accumulator, B, Hq, Sq, D),
    )  # fmt: skip
    return out


def check_fits(algorithm: str, table: tuple[int, int, int, int], free: int) -> None:
    """Raise torch.OutOfMemoryError if a table (B, Hq, Sq, cols) is larger than `free` bytes."""
    B, Hq, Sq, cols = table
    each = ALGORITHMS[algorithm].table_bytes
    needed = B * Hq * Sq * cols * each
    if needed > free:
        raise torch.OutOfMemoryError(
            f"algorithm {algorithm!r} keeps a table of {B} x {Hq} x {Sq} x {cols} elements, {each} "
            f"bytes each, in memory: {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that a new tensor can have, as far as the allocator can tell."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def source_digest() -> str:
    """Digest of the sources that the installed kernels were built from."""
    digest: str = _extension().build_info()["digest"]
    return digest


def _check(q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool) -> Algorithm:
    """Every argument; the row of the algorithm."""
    if algorithm not in ALGORITHMS:
        names = ", ".join(map(repr, ALGORITHMS))
        raise ValueError(f"algorithm is {algorithm!r}, expected one of {names}")
    problem.check_flag("causal", causal)
    for name, x in (("q", q), ("k", k), ("v", v)):
        problem.check_is_tensor(name, x)
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name} is {problem.name_of(x.dtype)}, expected bfloat16")
    *_, D, Dv = problem.check_inputs(q, k, v, None, None, None, bhsd=False, device_type="cuda")
    for name, x, dim in (("q", q, D), ("v", v, Dv)):
        if dim not in HEAD_DIMS or dim != D:
            expected = f"that of q, {D}" if name == "v" else "64 or 128"
            raise ValueError(
                f"{name} has shape {problem.shape_of(x)}: its head dim is {dim}, "
                f"expected {expected}"
            )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires a gradient, and the classic algorithms have no backward pass: "
                f"pass {name}.detach(), or call within torch.no_grad()"
            )
    if q.device.type != "cuda":
        raise ValueError(
            f"q is on {q.device}, expected a CUDA device: the classic algorithms are kernels only"
        )
    return ALGORITHMS[algorithm]


def _in_rows(x: Tensor) -> Tensor:
    """x as kernels can read it: unit last stride, rows at multiples of 16 bytes."""
    sizes = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    aligned = all(stride % 8 == 0 for size, stride in sizes if size > 1)
    if x.stride(-1) == 1 and aligned and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1)
def _extension() -> ModuleType:
    """The kernels; NotImplementedError with the way to get them if they are not there."""
    try:
        module = importlib.import_module("flash_ext._classic")
    except ImportError as error:
        raise NotImplementedError(
            f"the classic kernels are not installed ({error}). {build.REBUILD}"
        ) from error
    built = module.build_info()["version"]
    if built != build.__version__:
        raise NotImplementedError(
            f"the classic kernels {module.__file__} are of version {built}, the Python sources are "
            f"of version {build.__version__}. {build.REBUILD}"
        )
    return module
