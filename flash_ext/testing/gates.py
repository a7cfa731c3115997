"""Gates over the built kernels: what ptxas said of each one and what its machine code holds.

    python -m flash_ext.testing.gates             # a table of every kernel on every architecture
    python -m flash_ext.testing.gates --sass DIR  # and the machine code, one file an object

The objects are those of the last build in the source tree, as `build/compile_commands.json` lists
them; ptxas's report lies beside each. Machine code is read with cuobjdump: from PATH, a CUDA
toolkit or the wheel `nvidia-cuda-cuobjdump`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

KIB = 1024
REGISTER_FILE = 65536  # registers of a multiprocessor, the most a block can have
REGISTERS = 255  # the most a thread can have

WARPGROUP = 128  # threads

# Opcodes that a family's kernels cannot do without, and ones that have no place there: local
# memory, double precision that slipped in by a literal, and mma.sync beside wgmma.
REQUIRED = {
    "sm80": ("HMMA", "LDSM", "LDGSTS"),
    "sm90": ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"),
}
UNWANTED = ("LDL", "STL", "DADD", "DMUL", "DFMA", "DSETP")
FORBIDDEN = {"sm80": UNWANTED, "sm90": (*UNWANTED, "HMMA")}
# Matrix products of a pass. Forward: S and O. Backward: S, dP, dV, dK and dQ.
PRODUCTS = {"forward": 2, "backward": 5}
HMMA_MULTIPLY_ADDS = 16 * 8 * 16  # of one instruction of a warp
MANGLED = {"float16": "6__half", "bfloat16": "13__nv_bfloat16"}

Row = Mapping[str, Any]  # of the table of kernels, `_C.kernels()`


@dataclass(frozen=True)
class Usage:
    """What ptxas reported of one kernel on one architecture, with the functions it calls."""

    kernel: str  # mangled
    arch: str  # such as "sm_90a"
    registers: int
    stack: int  # bytes of local memory a thread: arrays that registers cannot hold, and spills
    spills: int  # bytes stored and loaded
    static_smem: int  # bytes


class Wgmma(NamedTuple):
    """One kind of HGMMA: the 64 x k by k x n product of a warpgroup."""

    n: int
    k: int
    dtype: str  # of A and B
    a_in_registers: bool
    transposed: str  # "", "A", "B" or "AB": stored with m or n running fastest

    def __str__(self) -> str:
        a = "registers" if self.a_in_registers else "shared memory"
        transposed = f", {self.transposed} transposed" if self.transposed else ""
        return f"64 x {self.n} x {self.k} {self.dtype}, A in {a}{transposed}"


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel on one architecture."""

    kernel: str
    arch: str
    opcodes: Counter[str]  # without their modifiers
    products: Counter[Wgmma] = field(default_factory=Counter)
    # Registers a thread that warpgroups give back down to, and that they ask for.
    given_back: tuple[int, ...] = ()
    asked_for: tuple[int, ...] = ()


def built_objects(root: Path) -> list[Path]:
    """Objects of CUDA sources of the last build, each with its `.ptxas.txt`; [] without a build."""
    commands = root / "build" / "compile_commands.json"
    if not commands.exists():
        return []
    entries = json.loads(commands.read_text(encoding="utf-8"))
    return sorted(root / entry["output"] for entry in entries if entry["file"].endswith(".cu"))


def ptxas_report(built: Path) -> str:
    return built.with_suffix(".ptxas.txt").read_text(encoding="utf-8")


def usages(report: str) -> Iterator[Usage]:
    """Every kernel that a report of `ptxas -v` speaks of."""
    for text in report.split("Compiling entry function ")[1:]:
        named = re.match(r"'(\S+)' for '(\S+)'", text)
        registers = re.search(r"Used (\d+) registers", text)
        frames = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
        )
        if named is None or registers is None or not frames:
            raise ValueError(f"not a report of ptxas -v:\n{text}")
        smem = re.search(r"Used [^\n]*?(\d+) bytes smem", text)
        yield Usage(
            kernel=named[1],
            arch=named[2],
            registers=int(registers[1]),
            stack=sum(int(stack) for stack, _, _ in frames),
            spills=sum(int(stores) + int(loads) for _, stores, loads in frames),
            static_smem=int(smem[1]) if smem else 0,
        )


def warnings(report: str) -> list[str]:
    """Lines that no kernel may have: warnings, and wgmma that ptxas had to serialise (C75xx)."""
    return [line for line in report.splitlines() if re.search(r"\bwarning\b|\(C75\d\d\)", line)]


def find_cuobjdump() -> str | None:
    """Path of cuobjdump, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in homes if home)]
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if found:
        return found
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(path.locate()) for path in files if path.stem == "cuobjdump"), None)


def disassemble(cuobjdump: str, built: Path) -> str:
    """Machine code of an object, all kernels and architectures, as text.

    Raises:
        RuntimeError: cuobjdump failed; it needs nvdisasm beside it or on PATH.
    """
    done = subprocess.run([cuobjdump, "-sass", str(built)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{cuobjdump} -sass {built}: {done.stderr.strip()}")
    return done.stdout


def codes(sass: str) -> Iterator[Code]:
    """Every kernel of a disassembly. A function that a kernel calls is part of it."""
    arch = ""
    for text in re.split(r"^(?=\s*(?:arch = |Function : ))", sass, flags=re.MULTILINE):
        named = re.match(r"\s*(arch =|Function :) (\S+)", text)
        if named is None:
            continue
        if named[1] == "arch =":
            arch = named[2]
            continue
        line = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)"
        moved = {
            way: tuple(int(number, 16) for number in re.findall(rf"{way}\S* [^;]*?0x(\w+)", text))
            for way in ("USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC")
        }
        yield Code(
            named[2], arch, Counter(re.findall(line, text)), _products(text), *moved.values()
        )


def _products(text: str) -> Counter[Wgmma]:
    """Kinds of HGMMA in a kernel's text: accumulator, A, B and their modifiers."""
    found: Counter[Wgmma] = Counter()
    pattern = r"HGMMA\.64x(\d+)x(\d+)\.F32(\.BF16)? R\w+, ([^;]+);"
    for n, k, bf16, operands in re.findall(pattern, text):
        dtype = "bfloat16" if bf16 else "float16"
        transposed = "".join(re.findall(r"\.tnsp(A|B)", operands))
        in_registers = not operands.startswith("gdesc")
        found[Wgmma(int(n), int(k), dtype, in_registers, transposed)] += 1
    return found


def smem_limit(arch: str) -> int:
    """Bytes of shared memory a block can ask for on an architecture such as "sm_90a"."""
    number = re.search(r"\d+", arch)
    if number is None:
        raise ValueError(f"arch: got {arch!r}, expected a name such as 'sm_90a'")
    capability = int(number[0])
    if capability in (80, 87):
        return 163 * KIB
    if capability in (86, 89) or capability >= 120:
        return 99 * KIB
    return 227 * KIB


def implements(row: Row, kernel: str) -> bool:
    """Whether a mangled name is that of a row's main kernel: family, pass, element and tile are in
    it, and behind them, as the last two numbers of a generic configuration, whether it has all
    features and whether it reads packed sequences."""
    tile = "".join(f"Li{row[size]}E" for size in ("head_dim", "block_m", "block_n"))
    element = MANGLED[row["dtype"]]
    kind = r"(?:Li\d+E)*(?:Lb(\d)ELb(\d)E)?"
    name = rf"4{row['family']}\w*_{row['pass']}I\w*{element}{tile}{kind}"
    named = re.search(name, kernel)
    if named is None:
        return False
    return (row["features"] == "full", row["packed"]) == (named[1] == "1", named[2] == "1")


def usage_faults(usage: Usage) -> Iterator[str]:
    """What of its resources makes a kernel unfit."""
    where = f"{usage.kernel} on {usage.arch}"
    if usage.spills:
        yield f"{where}: {usage.spills} bytes of registers spill"
    elif usage.stack:
        yield f"{where}: an array of {usage.stack} bytes lies in local memory"
    if usage.registers > REGISTERS:
        yield f"{where}: {usage.registers} registers a thread"


def row_faults(row: Row, usage: Usage) -> Iterator[str]:
    """Why a row's main kernel could not be launched with the row's threads."""
    granted = -(-usage.registers // 8) * 8  # the hardware grants registers by eights
    if granted * row["threads"] > REGISTER_FILE:
        yield (
            f"{usage.kernel} on {usage.arch}: {granted} registers for each of {row['threads']} "
            "threads"
        )


def smem_faults(rows: Iterable[Row], usages: Sequence[Usage]) -> Iterator[str]:
    """What no tile is small enough for.

    A row may ask for more shared memory than an architecture has, if another row of the same pass,
    dtype, head dim and features does not; but on some architecture each one must fit.
    """
    tiles: dict[tuple[str, ...], list[bool]] = {}
    for row in rows:
        mine = [usage for usage in usages if implements(row, usage.kernel)]
        fitting = [u for u in mine if row["smem_bytes"] + u.static_smem <= smem_limit(u.arch)]
        if not fitting:
            yield f"{dict(row)} fits on no architecture of the build"
        for usage in mine:
            served = (
                *(row["pass"], row["dtype"], str(row["head_dim"]), row["features"]),
                usage.arch,
            )
            tiles.setdefault(served, []).append(usage in fitting)
    for what, fits in tiles.items():
        if not any(fits):
            yield f"{' '.join(what)}: no tile of {len(fits)} fits into shared memory"


def code_faults(row: Row, code: Code) -> Iterator[str]:
    """What a row's main kernel lacks, or has and should not."""
    where = f"{code.kernel} on {code.arch}"
    for opcode in REQUIRED[row["family"]]:
        if not code.opcodes[opcode]:
            yield f"{where}: no {opcode}"
    if "HMMA" in REQUIRED[row["family"]]:
        # One tile, unrolled over a warp's share of it.
        tile = row["block_m"] * row["block_n"] * row["head_dim"]
        warps = row["threads"] // 32
        least = PRODUCTS[row["pass"]] * tile // (HMMA_MULTIPLY_ADDS * warps)
        if code.opcodes["HMMA"] < least:
            yield f"{where}: {code.opcodes['HMMA']} HMMA, the products of a tile take {least}"
    for opcode in FORBIDDEN[row["family"]]:
        if code.opcodes[opcode]:
            yield f"{where}: {code.opcodes[opcode]} {opcode}"
    if row["family"] == "sm90":
        yield from (f"{where}: {fault}" for fault in register_faults(row, code))
        yield from (f"{where}: {fault}" for fault in product_faults(row, code))


class Steps(NamedTuple):
    """How often a kind of HGMMA is needed: a product takes 16 columns of its inner dimension a
    step."""

    of_one: int  # steps of one product
    products: int  # that take this kind


def expected_products(row: Row, code: Code) -> dict[Wgmma, Steps]:
    """What the consumers of a block need for one tile, by the code they have."""
    return forward_products(row, code) if row["pass"] == "forward" else backward_products(row)


def forward_products(row: Row, code: Code) -> dict[Wgmma, Steps]:
    """S = Q Kᵀ, with K in shared memory and Q there or in registers, and O = P V, with P in
    registers and V transposed."""
    D, kBlockN = row["head_dim"], row["block_n"]
    s = Wgmma(kBlockN, 16, row["dtype"], a_in_registers=True, transposed="")
    if not code.products[s]:
        s = s._replace(a_in_registers=False)
    o = Wgmma(row["head_dim_v"], 16, row["dtype"], a_in_registers=True, transposed="B")
    return {s: Steps(D // 16, 1), o: Steps(kBlockN // 16, 1)}


def backward_products(row: Row) -> dict[Wgmma, Steps]:
    """Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, both from shared memory; dV += Pᵀ dO and dK += dSᵀ Q, with A in
    registers and B transposed; dQ = dS K, both from shared memory and transposed.

    A consumer computes its share of dQ: 64 rows where the tile has as many for each, else columns.
    Consumers that share 64 keys have code of their own: one for Sᵀ and dV, one for dPᵀ and dK, both
    for dQ, which they share with those of a second block and add up over the keys of both.
    """
    D, kBlockM, kBlockN = (row[size] for size in ("head_dim", "block_m", "block_n"))
    consumers = row["threads"] // WARPGROUP - 1
    paired = kBlockN == 64
    dq_columns = D if kBlockM == 64 * consumers else D // consumers // (1 + paired)
    dtype = row["dtype"]
    return {
        Wgmma(kBlockM, 16, dtype, a_in_registers=False, transposed=""): Steps(D // 16, 2),
        Wgmma(D, 16, dtype, a_in_registers=True, transposed="B"): Steps(kBlockM // 16, 2),
        Wgmma(dq_columns, 16, dtype, a_in_registers=False, transposed="AB"): Steps(
            kBlockN * (1 + paired) // 16, consumers if paired else 1
        ),
    }


def product_faults(row: Row, code: Code) -> Iterator[str]:
    """Which HGMMA are not those of the pass, or are not whole products."""
    expected = expected_products(row, code)
    for product, steps in expected.items():
        count = code.products[product]
        if count < steps.of_one * steps.products or count % steps.of_one:
            yield (
                f"{count} HGMMA of {product}, expected {steps.of_one} for each of at least "
                f"{steps.products} products"
            )
    for product, count in code.products.items():
        if product not in expected:
            yield f"{count} HGMMA of {product}, which is no product of the {row['pass']} pass"
    if code.products.total() != code.opcodes["HGMMA"]:
        yield f"{code.opcodes['HGMMA']} HGMMA, {code.products.total()} of them were understood"


def register_faults(row: Row, code: Code) -> Iterator[str]:
    """Whether warpgroups ask for more registers than the block has: they would wait for ever.

    One warpgroup, the producer, gives registers back; all others ask for more.
    """
    if len(code.given_back) != 1 or len(code.asked_for) != 1:
        yield f"registers given back {code.given_back}, asked for {code.asked_for}: expected one"
        return
    warpgroups = row["threads"] // WARPGROUP
    granted = REGISTER_FILE // row["threads"] // 8 * 8  # of each thread at the start
    needed = code.given_back[0] + (warpgroups - 1) * code.asked_for[0]
    if needed > warpgroups * granted:
        yield (
            f"{needed} registers for a thread of each of {warpgroups} warpgroups, "
            f"{warpgroups * granted} are there"
        )


def table(objects: list[Path], cuobjdump: str | None, sass: Path | None) -> Iterator[str]:
    """Lines that show every kernel; with `sass` the machine code is written there."""
    shown = ("HMMA", "LDSM", "LDGSTS", "HGMMA", "UTMALDG")
    yield f"registers  spills  stack  smem  arch     {'  '.join(shown)}  all     kernel"
    for built in objects:
        text = disassemble(cuobjdump, built) if cuobjdump else ""
        if sass is not None:
            sass.mkdir(parents=True, exist_ok=True)
            (sass / f"{built.name.split('.')[0]}.sass").write_text(text, encoding="utf-8")
        opcodes = {(code.kernel, code.arch): code.opcodes for code in codes(text)}
        for usage in usages(ptxas_report(built)):
            count = opcodes.get((usage.kernel, usage.arch), Counter())
            columns = "  ".join(f"{count[opcode]:{len(opcode)}}" for opcode in shown)
            yield (
                f"{usage.registers:9}  {usage.spills:6}  {usage.stack:5}  {usage.static_smem:4}  "
                f"{usage.arch:7}  {columns}  {count.total():6}  {usage.kernel}"
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_ext.testing.gates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sass", type=Path, help="folder to write the machine code to")
    options = parser.parse_args(arguments)
    objects = built_objects(Path.cwd())
    cuobjdump = find_cuobjdump()
    if not objects:
        print(f"{Path.cwd()}: no build/compile_commands.json; build first", file=sys.stderr)
        return 1
    if options.sass and cuobjdump is None:
        print("cuobjdump is not found; install nvidia-cuda-cuobjdump", file=sys.stderr)
        return 1
    for line in table(objects, cuobjdump, options.sass):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
