"""What the tests of the binding share: calls, bad tensors and a forged exchange table.

The forged table presents CPU tensors as CUDA ones.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_ext import operands
from flash_ext.dispatch import Kernel

_C = pytest.importorskip("flash_ext._C", reason="flash_ext is installed without compiled kernels")

BF16 = torch.bfloat16
ORDER = {
    "forward": ["q", "k", "v", "out", "lse", "sinks"],
    "backward": [
        *("dout", "dlse", "q", "k", "v", "out"),
        *("lse", "delta", "dq_accum", "dq", "dk", "dv"),
    ],
}
Arguments = dict[str, Any]


def find_kernel(which: str, head_dim: int = 64, **asked: object) -> int:
    """The first kernel for bfloat16 with these facts; features are lean unless they are asked."""
    asked = {"pass": which, "dtype": "bfloat16", "features": "lean", **asked}
    for row in _C.kernels():
        if asked.items() <= row.items() and min(row["head_dim"], row["head_dim_v"]) >= head_dim:
            return int(row["index"])
    pytest.skip(f"no kernel of head dim {head_dim} and {asked} is compiled")


def make(
    which: str,
    device: str = "cpu",
    *,
    B: int = 2,
    Sq: int = 24,
    Sk: int = 40,
    Hq: int = 4,
    Hk: int = 2,
    D: int = 64,
    Dv: int = 64,
    **kernel: object,
) -> Arguments:
    """Every argument of one call of the kernel with these facts, layout bshd; q, k, v and dout
    random, the rest NaN."""
    generator = torch.Generator().manual_seed(B * Sq + Sk)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, BF16)

    def blank(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    call: Arguments = {
        "kernel": find_kernel(which, **kernel),
        "q": random(B, Sq, Hq, D),
        "k": random(B, Sk, Hk, D),
        "v": random(B, Sk, Hk, Dv),
        "out": blank(B, Sq, Hq, Dv),
        "lse": blank(B, Hq, Sq, dtype=torch.float32),
        "softmax_scale": 0.125,
        "window": (-1, -1),
        "bhsd": False,
        "modifiers": None,
        "packing": None,
    }
    if which == "forward":
        return call | {"sinks": None}
    row = Kernel.of(_C.kernels()[call["kernel"]])
    return call | {
        "dout": random(B, Sq, Hq, Dv),
        "dlse": None,
        "delta": blank(B, Hq, Sq, dtype=torch.float32),
        "dq_accum": operands.dq_workspace(row, call["lse"], D).fill_(torch.nan),
        "dq": blank(B, Sq, Hq, D),
        "dk": blank(B, Sk, Hk, D),
        "dv": blank(B, Sk, Hk, Dv),
        "dq_turns": None,
        "splits": 1,
        "dk_accum": None,
        "dv_accum": None,
        "dbias": None,
        "dbias_fixed": None,
    }


def modified(
    *,
    softcap: object = 0.0,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    threshold: object = 0,
    seed: torch.Tensor | None = None,
) -> Arguments:
    """What makes a call one with modifiers."""
    return {"modifiers": (softcap, slopes, bias, threshold, seed)}


def split(call: Arguments, splits: int) -> Arguments:
    """What makes a backward call split its groups over thread blocks, workspaces full of NaN."""
    B, Hk, Sk = (call["k"].shape[axis] for axis in ((0, 1, 2) if call["bhsd"] else (0, 2, 1)))

    def workspace(columns: int) -> torch.Tensor:
        shape = (B, Hk, Sk, -(-columns // 16) * 16)
        return torch.full(shape, float("nan"), dtype=torch.float32, device=call["k"].device)

    D, Dv = call["k"].shape[-1], call["v"].shape[-1]
    return {"splits": splits, "dk_accum": workspace(D), "dv_accum": workspace(Dv)}


def run(which: str, call: Arguments, module: ModuleType = _C) -> None:
    tensors = [call[name] for name in ORDER[which]]
    rest = [call["softmax_scale"], *call["window"], call["bhsd"]]
    if which == "backward":
        rest += [call[name] for name in ("dq_turns", "splits", "dk_accum", "dv_accum")]
    rest += [call["modifiers"]]
    if which == "backward":
        rest += [call["dbias"], call["dbias_fixed"]]
    rest += [call["packing"]]
    getattr(module, which)(call["kernel"], *tensors, *rest)


def outputs(which: str, call: Arguments) -> list[torch.Tensor]:
    """What a call writes, as views."""
    names = ("out", "lse") if which == "forward" else ("delta", "dq", "dk", "dv")
    return [call[name] for name in names]


def make_call(which: str, device: str, **facts: Any) -> Arguments:
    """A call ready to run on CUDA: backward gets out and lse from forward.

    One block of keys and as many key as query heads by default: nothing depends on the order of
    floating-point additions, so results can be compared bit for bit.
    """
    facts = {"Hq": 2, "Hk": 2} | facts
    forward = make("forward", device, **facts)
    if which == "forward":
        return forward
    run("forward", forward)
    return make("backward", device, **facts) | {name: forward[name] for name in ("out", "lse")}


def long_rows(t: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values in rows that are `extra` elements apart."""
    wide = t.new_zeros(*t.shape[:-1], t.shape[-1] + extra)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def off_by_one(t: torch.Tensor) -> torch.Tensor:
    """The same shape and strides at an address that is not a multiple of 16 bytes."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape)


def every_second(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def one_longer(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: torch.cat([t, t.narrow(dim, 0, 1)], dim)


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.to(dtype)


ROWS = "last stride 1 and rows at multiples of 16 bytes"
BAD_TENSORS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], type, str]] = [
    # pass, argument, what is done to it, error, what its message says
    ("forward", "q", to(torch.float16), TypeError, "dtype bfloat16 was expected, got float16"),
    ("forward", "q", to(torch.float64), TypeError, "float16, bfloat16 or float32.*got float64"),
    ("forward", "k", to(torch.int8), TypeError, "float16, bfloat16 or float32.*got int8"),
    ("forward", "k", to(torch.int64), TypeError, "dtype bfloat16 was expected, got int64"),
    ("forward", "k", to(torch.bool), TypeError, "dtype bfloat16 was expected, got bool"),
    ("forward", "v", to(torch.float8_e4m3fn), TypeError, "got 8-bit DLPack type 10"),
    ("forward", "v", to(torch.complex64), TypeError, "got complex64"),
    ("forward", "out", to(torch.float16), TypeError, "dtype bfloat16 was expected, got float16"),
    ("forward", "lse", to(BF16), TypeError, "dtype float32 was expected, got bfloat16"),
    ("forward", "q", lambda t: t[0], ValueError, "rank 4 was expected"),
    ("forward", "q", lambda t: t[None], ValueError, "rank 1 to 4 was expected"),
    ("forward", "k", one_longer(0), ValueError, r"shape \(2, 40, 2, 64\) was expected, got \(3,"),
    ("forward", "v", one_longer(1), ValueError, r"shape \(2, 40, 2, 64\).*got \(2, 41, 2, 64\)"),
    ("forward", "v", one_longer(2), ValueError, r"shape \(2, 40, 2, 64\).*got \(2, 40, 3, 64\)"),
    ("forward", "k", lambda t: t[..., :32], ValueError, r"shape \(2, 40, 2, 64\) was expected"),
    ("forward", "out", one_longer(1), ValueError, r"shape \(2, 24, 4, 64\) was expected"),
    ("forward", "out", lambda t: t[..., :56], ValueError, r"shape \(2, 24, 4, 64\) was expected"),
    ("forward", "lse", one_longer(2), ValueError, r"shape \(2, 4, 24\) was expected"),
    ("forward", "lse", lambda t: t.mT.contiguous().mT, ValueError, "contiguous tensor was exp"),
    ("forward", "q", every_second, ValueError, ROWS),
    ("forward", "k", off_by_one, ValueError, f"{ROWS}.* 2 modulo 16"),
    ("forward", "v", lambda t: long_rows(t, 4), ValueError, ROWS),
    ("forward", "out", lambda t: long_rows(t, 4), ValueError, ROWS),
    ("forward", "q", lambda t: t[:, :, :3], ValueError, "multiple of k's was expected, got 3 and"),
    ("backward", "dout", to(torch.float32), TypeError, "dtype bfloat16 was expected, got float32"),
    ("backward", "out", to(torch.float32), TypeError, "dtype bfloat16 was expected, got float32"),
    ("backward", "dout", every_second, ValueError, ROWS),
    ("backward", "dout", one_longer(2), ValueError, r"shape \(2, 24, 4, 64\) was expected"),
    ("backward", "delta", one_longer(2), ValueError, r"shape \(2, 4, 24\) was expected"),
    ("backward", "dq_accum", one_longer(3), ValueError, r"shape \(2, 4, \d+, \d+\) was exp"),
    ("backward", "dq_accum", off_by_one, ValueError, f"{ROWS}.* 4 modulo 16"),
    ("backward", "dq", one_longer(3), ValueError, r"shape \(2, 24, 4, 64\) was expected"),
    ("backward", "dk", one_longer(1), ValueError, r"shape \(2, 40, 2, 64\) was expected"),
    ("backward", "dk", lambda t: long_rows(t, 8), ValueError, "contiguous tensor was expected"),
    ("backward", "dv", to(torch.float32), TypeError, "dtype bfloat16 was expected, got float32"),
]


CAPSULE = b"dlpack_exchange_api"
POINTERS = 7  # version, previous table, allocate, export, import, borrow, current stream
EXPORT, BORROW = 3, 5
TENSOR_IN_MANAGED, DEVICE_TYPE, DEVICE_INDEX = 32, 8, 12  # bytes
CPU, CUDA = 1, 2

get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype = ctypes.c_void_p
get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
Function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)


def load_copy(folder: Path) -> ModuleType:
    """The extension once more, with static variables of its own."""
    path = shutil.copy(_C.__file__, folder)
    name = f"{folder.name}._C"  # pybind11 hands out one module per name
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def torch_table() -> int:
    """Address of torch's exchange table."""
    capsule = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    return int(get_pointer(capsule, CAPSULE))


def make_capsule(table: ctypes.Array[ctypes.c_uint64]) -> object:
    return new_capsule(ctypes.addressof(table), CAPSULE, None)


class Forgery:
    """torch's exchange table with every CPU tensor on cuda:0, those in `second` on cuda:1."""

    def __init__(self, borrow: bool) -> None:
        self.table = (ctypes.c_uint64 * POINTERS).from_buffer_copy(
            ctypes.string_at(torch_table(), 8 * POINTERS)
        )
        self.second: list[torch.Tensor] = []
        self.borrow, self.export = (Function(self.table[i]) for i in (BORROW, EXPORT))
        self.callbacks = Function(self.forged_borrow), Function(self.forged_export)
        functions = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.callbacks]
        self.table[BORROW] = functions[0] if borrow else 0
        self.table[EXPORT] = functions[1]
        self.capsule = make_capsule(self.table)

    def forge(self, object: torch.Tensor, address: int) -> None:
        device_type = ctypes.c_int32.from_address(address + DEVICE_TYPE)
        if device_type.value == CPU:
            device_type.value = CUDA
        if any(object is tensor for tensor in self.second):
            ctypes.c_int32.from_address(address + DEVICE_INDEX).value = 1

    def forged_borrow(self, object: torch.Tensor, out: int) -> int:
        self.borrow(object, out)
        self.forge(object, out)
        return 0

    def forged_export(self, object: torch.Tensor, out: int) -> int:
        self.export(object, out)
        managed = ctypes.c_uint64.from_address(out).value
        self.forge(object, managed + TENSOR_IN_MANAGED)
        return 0
