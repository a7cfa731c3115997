"""Eager calls past PyTorch's dispatcher: who takes that way, who does not, and equal results.

As in test_binding.py, a forged exchange table presents CPU tensors as CUDA ones. What launches is
in test_direct_gpu.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
from flash_ext import direct, ops
from flash_ext.testing import forced

BF16 = torch.bfloat16
PLAIN = (-1, 0, False, None, None)  # settings: window, bhsd, deterministic, softmax_scale


class Subclass(Tensor):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def answers() -> list[bool]:
    """Whether each question has its usual answer."""
    return [ask() is usual for ask, usual in direct._QUESTIONS]


def test_nobody_watches_by_default() -> None:
    assert all(answers())
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", BF16)):
        with context:
            assert all(answers())


@pytest.mark.parametrize(
    "watch",
    [
        FakeTensorMode,
        DispatchMode,
        FunctionMode,
        lambda: torch.device("cpu"),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    ids=["fake", "dispatch_mode", "function_mode", "default_device", "profiler"],
)
def test_modes_are_noticed(watch: Callable[[], AbstractContextManager[Any]]) -> None:
    with watch():
        assert not all(answers())
    assert all(answers())


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.vmap(f)(torch.zeros(2)),
        lambda f: torch.func.grad(f)(torch.zeros(())),
        lambda f: torch.jit.trace(f, torch.zeros(()), check_trace=False),
        lambda f: torch.fx.experimental.proxy_tensor.make_fx(f)(torch.zeros(())),
    ],
    ids=["vmap", "grad", "jit_trace", "make_fx"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_transforms_are_noticed(transform: Callable[[Any], Any]) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(all(answers()))
        return x.sum()

    transform(function)
    assert seen and not any(seen)


class Launcher:
    """Stands in for the extension: counts the plain calls it is asked for and declines them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.asked.append(args)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    stand_in = Launcher()
    monkeypatch.setattr(direct, "_launcher", lambda: stand_in)
    return stand_in


def make(requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(1, 8, 2, 16, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"causal": True, "window_size": (3, 5)}, True),
        ({"layout": "bhsd", "return_lse": True}, True),
        ({"softmax_scale": 0.5}, True),
        ({"softcap": 5.0}, False),
        ({"dropout_p": 0.5}, False),
        ({"out_dtype": torch.float32}, False),
        ({"sinks": torch.zeros(2)}, False),
        ({"attn_bias": torch.zeros(8, 8)}, False),
        ({"alibi_slopes": torch.zeros(2)}, False),
    ],
    ids=str,
)
def test_which_calls_are_plain(
    options: dict[str, Any], plain: bool, requires_grad: bool, launcher: Launcher
) -> None:
    flash_ext.attention(*make(requires_grad), **options)
    assert len(launcher.asked) == plain


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("leaves", ["", "q", "k", "v", "qkv"])
def test_results_are_returned_and_recorded(
    leaves: str, return_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the extension computed is the result, with the gradients of the operator's; lse is
    asked for where it is a result or a backward pass may follow."""
    wanted = []

    def launch(q: Tensor, k: Tensor, v: Tensor, settings: Any, wants_lse: bool) -> Any:
        wanted.append(wants_lse)
        with torch.no_grad():
            out, lse = ops.forward(q, k, v, *settings)
        return (out, lse) if wants_lse else out

    tensors = {
        name: x.requires_grad_(name in leaves) for name, x in zip("qkv", make(), strict=True)
    }
    found = []
    for launcher in (lambda: launch, lambda: None):
        monkeypatch.setattr(direct, "_launcher", launcher)
        result = flash_ext.attention(**tensors, causal=True, return_lse=return_lse)
        results = result if return_lse else (result,)
        loss = sum(x.square().sum() for x in results)
        asked = [tensors[name] for name in leaves]
        found.append([*results, *(torch.autograd.grad(loss, asked) if asked else ())])
    assert wanted == [bool(leaves) or return_lse]
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y) and x.requires_grad == y.requires_grad


def test_forced_kernels_are_left_to_the_operator(launcher: Launcher) -> None:
    with forced(family="sm80"), pytest.raises(NotImplementedError, match="forced"):
        flash_ext.attention(*make())
    assert not launcher.asked


def test_compiled_calls_are_operators(launcher: Launcher) -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(flash_ext.attention, backend=keep, fullgraph=True)(*make())
    (graph,) = graphs
    assert ops.forward in [node.target for node in graph.graph.nodes]
    assert not launcher.asked


# --- the function of the extension ----------------------------------------------------------------


class Choices:
    """A `choose` that sends every combination to the operator."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def __call__(self, *args: Any) -> None:
        self.made.append(args)
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("flash_ext._C", reason="flash_ext is installed without compiled kernels")
    import binding_kit as kit

    copy = kit.load_copy(tmp_path_factory.mktemp("direct"))
    forgery = kit.Forgery(borrow=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", forgery.capsule)
        kit.run("forward", kit.make("forward", Sq=0), copy)  # looks the table up, once for all
    yield copy


def half(*shape: int) -> Tensor:
    return torch.zeros(shape or (1, 8, 2, 64), dtype=BF16)


def test_choice_is_made_once(module: Any) -> None:
    choices = Choices()
    call = module.direct_forward((), choices)
    q = half()
    for _ in range(3):
        assert call(q, half(), half(), PLAIN, False) is None
    assert len(choices.made) == 1
    different = [
        (q[:, :4], q, q, PLAIN),
        (q, q, half(1, 8, 2, 32), PLAIN),
        (half(1, 2, 8, 64).transpose(1, 2), q, q, PLAIN),
        (q.half(), q, q, PLAIN),
        (q, q, q, (-1, -1, False, None, None)),
        (q, q, q, (3, 0, False, None, None)),
        (q, q, q, (-1, 0, True, None, None)),
        (q, q, q, (-1, 0, False, False, None)),
        (q, q, q, (-1, 0, False, True, None)),
    ]
    for wants_lse in (False, True):
        for args in different:
            assert call(*args, wants_lse) is None
    assert len(choices.made) == 1 + len(different)
    assert choices.made[-1][3:] == (-1, 0, False, True)
    call(torch.nn.Parameter(q), q, q, (-1, 0, False, None, 0.5), False)  # neither is part of it
    assert len(choices.made) == 1 + len(different)


def test_choices_are_bounded(module: Any) -> None:
    choices = Choices()
    call = module.direct_forward((), choices)
    q = half()
    for window in (*range(4097), 4096, 0):
        call(q, q, q, (window, 0, False, None, None), False)
    assert len(choices.made) == 4098


def test_errors_of_a_choice_are_raised_each_time(module: Any) -> None:
    choices = Choices()
    choices.error = NotImplementedError("nothing serves it")
    call = module.direct_forward((), choices)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="nothing serves it"):
            call(half(), half(), half(), PLAIN, False)
    assert len(choices.made) == 2


@pytest.mark.parametrize(
    "unusual",
    [
        lambda: half().as_subclass(Subclass),
        lambda: torch._neg_view(half()),
        lambda: torch._efficientzerotensor((1, 8, 2, 64), dtype=BF16),
        lambda: torch.zeros(1024 + 1, dtype=BF16)[1:].view(1, 8, 2, 64),
        lambda: half().to("meta"),
        lambda: half()[0],
        lambda: half(1, 0, 2, 64),
        lambda: None,
        lambda: 3.0,
    ],
    ids=[
        "subclass",
        "negative",
        "zero",
        "offset",
        "meta",
        "rank",
        "empty",
        "None",
        "float",
    ],
)
@pytest.mark.parametrize("position", range(3))
def test_unusual_tensors_are_left_to_the_operator(
    unusual: Callable[[], Any], position: int, module: Any
) -> None:
    choices = Choices()
    tensors: list[Any] = [half(), half(), half()]
    tensors[position] = unusual()
    assert module.direct_forward((), choices)(*tensors, PLAIN, False) is None
    assert not choices.made


@pytest.mark.parametrize("move", [Tensor.to_sparse, Tensor.contiguous, lambda x: x.to("meta")])
def test_only_cuda_tensors_are_read(move: Callable[[Tensor], Tensor]) -> None:
    extension = pytest.importorskip("flash_ext._C")
    x, choices = move(half()), Choices()
    assert extension.direct_forward((), choices)(x, x, x, PLAIN, False) is None
    assert not choices.made


def test_unusual_situations_are_left_to_the_operator(module: Any) -> None:
    choices = Choices()
    call = module.direct_forward(direct._QUESTIONS, choices)
    q = half()
    with FunctionMode():
        assert call(q, q, q, PLAIN, False) is None
    with pytest.raises(ZeroDivisionError):
        module.direct_forward(((lambda: 1 // 0, 0),), choices)(q, q, q, PLAIN, False)
    assert call(q, q, q, (2**70, 0, False, None, None), False) is None
    assert not choices.made
    call(q, q, q, PLAIN, False)
    assert len(choices.made) == 1


@pytest.mark.parametrize(
    "args", [(), (None,) * 5, (None, None, None, PLAIN), (None, None, None, PLAIN[:4], False)]
)
def test_other_signatures_are_refused(args: tuple[Any, ...]) -> None:
    extension = pytest.importorskip("flash_ext._C")
    with pytest.raises(TypeError, match="expected q, k, v, settings"):
        extension.direct_forward((), Choices())(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_errors_of_a_launch_are_raised(module: Any) -> None:
    """Here the driver is what is missing."""
    import binding_kit as kit

    def choose(*args: Any) -> tuple[int, float, Tensor, Tensor]:
        return kit.find_kernel("forward"), 0.125, half(), torch.zeros(1, 2, 8)

    call = module.direct_forward((), choose)
    for wants_lse in (False, True):
        with pytest.raises(RuntimeError, match="needs an NVIDIA driver"):
            call(half(), half(), half(), PLAIN, wants_lse)
    with pytest.raises(ValueError, match=r"^v: shape .* was expected"):
        call(half(), half(), half(1, 4, 2, 64), PLAIN, False)


def test_function_goes_with_its_choices() -> None:
    extension = pytest.importorskip("flash_ext._C")
    choices = Choices()
    seen = weakref.ref(choices)
    call = extension.direct_forward((), choices)
    del choices
    assert seen() is not None
    del call
    assert seen() is None
