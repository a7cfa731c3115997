"""Which kernel serves a problem, and why no other: a pure function from facts to a Plan.

A build reports its kernels as a table in order of preference. For each pass the first row that can
serve the problem on the given hardware is taken; the reasons against the rows before it are kept.
The same reasons explain a problem that no row serves. Nothing here touches a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flash_ext.problem import Capability, Problem, name_of

FAMILIES = ("sm80", "sm90")
PASSES = ("forward", "backward")
REFERENCE = "reference"

# Opt-in shared memory of a block in KiB, for cards that are explained without being there.
SMEM_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
LEAST_SMEM_KIB = 99

WORKSPACE_STEP = 16  # fp32 workspaces of gradients have rows of a multiple of this many columns


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a choice depends on."""

    capability: Capability
    smem_limit: int  # bytes of shared memory that a block may ask for
    multiprocessors: int | None = None  # None: a capability is explained, and its GPUs differ

    @classmethod
    def absent(cls, capability: Capability) -> Hardware:
        """A GPU of a capability that is not there to be asked."""
        return cls(capability, SMEM_KIB.get(capability, LEAST_SMEM_KIB) * 1024)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of the table of compiled kernels."""

    index: int  # what the binding calls it
    family: str
    pass_: str  # "forward" or "backward"
    dtype: str
    head_dim: int  # serves D up to this
    head_dim_v: int  # serves Dv up to this
    features: str  # "lean", or "full": also softcap, ALiBi, bias and dropout
    block_m: int  # query rows of a tile
    block_n: int  # key rows of a tile
    threads: int
    stages: int
    smem_bytes: int
    deterministic: bool  # backward: gradients can be bit-equal from run to run
    splits_groups: bool  # backward: thread blocks can share the query heads of a group
    packed: bool  # serves packed sequences
    whole_dq_tiles: bool  # backward: dQ's workspace is made of whole tiles

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Kernel:
        facts = {
            "head_dim_v": row["head_dim"],
            "deterministic": True,
            "splits_groups": False,
            "packed": False,
            "whole_dq_tiles": False,
            **row,
        }
        return cls(pass_=facts.pop("pass"), **facts)

    @property
    def kind(self) -> str:
        """Features, and whether it is a lean one for packed sequences."""
        return "packed lean" if self.packed and self.features == "lean" else self.features

    @property
    def head_dims(self) -> str:
        """Up to which it serves."""
        narrow = f" with values up to {self.head_dim_v}" if self.head_dim_v < self.head_dim else ""
        return f"{self.head_dim}{narrow}"

    def serves_dims_of(self, problem: Problem) -> bool:
        return self.head_dim >= problem.D and self.head_dim_v >= problem.Dv

    def __str__(self) -> str:
        return (
            f"{self.kind} kernel for head dims up to {self.head_dims}, "
            f"tile {self.block_m} x {self.block_n}, {self.stages} stages, {self.threads} threads, "
            f"{self.smem_bytes / 1024:.0f} KiB of shared memory"
        )


@dataclass(frozen=True, slots=True)
class Forced:
    """What `flash_ext.testing.forced` asks for; None leaves the choice free."""

    family: str | None = None
    smem_limit: int | None = None  # bytes


in_force: Forced | None = None  # for every thread: backward passes run in threads of their own


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs one pass.

    Attributes:
        family: "sm80", "sm90", "reference" (the CPU path), or None when nothing serves.
        kernel: the row of the table; None on CPU or when nothing serves.
        reason: why this one.
        refused: why not each one that would have been preferred.
        splits: thread blocks that share the query heads of a group in the backward pass.
        split_reason: why that many; empty where a group has one head or the GPU is full anyway.
    """

    family: str | None
    kernel: Kernel | None
    reason: str
    refused: tuple[str, ...] = ()
    splits: int = 1
    split_reason: str = ""

    @property
    def tile(self) -> tuple[int, int] | None:
        """Query and key rows of a tile."""
        return (self.kernel.block_m, self.kernel.block_n) if self.kernel else None

    def __str__(self) -> str:
        split = f"\n    {self.split_reason}" if self.split_reason else ""
        lines = [f"{self.family or 'none'}: {self.reason}{split}", *self.refused]
        return "\n    not ".join(lines) if self.family else "\n    ".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for both passes of one problem; `str(plan)` is meant to be read."""

    problem: Problem
    target: str  # "CPU" or "compute capability 9.0"
    forward: Choice
    backward: Choice

    @property
    def family(self) -> str | None:
        """Family of the forward pass."""
        return self.forward.family

    @property
    def tile(self) -> tuple[int, int] | None:
        """(query rows, key rows) of a forward tile."""
        return self.forward.tile

    def kernel(self, pass_: str) -> Kernel:
        """The kernel of a pass.

        Raises:
            NotImplementedError: no compiled kernel serves it; with the reasons.
        """
        choice: Choice = getattr(self, pass_)
        if choice.kernel is None:
            reasons = "".join(f"\n  {reason}" for reason in choice.refused)
            raise NotImplementedError(
                f"the {pass_} pass is not served on {self.target}: {choice.reason}{reasons}\n"
                f"asked for: {self.problem}"
            )
        return choice.kernel

    def __str__(self) -> str:
        return (
            f"{self.problem}\non {self.target}\n"
            f"  forward {self.forward}\n  backward {self.backward}"
        )


def runs_on(family: str, archs: Iterable[str], capability: Capability) -> str | None:
    """None if a family's code in this build runs on the hardware, else the reason.

    Args:
        archs: compiled architectures, such as "80", "90a" or "80+PTX".
    """
    shown = "{}.{}".format(*capability)
    if family == "sm90":
        if capability != (9, 0):
            return f"needs compute capability 9.0, not {shown}"
        if any(arch.startswith("90a") for arch in archs):
            return None
    elif capability < (8, 0):
        return f"needs compute capability 8.0 or later, not {shown}"
    elif any(_covers(arch, capability) for arch in archs):
        return None
    needed = "90a" if capability == (9, 0) else "{}{}".format(*capability)
    return (
        f"this build has code for {', '.join(archs) or 'no architecture'}, none for compute "
        f"capability {shown}: rebuild with FLASH_EXT_CUDA_ARCHS={needed} pip install ."
    )


def _covers(arch: str, capability: Capability) -> bool:
    """Native code runs within its major version, PTX on everything later."""
    parsed = re.fullmatch(r"(\d+)(\d)([af]?)(\+PTX)?", arch)
    if parsed is None:
        raise ValueError(f"compiled architecture {arch!r} is not of the form 80, 90a or 80+PTX")
    compiled = (int(parsed[1]), int(parsed[2]))
    if parsed[3] == "a":
        return capability == compiled
    if parsed[4]:
        return capability >= compiled
    return capability[0] == compiled[0] and capability >= compiled


def plan_cpu(problem: Problem, forced: Forced | None = None) -> Plan:
    """The plan of CPU tensors: the reference, for every problem.

    Raises:
        NotImplementedError: a CUDA kernel is forced.
    """
    if forced is not None:
        raise NotImplementedError(
            f"flash_ext.testing.forced is in force (family {forced.family}, smem_limit "
            f"{forced.smem_limit}), but the tensors are on the CPU, where only the reference runs"
        )
    choice = Choice(REFERENCE, None, "tiled algorithm in PyTorch operations, for CPU tensors")
    return Plan(problem, "CPU", choice, choice)


def plan(
    problem: Problem,
    kernels: Sequence[Kernel],
    archs: Sequence[str],
    hardware: Hardware,
    forced: Forced | None = None,
    missing: str = "",
) -> Plan:
    """Choose a kernel for each pass.

    Args:
        kernels: the table of the build, in order of preference.
        archs: compiled architectures, see `runs_on`.
        hardware: the device.
        forced: a family or a smaller limit to obey.
        missing: why the build has no kernels at all, if it has none.

    Returns:
        The Plan. A pass that nothing serves has family None and says why; `Plan.kernel` then
        raises.
    """
    forced = forced or Forced()
    if forced.smem_limit is not None:
        smem_limit = min(hardware.smem_limit, forced.smem_limit)
        hardware = replace(hardware, smem_limit=smem_limit)
    families = {row.family: runs_on(row.family, archs, hardware.capability) for row in kernels}
    choices = [
        _choose(pass_, problem, kernels, families, hardware, forced, missing) for pass_ in PASSES
    ]
    return Plan(problem, "compute capability {}.{}".format(*hardware.capability), *choices)


def _choose(
    pass_: str,
    problem: Problem,
    kernels: Sequence[Kernel],
    families: Mapping[str, str | None],
    hardware: Hardware,
    forced: Forced,
    missing: str,
) -> Choice:
    if not kernels:
        return Choice(None, None, missing or "this build has no CUDA kernels")
    if forced.family is not None and forced.family not in families:
        return Choice(None, None, f"forced to family {forced.family}, which this build lacks")
    # A family that has kernels for such a problem in the other pass alone leaves this one free.
    forced_passes = {
        row.pass_ for row in kernels if row.family == forced.family and _is_made_for(row, problem)
    }
    family = forced.family if pass_ in forced_passes or not forced_passes else None
    dtype = name_of(problem.dtype)
    rows = [row for row in kernels if (row.pass_, row.dtype) == (pass_, dtype)]
    refused: list[str] = []
    for row in rows:
        if family not in (None, row.family):
            reason: str | None = f"forced to family {family}"
        else:
            reason = families[row.family] or _unfit(row, problem, hardware.smem_limit)
        if reason is None:
            why = "forced" if family else "first in order of preference that serves it"
            if forced.family != family:
                why += f"; {forced.family} has no {pass_} kernels for such a problem to force"
            passed_over = tuple(dict.fromkeys(refused))
            split = _split(row, problem, hardware.multiprocessors)
            return Choice(row.family, row, f"{row}; {why}", passed_over, *split)
        refused.append(f"{row.family}, head dims up to {row.head_dims}, {row.kind}: {reason}")
    if not rows:
        reason = f"no kernel for {dtype} is compiled"
    elif max(problem.D, problem.Dv) > max(row.head_dim for row in rows):
        dims = sorted({row.head_dim for row in rows})
        reason = (
            f"kernels are compiled for head dims up to {dims} (FLASH_EXT_HEAD_DIMS limits them)"
        )
    else:
        reason = "no compiled kernel can"
    return Choice(None, None, reason, tuple(dict.fromkeys(refused)))


def _is_made_for(row: Kernel, problem: Problem) -> bool:
    """Whether a kernel reads tensors of this kind at all, whatever else is asked of it."""
    fits = row.serves_dims_of(problem) and (row.packed or not problem.varlen)
    return fits and row.dtype == name_of(problem.dtype)


def _unfit(row: Kernel, problem: Problem, smem_limit: int) -> str | None:
    """Why a kernel that the hardware runs cannot serve the problem; None if it can."""
    if not row.serves_dims_of(problem):
        if row.head_dim >= problem.D:
            return f"the head dim of the values is {problem.Dv}"
        return f"the head dim is {problem.D}"
    if problem.varlen and not row.packed:
        return "does not read packed sequences"
    if problem.modifiers and row.features != "full":
        return f"does not serve {', '.join(problem.modifiers)}"
    if row.pass_ == "backward" and problem.deterministic and not row.deterministic:
        return "does not serve deterministic=True"
    if row.smem_bytes > smem_limit:
        return (
            f"tile {row.block_m} x {row.block_n} asks for {row.smem_bytes} bytes of shared memory, "
            f"{smem_limit} are available"
        )
    return None


def _split(row: Kernel, problem: Problem, multiprocessors: int | None) -> tuple[int, str]:
    """Thread blocks that share the query heads of a group, and why.

    One block walks over all heads of a group. Where that makes less than two blocks for each
    multiprocessor, the heads are dealt out to as many more as are needed, at most one a head.
    """
    if problem.varlen:  # the lengths, and so the blocks, are known to the device alone
        return 1, ""
    blocks = -(-problem.Sk // row.block_n) * problem.Hk * problem.B
    group = problem.Hq // problem.Hk
    if not row.splits_groups or blocks == 0 or group <= 1:
        return 1, ""
    if multiprocessors is not None and blocks >= 2 * multiprocessors:
        return 1, ""
    heads = f"group of {group} query heads"
    if problem.deterministic:
        return 1, f"{heads} not split: with deterministic=True additions keep their order"
    columns = sum(-(-D // WORKSPACE_STEP) * WORKSPACE_STEP for D in (problem.D, problem.Dv))
    mib = 4 * problem.B * problem.Hk * problem.Sk * columns / 2**20
    added = f"dk and dv added in fp32 ({mib:.1f} MiB)"
    if multiprocessors is None:
        few = f"on a GPU of more than {blocks // 2} multiprocessors"
        return 1, f"{heads} split over several thread blocks, {added}, {few}"
    splits = min(group, -(-2 * multiprocessors // blocks))
    few = f"because {blocks} are less than 2 for each of {multiprocessors} multiprocessors"
    return splits, f"{heads} split over {splits} thread blocks, {added}, {few}"
