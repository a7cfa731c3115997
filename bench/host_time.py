"""Host time of a small attention call: what it costs until its kernel is enqueued.

    python -m bench.host_time

flash_ext beside PyTorch's SDPA, causal, for inputs that need no gradient and inputs that do: the
forward pass is then recorded for autograd. The providers take turns. Printed are microseconds per
call, the median and the 20th percentile over the rounds.

On a CPU (`--device cpu`) flash_ext's CUDA operator runs with a kernel that does nothing, which
leaves the cost of the Python layer and of PyTorch's dispatcher, past which only CUDA tensors go;
SDPA really computes there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_ext
from flash_ext import build, dispatch, ops
from flash_ext.testing.timing import quantile, refuse_attached_tool

Call = Callable[[], object]
SHAPE = (1, 64, 4, 64)  # B, S, H, D: its kernel is done before the host has enqueued the next
CALLS = 200  # per round; fewer than the launches that a stream takes before it blocks


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def make_calls(device: torch.device) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for recorded in (False, True):
        q, k, v = torch.randn(3, *SHAPE, device=device, dtype=torch.float16).unbind(0)
        heads_first = [x.transpose(1, 2).contiguous().requires_grad_(recorded) for x in (q, k, v)]
        ours = [x.clone().requires_grad_(recorded) for x in (q, k, v)]
        suffix = "with grad" if recorded else "no grad"
        calls[f"flash_ext, {suffix}"] = partial(flash_ext.attention, *ours, causal=True)
        calls[f"sdpa, {suffix}"] = partial(_causal_sdpa, *heads_first)
    return calls


def time_calls(calls: dict[str, Call], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """name -> microseconds per call in each round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(rounds + 1):  # the first one warms up
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            elapsed = time.perf_counter() - start
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_index:
                samples[name].append(1e6 * elapsed / CALLS)
    return samples


def use_idle_kernel() -> torch.library.Library:
    """Let CPU tensors run the CUDA operator, with a kernel that does nothing; for this process."""
    row = {"index": 0, "family": "sm80", "dtype": "float16", "features": "full", "head_dim": 256,
           "block_m": 128, "block_n": 64, "threads": 128, "stages": 2, "smem_bytes": 0,
           "deterministic": True}  # fmt: skip
    kernels = [dispatch.Kernel.of({**row, "pass": pass_}) for pass_ in dispatch.PASSES]
    idle: Any = SimpleNamespace(
        forward=lambda *args: None,
        backward=lambda *args: None,
        direct_forward=lambda *args: None,  # every call is left to the operator
    )

    def plan_on(device: torch.device, problem: Any) -> dispatch.Plan:
        return dispatch.plan(problem, kernels, ("80",), dispatch.Hardware.absent((8, 0)))

    torch.set_num_threads(1)
    build.extension = lambda: idle
    ops.plan_on = plan_on
    library = torch.library.Library("flash_ext", "IMPL")
    library.impl("forward", ops._forward_cuda, "CPU", allow_override=True)
    return library


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--rounds", type=int, default=50)
    args = p.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: no CUDA device is visible (--device cpu times the Python layer)")
    try:
        refuse_attached_tool()
    except RuntimeError as error:
        p.error(str(error))
    idle = use_idle_kernel() if args.device == "cpu" else None
    device = torch.device(args.device)
    info = flash_ext.build_info() if idle is None else None
    print(f"torch {torch.__version__}, {info or 'idle kernel'}, {args.device}")
    for name, samples in time_calls(make_calls(device), device, args.rounds).items():
        print(f"{name:24} {quantile(samples, 0.5):7.2f} {quantile(samples, 0.2):7.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
