"""The forward pass of eager calls, past PyTorch's dispatcher where nobody would see the difference.

A small call is over on the GPU before the host has found its way through the dispatcher to
`ops._forward_cuda`. So a plain call goes from here to its kernel in one function of the extension.
It has the same checks and chooses the same kernel, once per combination of shapes, strides, dtypes
and flags. Whoever watches operators (tracing, modes, transforms, subclasses, a profiler) still
sees flash_ext::forward, and so does every call that is not plain.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_ext import build, dispatch, ops

# What makes a call one to be watched: a question to PyTorch, and the answer when nobody watches.
# Private functions, for there are no public ones; each is in PyTorch 2.10 and later.
_QUESTIONS = (
    (torch._C._len_torch_dispatch_stack, 0),  # fake tensors, make_fx, any TorchDispatchMode
    (torch._C._len_torch_function_stack, 0),  # a TorchFunctionMode, torch.set_default_device
    (torch._C._are_functorch_transforms_active, False),
    (torch._C._is_tracing, False),  # torch.jit.trace
    (torch._C._autograd._profiler_enabled, False),
)

Choice: TypeAlias = tuple[int, float, Tensor, Tensor]  # kernel, default scale, out, lse


def forward(q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...], wants_lse: bool) -> Any:
    """What flash_ext::forward computes for a call without modifiers: out, or (out, lse) where lse
    is wanted. None where the operator has to run."""
    if dispatch.in_force is not None or is_dynamo_compiling():
        return None
    launch = _launcher()
    return launch and launch(q, k, v, settings, wants_lse)


@lru_cache(maxsize=1)
def _launcher() -> Any:
    """What launches plain calls and returns None for others; None without an extension."""
    extension = build.extension()
    return extension and extension.direct_forward(_QUESTIONS, _choose)


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_left: int,
    window_right: int,
    bhsd: bool,
    deterministic: bool | None,
) -> Choice | None:
    """What serves a combination seen for the first time; None where the operator has to copy."""
    launch = ops.launch_of(
        q, k, v, None, None, None, window_left, window_right, 0.0, 0.0, None, deterministic, bhsd
    )
    kernel = launch.kernel_for(deterministic)
    if not launch.in_place:
        return None
    return kernel.index, launch.default_scale, *launch.new_results(q, None)
