"""Attention against softmax in fp64: one suite for CPU tensors and, where there is a GPU, CUDA.

Every case runs forward and backward over poisoned memory. Axes are combined pairwise: each pair of
values of any two of them occurs in some case.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_kit import attend, bit_equal, hold, kernel_family, require_served, run, run_and_hold

from flash_ext.testing.cases import MEMORY, Case, Inputs, guarded, make_inputs, pairwise

LENGTHS = [
    *[(1, 1), (1, 239), (3, 799), (113, 203), (128, 217), (256, 512), (512, 256), (129, 128)],
    *[(64, 65), (300, 1), (1023, 1024), (1024, 1023)],
]
SHORT = [lengths for lengths in LENGTHS if max(lengths) < 700]
MASKS = [
    *[(False, (None, None)), (True, (None, None)), (False, (32, 64)), (True, (100, None))],
    *[(False, (0, 0)), (False, (17, None)), (False, (None, 5)), (True, (0, None))],
]
HEADS = [(3, 3), (6, 2), (4, 1)]
HEAD_DIMS = [
    *[(8, None), (33, None), (40, None), (59, None), (64, None), (72, None), (80, None)],
    *[(96, None), (111, None), (128, None), (64, 128), (128, 64), (40, 8), (64, 33)],
]
HALVES = [torch.float16, torch.bfloat16]
EXTRAS = [
    {},
    {"lse_gradient": True},
    {"sinks": torch.float32},
    {"sinks": torch.bfloat16, "lse_gradient": True, "layout": "bhsd"},
    {"layout": "bhsd"},
    {"out_dtype": torch.float32},
    {"softmax_scale": 0.3, "memory": "packed"},
    {"softmax_scale": -0.1, "memory": "transposed"},
    {"softmax_scale": 0.0},
]


def combined(seed: int, lengths: list[tuple[int, int]], dtypes: list[torch.dtype]) -> list[Case]:
    """Cases in which all pairs of values of the axes occur."""
    axes = dict(lengths=lengths, mask=MASKS, heads=HEADS, dims=HEAD_DIMS, extra=EXTRAS)
    names = list(axes)
    # pairwise sets fields of a Case; the values of these axes are several fields at once.
    stand_in = dict(zip(names, ("seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim"),
                        strict=True))  # fmt: skip
    indices = {stand_in[name]: range(len(axes[name])) for name in names}
    cases = []
    for picked in pairwise(Case(), seed, dtype=dtypes, **indices):
        choice = {name: axes[name][getattr(picked, stand_in[name])] for name in names}
        sizes = dict(zip(("seqlen_q", "seqlen_k"), choice["lengths"], strict=True))
        heads = dict(zip(("heads_q", "heads_k"), choice["heads"], strict=True))
        dims = dict(zip(("head_dim", "head_dim_v"), choice["dims"], strict=True))
        mask = dict(zip(("causal", "window_size"), choice["mask"], strict=True))
        common = dict(dtype=picked.dtype, seed=len(cases))
        cases.append(Case(**common, **sizes, **heads, **dims, **mask, **choice["extra"]))
    return cases
