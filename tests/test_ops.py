"""The operators: what the CUDA one hands to a kernel, and that fake results look like real ones.

The CUDA operator runs here on CPU tensors with a kernel that computes by the reference, and that
insists on what the binding insists on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_ext import build, dispatch, ops, reference
from flash_ext.dispatch import Hardware, Kernel, Plan
from flash_ext.problem import Problem
from flash_ext.testing.cases import MEMORY, Case, Inputs, make_inputs

HALVES = [torch.float16, torch.bfloat16]


Modifiers = tuple[float, Tensor | None, Tensor | None, int, Tensor | None] | None


class FakeExtension:
    """Kernels that compute by the reference; keeps the arguments of the last call."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.last: dict[str, Any] = {}

    def forward(
        self, kernel: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        sinks: Tensor | None, scale: float, left: int, right: int, bhsd: bool, modifiers: Modifiers,
        packing: None,
    ) -> None:  # fmt: skip
        self.last = {"kernel": kernel, "q": q, "k": k, "v": v, "out": out, "sinks": sinks}
        self.last |= {"modifiers": modifiers}
        self._insist(q, k, v, out, floats=(lse, sinks))
        plain = {"softmax_scale": scale, "window_left": left, "window_right": right, "bhsd": bhsd}
        plain |= self._named(modifiers)
        result = reference.forward(q, k, v, sinks=sinks, out_dtype=out.dtype, **plain)
        for target, values in zip((out, lse), result, strict=True):
            target.copy_(values)

    def backward(
        self, kernel: int, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, delta: Tensor, dq_accum: Tensor | None, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, scale: float, left: int, right: int, bhsd: bool,
        dq_turns: Tensor | None, splits: int, dk_accum: Tensor | None, dv_accum: Tensor | None,
        modifiers: Modifiers, dbias: Tensor | None, dbias_fixed: Tensor | None, packing: None,
    ) -> None:  # fmt: skip
        self.last = {"kernel": kernel, "q": q, "k": k, "v": v, "dq_accum": dq_accum, "dout": dout}
        self.last |= {"dq_turns": dq_turns, "dq": dq, "dk": dk, "dv": dv}
        self.last |= {"splits": splits, "dk_accum": dk_accum, "dv_accum": dv_accum}
        self.last |= {"modifiers": modifiers, "dbias": dbias, "dbias_fixed": dbias_fixed}
        assert len({q.dtype, out.dtype, dout.dtype}) == 1
        self._insist(q, k, v, out, dout, floats=(lse, dlse, delta, dq_accum, dk_accum, dv_accum))
        assert (dq is None) == (dq_accum is None)
        row = self.kernels[kernel]
        rows, columns = lse.shape[2], -(-q.shape[-1] // 16) * 16
        if row.whole_dq_tiles:
            rows, columns = -(-rows // row.block_m) * row.block_m, row.head_dim
        assert dq_accum is None or dq_accum.shape == (*lse.shape[:2], rows, columns)
        seq, head = (2, 1) if bhsd else (1, 2)
        for gradient, workspace in ((dk, dk_accum), (dv, dv_accum)):
            assert (workspace is not None) == (splits > 1 and gradient is not None)
            if gradient is not None and workspace is not None:
                sizes = (gradient.shape[0], gradient.shape[head], gradient.shape[seq])
                assert workspace.shape == (*sizes, -(-gradient.shape[-1] // 16) * 16)
        plain = {"softmax_scale": scale, "window_left": left, "window_right": right, "bhsd": bhsd}
        plain |= self._named(modifiers)
        want_dbias = dbias is not None
        gradients = reference.backward(
            dout, dlse, q, k, v, out, lse, want_dbias=want_dbias, **plain
        )
        sums = (dout.float() * out).sum(-1)
        delta.copy_((sums if bhsd else sums.transpose(1, 2)) - (0 if dlse is None else dlse))
        for target, values in zip((dq, dk, dv, dbias), gradients, strict=False):
            if target is not None:
                assert target.is_contiguous()
                target.copy_(values)

    def _named(self, modifiers: Modifiers) -> dict[str, Any]:
        if modifiers is None:
            return {}
        softcap, slopes, bias, threshold, seed = modifiers
        self._insist(floats=(slopes,))
        assert bias is None or (bias.dim() == 4 and bias.dtype != torch.float64)
        assert (threshold > 0) <= (seed is not None and seed.shape == (1,))
        return {
            "softcap": softcap, "alibi_slopes": slopes, "attn_bias": bias, "seed": seed,
            "dropout_p": threshold / 65536,
        }  # fmt: skip

    def _insist(self, *tensors: Tensor, floats: tuple[Tensor | None, ...]) -> None:
        for x in tensors:
            rows = zip(x.shape[:-1], x.stride()[:-1], strict=True)
            steps = [stride for size, stride in rows if size > 1]
            assert x.shape[-1] % 8 == 0
            assert x.stride(-1) == 1
            assert all(step * x.element_size() % 16 == 0 for step in (*steps, x.storage_offset()))
        for y in floats:
            assert y is None or (y.is_contiguous() and y.dtype == torch.float32)


ROW = {
    "family": "sm80", "features": "lean", "head_dim": 128, "block_m": 128, "block_n": 64,
    "threads": 128, "stages": 2, "smem_bytes": 98304, "splits_groups": True,
}  # fmt: skip

A100 = Hardware((8, 0), 163 * 1024, 108)


@pytest.fixture
def extension(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeExtension]:
    """A build whose forward serves all of both halves, and whose backward is not deterministic.

    Lean kernels alone, unless the fixture gets the parameter "full"; with "whole_dq_tiles" these
    take dQ's workspace in whole tiles.
    """
    kind = getattr(request, "param", "lean")
    features = ("lean", "full") if kind == "full" else ("lean",)
    rows = [
        {**ROW, "pass": pass_, "dtype": dtype, "features": feature}
        | {"deterministic": feature == "full" or pass_ == "forward"}
        | {"whole_dq_tiles": kind == "whole_dq_tiles" and pass_ == "backward"}
        for feature, pass_, dtype in product(features, dispatch.PASSES, ("float16", "bfloat16"))
    ]
    kernels = [Kernel.of({**row, "index": index}) for index, row in enumerate(rows)]

    def plan_on(device: torch.device, problem: Problem) -> Plan:
        return dispatch.plan(problem, kernels, ("80",), A100, dispatch.in_force)

    fake = FakeExtension(kernels)
    monkeypatch.setattr(build, "extension", lambda: fake)
    monkeypatch.setattr(ops, "plan_on", plan_on)
    ops._launches.clear()
    yield fake
    ops._launches.clear()


def both_passes(
    inputs: Inputs, forward: Callable[..., Any], backward: Callable[..., Any]
) -> dict[str, Tensor]:
    """out, lse and all gradients by two implementations of the operators."""
    private = inputs.private()
    out, lse = forward(inputs.q, inputs.k, inputs.v, **private, out_dtype=inputs.out_dtype)
    gradients = backward(
        inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse,
        (True, True, True, "attn_bias" in inputs.leaves(), inputs.sinks is not None), **private,
    )  # fmt: skip
    names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
    return dict(zip(names, (out, lse, *gradients), strict=True))


def cuda_and_reference(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def forward(*args: Any, **more: Any) -> Any:
        return reference.forward(*args, **more)

    def backward(*args: Any, **more: Any) -> Any:
        *tensors, want = args
        names = ("want_dq", "want_dk", "want_dv", "want_dbias", "want_dsinks")
        return reference.backward(*tensors, **dict(zip(names, want, strict=True)), **more)

    return both_passes(inputs, ops._forward_cuda, ops._backward_cuda), both_passes(
        inputs, forward, backward
    )


def hold_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].stride() == value.stride(), name
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("D", "Dv"), [(64, None), (33, 8), (40, 59), (5, 1)])
def test_cuda_operator_makes_inputs_readable(
    D: int, Dv: int | None, memory: str, layout: str, extension: FakeExtension
) -> None:
    """D12, D25: any strides and head dims; copied only where kernels cannot read in place."""
    case = Case(
        seqlen_q=9, seqlen_k=13, heads_q=4, head_dim=D, head_dim_v=Dv, dtype=torch.bfloat16,
        causal=True, layout=layout, memory=memory, lse_gradient=True, sinks=torch.float16,
    )  # fmt: skip
    inputs = make_inputs(case)
    found, expected = cuda_and_reference(inputs)
    hold_equal(found, expected)
    in_place = memory not in ("strided", "offset") and D % 8 == 0
    assert (extension.last["q"].data_ptr() == inputs.q.data_ptr()) == in_place
    assert extension.last["q"].shape[-1] == -(-D // 8) * 8


@pytest.mark.parametrize("extension", ["whole_dq_tiles"], indirect=True)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("Sq", "rows"), [(0, 0), (1, 128), (128, 128), (129, 256)])
@pytest.mark.parametrize("D", [128, 40])
def test_whole_tiles_in_the_workspace_of_dq(
    D: int, Sq: int, rows: int, layout: str, extension: FakeExtension
) -> None:
    case = Case(
        seqlen_q=Sq, seqlen_k=5, heads_q=4, head_dim=D, dtype=torch.bfloat16, layout=layout
    )  # fmt: skip
    found, expected = cuda_and_reference(make_inputs(case))
    hold_equal(found, expected)
    assert extension.last["dq_accum"].shape == (case.batch, 4, rows, 128)


@pytest.mark.parametrize("dtype", HALVES)
def test_cuda_operator_casts(dtype: torch.dtype, extension: FakeExtension) -> None:
    """out_dtype float32 and a dout of any dtype; kernels get halves in backward."""
    case = Case(seqlen_q=9, seqlen_k=5, dtype=dtype, out_dtype=torch.float32, lse_gradient=True)
    inputs = make_inputs(case)
    found, expected = cuda_and_reference(inputs)
    assert found["out"].dtype == torch.float32
    for name in ("out", "lse"):
        torch.testing.assert_close(found[name], expected[name])
    for name in ("dq", "dk", "dv"):  # dout and out are rounded before the kernel sees them
        torch.testing.assert_close(found[name], expected[name], atol=0.05, rtol=0.05)


MODIFIED: list[dict[str, Any]] = [
    {"softcap": 3.0},
    {"alibi": "h"},
    {"alibi": "bh", "softcap": 3.0, "sinks": torch.float32},
    {"dropout_p": 0.25, "lse_gradient": True},
    {"bias": "bhqk", "bias_hidden": 0.2},
    {"bias": "bhqk", "bias_dtype": torch.float64},
    {"bias": "hk", "bias_dtype": torch.float32, "dropout_p": 0.5},
    {"bias": "q", "bias_dtype": torch.float64},
    {"bias": "bk", "bias_dtype": torch.bool, "bias_hidden": 0.5, "layout": "bhsd"},
]
FULL = pytest.mark.parametrize("extension", ["full"], indirect=True)


@FULL
@pytest.mark.parametrize("asked", MODIFIED, ids=str)
@pytest.mark.parametrize("head_dim", [64, 33])
def test_modifiers_reach_kernels_with_all_features(
    head_dim: int, asked: dict[str, Any], extension: FakeExtension
) -> None:
    case = Case(seqlen_q=9, seqlen_k=13, heads_q=4, head_dim=head_dim, dtype=torch.float16, **asked)
    inputs = make_inputs(case)
    if inputs.alibi_slopes is not None:
        inputs.alibi_slopes = torch.stack((inputs.alibi_slopes,) * 2, -1)[..., 0]
    found, expected = cuda_and_reference(inputs)
    if case.bias_dtype == torch.float64:  # kernels read it, and write its gradient, in fp32
        assert found["dbias"].dtype == torch.float64
        found["dbias"], expected["dbias"] = found["dbias"].float(), expected["dbias"].float()
    hold_equal(found, expected)
    softcap, slopes, bias, threshold, seed = extension.last["modifiers"]
    assert (softcap, threshold) == (case.softcap, round(case.dropout_p * 65536))
    assert (slopes is None) == (case.alibi is None)
    assert (seed is None) == (case.dropout_p == 0)
    assert (bias is None) == (case.bias is None)
    dbias = extension.last["dbias"]
    assert (dbias is None) == ("attn_bias" not in inputs.leaves())
    if dbias is not None:
        assert dbias.dtype == (bias.dtype if case.bias == "bhqk" else torch.float32)


@FULL
def test_lean_kernels_serve_what_they_can(extension: FakeExtension) -> None:
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16, sinks=torch.float32))
    cuda_and_reference(inputs)
    assert extension.last["modifiers"] is None


@FULL
def test_dropout_needs_its_seed(extension: FakeExtension) -> None:
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16))
    with pytest.raises(ValueError, match="^seed is None, but dropout_p is 0.5"):
        ops._forward_cuda(inputs.q, inputs.k, inputs.v, dropout_p=0.5)


@FULL
@pytest.mark.parametrize("dims", ["bhqk", "hqk", "k"])
def test_sums_of_bias_gradients_in_fixed_point(dims: str, extension: FakeExtension) -> None:
    """With deterministic=True alone, and where there is a sum: a workspace of int64 zeros."""
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16, bias=dims))
    bias = inputs.attn_bias
    assert bias is not None
    q, k, v = inputs.q, inputs.k, inputs.v
    for deterministic in (False, True):
        more: dict[str, Any] = {"deterministic": deterministic, "attn_bias": bias}
        out, lse = ops._forward_cuda(q, k, v, **more)
        ops._backward_cuda(
            inputs.dout, None, q, k, v, out, lse, (True, True, True, True, False), **more
        )
        fixed = extension.last["dbias_fixed"]
        assert (fixed is not None) == (deterministic and dims != "bhqk")
        if fixed is not None:
            assert (fixed.shape, fixed.dtype) == ((1 + bias.numel(),), torch.int64)
            assert not fixed.any()


DOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x.new_ones(()).expand(x.shape),
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every_second_batch": lambda x: torch.stack((x, x), 1).flatten(0, 1)[::2],
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
    "offset": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "float32": lambda x: x.float(),
    "float64": lambda x: x.double(),
}


@pytest.mark.parametrize("name", DOUT)
def test_any_dout(name: str, extension: FakeExtension) -> None:
    """D11: the layout and dtype of the incoming gradient do not matter."""
    inputs = make_inputs(Case(batch=2, seqlen_q=9, seqlen_k=9, dtype=torch.float16))
    assert inputs.dout is not None
    dout = DOUT[name](inputs.dout)
    plain = dout.half().clone(memory_format=torch.contiguous_format)
    out, lse = ops._forward_cuda(inputs.q, inputs.k, inputs.v)
    rest = (None, inputs.q, inputs.k, inputs.v, out, lse, (True, True, True, False, False))
    for found, expected in zip(
        ops._backward_cuda(dout, *rest), ops._backward_cuda(plain, *rest), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("want", list(product((False, True), repeat=3)))
def test_cuda_operator_asks_for_what_is_wanted(
    want: tuple[bool, bool, bool], extension: FakeExtension
) -> None:
    """Gradients that nobody asked for are neither allocated nor computed."""
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16))
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    out, lse = ops._forward_cuda(q, k, v)
    sinks = torch.zeros(2, dtype=torch.float16)
    found = ops._backward_cuda(dout, None, q, k, v, out, lse, (*want, False, want[0]), sinks=sinks)
    assert [x.numel() > 0 for x in found] == [*want, False, want[0]]
    for name, wanted in zip(("dq", "dk", "dv"), want, strict=True):
        assert (extension.last[name] is not None) == wanted
    assert (extension.last["dq_accum"] is not None) == want[0]
    assert len({x.data_ptr() for x in found if x.numel()}) == sum(want) + want[0]


@pytest.mark.parametrize("want", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 24), (33, 59)])
def test_workspaces_of_split_groups(
    D: int, Dv: int, layout: str, want: tuple[bool, bool, bool], extension: FakeExtension
) -> None:
    """Where a group is split: fp32 dK and dV, of the gradients that are asked for."""
    case = Case(
        batch=1, seqlen_q=9, seqlen_k=5, heads_q=6, heads_k=2, head_dim=D, head_dim_v=Dv,
        dtype=torch.bfloat16, layout=layout,
    )  # fmt: skip
    inputs = make_inputs(case)
    q, k, v, bhsd = inputs.q, inputs.k, inputs.v, layout == "bhsd"
    out, lse = ops._forward_cuda(q, k, v, bhsd=bhsd)
    found = ops._backward_cuda(
        inputs.dout, None, q, k, v, out, lse, (*want, False, False), bhsd=bhsd
    )
    assert extension.last["splits"] == 3
    assert [x.numel() > 0 for x in found[:3]] == [*want]
    for name, columns, wanted in (("dk_accum", D, want[1]), ("dv_accum", Dv, want[2])):
        expected = (1, 2, 5, -(-columns // 16) * 16) if wanted else None
        workspace = extension.last[name]
        assert (None if workspace is None else tuple(workspace.shape)) == expected


def test_no_workspace_without_a_split(extension: FakeExtension) -> None:
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16))
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = ops._forward_cuda(q, k, v)
    ops._backward_cuda(inputs.dout, None, q, k, v, out, lse, (True,) * 3 + (False,) * 2)
    assert extension.last["splits"] == 1
    assert extension.last["dk_accum"] is extension.last["dv_accum"] is None


def test_kernel_of_the_dtype_is_called(extension: FakeExtension) -> None:
    for index, dtype in enumerate(HALVES):
        inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=dtype))
        out, lse = ops._forward_cuda(inputs.q, inputs.k, inputs.v)
        assert extension.last["kernel"] == index
        ops._backward_cuda(
            inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, (True,) * 3 + (False,) * 2
        )
        assert extension.last["kernel"] == index + 2


def test_unserved_calls_never_reach_a_kernel(extension: FakeExtension) -> None:
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16))
    q, k, v = inputs.q, inputs.k, inputs.v
    with pytest.raises(NotImplementedError, match="forward pass .*\n.* does not serve softcap"):
        ops._forward_cuda(q, k, v, softcap=5.0)
    with pytest.raises(NotImplementedError, match="backward pass .*\n.*deterministic=True"):
        ops._forward_cuda(q, k, v, deterministic=True)
    assert not extension.last
    out, lse = ops._forward_cuda(q, k, v, deterministic=False)
    with pytest.raises(NotImplementedError, match="deterministic=True"):
        ops._backward_cuda(inputs.dout, None, q, k, v, out, lse, (True,) * 5, deterministic=True)


def test_arguments_are_checked_once(
    extension: FakeExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call with the same shapes, strides, dtypes and flags builds nothing."""
    checks = []
    check = ops.of_tensors

    def counted(*args: Any, **more: Any) -> Problem:
        checks.append(args)
        return check(*args, **more)

    monkeypatch.setattr(ops, "of_tensors", counted)
    inputs = make_inputs(Case(seqlen_q=4, seqlen_k=4, dtype=torch.float16))
    q, k, v = inputs.q, inputs.k, inputs.v
    for _ in range(3):
        ops._forward_cuda(q, k, v)
    assert len(checks) == 1
    ops._forward_cuda(q, k, v, window_right=0)
    ops._forward_cuda(q[:, :3], k, v)
    ops._forward_cuda(q, k, v, sinks=torch.zeros(2))
    assert len(checks) == 4
    with pytest.raises(TypeError):
        ops._forward_cuda(q, k.bfloat16(), v)
    with pytest.raises(TypeError):
        ops._forward_cuda(q, k.bfloat16(), v)


def test_cache_of_launches_is_bounded(
    extension: FakeExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "MOST_LAUNCHES", 3)
    for length in range(1, 9):
        inputs = make_inputs(Case(seqlen_q=length, seqlen_k=4, dtype=torch.float16))
        ops._forward_cuda(inputs.q, inputs.k, inputs.v)
        assert 1 <= len(ops._launches) <= 3


def described(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("sizes", [(9, 13), (0, 3), (3, 0)])
def test_fake_results_look_like_real_ones(
    sizes: tuple[int, int], layout: str, memory: str, where: str, device: torch.device
) -> None:
    """D24: shape, stride and dtype of every result, of both operators."""
    case = Case(
        seqlen_q=sizes[0], seqlen_k=sizes[1], heads_q=4, head_dim=16, head_dim_v=24,
        dtype=torch.float16, layout=layout, memory=memory, sinks=torch.bfloat16,
        out_dtype=torch.float32, lse_gradient=True, bias="hk", alibi="bh",
    )  # fmt: skip
    inputs = make_inputs(case, device)

    def run(move: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        def moved(x: Any) -> Any:
            return move(x) if isinstance(x, Tensor) else x

        q, k, v = (moved(x) for x in (inputs.q, inputs.k, inputs.v))
        private = {name: moved(x) for name, x in inputs.private().items()}
        out, lse = ops.forward(q, k, v, **private, out_dtype=torch.float32)
        want = (True, False, True, True, True)
        dout, dlse = moved(inputs.dout), moved(inputs.dlse)
        return out, lse, *ops.backward(dout, dlse, q, k, v, out, lse, want, **private)

    real = run(lambda x: x)
    if where == "meta":
        pretended = run(lambda x: x.to("meta"))
    else:
        with FakeTensorMode() as mode:
            pretended = run(mode.from_tensor)
    assert described(pretended) == described(real)


def test_operators_are_pure_and_seeded() -> None:
    assert torch.Tag.nondeterministic_seeded in ops.forward.tags
    assert not ops.forward._schema.is_mutable
    assert not ops.backward._schema.is_mutable


def test_other_tensors_are_refused() -> None:
    x = torch.ones(1, 2, 1, 8).to_sparse()
    with pytest.raises(NotImplementedError, match=r"q is a torch.sparse_coo tensor on cpu, expec"):
        ops.forward(x, x, x)
