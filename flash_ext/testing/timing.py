"""Timing of short GPU calls: CUDA events, a cold L2, and several contestants in turn.

`interleaved` times named calls round-robin in one process, so that clocks, temperature and power
budget are the same for all of them; `graph_replay` times calls too short for the host to feed.
Both refuse to run while a profiler or sanitizer is attached, because such figures mean nothing.
On a CPU device `interleaved` reads the host's clock: enough to try a benchmark, not to quote it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

# Larger than any GPU's L2 (50 MiB on H100, 126 MiB on B200).
FLUSH_BYTES = 256 * 2**20

# Environment variables, or prefixes of them, that each tool sets in the processes it starts.
TOOL_VARIABLES = {
    "NV_SANITIZER_INJECTION": "Compute Sanitizer",
    "NV_COMPUTE_SANITIZER": "Compute Sanitizer",
    "NV_NSIGHT_INJECTION": "Nsight Compute",
    "NV_TPS_LAUNCH_TOKEN": "Nsight Compute",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "QUADD_INJECTION": "Nsight Systems",
    "NVPROF_ID": "nvprof",
    "CUDA_INJECTION64_PATH": "a CUDA tool",
    "NVTX_INJECTION64_PATH": "an NVTX tool",
}


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median and the 20th and 80th percentile over `rounds`."""

    median: float
    p20: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        return cls(
            quantile(samples, 0.5), quantile(samples, 0.2), quantile(samples, 0.8), len(samples)
        )


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the samples lie, interpolated between neighbours."""
    if not samples:
        raise ValueError("samples: got none, expected at least one")
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def attached_tool(environ: Mapping[str, str] | None = None) -> str | None:
    """What would distort timings of this process, with the evidence, or None.

    Looks at the environment (the process's own by default) and at PyTorch's profiler.
    """
    environ = os.environ if environ is None else environ
    for prefix, tool in TOOL_VARIABLES.items():
        for name in environ:
            if name.startswith(prefix) and environ[name]:
                return f"{tool} is attached ({name} is set)"
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "every launch waits for its end (CUDA_LAUNCH_BLOCKING is set)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.autograd._profiler_enabled():
        return "PyTorch's profiler is running"
    return None


def refuse_attached_tool() -> None:
    """Raise RuntimeError if a profiler, a sanitizer or blocking launches would distort timings."""
    tool = attached_tool()
    if tool is not None:
        raise RuntimeError(f"timings refused: {tool}; run again without it")


def interleaved(
    calls: Mapping[str, Call], *, device: torch.device, rounds: int = 20, warmup: int = 3
) -> dict[str, Timing]:
    """Time every call once per round, in turn, with a cold L2 before each.

    The order is reversed in every second round, so no call always follows the same one. Nothing
    synchronises between calls: the host runs ahead while the flush (about 60 us on an H200) and
    the call before it keep the GPU busy. A call whose host time is longer than that shows it.

    Args:
        calls: name -> call without arguments. Its results are dropped.
        device: where the calls run; a CPU device uses the host's clock and no flush.
        rounds: timed runs of each call.
        warmup: runs of each call before the first timed one.
    """
    refuse_attached_tool()
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds, warmup: got {rounds}, {warmup}, expected >= 1 and >= 0")
    clock: _Clock = _EventClock(device) if device.type == "cuda" else _HostClock()
    for call in calls.values():
        for _ in range(warmup):
            call()
    names = list(calls)
    for round_index in range(rounds):
        for name in names[:: 1 if round_index % 2 == 0 else -1]:
            clock.run(name, calls[name])
    samples = clock.samples()
    return {name: Timing.of(samples[name]) for name in names}


def graph_replay(
    calls: Sequence[Call], *, device: torch.device, rounds: int = 50, warmup: int = 3
) -> Timing:
    """Time calls captured into one CUDA graph, in milliseconds per call.

    For calls of a few microseconds, which the host cannot queue fast enough one by one. The calls
    run one after another within the graph: give each its own inputs, more than L2 holds in all,
    to time them cold; L2 is flushed before each replay only.
    """
    refuse_attached_tool()
    if not calls or rounds < 1:
        raise ValueError(f"calls, rounds: got {len(calls)}, {rounds}, expected at least one each")
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, expected a CUDA device")
    import torch

    with torch.cuda.device(device):
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(max(warmup, 1)):
                for call in calls:
                    call()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        clock = _EventClock(device)
        graph.replay()
        for _ in range(rounds):
            clock.run("graph", graph.replay)
        return Timing.of([ms / len(calls) for ms in clock.samples()["graph"]])


class _Clock(Protocol):
    """Runs calls and keeps their times."""

    def run(self, name: str, call: Call) -> None: ...

    def samples(self) -> dict[str, list[float]]:
        """name -> milliseconds of each run."""
        ...


class _HostClock:
    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}

    def run(self, name: str, call: Call) -> None:
        start = time.perf_counter()
        call()
        self._samples.setdefault(name, []).append(1e3 * (time.perf_counter() - start))

    def samples(self) -> dict[str, list[float]]:
        return self._samples


class _EventClock:
    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def run(self, name: str, call: Call) -> None:
        import torch

        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        self._flush.zero_()
        start.record(stream)
        call()
        end.record(stream)
        self._events.setdefault(name, []).append((start, end))

    def samples(self) -> dict[str, list[float]]:
        import torch

        torch.cuda.synchronize(self._device)
        return {
            name: [start.elapsed_time(end) for start, end in pairs]
            for name, pairs in self._events.items()
        }
