"""What was built, what runs on this machine, whether it is right, and how fast.

Results of a few small problems, forward and backward, are held against plain softmax in fp64 by the
rule of `flash_ext.testing.numeric`. With a GPU its kernels are checked too, and timed beside
PyTorch's scaled_dot_product_attention. The exit code is 0 only if every result agrees.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flash_ext
from flash_ext import build
from flash_ext.testing import numeric, timing
from flash_ext.testing.cases import Case, make_inputs
from flash_ext.testing.machine import driver_version
from flash_ext.testing.timing import Call

CASES = {
    "full": Case(seqlen_q=200, seqlen_k=200),
    "causal, grouped heads": Case(seqlen_q=130, seqlen_k=257, heads_q=6, head_dim=128, causal=True),
    "window, head dims 40 and 24": Case(
        seqlen_q=190, seqlen_k=300, head_dim=40, head_dim_v=24, window_size=(50, 20)
    ),
    "rows that see no key": Case(seqlen_q=150, seqlen_k=70, causal=True, head_dim=59),
    "sinks, gradient of lse": Case(sinks=torch.float32, lse_gradient=True, causal=True),
    "softcap": Case(softcap=5.0, causal=True),
    "ALiBi": Case(alibi="h", seqlen_q=100),
    "bias with a gradient": Case(bias="hqk", seqlen_k=150),
    "bool mask": Case(bias="bqk", bias_dtype=torch.bool, bias_hidden=0.3),
}
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
EXPLAINED: dict[str, dict[str, Any]] = {
    "causal": {"shape": (4, 4096, 16, 64), "causal": True},
    "wide heads": {"shape": (2, 8192, 16, 128)},
    "softcap": {"shape": (4, 4096, 16, 64), "softcap": 30.0},
}
Shape = tuple[int, int, int, int]  # (B, S, H, D)
TIMED: tuple[Shape, ...] = ((4, 4096, 16, 64), (4, 4096, 16, 128))


def environment() -> Iterator[str]:
    """Versions, the build and the GPUs, one line each."""
    info = flash_ext.build_info()
    yield f"flash_ext {info.version}, Python {platform.python_version()}, torch {torch.__version__}"
    if build.extension() is None:
        yield build.missing_reason()
    else:
        dims = ", ".join(map(str, info.head_dims))
        yield f"built by nvcc {info.nvcc} for {', '.join(info.archs)}, head dims {dims}"
        yield f"sources {info.digests.get('csrc', 'unknown')}"
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        yield f"no usable GPU (torch is built for: {built})"
        return
    yield f"torch's CUDA {torch.version.cuda}, driver {driver_version()}"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        yield f"GPU {index}: {name}, compute capability {major}.{minor}"


def plans() -> Iterator[str]:
    """What `explain` says of a few shapes: on the GPU here, else on one the build is for."""
    capability: tuple[int, int] | None = None
    if build.extension() is not None:
        here = torch.cuda.is_available()
        capability = torch.cuda.get_device_capability() if here else (9, 0)
    for title, facts in EXPLAINED.items():
        arguments = {name: value for name, value in facts.items() if name != "shape"}
        q = torch.empty((), dtype=torch.bfloat16).expand(facts["shape"])
        plan = flash_ext.explain(q, q, q, capability=capability, **arguments)
        yield f"{title}: {plan}".replace("\n", "\n  ")


def check(case: Case, device: str) -> str:
    """Run one case, forward and backward, and hold it against the oracle.

    Raises:
        AssertionError: a result is wrong.
    """
    inputs = make_inputs(case, device).requires_grad_()
    out, lse = flash_ext.attention(inputs.q, inputs.k, inputs.v, **inputs.public(), return_lse=True)
    leaves = inputs.leaves()
    outputs, seeds = [out], [inputs.dout]
    if inputs.dlse is not None:
        outputs, seeds = [out, lse], [inputs.dout, inputs.dlse]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
    names = {"attn_bias": "dbias", "sinks": "dsinks"}
    named = {names.get(n, f"d{n}"): g for n, g in zip(leaves, gradients, strict=True)}
    ratios = numeric.check(inputs, out.detach(), lse.detach(), **named)
    worst = max(ratios, key=lambda name: ratios[name])
    return f"largest error {ratios[worst]:.2f} of the allowed, in {worst}"


def checks(device: str) -> bool:
    """Check every case in every dtype of a device; print a line each; whether all agree."""
    wrong = 0
    for dtype in DTYPES[device]:
        for title, case in CASES.items():
            label = f"{device} {str(dtype).removeprefix('torch.'):8} {title}"
            try:
                print(f"  ok       {label}: {check(replace(case, dtype=dtype), device)}")
            except Exception as error:
                wrong += 1
                print(f"  FAILED   {label}: {type(error).__name__}: {error}")
    return wrong == 0


def timed_calls(
    shape: Shape, causal: bool, device: torch.device
) -> Iterator[tuple[str, float, dict[str, Call]]]:
    """For each pass: its name, its floating-point operations, and the calls to time."""
    B, S, H, D = shape
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    q_, k_, v_ = (x.transpose(1, 2) for x in leaves)

    def ours() -> torch.Tensor:
        return flash_ext.attention(*leaves, causal=causal)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(q_, k_, v_, is_causal=causal).transpose(1, 2)

    def backward(out: torch.Tensor) -> object:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    operations = 4.0 * B * H * S * S * D / (2 if causal else 1)
    runs = {"flash_ext": ours, "sdpa": sdpa}
    yield "forward", operations, {name: torch.no_grad()(run) for name, run in runs.items()}
    backwards: dict[str, Call] = {name: partial(backward, run()) for name, run in runs.items()}
    yield "backward", 2.5 * operations, backwards


def timings(device: torch.device, shapes: Sequence[Shape] = TIMED) -> Iterator[str]:
    """Milliseconds and TFLOP/s of flash_ext and of PyTorch on the same tensors, in turn."""
    tool = timing.attached_tool()
    if tool is not None:
        yield f"not timed: {tool}"
        return
    for shape, causal in itertools.product(shapes, (False, True)):
        for pass_, operations, calls in timed_calls(shape, causal, device):
            times = timing.interleaved(calls, device=device)
            parts = [
                f"{name} {t.median:.3f} ms ({operations / t.median / 1e9:.0f} TFLOP/s)"
                for name, t in times.items()
            ]
            mask = "causal" if causal else "full"
            yield f"{shape} bfloat16 {mask:6} {pass_:8}: {', '.join(parts)}"


def show(title: str, lines: Iterator[str]) -> None:
    """Print a section."""
    print(title)
    for line in lines:
        print(f"  {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print everything; 0 if all results agree and the build is whole."""
    argparse.ArgumentParser("python -m flash_ext", description=__doc__).parse_args(argv)
    show("Environment", environment())
    compiled = importlib.util.find_spec("flash_ext._C") is not None
    if compiled and build.extension() is None:
        print("FAILED: the compiled extension does not load (reason above)")
        return 1
    show("Plans", plans())

    print("Checks against plain softmax in fp64, forward and backward")
    agree = checks("cpu")
    on_gpu = compiled and torch.cuda.is_available()
    if on_gpu:
        agree = checks("cuda") and agree
    else:
        reason = "there is no GPU" if compiled else "there are no compiled kernels"
        print(f"  CUDA is not checked: {reason}")
    if on_gpu and agree:
        device = torch.device("cuda", torch.cuda.current_device())
        show("Timings beside PyTorch's scaled_dot_product_attention", timings(device))
    print("All results agree." if agree else "FAILED: some results do not agree, see above.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
