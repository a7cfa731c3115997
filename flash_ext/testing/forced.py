"""Forcing the choice of kernels, so that every family and tile can be tested on one card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flash_ext import dispatch


@contextmanager
def forced(family: str | None = None, smem_limit: int | None = None) -> Iterator[None]:
    """Within the context only kernels of one family, or of limited shared memory, are chosen.

    A family that has kernels for tensors of this kind (dtype, head dims, packed or not) in one pass
    alone leaves the other pass free, as `explain` tells. The context holds for every thread,
    backward passes included, and for `explain`. A call that no such kernel serves raises
    `NotImplementedError`, and so does one with CPU tensors.

    Args:
        family: "sm80" or "sm90"; None leaves the family free.
        smem_limit: bytes of shared memory that a block may ask for; never more than the device's.

    Raises:
        ValueError: an unknown family, a limit that is not positive, or nothing to force.
    """
    if family is None and smem_limit is None:
        raise ValueError("forced needs a family, a smem_limit or both, got neither")
    if family is not None and family not in dispatch.FAMILIES:
        raise ValueError(f"family is {family!r}, expected one of {dispatch.FAMILIES}")
    if smem_limit is not None and smem_limit <= 0:
        raise ValueError(f"smem_limit is {smem_limit}, expected a positive number of bytes")
    before = dispatch.in_force
    dispatch.in_force = dispatch.Forced(family, smem_limit)
    try:
        yield
    finally:
        dispatch.in_force = before
