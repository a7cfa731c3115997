"""Faults that attention kernels had in the field, as small inputs: numbers.

The id of a test names a kind of fault; its docstring says in a line what went wrong. Large inputs
run on a GPU only. What concerns devices, streams, graphs and tracing is in test_field_runtime.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_kit import (
    Outcome,
    assert_bit_equal,
    attend,
    hold,
    run,
    run_and_hold,
)
from torch import Tensor

import flash_ext
from flash_ext.testing.cases import MEMORY, Case, Inputs, make_inputs

HALVES = [torch.float16, torch.bfloat16]
SMALL = Case(
    batch=2, seqlen_q=48, seqlen_k=64, heads_q=4, heads_k=2, head_dim=64, dtype=torch.bfloat16
)
GIB = 2**30


def require_memory(device: torch.device, gib: int) -> None:
    """Skip on a card that is too small."""
    total = torch.cuda.get_device_properties(device).total_memory
    if total < (gib + 2) * GIB:
        pytest.skip(f"needs {gib} GiB of device memory")


def on_gpu_if_long(length: int, device: torch.device, longest: int = 10_000) -> None:
    if length > longest and device.type == "cpu":
        pytest.skip(f"length {length}: on a GPU only")


def same(found: Outcome, expected: Outcome, names: tuple[str, ...] = ("dq", "dk", "dv")) -> None:
    """Bit-equal results. dq counts as well: the keys of these inputs are one tile's."""
    assert_bit_equal(found.out, expected.out)
    assert_bit_equal(found.lse, expected.lse)
    for name in names:
        assert_bit_equal(found.gradients[name], expected.gradients[name], name)


# Numbers at the edge


@pytest.mark.parametrize("level", [-1e4, -6e4, -2.4e5])
@pytest.mark.parametrize("Sk", [1, 64])
def test_d01_very_negative_scores(level: float, Sk: int, device: torch.device) -> None:
    """D01: a finite "minus infinity" beat real scores; rows were 0 and lse the stand-in."""
    D, Hq = 128, 16
    q = torch.ones(1, 3, Hq, D, dtype=torch.bfloat16, device=device)
    k = torch.full((1, Sk, 1, D), level / D, dtype=torch.bfloat16, device=device)
    k[:, 0] = (level + 5000) / D
    v = torch.randn(1, Sk, 1, D, generator=torch.Generator().manual_seed(0)).to(k)
    inputs = Inputs(q, k, v, dout=torch.ones_like(q))
    found = run(inputs)
    hold(inputs, found)
    assert_bit_equal(found.out, v[:, :1].expand_as(q).contiguous())
    assert_bit_equal(found.gradients["dv"][:, 0], torch.full_like(v[:, 0], 3.0 * Hq))


HIDDEN_ROWS = [
    *[(5, 2, True, (None, None), 3), (129, 128, True, (None, None), 1)],
    *[(300, 1, True, (None, None), 299), (129, 33, False, (32, 64), 32)],
    *[(300, 60, False, (None, 5), 235), (70, 20, True, (3, None), 50)],
    (2048, 1024, True, (None, None), 1024),
]


@pytest.mark.parametrize(("Sq", "Sk", "causal", "window", "hidden"), HIDDEN_ROWS)
@pytest.mark.parametrize("dtype", HALVES)
def test_d03_rows_that_see_no_key(
    Sq: int,
    Sk: int,
    causal: bool,
    window: tuple[int | None, int | None],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """D03: the first rows see nothing; lse was finite or results NaN, and dk, dv suffered."""
    on_gpu_if_long(Sq, device, longest=1000)
    case = replace(SMALL, seqlen_q=Sq, seqlen_k=Sk, dtype=dtype, causal=causal, window_size=window)
    _, found = run_and_hold(replace(case, lse_gradient=True), device)
    assert (found.out[:, :hidden] == 0).all()
    assert (found.lse[..., :hidden] == -torch.inf).all()
    assert (found.gradients["dq"][:, :hidden] == 0).all()
    assert found.lse[..., hidden:].isfinite().all()


@pytest.mark.parametrize("Sk", [1, 2, 63, 64, 65, 127, 129])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("magnitude", [3.0, 10.0])
def test_d04_few_keys(Sk: int, head_dim: int, magnitude: float, device: torch.device) -> None:
    """D04: scores past the last key were not masked in backward: NaN in dq."""
    lengths = {1: 76, 2: 34}
    case = Case(
        batch=1,
        seqlen_q=lengths.get(Sk, 146),
        seqlen_k=Sk,
        heads_q=5,
        heads_k=5,
        head_dim=head_dim,
        dtype=torch.float16,
        magnitude=magnitude,
    )
    for causal in (False, True):
        run_and_hold(replace(case, causal=causal), device)


# Sizes


@pytest.mark.parametrize(
    "shape",
    [(70_000, 1, 1, 8), (1, 1, 70_000, 8)],
    ids=["batch", "heads"],
)
def test_d09_more_than_65535(shape: tuple[int, int, int, int], device: torch.device) -> None:
    """D09: batch, heads or blocks beyond a grid's 65,535: launch errors, stale results."""
    halves_agree(shape, Sk=2, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "Sk"),
    [
        ((65_535, 4, 8, 64), 4),
        ((65_536, 4, 8, 64), 4),
        ((70_000, 4, 8, 64), 4),
        ((1, 1, 65_536, 64), 4),
        ((2, 3, 71_280, 64), 3),
        ((1, 65_600 * 128, 1, 64), 16),  # blocks of rows
    ],
    ids=str,
)
def test_d09_large(shape: tuple[int, int, int, int], Sk: int) -> None:
    """D09 at full size."""
    device = cuda_device()
    require_memory(device, 24)
    halves_agree(shape, Sk, device)


def cuda_device() -> torch.device:
    return torch.device("cuda")


def halves_agree(shape: tuple[int, int, int, int], Sk: int, device: torch.device) -> None:
    """Results are those of the two halves along the longest of B, Sq, H, bit for bit."""
    B, _, H, D = shape
    axis = max(range(3), key=lambda i: shape[i])
    Hk = 1 if axis == 2 else H
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    q, dout = normal(*shape), normal(*shape)
    k, v = normal(B, Sk, Hk, D), normal(B, Sk, Hk, D)
    whole = run(Inputs(q, k, v, dout))
    middle = shape[axis] // 2
    for start, length in ((0, middle), (middle, shape[axis] - middle)):
        half = [x.detach().narrow(axis, start, length) for x in (q, dout)]
        keys = [x.detach().narrow(0, start, length) if axis == 0 else x.detach() for x in (k, v)]
        found = run(Inputs(half[0], *keys, half[1]))
        assert_bit_equal(found.out, whole.out.narrow(axis, start, length))
        assert_bit_equal(found.gradients["dq"], whole.gradients["dq"].narrow(axis, start, length))
        for name in ("dk", "dv") if axis == 0 else ():
            expected = whole.gradients[name].narrow(0, start, length)
            assert_bit_equal(found.gradients[name], expected, name)


@pytest.mark.gpu
@pytest.mark.parametrize("stretched", ["batch", "sequence", "head"])
def test_d07_strides_beyond_32_bits(stretched: str) -> None:
    """D07, D08: offsets of inputs past 2^31 elements wrapped."""
    device = cuda_device()
    require_memory(device, 16)
    inputs = make_inputs(replace(SMALL, batch=3, heads_q=4, heads_k=4, causal=True), device)
    expected = run(inputs)
    axis = {"batch": 0, "sequence": 1, "head": 2}[stretched]
    far = []
    for x in (inputs.q, inputs.k, inputs.v):
        memory = torch.empty(2**31 + 2**20, dtype=x.dtype, device=device)
        strides = list(x.stride())
        strides[axis] = (2**31 // (x.shape[axis] - 1) // 64 + 1) * 64
        far.append(memory.as_strided(x.shape, strides).copy_(x.detach()))
    same(run(replace(inputs, q=far[0], k=far[1], v=far[2])), expected)


@pytest.mark.gpu
def test_d07_results_beyond_32_bits() -> None:
    """D07: offsets into out and into dq's accumulator, of more than 2^31 elements, wrapped."""
    device = cuda_device()
    require_memory(device, 48)
    Sq, Hq, D = 2**17 + 40, 128, 128  # 2.15e9 elements
    q = torch.randn(1, Sq, Hq, D, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 16, 1, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    whole = run(Inputs(q, k, v, dout=q.detach()))
    for rows in (slice(0, 130), slice(-130, None)):
        part = q.detach()[:, rows].clone()
        found = run(Inputs(part, k.detach(), v.detach(), dout=part.detach()))
        assert_bit_equal(found.out, whole.out[:, rows])
        assert_bit_equal(found.gradients["dq"], whole.gradients["dq"][:, rows])


EMPTY = [
    *[{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_q": 0, "seqlen_k": 0}],
    {"seqlen_k": 0, "sinks": torch.float32},
]


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_d10_nothing_to_do(sizes: dict[str, int], causal: bool, device: torch.device) -> None:
    """D10: launches of no blocks failed; out of Sk = 0 was what memory held."""
    inputs, found = run_and_hold(replace(SMALL, causal=causal, **sizes), device)
    assert found.out.shape == (*inputs.q.shape[:3], inputs.v.shape[-1])
    assert (found.out == 0).all()
    if inputs.sinks is None:
        assert (found.lse == -torch.inf).all()
    assert (found.gradients["dq"] == 0).all()
    assert (found.gradients["dk"] == 0).all()
    assert (found.gradients["dv"] == 0).all()


# Layouts


def dout_layouts(dout: Tensor) -> dict[str, Tensor]:
    """The same gradient of out in other memory."""
    B, S, H, D = dout.shape
    swapped = dout.transpose(0, 1).contiguous().transpose(0, 1)
    sliced = dout.new_full((2 * B, S, H, D), torch.nan)
    sliced[::2] = dout
    offset = dout.new_full((dout.numel() + 1,), torch.nan)
    offset[1:] = dout.flatten()
    return {
        "swapped": swapped,
        "every_second": sliced[::2],
        "strided": MEMORY["strided"](dout, 2),
        "offset": offset[1:].view_as(dout),
        "float32": dout.float(),
    }


@pytest.mark.parametrize("head_dim", [64, 33])
def test_d11_memory_of_dout(head_dim: int, device: torch.device) -> None:
    """D11: a gradient that is not contiguous was read as if it were."""
    inputs = make_inputs(replace(SMALL, head_dim=head_dim), device)
    assert inputs.dout is not None
    expected = run(inputs)
    for name, dout in dout_layouts(inputs.dout).items():
        print(name)
        same(run(replace(inputs, dout=dout)), expected)
    ones = run(replace(inputs, dout=torch.ones_like(inputs.dout)))
    expanded = inputs.dout.new_ones(()).expand_as(inputs.dout)
    same(run(replace(inputs, dout=expanded)), ones)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("of_q", MEMORY)
def test_d12_memory_of_inputs(of_q: str, layout: str, device: torch.device) -> None:
    """D12: q, k and v in different memory; one's strides were used for another."""
    case = Case(
        batch=2,
        seqlen_q=20,
        seqlen_k=24,
        heads_q=4,
        heads_k=2,
        head_dim=16,
        dtype=torch.float16,
        layout=layout,
    )
    for of_k in MEMORY:
        for of_v in MEMORY:
            print(of_q, of_k, of_v)
            inputs = make_inputs(replace(case, memory=(of_q, of_k, of_v)), device)
            plain = replace(inputs, **{n: getattr(inputs, n).contiguous() for n in "qkv"})
            same(run(inputs), run(plain))


@pytest.mark.parametrize("memory", ["heads_expanded", "batch_expanded"])
def test_d12_expanded_inputs_sum_their_gradients(memory: str, device: torch.device) -> None:
    """D12: a stride-0 input is one tensor: its gradient is the sum over the expanded dim."""
    inputs = make_inputs(replace(SMALL, dtype=torch.float16), device)
    axis = 2 if memory == "heads_expanded" else 0
    k, v = (x.narrow(axis, 0, 1).contiguous() for x in (inputs.k, inputs.v))
    leaves = [x.clone().requires_grad_() for x in (k, v)]
    expanded = [x.expand_as(inputs.k) for x in leaves]
    out, _ = attend(replace(inputs, k=expanded[0], v=expanded[1]))
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    apart = run(replace(inputs, k=k.expand_as(inputs.k), v=v.expand_as(inputs.v)))
    for name, gradient in zip(("dk", "dv"), gradients, strict=True):
        expected = apart.gradients[name].sum(axis, keepdim=True)
        torch.testing.assert_close(gradient, expected, atol=2**-9, rtol=2**-9)


# Gradients


@pytest.mark.parametrize("extra", [{}, {"causal": True}, {"softcap": 5.0}, {"alibi": "h"}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_d18_loss_on_lse(head_dim: int, extra: dict[str, object], device: torch.device) -> None:
    """D18: a loss on lse had no gradient; now dv is exactly 0 and dq, dk are right."""
    case = replace(SMALL, seqlen_q=128, seqlen_k=200, head_dim=head_dim, lse_gradient=True)
    inputs = replace(make_inputs(replace(case, **extra), device), dout=None)
    inputs.requires_grad_()
    _, lse = attend(inputs)
    dq, dk, dv = torch.autograd.grad(lse, (inputs.q, inputs.k, inputs.v), inputs.dlse)
    assert (dv == 0).all()
    zero = torch.zeros_like(inputs.q)
    with torch.no_grad():
        out, lse = attend(inputs)
    hold(replace(inputs, dout=zero), Outcome(out, lse, {"dq": dq, "dk": dk, "dv": dv}))
    assert dq.abs().max() > 0


def test_d18_unused_lse_changes_nothing(device: torch.device) -> None:
    """D18: gradients are bit-equal whether lse is returned or not, if no loss is on it."""
    inputs = make_inputs(SMALL, device).requires_grad_()
    out = flash_ext.attention(inputs.q, inputs.k, inputs.v)
    alone = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    found = run(inputs)
    for name, gradient in zip(("dq", "dk", "dv"), alone, strict=True):
        assert_bit_equal(gradient, found.gradients[name], name)


def test_d18_double_backward_is_refused(device: torch.device) -> None:
    """D18: second derivatives were zeros; now they are an error."""
    inputs = make_inputs(SMALL, device).requires_grad_()
    out, lse = attend(inputs)
    loss = out.float().sum() + lse.sum()
    (dq,) = torch.autograd.grad(loss, inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.float().sum().backward()


REPEATED = (
    replace(SMALL, seqlen_q=500, seqlen_k=500, causal=True),
    replace(SMALL, seqlen_q=300, seqlen_k=700, heads_k=1, head_dim=128, dtype=torch.float16),
    replace(SMALL, seqlen_q=700, seqlen_k=300, head_dim=128, window_size=(100, 40)),
    replace(SMALL, seqlen_q=390, seqlen_k=390, head_dim=256, causal=True),
)


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_d20_deterministic_gradients(case: Case, device: torch.device) -> None:
    """D20: `deterministic` taken but ignored: bits of dq changed from run to run."""
    inputs = make_inputs(case, device)
    first = run(inputs, deterministic=True)
    hold(inputs, first)
    for _ in range(20 if device.type == "cuda" else 1):
        again = run(inputs, deterministic=True)
        for name, gradient in first.gradients.items():
            assert_bit_equal(again.gradients[name], gradient, name)


@pytest.mark.parametrize("head_dim", [8, 33, 40, 59, 63, 72, 80, 111, 120, 250])
def test_d25_odd_head_dims_in_all_modes(head_dim: int, device: torch.device) -> None:
    """D25: paths without gradients failed where the head dim was padded; 1/sqrt(D) is of D."""
    inputs = make_inputs(replace(SMALL, head_dim=head_dim), device)
    expected = run(inputs)
    hold(inputs, expected)
    plain = replace(inputs, **{name: getattr(inputs, name).detach() for name in "qkv"})
    results = [attend(plain)]
    with torch.no_grad():
        results.append(attend(inputs))
    with torch.inference_mode():
        results.append(attend(plain))
    results.append(attend(replace(plain, v=plain.v.clone().requires_grad_())))
    for out, lse in results:
        assert_bit_equal(out, expected.out)
        assert_bit_equal(lse.detach(), expected.lse)


@pytest.mark.parametrize("asked", range(1, 16))
def test_d26_some_gradients(asked: int, device: torch.device) -> None:
    """D26: only some inputs ask for a gradient; backward read what was never saved."""
    inputs = make_inputs(replace(SMALL, sinks=torch.float32, lse_gradient=True), device)
    expected = run(inputs)
    names = [n for bit, n in enumerate(("q", "k", "v", "sinks")) if asked >> bit & 1]
    fresh = {n: getattr(inputs, n).detach().clone() for n in ("q", "k", "v", "sinks")}
    for name in names:
        fresh[name].requires_grad_()
    out, lse = attend(replace(inputs, **fresh))
    torch.autograd.backward([out, lse], [inputs.dout, inputs.dlse])
    for name, leaf in fresh.items():
        if name in names:
            assert leaf.grad is not None
            assert_bit_equal(leaf.grad, expected.gradients[f"d{name}"], name)
        else:
            assert leaf.grad is None


# Alignment of masks

TABLE = [(1, 70), (2, 5), (5, 2), (128, 512), (512, 128)]


@pytest.mark.parametrize(("Sq", "Sk"), TABLE)
@pytest.mark.parametrize("causal", [False, True])
def test_d29_bottom_right(Sq: int, Sk: int, causal: bool, device: torch.device) -> None:
    """D29: causal was aligned top left, or forgotten in backward. v counts the keys a row sees."""
    run_and_hold(replace(SMALL, seqlen_q=Sq, seqlen_k=Sk, causal=causal), device)
    q = torch.zeros(1, Sq, 1, 8, dtype=torch.float16, device=device)
    k = torch.zeros(1, Sk, 1, 8, dtype=torch.float16, device=device)
    _, lse = attend(Inputs(q, k, k, causal=causal))
    seen = torch.arange(1, Sq + 1).add(Sk - Sq).clamp(min=0) if causal else torch.full((Sq,), Sk)
    torch.testing.assert_close(lse[0, 0].cpu().exp(), seen.float(), atol=1e-3, rtol=1e-5)


def test_d29_one_query_is_causal_already(device: torch.device) -> None:
    inputs = make_inputs(replace(SMALL, seqlen_q=1, seqlen_k=300), device)
    same(run(replace(inputs, causal=True)), run(inputs), names=("dk", "dv"))


# Accuracy

LONG = [512, 4096, 32_768, 131_072]


@pytest.mark.parametrize("Sk", LONG)
@pytest.mark.parametrize("dtype", HALVES)
def test_d41_ones_stay_ones(Sk: int, dtype: torch.dtype, device: torch.device) -> None:
    """D41: v of ones gives ones within a rounding, at any length."""
    on_gpu_if_long(Sk, device)
    case = Case(batch=1, seqlen_q=130, seqlen_k=Sk, heads_q=2, heads_k=1, dtype=dtype)
    inputs = make_inputs(case, device)
    inputs.v.fill_(1.0)
    out, _ = attend(inputs)
    bound = 2**-8 if dtype == torch.bfloat16 else 2**-10
    assert (out.float() - 1).abs().max() <= bound


@pytest.mark.parametrize("Sk", LONG)
@pytest.mark.parametrize("kind", ["near one", "uniform", "peaked"])
@pytest.mark.parametrize("dtype", HALVES)
def test_d41_accuracy_at_length(
    Sk: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """D41: the error stays within the rule however many keys there are, and whatever they are."""
    on_gpu_if_long(Sk, device)
    magnitude = 4.0 if kind == "peaked" else 1.0
    case = Case(batch=1, seqlen_q=64, seqlen_k=Sk, heads_q=2, heads_k=1, dtype=dtype)
    inputs = make_inputs(replace(case, magnitude=magnitude), device)
    if kind == "near one":
        inputs.v.mul_(0.01).add_(1.0)
    elif kind == "uniform":
        inputs.q.zero_()
    found = run(inputs)
    hold(inputs, found)
    if kind == "uniform":
        mean = inputs.v.detach().double().mean(1, keepdim=True)
        assert (found.out.double() - mean).abs().max() <= 2**-8 * mean.abs().max()


@pytest.mark.parametrize("Sk", [0, 1, 300])
@pytest.mark.parametrize("logit", [-torch.inf, -100.0, 0.5, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d42_sinks(Sk: int, logit: float, dtype: torch.dtype, device: torch.device) -> None:
    """D42: lse of a row without keys was NaN, of a large sink inf, and sinks had no gradient."""
    case = replace(SMALL, seqlen_q=310, seqlen_k=Sk, causal=True, sinks=dtype, lse_gradient=True)
    inputs = make_inputs(case, device)
    assert inputs.sinks is not None
    inputs.sinks.fill_(logit)
    found = run(inputs)
    hold(inputs, found)
    empty = 310 - Sk
    assert (found.lse[..., :empty] == logit).all()
    assert (found.out[:, :empty] == 0).all()
    if logit == -torch.inf:
        plain = replace(inputs, sinks=None)
        same(run(plain), found, names=("dk", "dv"))  # the keys are more than one tile
