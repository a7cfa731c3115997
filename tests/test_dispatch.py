"""The choice of a kernel: a pure function of a made-up table, hardware and problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_ext import dispatch, ops
from flash_ext.dispatch import Forced, Hardware, Kernel, Plan
from flash_ext.problem import Capability, Problem

KIB = 1024
ARCHS = ("80", "90a", "80+PTX")
A100, GEFORCE, HOPPER = (8, 0), (8, 6), (9, 0)

PROBLEM = Problem(
    *(2, 512, 512, 8, 4, 64, 64),
    dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    window=(-1, 0),
    modifiers=(),
    deterministic=False,
)


def row(
    family: str, pass_: str, head_dim: int, block_m: int, smem: int, **more: Any
) -> dict[str, Any]:
    """A row as the binding reports it; smem in KiB."""
    facts = {"family": family, "pass": pass_, "head_dim": head_dim, "block_m": block_m}
    fixed = {"dtype": "bfloat16", "features": "lean", "block_n": 64, "threads": 128, "stages": 2}
    return {**facts, **fixed, "smem_bytes": smem * KIB, "deterministic": True, **more}


ROWS = [
    row("sm90", "forward", 64, 192, 180),
    row("sm80", "forward", 64, 128, 120),
    row("sm80", "forward", 64, 64, 48),
    row("sm80", "forward", 64, 64, 64, features="full"),
    row("sm80", "forward", 128, 128, 96),
    row("sm90", "backward", 64, 128, 200, deterministic=False),
    row("sm80", "backward", 64, 64, 90, splits_groups=True),
    row("sm80", "backward", 64, 64, 99, features="full"),
    row("sm80", "forward", 64, 32, 24, dtype="float16"),
]
KERNELS = [Kernel.of({**item, "index": index}) for index, item in enumerate(ROWS)]


def plan(
    capability: Capability = HOPPER,
    *,
    archs: tuple[str, ...] = ARCHS,
    forced: Forced | None = None,
    smem: int | None = None,
    multiprocessors: int | None = None,
    **change: Any,
) -> Plan:
    hardware = Hardware.absent(capability)
    if smem is not None:
        hardware = replace(hardware, smem_limit=smem)
    hardware = replace(hardware, multiprocessors=multiprocessors)
    return dispatch.plan(replace(PROBLEM, **change), KERNELS, archs, hardware, forced)


def test_first_row_that_serves() -> None:
    found = plan()
    assert (found.family, found.tile) == ("sm90", (192, 64))
    assert found.kernel("forward").index == 0
    assert found.kernel("backward").index == 5
    assert found.forward.refused == ()


def test_reasons_against_faster_ones() -> None:
    found = plan(A100)
    assert found.kernel("forward").index == 1
    assert len(found.forward.refused) == 1
    assert "sm90" in found.forward.refused[0]
    assert "needs compute capability 9.0, not 8.0" in found.forward.refused[0]


def test_shared_memory_decides_the_tile() -> None:
    """D39: the device's limit picks a tile, or there is a clear error."""
    found = plan(GEFORCE)
    assert found.kernel("forward").index == 2
    assert "tile 128 x 64 asks for 122880 bytes of shared memory, 101376 are available" in str(
        found
    )
    small = plan(GEFORCE, smem=40 * KIB)
    assert small.family is None
    with pytest.raises(NotImplementedError, match="asks for 49152 bytes of shared memory, 40960"):
        small.kernel("forward")


@pytest.mark.parametrize(("D", "Dv", "index"), [(8, 64, 0), (64, 65, 4), (100, 40, 4), (128, 1, 4)])
def test_larger_head_dim_decides(D: int, Dv: int, index: int) -> None:
    assert plan(D=D, Dv=Dv).kernel("forward").index == index


def test_head_dim_without_kernel() -> None:
    found = plan(D=192)
    with pytest.raises(NotImplementedError, match=r"compiled for head dims up to \[64, 128\]"):
        found.kernel("forward")
    with pytest.raises(NotImplementedError, match=r"the backward pass .* head dims up to \[64\]"):
        found.kernel("backward")


@pytest.mark.parametrize("modifier", ["softcap", "alibi_slopes", "attn_bias", "dropout_p"])
def test_modifiers_need_all_features(modifier: str) -> None:
    found = plan(modifiers=(modifier,))
    assert found.kernel("forward").index == 3
    assert found.kernel("backward").index == 7
    assert f"sm90, head dims up to 64, lean: does not serve {modifier}" in found.forward.refused
    with pytest.raises(NotImplementedError, match=f"does not serve {modifier}, .*|the head dim"):
        plan(modifiers=(modifier,), D=128).kernel("forward")


def test_packed_sequences_need_a_kernel_that_reads_them() -> None:
    with pytest.raises(NotImplementedError, match="does not read packed sequences"):
        plan(varlen=True).kernel("forward")
    rows = [
        {**item, "packed": packed, "index": 2 * index + packed}
        for index, item in enumerate(ROWS)
        for packed in ((False, True) if item["family"] == "sm80" else (False,))
    ]
    kernels = [Kernel.of(item) for item in rows]
    hardware = replace(Hardware.absent(HOPPER), multiprocessors=132)
    asked = replace(PROBLEM, varlen=True, Hk=1)
    found = dispatch.plan(asked, kernels, ARCHS, hardware)
    for choice in (found.forward, found.backward):
        assert choice.kernel is not None
        assert choice.kernel.packed
        assert choice.reason.startswith("packed lean kernel")
        assert any(reason.startswith("sm90") for reason in choice.refused)
    assert found.backward.splits == 1
    dense = dispatch.plan(
        replace(asked, varlen=False), kernels, ARCHS, hardware, Forced(family="sm80")
    )
    assert not dense.kernel("forward").packed
    assert dense.backward.splits > 1


def test_determinism_with_a_bias() -> None:
    assert plan(deterministic=True, modifiers=("attn_bias",)).kernel("backward").index == 7


def test_determinism_needs_a_row_for_it() -> None:
    assert plan(deterministic=True).kernel("backward").index == 6
    assert plan(deterministic=True).kernel("forward").index == 0
    forced = plan(deterministic=True, forced=Forced("sm90"))
    with pytest.raises(NotImplementedError, match="does not serve deterministic=True"):
        forced.kernel("backward")


def test_forward_alone_can_be_served() -> None:
    found = plan(D=128)
    assert found.kernel("forward").index == 4
    assert found.backward.family is None
    assert "backward none" in str(found)


def test_dtype_without_kernel() -> None:
    with pytest.raises(NotImplementedError, match="no kernel for float32 is compiled"):
        plan(dtype=torch.float32).kernel("forward")
    with pytest.raises(NotImplementedError, match="no kernel for float16 is compiled"):
        plan(dtype=torch.float16).kernel("backward")


def test_forced_family() -> None:
    found = plan(forced=Forced(family="sm80"))
    assert found.kernel("forward").index == 1
    assert "forced to family sm80" in found.forward.refused[0]
    with pytest.raises(NotImplementedError, match=r"needs compute capability 9.0, not 8.0"):
        plan(A100, forced=Forced(family="sm90")).kernel("forward")
    lean = [kernel for kernel in KERNELS if kernel.family == "sm80"]
    hopper = Hardware.absent(HOPPER)
    without = dispatch.plan(PROBLEM, lean, ARCHS, hopper, Forced(family="sm90"))
    with pytest.raises(NotImplementedError, match="forced to family sm90, which this build lacks"):
        without.kernel("forward")


# On Hopper: kernels of its own for both passes, lean and dense.
OF_HOPPER = [
    *(row("sm90", "forward", D, 128, 190) for D in (64, 96, 128)),
    row("sm90", "forward", 192, 128, 210, head_dim_v=128),
    *(row("sm90", "forward", D, 128, 200) for D in (192, 256)),
    *(row("sm90", "backward", D, 64, 200, whole_dq_tiles=True) for D in (64, 128, 256)),
]
GENERIC = [
    row("sm80", pass_, D, 64, 90, features=features, packed=packed)
    for pass_ in dispatch.PASSES
    for D in (64, 128, 256)
    for features, packed in (("lean", False), ("lean", True), ("full", True))
]


def plan_on_hopper(
    forced: Forced | None = None, of_hopper: list[dict[str, Any]] = OF_HOPPER, **change: Any
) -> Plan:
    rows = [{**item, "index": index} for index, item in enumerate(of_hopper + GENERIC)]
    kernels = [Kernel.of(item) for item in rows]
    hopper = Hardware.absent(HOPPER)
    return dispatch.plan(replace(PROBLEM, **change), kernels, ARCHS, hopper, forced)


@pytest.mark.parametrize(
    ("D", "Dv", "served"),
    [
        (72, 96, "96,"),
        (192, 128, "192 with values up to 128,"),
        (136, 8, "192 with values up to 128,"),
        (192, 136, "192,"),
        (128, 192, "192,"),
        (200, 128, "256,"),
    ],
)
def test_narrow_values_have_a_kernel_of_their_own(D: int, Dv: int, served: str) -> None:
    forward = plan_on_hopper(D=D, Dv=Dv).forward
    assert forward.family == "sm90"
    assert forward.reason.startswith(f"lean kernel for head dims up to {served}")
    if Dv == 136:
        assert (
            "sm90, head dims up to 192 with values up to 128, lean: the head dim of the values is "
            "136"
        ) in forward.refused


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("D", "Dv", "head_dim"), [(64, 8, 64), (40, 72, 128), (128, 136, 256), (256, 256, 256)]
)
def test_backward_of_hopper_is_preferred(
    D: int, Dv: int, head_dim: int, deterministic: bool
) -> None:
    backward = plan_on_hopper(D=D, Dv=Dv, deterministic=deterministic).backward
    assert backward.family == "sm90"
    assert backward.kernel is not None
    assert (backward.kernel.head_dim, backward.kernel.whole_dq_tiles) == (head_dim, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"varlen": True}, "does not read packed sequences"),
        ({"modifiers": ("softcap",)}, "does not serve softcap"),
    ],
    ids=str,
)
def test_backward_on_hopper_that_is_the_generic_one(change: dict[str, Any], reason: str) -> None:
    backward = plan_on_hopper(**change).backward
    assert backward.family == "sm80"
    assert backward.kernel is not None
    assert not backward.kernel.whole_dq_tiles
    assert f"sm90, head dims up to 256, lean: {reason}" in backward.refused


@pytest.mark.parametrize("change", [{"D": 192}, {"Dv": 256}, {"D": 130, "deterministic": True}])
def test_forced_family_leaves_a_pass_free_that_it_has_no_kernels_for(
    change: dict[str, Any],
) -> None:
    without = [x for x in OF_HOPPER if (x["pass"], x["head_dim"]) != ("backward", 256)]
    found = plan_on_hopper(Forced("sm90"), without, **change)
    assert (found.forward.family, found.backward.family) == ("sm90", "sm80")
    assert found.forward.reason.endswith("; forced")
    assert found.backward.reason.endswith(
        "; first in order of preference that serves it; sm90 has no backward kernels for such a "
        "problem to force"
    )
    unforced = plan_on_hopper(None, without, **change).backward
    assert unforced.family == "sm80"
    assert found.backward.refused == unforced.refused


@pytest.mark.parametrize(
    ("change", "smem_limit", "reason"),
    [
        ({}, 199, "asks for 204800 bytes of shared memory, 203776 are available"),
        ({"modifiers": ("softcap",)}, None, "does not serve softcap"),
        ({"varlen": True}, None, "does not read packed sequences"),  # in neither pass
        ({"D": 264}, None, "the head dim is 264"),
    ],
    ids=str,
)
def test_forced_family_refuses_what_it_has_kernels_for_but_cannot_serve(
    change: dict[str, Any], smem_limit: int | None, reason: str
) -> None:
    forced = Forced("sm90", None if smem_limit is None else smem_limit * KIB)
    found = plan_on_hopper(forced, **change)
    assert found.backward.family is None
    assert any(reason in refusal for refusal in found.backward.refused)
    with pytest.raises(NotImplementedError, match="the backward pass is not served"):
        found.kernel("backward")


def test_compiled_kernels_on_hopper() -> None:
    """The first row that fits a dense plain call is Hopper's, if this build has it."""
    kernels = ops.compiled_kernels()
    dims = [row.head_dim for row in kernels if (row.family, row.pass_) == ("sm90", "backward")]
    if not dims:
        pytest.skip("no backward kernels of Hopper's are compiled")
    hopper = Hardware.absent(HOPPER)
    for D in sorted({row.head_dim for row in kernels}):
        found = dispatch.plan(replace(PROBLEM, D=D, Dv=D), kernels, ("90a",), hopper)
        assert found.backward.family == ("sm90" if max(dims) >= D else "sm80"), D
        for change in ({"varlen": True}, {"modifiers": ("dropout_p",)}):
            other = replace(PROBLEM, D=D, Dv=D, **change)
            backward = dispatch.plan(other, kernels, ("90a",), hopper).backward
            assert backward.family == "sm80"
            assert any(reason.startswith("sm90") for reason in backward.refused)


def test_forced_shared_memory_never_exceeds_the_device() -> None:
    assert plan(forced=Forced(smem_limit=99 * KIB)).kernel("forward").index == 2
    assert plan(GEFORCE, forced=Forced(smem_limit=227 * KIB)).kernel("forward").index == 2


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("80",), (8, 0), True),
        (("80",), (8, 6), True),
        (("86",), (8, 0), False),
        (("86",), (8, 9), True),
        (("80",), (9, 0), False),
        (("80+PTX",), (9, 0), True),
        (("80+PTX",), (12, 0), True),
        (("90+PTX",), (8, 9), False),
        (("90a",), (9, 0), True),
        (("90a",), (10, 0), False),
        (("100f",), (10, 3), True),
        (("120",), (12, 1), True),
        ((), (8, 0), False),
        (("50+PTX",), (7, 5), False),
    ],
)
def test_generic_family_runs_where_its_code_does(
    archs: tuple[str, ...], capability: Capability, runs: bool
) -> None:
    assert (dispatch.runs_on("sm80", archs, capability) is None) == runs


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("90a",), (9, 0), True),
        (("80", "90a", "80+PTX"), (9, 0), True),
        (("90",), (9, 0), False),
        (("90a",), (8, 0), False),
        (("90a", "80+PTX"), (10, 0), False),
    ],
)
def test_hopper_family_needs_its_own_code(
    archs: tuple[str, ...], capability: Capability, runs: bool
) -> None:
    assert (dispatch.runs_on("sm90", archs, capability) is None) == runs


def test_hardware_without_code_is_told_how_to_rebuild() -> None:
    """D36: the compiled architectures and the way out."""
    found = plan((12, 0), archs=("80", "90a"))
    message = (
        "this build has code for 80, 90a, none for compute capability 12.0: rebuild with "
        "FLASH_EXT_CUDA_ARCHS=120 pip install ."
    )
    with pytest.raises(NotImplementedError, match=message):
        found.kernel("forward")
    with pytest.raises(NotImplementedError, match="needs compute capability 8.0 or later, not 7.5"):
        plan((7, 5)).kernel("forward")


def test_build_without_kernels_says_how_to_get_them() -> None:
    hopper = Hardware.absent(HOPPER)
    found = dispatch.plan(PROBLEM, [], (), hopper, None, "installed without compiled kernels")
    with pytest.raises(NotImplementedError, match="installed without compiled kernels"):
        found.kernel("forward")


def test_error_and_plan_give_the_same_reasons() -> None:
    found = plan(D=128, Dv=128, modifiers=("softcap",))
    with pytest.raises(NotImplementedError) as caught:
        found.kernel("forward")
    reasons = [found.forward.reason, *found.forward.refused]
    assert len(reasons) > 2
    assert all(reason in str(caught.value) and reason in str(found) for reason in reasons)


@pytest.mark.parametrize(
    ("B", "Sk", "Hq", "Hk", "splits"),
    [
        (1, 64, 8, 1, 8),  # one tile: a head for each block, no more
        (1, 64 * 53, 8, 1, 5),  # 53 * 5 >= 264, 53 * 4 is not
        (1, 64 * 66, 8, 1, 4),
        (1, 64 * 66 - 63, 8, 1, 4),  # the last tile has one key
        (1, 64 * 131, 8, 1, 3),
        (2, 64 * 66, 8, 1, 2),
        (1, 64 * 66, 8, 2, 2),
        (1, 64 * 132, 6, 2, 1),  # 264 blocks
        (1, 64 * 263, 6, 1, 2),
        (1, 64, 8, 8, 1),  # nothing to share
        (1, 0, 8, 1, 1),
        (0, 64, 8, 1, 1),
        (1, 64, 0, 2, 1),
    ],
)
def test_group_is_split_where_blocks_are_few(
    B: int, Sk: int, Hq: int, Hk: int, splits: int
) -> None:
    """At least two blocks for each multiprocessor, as far as the heads of a group go."""
    found = plan(A100, multiprocessors=132, B=B, Sk=Sk, Hq=Hq, Hk=Hk)
    assert found.kernel("backward").splits_groups
    assert found.backward.splits == splits
    assert bool(found.backward.split_reason) == (splits > 1)
    assert (found.forward.splits, found.forward.split_reason) == (1, "")
    if splits > 1:
        assert f"query heads split over {splits} thread blocks" in str(found)


def test_plan_tells_the_split() -> None:
    facts = {"B": 1, "Sk": 64 * 66, "Hk": 1, "Dv": 40}
    split = "group of 8 query heads split over {} thread blocks, dk and dv added in fp32 (1.8 MiB)"
    found = plan(A100, multiprocessors=132, **facts)
    assert found.backward.split_reason == (
        split.format(4) + ", because 66 are less than 2 for each of 132 multiprocessors"
    )
    lines = [line.strip() for line in str(found).splitlines()]
    assert lines[lines.index(found.backward.split_reason) - 1].startswith("backward sm80: lean")

    open_ = plan(A100, **facts).backward
    assert open_.split_reason == (
        split.format("several") + ", on a GPU of more than 33 multiprocessors"
    )
    ordered = plan(A100, multiprocessors=132, deterministic=True, **facts).backward
    assert ordered.split_reason == (
        "group of 8 query heads not split: with deterministic=True additions keep their order"
    )
    assert open_.splits == ordered.splits == 1


def test_only_kernels_that_can_split_groups() -> None:
    found = plan(HOPPER, multiprocessors=132, B=1, Sk=64, Hk=1)
    assert not found.kernel("backward").splits_groups
    assert (found.backward.splits, found.backward.split_reason) == (1, "")


def test_cpu_plan() -> None:
    found = dispatch.plan_cpu(PROBLEM)
    assert (found.family, found.tile, found.target) == ("reference", None, "CPU")
    with pytest.raises(NotImplementedError, match="only the reference runs"):
        dispatch.plan_cpu(PROBLEM, Forced(family="sm80"))


def test_plan_reads_well() -> None:
    lines = str(plan(A100, deterministic=True)).splitlines()
    assert lines[0] == (
        "q (2, 512, 8, 64), k (2, 512, 4, 64), v (2, 512, 4, 64), bfloat16, window (None, 0), "
        "deterministic"
    )
    assert lines[1] == "on compute capability 8.0"
    assert lines[2].startswith("  forward sm80: lean kernel for head dims up to 64, tile 128 x")
    assert lines[3].strip().startswith("not sm90, head dims up to 64, lean: needs compute")


@pytest.mark.parametrize("arch", ["sm_80", "", "80+SASS", "8"])
def test_unknown_architecture_of_a_build(arch: str) -> None:
    with pytest.raises(ValueError, match="compiled architecture"):
        dispatch.runs_on("sm80", (arch,), HOPPER)
