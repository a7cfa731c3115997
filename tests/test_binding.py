"""The binding: what it refuses, and that it launches on the right device and stream.

Without a GPU most checks would hide behind "a CUDA tensor was expected". So one fixture loads a
second copy of the extension beside a forged exchange table that presents CPU tensors as CUDA ones:
every check runs on every machine, and nothing is launched.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from binding_kit import (
    BAD_TENSORS,
    BF16,
    ROWS,
    Arguments,
    Forgery,
    find_kernel,
    load_copy,
    make,
    make_capsule,
    modified,
    off_by_one,
    run,
    split,
    torch_table,
)
from torch._subclasses import FakeTensorMode

from flash_ext import operands

_C = pytest.importorskip("flash_ext._C", reason="flash_ext is installed without compiled kernels")

# --- what every machine can see -------------------------------------------------------------------


def test_kernel_table() -> None:
    rows = _C.kernels()
    assert rows
    for index, row in enumerate(rows):
        assert row["index"] == index
        assert row["family"] in ("sm80", "sm90")
        assert row["pass"] in ("forward", "backward")
        assert row["dtype"] in ("float16", "bfloat16")
        assert row["features"] in ("lean", "full")
        assert isinstance(row["deterministic"], bool)
        assert isinstance(row["splits_groups"], bool)
        assert isinstance(row["whole_dq_tiles"], bool)
        assert not (row["whole_dq_tiles"] and (row["packed"] or row["pass"] == "forward"))
        sizes = ("head_dim", "block_m", "block_n", "threads", "stages", "smem_bytes")
        assert all(row[name] > 0 for name in sizes)
    assert {row["head_dim"] for row in rows} <= set(_C.build_info()["head_dims"])


def test_build_info() -> None:
    info = _C.build_info()
    assert set(info) == {"version", "archs", "nvcc", "flags", "head_dims", "digests"}
    assert all(info["archs"])
    assert {"binding", "csrc"} < set(info["digests"])
    assert all(int(digest, 16) for digest in info["digests"].values())


def test_imports_without_torch() -> None:
    """D35: a binary of another torch died with an undefined symbol; this one needs none."""
    script = f"""
        import importlib.machinery, importlib.util, sys
        sys.modules["torch"] = None
        loader = importlib.machinery.ExtensionFileLoader("_C", {_C.__file__!r})
        spec = importlib.util.spec_from_loader("_C", loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        assert module.kernels() and module.build_info()["version"]
        try:
            row = next(r["index"] for r in module.kernels() if r["pass"] == "forward")
            module.forward(row, *[None] * 6, 1.0, -1, -1, False, None, None)
        except ModuleNotFoundError as error:
            print("refused:", error)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("refused:")


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_cpu_tensor_is_refused(which: str) -> None:
    with pytest.raises(ValueError, match=r"^q: a CUDA tensor was expected, got cpu$"):
        run(which, make(which))


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "NoneType"), (3, "int"), ([[0.0]], "list"), (torch.zeros(1).numpy(), "ndarray")],
    ids=["None", "int", "list", "ndarray"],
)
def test_other_objects_are_refused(value: object, got: str) -> None:
    with pytest.raises(TypeError, match=rf"^q: a torch\.Tensor was expected, got .*{got}$"):
        run("forward", make("forward") | {"q": value})


def meta_tensor() -> torch.Tensor:
    return torch.empty(2, 24, 4, 64, dtype=BF16, device="meta")


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, 24, 4, 64, dtype=BF16, device="cuda")


def sparse_tensor() -> torch.Tensor:
    return torch.zeros(2, 24, 4, 64, dtype=BF16).to_sparse()


@pytest.mark.parametrize("make_tensor", [meta_tensor, fake_tensor, sparse_tensor])
def test_tensor_without_memory_is_refused(make_tensor: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"^q: a .*CUDA.* was expected, got") as raised:
        run("forward", make("forward") | {"q": make_tensor()})
    assert "\n" not in str(raised.value)


def test_functorch_wrapper_is_refused() -> None:
    call = make("forward")

    def mapped(q: torch.Tensor) -> torch.Tensor:
        run("forward", call | {"q": q})
        return q

    with pytest.raises(ValueError, match=r"^q: a dense tensor with CUDA memory was expected"):
        torch.func.vmap(mapped)(torch.zeros(3, 2, 24, 4, 64, dtype=BF16))


# --- CPU tensors that pretend ---------------------------------------------------------------------


@pytest.fixture(scope="module", params=["borrow", "export"])
def forged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModuleType, Forgery]:
    module = load_copy(tmp_path_factory.mktemp("binding"))
    forgery = Forgery(borrow=request.param == "borrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", forgery.capsule)
        run("forward", make("forward", Sq=0), module)  # the module looks the table up once
    return module, forgery


@pytest.mark.parametrize(("which", "name", "change", "error", "says"), BAD_TENSORS)
def test_bad_tensor_is_named(
    forged: tuple[ModuleType, Forgery],
    which: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    error: type[Exception],
    says: str,
) -> None:
    call = make(which)
    with pytest.raises(error, match=rf"^{name}: .*{says}"):
        run(which, call | {name: change(call[name])}, forged[0])


@pytest.mark.parametrize(
    ("which", "changes", "says"),
    [
        ("forward", {"kernel": -1}, "^kernel: the index of a forward row.* got -1$"),
        ("forward", {"kernel": 10**6}, "^kernel: the index of a forward row"),
        ("forward", {"window": (-2, -1)}, "^window_left: -1 or more was expected, got -2$"),
        ("backward", {"window": (0, -7)}, "^window_right: -1 or more was expected, got -7$"),
        ("forward", {"sinks": torch.zeros(3)}, r"^sinks: shape \(4,\) was expected, got \(3,\)$"),
        ("forward", {"sinks": torch.zeros(8)[::2]}, "^sinks: a contiguous tensor was expected"),
        ("forward", {"sinks": torch.tensor(0.0)}, r"^sinks: .*rank 1 to 4 was expected, got \(\)$"),
        ("backward", {"dlse": torch.zeros(2, 24, 4)}, r"^dlse: shape \(2, 4, 24\) was expected"),
        ("backward", {"dq": None}, "^dq_accum: .*exactly when dq is asked for.* got a tensor$"),
        ("backward", {"dq_accum": None}, "^dq_accum: .*exactly when dq is asked for.* got None$"),
        ("forward", {"bhsd": True}, r"^k: shape \(2, 40, 2, 64\) was expected|^q: a number"),
    ],
)
def test_bad_argument_is_named(
    forged: tuple[ModuleType, Forgery], which: str, changes: Arguments, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        run(which, make(which) | changes, forged[0])


@pytest.mark.parametrize(("which", "other"), [("forward", "backward"), ("backward", "forward")])
def test_row_of_the_other_pass(forged: tuple[ModuleType, Forgery], which: str, other: str) -> None:
    with pytest.raises(ValueError, match=rf"^kernel: the index of a {which} row"):
        run(which, make(which) | {"kernel": find_kernel(other)}, forged[0])


@pytest.mark.parametrize("D", [12, 4, 512])
def test_head_dim_beyond_the_kernel(forged: tuple[ModuleType, Forgery], D: int) -> None:
    with pytest.raises(ValueError, match=rf"^[qk]: a head dim that is a multiple of 8.* got {D}$"):
        run("forward", make("forward", D=D), forged[0])


def test_turns_fit_the_kernel(forged: tuple[ModuleType, Forgery]) -> None:
    call = make("backward")
    with pytest.raises(ValueError, match=r"^dq_turns: shape \(\d+,\) was expected, got \(1,\)$"):
        run("backward", call | {"dq_turns": torch.zeros(1, dtype=torch.int32)}, forged[0])
    row = _C.kernels()[call["kernel"]]
    B, Hq, Sq = call["lse"].shape
    counters = 1 + B * Hq * -(-Sq // operands.TURN_ROWS) * (row["threads"] // 32)
    with pytest.raises(TypeError, match="^dq_turns: dtype int32 was expected"):
        run("backward", call | {"dq_turns": torch.zeros(counters)}, forged[0])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("Sq", "D"), [(24, 64), (130, 40), (128, 8)])
def test_workspace_of_dq_fits_the_kernel(
    forged: tuple[ModuleType, Forgery], Sq: int, D: int, whole: bool
) -> None:
    """Rows of q and columns in steps of 16, or whole tiles of the kernel."""
    call = make("backward", Sq=Sq, D=D, whole_dq_tiles=whole)
    row = _C.kernels()[call["kernel"]]
    rows, columns = Sq, -(-D // 16) * 16
    if whole:
        rows, columns = -(-Sq // row["block_m"]) * row["block_m"], row["head_dim"]
    assert call["dq_accum"].shape == (2, 4, rows, columns)
    expected = re.escape(f"shape (2, 4, {rows}, {columns}) was expected, got (2, 4, ")
    for wrong in ((rows + 1, columns), (rows, columns + 16), (rows - 1, columns)):
        dq_accum = torch.zeros(2, 4, *wrong)
        with pytest.raises(ValueError, match=rf"^dq_accum: {expected}{wrong[0]}, {wrong[1]}\)$"):
            run("backward", call | {"dq_accum": dq_accum}, forged[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"splits": 0}, "^splits: 1 to 2 was expected, got 0$"),
        ({"splits": 3}, "^splits: 1 to 2 was expected, got 3$"),
        ({"splits": 1}, "^dk_accum: .*exactly when dk is asked for and splits is above 1.* a ten"),
        ({"dk_accum": None}, "^dk_accum: .*exactly when dk is asked for .* got None$"),
        ({"dv_accum": None}, "^dv_accum: .*exactly when dv is asked for .* got None$"),
        ({"dk": None}, "^dk_accum: .*exactly when dk is asked for .* got a tensor$"),
        ({"dv": None}, "^dv_accum: .*exactly when dv is asked for .* got a tensor$"),
        ({"dq_turns": torch.zeros(1, dtype=torch.int32)}, "^splits: 1 to 1 was expected, got 2$"),
        (
            {"dk_accum": torch.zeros(2, 2, 40, 80)},
            r"^dk_accum: shape \(2, 2, 40, 64\) was expected, got \(2, 2, 40, 80\)$",
        ),
        (
            {"dv_accum": torch.zeros(2, 40, 2, 64).transpose(1, 2)},
            "^dv_accum: a contiguous tensor was expected",
        ),
        (
            {"dv_accum": off_by_one(torch.zeros(2, 2, 40, 64))},
            f"^dv_accum: .*{ROWS}.* 4 modulo 16",
        ),
    ],
)
def test_split_groups_need_their_workspaces(
    forged: tuple[ModuleType, Forgery], changes: Arguments, says: str
) -> None:
    call = make("backward")
    with pytest.raises(ValueError, match=says):
        run("backward", call | split(call, 2) | changes, forged[0])


BAD_MODIFIERS: list[tuple[Arguments, type[Exception], str]] = [
    ({"softcap": -1.0}, ValueError, "^softcap: 0 or a finite number was expected, got -1"),
    ({"softcap": float("inf")}, ValueError, "^softcap: 0 or a finite number was expected"),
    ({"softcap": float("nan")}, ValueError, "^softcap: 0 or a finite number was expected"),
    ({"slopes": torch.zeros(3)}, ValueError, r"^alibi_slopes: shape \(4,\) was expected, got \(3,"),
    ({"slopes": torch.zeros(4, 2)}, ValueError, r"^alibi_slopes: shape \(2, 4\) was expected"),
    ({"slopes": torch.zeros(4, 2).mT}, ValueError, "^alibi_slopes: a contiguous tensor was exp"),
    ({"slopes": torch.zeros(4).half()}, TypeError, "^alibi_slopes: dtype float32 was expected"),
    ({"bias": torch.zeros(24, 40)}, ValueError, r"^attn_bias: rank 4 .* got \(24, 40\)$"),
    (
        {"bias": torch.zeros(1, 1, 24, 39)},
        ValueError,
        r"^attn_bias: .* broadcasts to \(2, 4, 24, 40\) was expected, got \(1, 1, 24, 39\)$",
    ),
    ({"bias": torch.zeros(1, 1, 1, 1).int()}, TypeError, "^attn_bias: .*or bool.* got int32$"),
    ({"bias": torch.zeros(1, 1, 1, 1).double()}, TypeError, "^attn_bias: .* got float64$"),
    ({"threshold": -1}, ValueError, "^drop_threshold: 0 to 65535 was expected, got -1$"),
    ({"threshold": 65536}, ValueError, "^drop_threshold: 0 to 65535 was expected, got 65536$"),
    ({"threshold": 1}, TypeError, r"^seed: a torch\.Tensor was expected, got NoneType$"),
    ({"threshold": 1, "seed": torch.zeros(2).long()}, ValueError, r"^seed: shape \(1,\) was exp"),
    ({"threshold": 1, "seed": torch.zeros(1)}, TypeError, "^seed: dtype int64 was expected"),
]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("wrong", "error", "says"), BAD_MODIFIERS)
def test_bad_modifier_is_named(
    forged: tuple[ModuleType, Forgery],
    which: str,
    wrong: Arguments,
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        run(which, make(which, features="full") | modified(**wrong), forged[0])


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_lean_kernels_take_no_modifiers(forged: tuple[ModuleType, Forgery], which: str) -> None:
    with pytest.raises(ValueError, match="^modifiers: None for a lean kernel was expected"):
        run(which, make(which) | modified(softcap=1.0), forged[0])
    with pytest.raises(TypeError, match="^modifiers: None or a tuple of 5 was expected, got list"):
        run(which, make(which, features="full") | {"modifiers": []}, forged[0])


OFFSETS = torch.tensor([0, 3, 24], dtype=torch.int32)
USED = torch.zeros(2, dtype=torch.int32)
BAD_PACKINGS: list[tuple[object, type[Exception], str]] = [
    ([OFFSETS] * 4, TypeError, "^packing: None or a tuple of 4 was expected, got list$"),
    ((OFFSETS,) * 3, TypeError, "^packing: None or a tuple of 4 was expected, got tuple$"),
    ((OFFSETS.long(), OFFSETS, None, None), TypeError, "^cu_seqlens_q: dtype int32 was expected"),
    ((None, OFFSETS, None, None), TypeError, r"^cu_seqlens_q: a torch\.Tensor was expected"),
    ((OFFSETS, None, None, None), TypeError, r"^cu_seqlens_k: .*torch\.Tensor was expected"),
    ((OFFSETS[None], OFFSETS, None, None), ValueError, "^cu_seqlens_q: rank 1 was expected"),
    ((OFFSETS[:0], OFFSETS[:0], None, None), ValueError, r"^cu_seqlens_q: shape \(B \+ 1,\) was"),
    ((OFFSETS, OFFSETS[1:], None, None), ValueError, r"^cu_seqlens_k: shape \(3,\) was expected"),
    ((OFFSETS, OFFSETS, OFFSETS, None), ValueError, r"^seqused_q: shape \(2,\) was expected"),
    ((OFFSETS, OFFSETS, None, USED.long()), TypeError, "^seqused_k: dtype int32 was expected"),
    (
        (OFFSETS, OFFSETS.repeat_interleave(2)[::2], None, None),
        ValueError,
        "^cu_seqlens_k: a contiguous tensor was expected",
    ),
]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("packing", "error", "says"), BAD_PACKINGS)
def test_bad_packing_is_named(
    forged: tuple[ModuleType, Forgery],
    which: str,
    packing: object,
    error: type[Exception],
    says: str,
) -> None:
    call = make(which, B=1, packed=True) | {"packing": packing}
    with pytest.raises(error, match=says):
        run(which, call, forged[0])


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_packed_sequences_are_one_batch_entry(
    forged: tuple[ModuleType, Forgery], which: str
) -> None:
    packing = {"packing": (OFFSETS, OFFSETS, None, None)}
    with pytest.raises(ValueError, match=r"^packing: None but for q, k and v \(1, T, H, D\)"):
        run(which, make(which, packed=True) | packing, forged[0])
    with pytest.raises(ValueError, match="^packing: None for a kernel that reads no packed seq"):
        run(which, make(which, B=1) | packing, forged[0])


def test_packed_turns_fit_the_sequences(forged: tuple[ModuleType, Forgery]) -> None:
    call = make("backward", B=1, packed=True) | {"packing": (OFFSETS, OFFSETS, None, None)}
    warps = _C.kernels()[call["kernel"]]["threads"] // 32
    says = rf"^dq_turns: shape \({1 + 4 * (24 // 128 + 2 + 1) * warps},\) was expected"
    with pytest.raises(ValueError, match=says):
        run("backward", call | {"dq_turns": torch.zeros(1, dtype=torch.int32)}, forged[0])
    with pytest.raises(ValueError, match="^splits: 1 to 1 was expected, got 2$"):
        run("backward", call | split(call, 2), forged[0])


BIAS = torch.zeros(2, 4, 24, 40, dtype=BF16)
BAD_BIAS_GRADIENTS: list[tuple[Arguments, torch.Tensor, type[Exception], str]] = [
    ({}, BIAS, ValueError, "^dbias: None without an attn_bias was expected"),
    ({"bias": BIAS.bool()}, BIAS, ValueError, "^dbias: None for a bool attn_bias was expected"),
    ({"bias": BIAS}, BIAS.float(), TypeError, "^dbias: dtype bfloat16 was expected, got float32"),
    ({"bias": BIAS[:1]}, BIAS[:1], TypeError, "^dbias: dtype float32 was expected, got bfloat16"),
    ({"bias": BIAS}, BIAS[:1], ValueError, r"^dbias: shape \(2, 4, 24, 40\) was expected"),
    ({"bias": BIAS}, BIAS.mT.contiguous().mT, ValueError, "^dbias: a contiguous tensor was exp"),
]


@pytest.mark.parametrize(("given", "dbias", "error", "says"), BAD_BIAS_GRADIENTS)
def test_bad_bias_gradient_is_named(
    forged: tuple[ModuleType, Forgery],
    given: Arguments,
    dbias: torch.Tensor,
    error: type[Exception],
    says: str,
) -> None:
    call = make("backward", features="full") | modified(**given) | {"dbias": dbias}
    with pytest.raises(error, match=says):
        run("backward", call, forged[0])


SUM = BIAS[:1, :, :1].float()
FIXED = torch.zeros(1 + SUM.numel(), dtype=torch.int64)
BAD_FIXED_POINT: list[tuple[torch.Tensor | None, torch.Tensor, type[Exception], str]] = [
    (None, FIXED, ValueError, "^dbias_fixed: None without dbias was expected"),
    (BIAS.float(), FIXED, ValueError, "^dbias_fixed: None where dbias is not a sum was expected"),
    (SUM, FIXED[1:], ValueError, r"^dbias_fixed: shape \(161,\) was expected, got \(160,\)$"),
    (SUM, FIXED.int(), TypeError, "^dbias_fixed: dtype int64 was expected, got int32$"),
    (SUM, FIXED.repeat(2)[::2], ValueError, "^dbias_fixed: a contiguous tensor was expected"),
]


@pytest.mark.parametrize(("dbias", "fixed", "error", "says"), BAD_FIXED_POINT)
def test_bad_fixed_point_is_named(
    forged: tuple[ModuleType, Forgery],
    dbias: torch.Tensor | None,
    fixed: torch.Tensor,
    error: type[Exception],
    says: str,
) -> None:
    given = {"bias": BIAS.float() if dbias is None else dbias}
    call = make("backward", features="full") | modified(**given)
    with pytest.raises(error, match=says):
        run("backward", call | {"dbias": dbias, "dbias_fixed": fixed}, forged[0])


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("name", ["k", "v", "out", "lse"])
def test_mixed_devices(forged: tuple[ModuleType, Forgery], which: str, name: str) -> None:
    module, forgery = forged
    call = make(which)
    forgery.second.append(call[name])
    try:
        with pytest.raises(ValueError, match=rf"^{name}: device cuda:0 of q was.* got cuda:1$"):
            run(which, call, module)
    finally:
        forgery.second.clear()


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Sq": 0}, {"Hq": 0, "Hk": 0}], ids=str)
def test_nothing_to_do(forged: tuple[ModuleType, Forgery], sizes: dict[str, int]) -> None:
    run("forward", make("forward", "cpu", **sizes), forged[0])


def test_exported_memory_is_given_back(forged: tuple[ModuleType, Forgery]) -> None:
    owner = torch.zeros(2, 4, 24).numpy()
    held = sys.getrefcount(owner)
    with pytest.raises(ValueError, match=r"^sinks: shape \(4,\) was expected"):
        run("forward", make("forward") | {"sinks": torch.from_numpy(owner)}, forged[0])
    assert sys.getrefcount(owner) == held


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_missing_driver_is_named(forged: tuple[ModuleType, Forgery]) -> None:
    with pytest.raises(RuntimeError, match=r"needs an NVIDIA driver for CUDA \d+ .*or newer"):
        run("forward", make("forward"), forged[0])


def test_torch_without_the_exchange_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_copy(tmp_path)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with pytest.raises(ImportError, match=r"torch >= 2\.10.* is needed, got torch "):
        run("forward", make("forward"), module)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^q: a CUDA tensor was expected"):
        run("forward", make("forward"), module)


def test_older_table_behind_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_copy(tmp_path)
    newer = (ctypes.c_uint64 * 2)(2, torch_table())  # version 2.0, then the previous table
    capsule = make_capsule(newer)
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
    with pytest.raises(ValueError, match=r"^q: a CUDA tensor was expected, got cpu$"):
        run("forward", make("forward"), module)
