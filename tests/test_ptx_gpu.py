"""Every wrapper of `csrc/ptx` for Hopper on the hardware, against layouts and sums made here.

All numbers are small integers, so that every comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from ptx_kit import Kernels, find_nvcc, map_shape, slab_image
from torch import Tensor

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not found"),
]
DTYPES = [torch.float16, torch.bfloat16]
NAN = float("nan")
INVALID_VALUE = 1  # cudaErrorInvalidValue


@lru_cache
def kernels(name: str) -> Kernels:
    return Kernels(name)


def cuda(shape: int | tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(
        (shape,) if isinstance(shape, int) else shape, value, dtype=dtype, device="cuda"
    )


def integers(shape: tuple[int, ...], most: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers from -most to most."""
    return torch.randint(-most, most + 1, shape, device="cuda").to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


# --- Synchronisation -----------------------------------------------------------------------------


def test_mbarrier_ring() -> None:
    rounds = 9
    out = cuda((rounds, 32), -1, torch.int32)
    kernels("sync").call("test_mbarrier_ring", out, rounds)
    assert out.tolist() == [[100 * i + lane for lane in range(32)] for i in range(rounds)]


def test_arrivals_from_another_block() -> None:
    rounds = 5
    out = cuda((2, rounds), -1, torch.int32)
    kernels("sync").call("test_remote_arrive", out, rounds)
    assert out.tolist() == [[10] * rounds] * 2


def test_named_barriers_pass_the_turn() -> None:
    turns = 20
    log = cuda(2 * turns, -1, torch.int32)
    kernels("sync").call("test_take_turns", log, turns)
    assert log.tolist() == [0, 1] * turns


def test_setmaxnreg() -> None:
    threads, values = 384, 192
    x = torch.arange(threads + values, device="cuda", dtype=torch.float32)
    out = cuda(threads, NAN, torch.float32)
    kernels("sync").call("test_move_registers", x, out)
    sums = [sum(range(t, t + values)) for t in range(128, threads)]
    assert out.tolist() == [*range(128), *sums]


def test_elect_sync() -> None:
    out = cuda(4, 0, torch.int32)
    kernels("sync").call("test_elect_lanes", out)
    assert [(word & 0xFFFFFFFF).bit_count() for word in out.tolist()] == [1] * 4


def test_stmatrix() -> None:
    out = cuda(512, -1, torch.int16)
    kernels("sync").call("test_store_matrices", out)
    assert out.tolist() == list(range(512))


def test_grid_dependency() -> None:
    data, out = cuda(512, 0, torch.int32), cuda(512, -1, torch.int32)
    kernels("sync").call("test_grid_dependency", data, out)
    assert out.tolist() == list(range(1, 513))


# --- TMA -----------------------------------------------------------------------------------------

B, S, H, D = 2, 150, 3, 80
LAYOUTS: dict[str, Callable[[], Tensor]] = {  # storage, larger than the (B, S, H, D) tensor in it
    "bshd": lambda: cuda((B, S + 9, H + 1, D + 8), NAN, torch.float16),
    "bhsd": lambda: cuda((B, H + 1, S + 9, D + 8), NAN, torch.float16).transpose(1, 2),
}
BOXES = {  # first column, row, head, batch entry
    "inside": (0, 8, 1, 0),
    "rows_end": (0, 130, 2, 1),
    "columns_end": (64, 3, 0, 1),
    "both_end": (64, 149, 1, 0),
    "outside": (0, 150, 0, 0),
}


def tensor_in(storage: Tensor) -> Tensor:
    """A (B, S, H, D) view filled with numbers below 2048, with NaN all around it."""
    x = storage[:, :S, :H, :D]
    x.copy_((torch.arange(x.numel(), device="cuda") % 2048).view(x.shape))
    return x


def box_of(x: Tensor, first: tuple[int, ...], rows: int, cols: int) -> Tensor:
    """A (rows, cols) box at (column, row, head, batch); zeros beyond the end."""
    col, row, head, batch = first
    box = x.new_zeros(rows, cols)
    part = x[batch, row : row + rows, head, col : col + cols]
    box[: part.shape[0], : part.shape[1]] = part
    return box


def assert_image(got: Tensor, expected: Tensor, line: int) -> None:
    """Images (int16), with the lines of swizzle that differ."""
    wrong = (got != expected).view(-1, line)
    if bool(wrong.any()):
        lines = wrong.any(1).nonzero().flatten().tolist()
        first = lines[0]
        pytest.fail(
            f"{int(wrong.sum())} elements of {got.numel()} in lines {compact(lines)};\n"
            f"  line {first}\n  got      {got.view(-1, line)[first].tolist()}\n"
            f"  expected {expected.view(-1, line)[first].tolist()}",
            pytrace=False,
        )


@pytest.mark.parametrize("rows", [64, 176])
@pytest.mark.parametrize("slab", [64, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", BOXES)
def test_tma_load(where: str, layout: str, slab: int, rows: int) -> None:
    x, first = tensor_in(LAYOUTS[layout]()), BOXES[where]
    shape = map_shape(x, (slab, rows, 1, 1))
    expected = slab_image(box_of(x, first, rows, slab), slab)
    for policy in range(3):
        image = cuda(expected.numel(), -2, torch.int16)
        kernels("tma").call("test_load_box", x, shape, first, image, policy, 0)
        assert_image(image, expected, slab)


def test_tma_loads_what_its_block_wrote() -> None:
    x = cuda((1, 64, 1, 64), 0, torch.int16)
    image = cuda(64 * 64, -2, torch.int16)
    shape = map_shape(x, (64, 64, 1, 1))
    kernels("tma").call("test_load_box", x, shape, (0, 0, 0, 0), image, 0, x.numel())
    numbers = torch.arange(x.numel(), device="cuda") % 2048
    assert_image(image, slab_image(numbers.to(torch.int16).view(64, 64), 64), 64)


def test_tma_box_of_rows_and_heads() -> None:
    """A box over two dimensions: here over three heads of each row."""
    x = tensor_in(LAYOUTS["bshd"]())
    rows, first = 16, (0, 1, 140, 1)  # the map's order: column, head, row, batch entry
    shape = map_shape(x.transpose(1, 2), (64, 2, rows, 1))
    image = cuda(64 * 2 * rows, -2, torch.int16)
    kernels("tma").call("test_load_box", x, shape, first, image, 0, 0)
    box = x.new_zeros(rows, 2, 64)
    box[: S - 140] = x[1, 140:, 1:3, :64]
    assert_image(image, slab_image(box.view(2 * rows, 64), 64), 64)


def test_tma_dimensions_of_size_one_have_any_stride() -> None:
    storage = tensor_in(LAYOUTS["bshd"]())
    for strides in [(0, storage.stride(1), 0, 1), (3, storage.stride(1), -5, 1)]:
        shape = map_shape(storage[:1, :, :1], (64, 64, 1, 1))
        shape.strides[:] = [strides[i] for i in (3, 1, 2, 0)]
        image = cuda(64 * 64, -2, torch.int16)
        kernels("tma").call("test_load_box", storage, shape, (0, 8, 0, 0), image, 0, 0)
        assert_image(image, slab_image(box_of(storage, (0, 8, 0, 0), 64, 64), 64), 64)


def test_tma_expanded_heads_are_right_or_refused() -> None:
    x = tensor_in(LAYOUTS["bshd"]())[:, :, :1].expand(-1, -1, H, -1)
    shape, first = map_shape(x, (64, 64, 1, 1)), (0, 8, 2, 1)
    image = cuda(64 * 64, -2, torch.int16)
    error = kernels("tma").code("test_load_box", x, shape, first, image, 0, 0)
    assert error in (0, INVALID_VALUE)
    if error == 0:
        assert_image(image, slab_image(box_of(x, first, 64, 64), 64), 64)


@pytest.mark.parametrize("wrong", ["address", "stride", "columns", "rows", "size"])
def test_tensor_map_refuses(wrong: str) -> None:
    x = cuda((2, 64, 2, 72), 0, torch.int16)
    shape = map_shape(x, (64, 64, 1, 1))
    assert kernels("tma").code("test_encode", x, shape) == 0
    if wrong == "address":
        x = x.flatten()[1:]
    elif wrong == "stride":
        shape.strides[1] = 68
    elif wrong == "columns":
        shape.box[0] = 48
    elif wrong == "rows":
        shape.box[1] = 257
    else:
        shape.sizes[1] = 0
    assert kernels("tma").code("test_encode", x, shape) == INVALID_VALUE


@pytest.mark.parametrize("slab", [64, 32])
def test_tma_multicast(slab: int) -> None:
    x = tensor_in(LAYOUTS["bshd"]())
    rows, first = 40, (0, 100, 1, 1)
    boxes = [box_of(x, (0, 100 + i * rows, 1, 1), rows, slab) for i in range(2)]
    expected = torch.cat([slab_image(box, slab) for box in boxes] * 2)
    images = cuda(expected.numel(), -2, torch.int16)
    shape = map_shape(x, (slab, rows, 1, 1))
    kernels("tma").call("test_multicast", x, shape, first, images)
    assert_image(images, expected, slab)


@pytest.mark.parametrize("slab", [64, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", BOXES)
def test_tma_store(where: str, layout: str, slab: int) -> None:
    storage = LAYOUTS[layout]()
    x, rows = storage[:, :S, :H, :D], 64
    box = (torch.arange(rows * slab, device="cuda") % 2048).view(rows, slab).to(x.dtype)
    expected = storage.clone()
    col, row, head, batch = BOXES[where]
    part = expected[:, :S, :H, :D][batch, row : row + rows, head, col : col + slab]
    part.copy_(box[: part.shape[0], : part.shape[1]])
    shape = map_shape(x, (slab, rows, 1, 1))
    kernels("tma").call("test_store_box", x, shape, BOXES[where], slab_image(box, slab))
    assert torch.equal(bits(storage), bits(expected))


def test_bulk_reduce_add() -> None:
    count, blocks = 4096, 100
    target = torch.arange(count + 4, device="cuda", dtype=torch.float32)
    numbers = target.clone()
    kernels("tma").call("test_reduce_add", target, count, blocks)
    numbers[:count] += blocks * numbers[:count] + blocks * (blocks - 1) // 2
    assert torch.equal(target, numbers)


# --- wgmma ---------------------------------------------------------------------------------------

COLUMNS = [32, 48, 64, 80, 96, 128, 160, 176, 192, 256]
DEPTHS = [16, 48, 64, 96, 128, 256]
MOST_K = 256
FORMS = {  # form: major of A ("R": registers), major of B
    "smem_K_K": ("K", "K"),
    "smem_K_MN": ("K", "MN"),
    "regs_K": ("R", "K"),
    "regs_MN": ("R", "MN"),
    "smem_MN_K": ("MN", "K"),
    "smem_MN_MN": ("MN", "MN"),
}


def compact(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2 5"."""
    runs: list[list[int]] = []
    for x in numbers:
        if runs and x == runs[-1][1] + 1:
            runs[-1][1] = x
        else:
            runs.append([x, x])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def operand(x: Tensor, major: str, slab: int) -> Tensor:
    """A (64 or N, K) operand as the kernel takes it; what no product may read is NaN."""
    full = torch.nn.functional.pad(x, (0, MOST_K - x.shape[1]), value=NAN)
    if major == "R":
        return full
    tile = full if major == "K" else full.T
    image = slab_image(tile, slab)
    largest = tile.shape[0] * (tile.shape[1] + -tile.shape[1] % 64)  # what the kernel copies
    return torch.nn.functional.pad(image, (0, largest - image.numel()), value=-1)


def product(form: str, a: Tensor, b: Tensor, a_slab: int, b_slab: int) -> Tensor:
    """A (64, K) . B (N, K)^T by wgmma."""
    major_a, major_b = FORMS[form]
    out = cuda((64, b.shape[0]), NAN, torch.float32)
    kernels("wgmma").call(
        "test_product", int(a.dtype == torch.bfloat16), b.shape[0], list(FORMS).index(form),
        operand(a, major_a, a_slab), operand(b, major_b, b_slab), out,
        a.shape[1] // 16, a_slab, b_slab,
    )  # fmt: skip
    return out


def elements_read(which: str, form: str, like: Tensor, n: int, slabs: tuple[int, int]) -> list[str]:
    """Which elements of A or B the hardware takes for others: found by products with unit rows."""
    rows, k = like.shape
    index = torch.arange(max(rows, k), device="cuda").to(like.dtype)
    by_row = index[:rows, None].expand(rows, k).contiguous()
    by_k = index[None, :k].expand(rows, k).contiguous()
    found = []
    units = n if which == "A" else 64
    for start in range(0, k, units):
        count = min(units, k - start)
        unit = like.new_zeros(units, k)
        unit[range(count), range(start, start + count)] = 1

        def read(
            values: Tensor, unit: Tensor = unit, start: int = start, count: int = count
        ) -> Tensor:  # (rows, count)
            if which == "A":
                return product(form, values, unit, *slabs)[:, :count]
            return product(form, unit, values, *slabs)[:count].T

        got = torch.stack([read(by_row), read(by_k)], -1).nan_to_num(-1).int().tolist()
        found += [
            f"{which}({row}, k {start + i}) reads ({got[row][i][0]}, k {got[row][i][1]})"
            for row in range(rows)
            for i in range(count)
            if got[row][i] != [row, start + i]
        ]
    return [f"{len(found)} of {rows * k} elements of {which}", *found[:8]]


def report(form: str, a: Tensor, b: Tensor, slabs: tuple[int, int], wrong: Tensor) -> str:
    """Where a product is wrong and what was read instead."""
    rows, cols = (wrong.any(i).nonzero().flatten().tolist() for i in (1, 0))
    lines = [f"{form} N={b.shape[0]} K={a.shape[1]} {a.dtype} slabs={slabs}:"]
    lines += [f"{int(wrong.sum())} wrong, rows {compact(rows)}, columns {compact(cols)}"]
    for which, like, major in (("A", a, FORMS[form][0]), ("B", b, FORMS[form][1])):
        if major != "R":
            lines += elements_read(which, form, like, b.shape[0], slabs)
    return "\n    ".join(lines)


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("form", FORMS)
def test_wgmma(form: str, n: int) -> None:
    major_a, _ = FORMS[form]
    if major_a == "MN" and n not in (64, 128):
        pytest.skip("an MN-major A is compiled for 64 and 128 columns")
    torch.manual_seed(n)
    failed = []
    for dtype in DTYPES:
        for k in DEPTHS:
            a, b = integers((64, k), 3, dtype), integers((n, k), 3, dtype)
            expected = a.float() @ b.float().T
            for a_slab in (64,) if major_a == "R" else (64, 32):
                for b_slab in (64, 32):
                    out = product(form, a, b, a_slab, b_slab)
                    wrong = out != expected  # NaN differs too
                    if bool(wrong.any()):
                        failed.append((form, a, b, (a_slab, b_slab), wrong))
    if failed:
        names = [f"K={a.shape[1]} {a.dtype} slabs={slabs}" for _, a, _, slabs, _ in failed]
        pytest.fail("\n".join([*names, report(*failed[0]), report(*failed[-1])]), pytrace=False)


# --- Tiles, operands and fragments together ------------------------------------------------------

CONFIGS = [(32, 128), (64, 128), (96, 96), (96, 80), (128, 176), (256, 80)]  # D, kBlockN
PLACES = {"inside": (16, 24, 1, 0), "ends": (128, 260, 2, 1), "end_of_first": (150, 250, 0, 0)}


def guarded(shape: tuple[int, ...], most: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers with NaN behind them."""
    numbers = integers(shape, most, dtype)
    storage = cuda(numbers.numel() + 4096 * 64, NAN, dtype)
    storage[: numbers.numel()] = numbers.flatten()
    return storage[: numbers.numel()].view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", range(len(CONFIGS)), ids=lambda i: f"{i}_D{CONFIGS[i][0]}")
def test_two_products(config: int, place: str, dtype: torch.dtype) -> None:
    torch.manual_seed(config)
    dim, block_n = CONFIGS[config]
    batch, seqlen_q, seqlen_k, heads = 2, 200, 300, 3
    q = guarded((batch, seqlen_q, heads, dim), 1, dtype)
    k = guarded((batch, seqlen_k, heads, dim), 1, dtype)
    v = guarded((batch, seqlen_k, heads, dim), 1, dtype)
    out = cuda(q.shape, NAN, dtype)
    m_row, n_row, h, b = PLACES[place]
    expected = out.clone()
    rows, keys = (
        slice(m_row, min(m_row + 128, seqlen_q)),
        slice(n_row, min(n_row + block_n, seqlen_k)),
    )
    scores = (q[b, rows, h].float() @ k[b, keys, h].float().T).to(dtype)
    expected[b, rows, h] = (scores.float() @ v[b, keys, h].float()).to(dtype)
    sizes = [batch, seqlen_q, seqlen_k, heads, dim]
    kernels("products").call(
        "test_products", int(dtype == torch.bfloat16), config, q, k, v, out, sizes,
        m_row, n_row, h, b,
    )  # fmt: skip
    wrong = (bits(out) != bits(expected)).any(-1).any(0).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"rows {compact(wrong)}"
