"""Gates over every built kernel: registers, local memory, shared memory, machine code.

They read the objects of the last build and need no GPU. Without a build they are skipped, unless
FLASH_EXT_REQUIRE_GATES=1 says that there has to be one. The readers and every gate are tested on
texts that must break them.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
from ptx_kit import find_nvcc

from flash_ext.build import extension
from flash_ext.testing import gates
from flash_ext.testing.digest import digests

ROOT = Path(__file__).resolve().parents[1]


def absent(what: str) -> NoReturn:
    """Skip, or fail where the gates are required."""
    if os.environ.get("FLASH_EXT_REQUIRE_GATES") == "1":
        pytest.fail(f"FLASH_EXT_REQUIRE_GATES=1: {what}", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="module")
def objects() -> list[Path]:
    built = gates.built_objects(ROOT)
    if not built:
        absent("no kernels were built in this tree")
    return built


@pytest.fixture(scope="module")
def usages(objects: list[Path]) -> list[gates.Usage]:
    return [usage for built in objects for usage in gates.usages(gates.ptxas_report(built))]


@pytest.fixture(scope="module")
def codes(objects: list[Path]) -> list[gates.Code]:
    cuobjdump = gates.find_cuobjdump()
    if cuobjdump is None:
        absent("cuobjdump is not found; the extra [test] brings it")
    return [code for built in objects for code in gates.codes(gates.disassemble(cuobjdump, built))]


@pytest.fixture(scope="module")
def rows(objects: list[Path]) -> list[gates.Row]:
    """The table of kernels, of a binary that was built from these objects."""
    module = extension()
    if module is None:
        absent("flash_ext._C is not to be loaded")
    info = module.build_info()
    if info["digests"] != digests(ROOT / "csrc"):
        absent("flash_ext._C was built from other sources than these")
    if {built.relative_to(ROOT).parts[2] for built in objects} != {"_".join(info["archs"])}:
        absent("flash_ext._C was built for other architectures than the last build in this tree")
    return list(module.kernels())


def native(rows_archs: list[str], family: str) -> set[str]:
    """Architectures a family has machine code for."""
    archs = {f"sm_{arch}" for arch in rows_archs if not arch.endswith("+PTX")}
    return archs & {"sm_90a"} if family == "sm90" else archs


def test_every_object_has_its_report(objects: list[Path]) -> None:
    for built in objects:
        assert built.exists()
        assert "ptxas info" in gates.ptxas_report(built)


def test_no_spill_and_no_local_memory(usages: list[gates.Usage]) -> None:
    assert usages
    faults = [fault for usage in usages for fault in gates.usage_faults(usage)]
    assert not faults, "\n".join(faults)


def test_no_warning(objects: list[Path]) -> None:
    found = [line for built in objects for line in gates.warnings(gates.ptxas_report(built))]
    assert not found, "\n".join(found)


def test_every_row_has_its_kernel(rows: list[gates.Row], usages: list[gates.Usage]) -> None:
    """On every architecture with machine code, once per (pass, dtype, head dim, tile)."""
    module = extension()
    assert module is not None
    for row in rows:
        found = {usage.arch for usage in usages if gates.implements(row, usage.kernel)}
        assert found == native(module.build_info()["archs"], row["family"]), dict(row)


def test_rows_can_be_launched(rows: list[gates.Row], usages: list[gates.Usage]) -> None:
    """Registers for all threads, and on each architecture a tile that its shared memory holds."""
    faults = [
        fault
        for row in rows
        for usage in usages
        if gates.implements(row, usage.kernel)
        for fault in gates.row_faults(row, usage)
    ]
    faults += gates.smem_faults(rows, usages)
    assert not faults, "\n".join(faults)


def test_machine_code(rows: list[gates.Row], codes: list[gates.Code]) -> None:
    """Tensor cores and asynchronous copies where they belong, on Hopper the products of the shapes
    that the table says and registers enough for every warpgroup; no double precision."""
    checked = [(row, code) for row in rows for code in codes if gates.implements(row, code.kernel)]
    assert {row["index"] for row, _ in checked} == {row["index"] for row in rows}
    faults = [fault for row, code in checked for fault in gates.code_faults(row, code)]
    assert not faults, "\n".join(faults)


# The gates themselves

KERNEL = (
    "_ZN9flash_ext4sm8013flash_forwardINS0_13ForwardConfigI6__halfLi64ELi128ELi64ELi4ELi2EEEEEv"
)
ROW = {
    "index": 0,
    "family": "sm80",
    "pass": "forward",
    "dtype": "float16",
    "head_dim": 64,
    "head_dim_v": 64,
    "features": "lean",
    "packed": False,
    "block_m": 128,
    "block_n": 64,
    "threads": 128,
    "smem_bytes": 48 * 1024,
}
REPORT = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{KERNEL}' for 'sm_80'
ptxas info    : Function properties for {KERNEL}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 512 bytes smem, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'spiller' for 'sm_90a'
ptxas info    : Function properties for spiller
    416 bytes stack frame, 764 bytes spill stores, 760 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 416 bytes cumulative stack size
ptxas info    : Compiling entry function 'caller' for 'sm_90a'
ptxas info    : Function properties for caller
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for called
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
SASS = f"""
Fatbin elf code:
================
arch = sm_80
\tcode for sm_80
\t\tFunction : {KERNEL}
\t.headerflags\t@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   MOV R1, c[0x0][0x28] ;     /* 0x00000a0000017a02 */
                                                              /* 0x000fe40000000f00 */
        /*00a0*/              @!P0 LDGSTS.E.BYPASS.128 [R11], [R2.64] ; /* 0x0000 */
        /*00f0*/                   LDSM.16.M88.4 R4, [R11] ;  /* 0x000000000b04783b */
        /*0100*/                   HMMA.16816.F32 R4, R4, R12, RZ ;
        /*10110*/              @P1 HMMA.16816.F32 R4, R4, R12, RZ ;
arch = sm_90a
\t\tFunction : other
        /*0000*/                   STL [R1], R2 ;
"""


HOPPER_KERNEL = (
    "_ZN9flash_ext4sm9013flash_forwardINS0_13ForwardConfigI13__nv_bfloat16"
    "Li64ELi192ELi32ELi4ELi2EEEEEvNS0_19ForwardKernelParamsE"
)
HOPPER_ROW = {
    **ROW, "family": "sm90", "dtype": "bfloat16", "block_m": 192, "block_n": 32, "threads": 512,
}  # fmt: skip
HOPPER_SASS = f"""
arch = sm_90a
\t\tFunction : {HOPPER_KERNEL}
        /*0310*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0 ;     /* 0x0000 */
        /*0740*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR28], RZ, !UPT ; /* 0x01 */
        /*0750*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR24], R24 ;
        /*0760*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0770*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0780*/                   HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR12].tnspB, R88, UP0 ;
        /*0790*/                   HGMMA.64x64x16.F32.BF16 R88, R148, gdesc[UR12].tnspB, R88, gsb0 ;
        /*c370*/                   UTMASTG.4D [UR8], [UR16] ;
        /*d610*/                   USETMAXREG.DEALLOC.CTAPOOL 0x20 ;
        /*ebb0*/                   UTMALDG.4D [UR16], [UR34] ;
"""


def good_code() -> gates.Code:
    # 128 x 64 scores of 64 channels, twice, over 4 warps.
    opcodes = {"HMMA": 2 * 128 * 64 * 64 // (16 * 8 * 16 * 4), "LDSM": 1, "LDGSTS": 1}
    return gates.Code(KERNEL, "sm_80", Counter(opcodes))


def test_report_is_read() -> None:
    first, spiller, caller = gates.usages(REPORT)
    assert first == gates.Usage(KERNEL, "sm_80", 168, 0, 0, 512)
    assert spiller == gates.Usage("spiller", "sm_90a", 32, 416, 1524, 0)
    assert caller.stack == 256, "the local memory of a called function counts"


def test_unreadable_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="ptxas"):
        list(gates.usages("Compiling entry function 'f' for 'sm_80'\nsomething else"))


def test_spills_and_local_memory_are_faults() -> None:
    first, spiller, caller = gates.usages(REPORT)
    assert list(gates.usage_faults(first)) == []
    assert "1524 bytes of registers spill" in "".join(gates.usage_faults(spiller))
    assert "256 bytes lies in local memory" in "".join(gates.usage_faults(caller))


def test_warnings_are_found() -> None:
    assert gates.warnings(REPORT) == []
    serialised = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async serialized"
    assert gates.warnings(f"{REPORT}{serialised}\n") == [serialised]
    assert gates.warnings("ptxas warning : something\n")


def test_disassembly_is_read() -> None:
    first, other = gates.codes(SASS)
    assert (first.kernel, first.arch) == (KERNEL, "sm_80")
    assert first.opcodes == {"MOV": 1, "LDGSTS": 1, "LDSM": 1, "HMMA": 2}
    assert (other.kernel, other.arch, other.opcodes["STL"]) == ("other", "sm_90a", 1)


def test_rows_name_their_kernel() -> None:
    assert gates.implements(ROW, KERNEL)
    for change in (
        {"pass": "backward"},
        {"dtype": "bfloat16"},
        {"head_dim": 128},
        {"block_n": 32},
        {"features": "full"},
    ):
        assert not gates.implements({**ROW, **change}, KERNEL)


def test_features_are_the_last_numbers_of_a_configuration() -> None:
    tile = "Li64ELi128ELi64E"
    assert tile in KERNEL
    kinds = {"Lb0ELb0E": ("lean", False), "Lb0ELb1E": ("lean", True), "Lb1ELb1E": ("full", True)}
    for numbers, kind in kinds.items():
        kernel = KERNEL.replace(tile, f"{tile}Li4ELi2E{numbers}")
        for features, packed in kinds.values():
            row = {**ROW, "features": features, "packed": packed}
            assert gates.implements(row, kernel) == (kind == (features, packed))
    alone = KERNEL.replace(tile, f"{tile}Li2ELi2ELb1E")  # another family's flag
    assert gates.implements({**ROW, "features": "lean", "packed": False}, alone)


@pytest.mark.parametrize(
    ("threads", "registers", "fault"),
    [(128, 168, ""), (512, 128, ""), (512, 129, "136 registers for each of 512 threads")],
)
def test_registers_of_a_launch(threads: int, registers: int, fault: str) -> None:
    usage = gates.Usage(KERNEL, "sm_80", registers, 0, 0, 512)
    found = "".join(gates.row_faults({**ROW, "threads": threads}, usage))
    assert found.endswith(fault)
    assert bool(found) == bool(fault)


def test_shared_memory_of_a_launch() -> None:
    """Static shared memory counts; a smaller tile may serve where the first does not fit."""
    large, small = KERNEL, KERNEL.replace("Li128ELi64E", "Li64ELi64E")
    usages = [
        gates.Usage(kernel, arch, 168, 0, 0, 512)
        for kernel in (large, small)
        for arch in ("sm_80", "sm_90")
    ]
    rows = [{**ROW, "smem_bytes": 200 * 1024}, {**ROW, "block_m": 64, "smem_bytes": 163 * 1024}]
    assert list(gates.smem_faults(rows, usages)) == [
        "forward float16 64 lean sm_80: no tile of 2 fits into shared memory"
    ]
    rows[1]["smem_bytes"] -= 512
    assert list(gates.smem_faults(rows, usages)) == []
    rows[0]["smem_bytes"] = 227 * 1024
    (fault,) = gates.smem_faults(rows, usages)
    assert fault.endswith("fits on no architecture of the build")


@pytest.mark.parametrize("missing", ["HMMA", "LDSM", "LDGSTS"])
def test_missing_instruction_is_a_fault(missing: str) -> None:
    code = good_code()
    assert list(gates.code_faults(ROW, code)) == []
    code.opcodes[missing] -= 1
    assert missing in "".join(gates.code_faults(ROW, code))


@pytest.mark.parametrize("opcode", ["LDL", "STL", "DADD", "DFMA"])
def test_unwanted_instruction_is_a_fault(opcode: str) -> None:
    code = good_code()
    code.opcodes[opcode] += 1
    assert opcode in "".join(gates.code_faults(ROW, code))


def hopper_faults(old: str = "", new: str = "") -> list[str]:
    """Faults of the Hopper kernel, every `old` in its machine code replaced."""
    return doctored_faults(HOPPER_ROW, HOPPER_SASS, old, new)


def doctored_faults(row: gates.Row, sass: str, old: str, new: str) -> list[str]:
    assert old in sass
    (code,) = gates.codes(sass.replace(old, new) if old else sass)
    return list(gates.code_faults(row, code))


def test_hopper_code_is_read() -> None:
    (code,) = gates.codes(HOPPER_SASS)
    s = gates.Wgmma(32, 16, "bfloat16", a_in_registers=False, transposed="")
    o = gates.Wgmma(64, 16, "bfloat16", a_in_registers=True, transposed="B")
    assert code.products == {s: 4, o: 2}
    assert (code.given_back, code.asked_for) == ((32,), (160,))
    assert gates.implements(HOPPER_ROW, code.kernel)
    assert not gates.implements({**HOPPER_ROW, "family": "sm80"}, code.kernel)
    assert hopper_faults() == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("UTMALDG", "LDG", "no UTMALDG"),
        ("UTMASTG", "STG", "no UTMASTG"),
        ("HGMMA.64x64x16", "HMMA.64x64x16", "2 HMMA"),
        ("HGMMA.64x32x16", "HGMMA.64x64x16", "4 HGMMA of 64 x 64 x 16 bfloat16, A in shared"),
        ("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16]", "NOP",
         "3 HGMMA of 64 x 32 x 16 bfloat16, A in shared memory, expected 4 for each of at least 1"),
        ("R24, gdesc[UR16], R24 ;", "R24", "6 HGMMA, 5 of them were understood"),
        ("R120, gdesc[UR12].tnspB", "R120, gdesc[UR12]",
         "1 HGMMA of 64 x 64 x 16 bfloat16, A in registers, which is no product of the forward"),
        ("gdesc[UR24]", "gdesc[UR24].tnspA.tnspB", "A in shared memory, AB transposed, which is"),
        (".BF16", "", "of 64 x 64 x 16 float16, A in registers, B transposed, which is no"),
        ("R120, gdesc", "gdesc[UR4], gdesc", "1 HGMMA of 64 x 64 x 16 bfloat16, A in shared"),
        ("0xa0", "0xa8", "536 registers for a thread of each of 4 warpgroups, 512 are there"),
        ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0", "NOP", "given back (32,), asked for ()"),
        ("USETMAXREG", "NOP", "no USETMAXREG"),
    ],
)  # fmt: skip
def test_doctored_hopper_code_is_a_fault(old: str, new: str, fault: str) -> None:
    assert fault in "\n".join(hopper_faults(old, new))


# Columns of dQ that a consumer computes, by head dim and tile: with 128 query rows half of these
# and all columns, with 64 half of the columns, and a quarter where two blocks share them.
DQ_COLUMNS = {(64, 128, 128): 64, (128, 64, 128): 64, (128, 128, 128): 128, (256, 64, 64): 64}
# With 64 keys both consumers have a dQ in the code, with 128 they share it.
PRODUCTS = [
    (tile, product)
    for tile in DQ_COLUMNS
    for product in ("S", "dP", "dV", "dK", "dQ", *(["dQ of the other"] if tile[2] == 64 else []))
]


def backward_row(head_dim: int, block_m: int, block_n: int) -> gates.Row:
    tile = {"head_dim": head_dim, "block_m": block_m, "block_n": block_n, "threads": 384}
    return {**HOPPER_ROW, **tile, "pass": "backward"}


def backward_sass(head_dim: int, block_m: int, block_n: int) -> str:
    """A kernel that has each of its products once, the name behind each step."""
    kernel = (
        "_ZN9flash_ext4sm9014flash_backwardINS0_14BackwardConfigI13__nv_bfloat16"
        f"Li{head_dim}ELi{block_m}ELi{block_n}ELi2ELi1EEEEEvNS0_20BackwardKernelParamsE"
    )
    first = (block_m, "gdesc[UR12]", head_dim // 16)
    second = (head_dim, "R184, gdesc[UR12].tnspB", block_m // 16)
    # With 64 keys a second block has as many.
    third = (DQ_COLUMNS[head_dim, block_m, block_n], "gdesc[UR12].tnspA.tnspB", 128 // 16)
    products = {"S": first, "dP": first, "dV": second, "dQ": third, "dK": second}
    if block_n == 64:
        products["dQ of the other"] = third
    lines = [
        *("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;", "USETMAXREG.DEALLOC.CTAPOOL 0x18 ;"),
        *("UTMALDG.4D [UR16], [UR12] ;", "UTMASTG.4D [UR8], [UR14] ;"),
    ]
    for name, (n, operands, steps) in products.items():
        lines += [f"HGMMA.64x{n}x16.F32.BF16 R24, {operands}, R24 ; /* {name} */"] * steps
    code = "".join(f"        /*{16 * i:04x}*/  {line}\n" for i, line in enumerate(lines))
    return f"arch = sm_90a\n\t\tFunction : {kernel}\n{code}"


@pytest.mark.parametrize("tile", DQ_COLUMNS, ids=str)
def test_hopper_backward_code_is_read(tile: tuple[int, int, int]) -> None:
    row, sass = backward_row(*tile), backward_sass(*tile)
    (code,) = gates.codes(sass)
    assert gates.implements(row, code.kernel)
    sizes = ({size: 96} for size in ("head_dim", "block_m", "block_n"))
    for change in (*sizes, {"pass": "forward"}, {"dtype": "float16"}):
        assert not gates.implements({**row, **change}, code.kernel)
    assert list(gates.code_faults(row, code)) == []


@pytest.mark.parametrize(("tile", "product"), PRODUCTS, ids=str)
def test_missing_product_of_the_backward_pass_is_a_fault(
    tile: tuple[int, int, int], product: str
) -> None:
    """The whole product, or one of its steps."""
    row, sass = backward_row(*tile), backward_sass(*tile)
    lines = sass.splitlines()
    steps = [line for line in lines if f"/* {product} */" in line]
    without = "\n".join(line for line in lines if line not in steps)
    doctored = [without, sass.replace(steps[-1], steps[-1].replace("HGMMA", "IMMA"))]
    for text in doctored:
        (code,) = gates.codes(text)
        (fault,) = gates.code_faults(row, code)
        assert "HGMMA of 64 x" in fault
        assert "expected" in fault


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (".tnspA", "", "A in shared memory, B transposed, which is no product of the backward"),
        ("R184, gdesc[UR12].tnspB", "gdesc[UR12].tnspB", "0 HGMMA of 64 x 128 x 16 bfloat16, A in"),
        ("64x128x16", "64x64x16", "8 HGMMA of 64 x 64 x 16 bfloat16, A in registers, B transp"),
        ("R24, gdesc[UR12], R24 ;", "R24", "32 HGMMA, 16 of them were understood"),
        ("0xf0", "0xf8", "520 registers for a thread of each of 3 warpgroups, 504 are there"),
        ("UTMASTG", "STG", "no UTMASTG"),
    ],
)
def test_doctored_hopper_backward_code_is_a_fault(old: str, new: str, fault: str) -> None:
    row, sass = backward_row(128, 64, 128), backward_sass(128, 64, 128)
    assert list(gates.code_faults(row, next(gates.codes(sass)))) == []
    assert fault in "\n".join(doctored_faults(row, sass, old, new))


SERIALISED = """
#include "ptx/wgmma.h"
using namespace flash_ext::ptx;
// The accumulator is touched between products of a group.
__global__ void touched(float* x, uint64_t a, uint64_t b) {
  float d[32];
  for (float& value : d) value = x[threadIdx.x];
  wgmma_fence();
  for (int i = 0; i < 4; ++i) {
    wgmma<__nv_bfloat16, 64, Major::kK, Major::kK>(d, a + i, b + i, true);
    d[3] += x[i];
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 32; ++i) x[threadIdx.x * 32 + i] = d[i];
}
"""


def test_the_compiler_tells_what_it_serialises(tmp_path: Path) -> None:
    """With the flags of the build, as information and without failing: only the kept report of an
    object shows it."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found")
    source = tmp_path / "touched.cu"
    source.write_text(SERIALISED)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert '"> $log 2>&1' in setup and '"-Xptxas=-v"' in setup
    done = subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas=-v",
         "-gencode=arch=compute_90a,code=sm_90a", f"-I{ROOT / 'csrc'}", "-c", str(source),
         "-o", str(tmp_path / "touched.o")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert any("(C75" in line for line in gates.warnings(done.stdout)), done.stdout


@pytest.mark.parametrize(
    ("arch", "kib"),
    [("sm_80", 163), ("sm_86", 99), ("sm_87", 163), ("sm_89", 99), ("sm_90", 227), ("sm_90a", 227),
     ("sm_100", 227), ("sm_120", 99), ("sm_121a", 99)],
)  # fmt: skip
def test_shared_memory_limits(arch: str, kib: int) -> None:
    assert gates.smem_limit(arch) == kib * 1024


def test_missing_build_fails_where_gates_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_EXT_REQUIRE_GATES", "1")
    with pytest.raises(pytest.fail.Exception, match="REQUIRE_GATES"):
        absent("nothing is built")
    monkeypatch.delenv("FLASH_EXT_REQUIRE_GATES")
    with pytest.raises(pytest.skip.Exception):
        absent("nothing is built")
