"""Builds `flash_ext._C`, the kernels of `csrc/<family>` and their Python binding, and
`flash_ext._classic`, those of `csrc/classic`, which nothing else needs.

Environment:
    FLASH_EXT_CUDA_ARCHS    architectures, such as "80;90a" or "80;80+PTX"; "none" installs the CPU
                            path alone, without nvcc. Default: those of the visible GPUs, else
                            "80;90a;80+PTX".
    FLASH_EXT_HEAD_DIMS     head dims to compile, such as "64,128". Default: all.
    FLASH_EXT_NVCC          nvcc to use, before CUDA_HOME, CUDA_PATH and PATH. Without any, a build
                            in isolation brings NVIDIA's compiler wheels.
    FLASH_EXT_ALLOW_SPILLS  "1" accepts kernels that keep registers in memory.
    FLASH_EXT_LINEINFO      "1" keeps source lines in the kernels, for Nsight and sanitizers;
                            the extension is twice as large.
    CXX                     host compiler.
    MAX_JOBS                parallel jobs. Default: what cores and free memory allow.

The name of every object holds a hash of all that went into it: source, headers, flags and compiler
versions, but no path outside this folder. So an object that exists is right, for every Python, for
builds in isolation and in place, and ninja is left with the missing ones. They lie in
`build/kernels/<architectures>` and `build/<python>`, each with the compiler's report beside it
(`.ptxas.txt`); `build/compile_commands.json` lists the objects of the last build.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CSRC = Path("csrc")  # builds run in the folder of this file, and every path is relative to it
BUILD = Path("build")

DEFAULT_ARCHS = ("80", "90a", "80+PTX")
OLDEST_ARCH = 80
OLDEST_NVCC = (12, 5)
ONLY_FOR = {"sm90": "90a"}  # families written for the instructions of one architecture
APART = "classic"  # the family of an extension of its own
APART_NEEDS = ("device.cpp", "error.cpp")  # of csrc/common
NVCC_WHEELS = [  # of one minor version of CUDA: mixed ones do not work together
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-Werror", "all-warnings"]
FLAGS += ["-Xcompiler=-Wall,-Wextra,-Werror,-fPIC,-fvisibility=hidden"]
KERNEL_FLAGS = ["-Xptxas=-v"]
LINK_FLAGS = ["-shared", "-cudart", "static", "-Xlinker=--exclude-libs=ALL,--as-needed,--strip-all"]
KEPT_VERSIONS = 4  # of each object
MEMORY_PER_JOB = 3 << 30


def fail(message: str) -> NoReturn:
    """End the build with one readable message instead of a traceback."""
    raise SystemExit(f"flash_ext: {message}")


def load_digest() -> ModuleType:
    """`flash_ext.testing.digest` by its path: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location("digest", "flash_ext/testing/digest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digest = load_digest()

# --- What is asked for ---------------------------------------------------------------------------


def words_of(variable: str) -> list[str]:
    """The words of a list in the environment, each once; [] when it is unset."""
    return list(dict.fromkeys(re.findall(r"[^;,\s]+", os.environ.get(variable, ""))))


@lru_cache(maxsize=1)
def visible_archs() -> tuple[str, ...]:
    """Architectures of this machine's GPUs that the kernels can serve, oldest first."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = {int(major) * 10 + int(minor) for major, minor in re.findall(r"(\d+)\.(\d)", answer)}
    return tuple("90a" if x == 90 else str(x) for x in sorted(found) if x >= OLDEST_ARCH)


def requested_archs() -> tuple[str, ...]:
    """Architectures to compile for; () for the CPU path alone."""
    words = words_of("FLASH_EXT_CUDA_ARCHS")
    if words == ["none"]:
        return ()
    for word in words:
        number = re.fullmatch(r"(\d+)([af]|\+PTX)?", word)
        if number is None or int(number[1]) < OLDEST_ARCH:
            fail(
                f"FLASH_EXT_CUDA_ARCHS={os.environ['FLASH_EXT_CUDA_ARCHS']!r}: {word!r} is no "
                f'architecture to compile for. Expected "none" or a list such as "80;90a", of '
                f'{OLDEST_ARCH} or newer; "80+PTX" adds PTX.'
            )
    return tuple(words) or visible_archs() or DEFAULT_ARCHS


def head_dim_of(source: Path) -> int | None:
    """The head dim that an instance file is of; None for other sources."""
    named = re.search(r"_hdim(\d+)\.cu", source.name)
    return int(named[1]) if named else None


def requested_head_dims() -> tuple[int, ...]:
    """Head dims to compile, out of those that have instance files."""
    present = sorted({dim for path in CSRC.glob("*/inst/*.cu") if (dim := head_dim_of(path))})
    words = words_of("FLASH_EXT_HEAD_DIMS")
    if not all(word.isdecimal() and int(word) in present for word in words):
        known = ",".join(map(str, present))
        text = os.environ["FLASH_EXT_HEAD_DIMS"]
        fail(f"FLASH_EXT_HEAD_DIMS={text!r}: expected some of the head dims {known!r}.")
    return tuple(sorted(map(int, words)) or present)


def jobs() -> int:
    """Parallel compilations: MAX_JOBS, else what cores and free memory allow."""
    text = os.environ.get("MAX_JOBS")
    if text:
        if not text.isdecimal() or int(text) == 0:
            fail(f"MAX_JOBS={text!r}: expected a positive number.")
        return int(text)
    free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    memory = int(free[1]) * 1024 if free else MEMORY_PER_JOB
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    if limit.exists() and limit.read_text().strip().isdecimal():
        memory = min(memory, int(limit.read_text()) - int(used.read_text()))
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_PER_JOB))


# --- The compilers -------------------------------------------------------------------------------


def find_nvcc() -> Path | None:
    """nvcc by FLASH_EXT_NVCC, CUDA_HOME, CUDA_PATH or PATH, or from an installed wheel."""
    for variable in ("FLASH_EXT_NVCC", "CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            nvcc = Path(value, "" if variable == "FLASH_EXT_NVCC" else "bin/nvcc").absolute()
            if shutil.which(nvcc) is None:
                fail(
                    f"{variable}={value!r}: {nvcc} is no program. Correct the variable or unset it."
                )
            return nvcc
    folders = [os.environ.get("PATH", ""), *(f"{folder}/nvidia/cu13/bin" for folder in sys.path)]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return Path(found).absolute() if found else None


def output_of(*command: str | Path) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"{shlex.join(map(str, command))} does not run: {error}")


class Toolchain:
    """nvcc and its host compiler: how they are called, and what of them decides an object."""

    def __init__(self, archs: Sequence[str]) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            fail(
                "no CUDA compiler is found. Set FLASH_EXT_NVCC or CUDA_HOME, put nvcc on PATH, or "
                f"install NVIDIA's wheels: `pip install {' '.join(NVCC_WHEELS)}` (a build in "
                "isolation does so itself). FLASH_EXT_CUDA_ARCHS=none installs the CPU path alone."
            )
        named = shlex.split(os.environ.get("CXX", ""))[:1]
        host = [*named, os.environ.get("NVCC_CCBIN") or "g++"][0]
        if shutil.which(host) is None:
            fail(f"the C++ compiler {host!r} is not found. Install one, or set CXX.")
        self.command = [str(nvcc), *(["-ccbin", host] if named else [])]
        self.version = re.findall(r"release [\d.]+, V([\d.]+)", output_of(nvcc, "--version"))[0]
        if tuple(map(int, self.version.split(".")[:2])) < OLDEST_NVCC:
            needed = ".".join(map(str, OLDEST_NVCC))
            fail(f"{nvcc} is of version {self.version}; {needed} or newer is needed.")
        known = output_of(nvcc, "--list-gpu-code").split()
        for arch in archs:
            if "sm_" + re.findall(r"\d+", arch)[0] not in known:
                fail(f"{nvcc} of version {self.version} has no architecture {arch!r}.")
        variables = [os.environ.get(f"NVCC_{end}_FLAGS", "") for end in ("PREPEND", "APPEND")]
        self.identity = [self.version, output_of(host, "--version").splitlines()[0], *variables]
        modes = "-compress-mode" in output_of(nvcc, "--help")
        self.compress = "-compress-mode=size" if modes else "-Xfatbin=-compress-all"
        wheel = nvcc.parents[1]  # its nvcc does not look into its own lib folder
        self.libraries = [f"-L{wheel / 'lib'}"] if wheel.name == "cu13" else []


# --- What is compiled ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One source file on its way to an object."""

    source: Path
    object: Path  # beside it: .ptxas.txt, what the compiler said, and .d, the headers it read
    command: list[str]
    inputs: frozenset[Path]  # the source and the headers of this project that it includes


def keyed(path: Path, *facts: object) -> Path:
    """`path` with a hash of the facts in its name."""
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return path.with_name(f"{path.stem}.{key}{path.suffix}")


@dataclass(frozen=True)
class Library:
    """One extension: what it is linked from, and by which command."""

    path: Path
    units: tuple[Unit, ...]
    link: list[str]


class Plan:
    """Every object of the extensions and the commands that make them."""

    def __init__(self, archs: tuple[str, ...], version: str) -> None:
        self.archs = archs
        self.head_dims = requested_head_dims()
        self.tools = Toolchain(archs)
        self.families = [
            name
            for name in digest.families(CSRC)
            if name != APART and ONLY_FOR.get(name, archs[0]) in archs
        ]
        lines = ["-lineinfo"] if os.environ.get("FLASH_EXT_LINEINFO") == "1" else []
        self.kernel_flags = [*KERNEL_FLAGS, *lines, self.tools.compress]
        self.kernel_dir = BUILD / "kernels" / "_".join(archs)
        self.python_dir = BUILD / sys.implementation.cache_tag
        self.generated = self.python_dir / "generated"
        self.write_build_facts(version)
        common = list(self.common_units())
        needed = [unit for unit in common if unit.source.name in APART_NEEDS]
        main = [*self.family_units(*self.families), *common, *self.binding_units("binding")]
        apart = [*self.family_units(APART), *self.binding_units(f"binding/{APART}")]
        self.units = [*main, *apart]
        self.libraries = {
            "_C": self.library("_C", main),
            "_classic": self.library("_classic", [*apart, *needed]),
        }

    def write_build_facts(self, version: str) -> None:
        """The header by which the binary knows what it was built from."""
        digests = digest.digests(CSRC)
        facts = {
            "VERSION": version,
            "ARCHS": ";".join(self.archs),
            "NVCC": self.tools.version,
            "FLAGS": shlex.join([*FLAGS, *self.kernel_flags]),
            "HEAD_DIMS": ";".join(map(str, self.head_dims)),
            "DIGESTS": ";".join(f"{name}={value}" for name, value in digests.items()),
        }
        apart = {"VERSION": version, "ARCHS": facts["ARCHS"], "DIGEST": digests[APART]}
        self.generated.mkdir(parents=True, exist_ok=True)
        for header, told in (("build_facts.h", facts), (f"{APART}_facts.h", apart)):
            lines = [f"#define FLASH_EXT_{name} {json.dumps(text)}" for name, text in told.items()]
            (self.generated / header).write_text("\n".join(["#pragma once", *lines, ""]))

    def family_units(self, *families: str) -> Iterator[Unit]:
        """Objects of kernels."""
        for family in families:
            folder = CSRC / family
            flags = [*self.kernel_flags, *self.gencode(ONLY_FOR.get(family), family == APART)]
            for source in sorted([*folder.glob("*.cu"), *folder.glob("inst/*.cu")]):
                dispatch = source.name == "dispatch.cu" and family != APART
                own = [self.head_dims_of(folder)] if dispatch else []
                if head_dim_of(source) in (None, *self.head_dims):
                    yield self.unit(source, self.kernel_dir, [*flags, *own])

    def common_units(self) -> Iterator[Unit]:
        """Objects of the host code that knows no Python."""
        built = [
            f"-DFLASH_EXT_WITH_{name.upper()}={int(name in self.families)}" for name in ONLY_FOR
        ]
        for source in sorted([*CSRC.glob("common/*.cu"), *CSRC.glob("common/*.cpp")]):
            flags = [*self.kernel_flags, *self.gencode()] if source.suffix == ".cu" else []
            own = built if source.stem == "registry" else []
            yield self.unit(source, self.kernel_dir, [*flags, *own])

    def gencode(self, only: str | None = None, small: bool = False) -> list[str]:
        """Native code for every architecture, or for one, and PTX; `small`: not both of one."""
        flags = []
        for arch in self.archs:
            number, _, ptx = arch.partition("+")
            if only in (None, arch) and not (small and f"{arch}+PTX" in self.archs):
                code = f"compute_{number}" if ptx else f"sm_{number}"
                flags.append(f"-gencode=arch=compute_{number},code={code}")
        return flags

    def head_dims_of(self, folder: Path) -> str:
        """A family's compiled head dims as a list of numbers; nvcc wants its commas escaped."""
        present = {head_dim_of(path) for path in folder.glob("inst/*.cu")}
        dims = [str(dim) for dim in self.head_dims if dim in present]
        return "-DFLASH_EXT_HEAD_DIMS=" + "\\,".join(dims)

    def binding_units(self, folder: str) -> Iterator[Unit]:
        """Objects of this Python."""
        try:
            import pybind11
        except ImportError:
            fail("pybind11 is not found. Builds without isolation need it: `pip install pybind11`.")
        include_dirs = {sysconfig.get_path(name) for name in ("include", "platinclude")}
        include_dirs.add(pybind11.get_include())
        versions = [pybind11.__version__, sys.version, sysconfig.get_config_var("EXT_SUFFIX")]
        for source in sorted((CSRC / folder).glob("*.cpp")):
            yield self.unit(source, self.python_dir, [], sorted(include_dirs), versions)

    def library(self, name: str, units: Sequence[Unit]) -> Library:
        """An extension of these objects."""
        objects = [str(unit.object) for unit in units]
        link = [*self.tools.command, *LINK_FLAGS, *self.tools.libraries, *objects]
        facts = (objects, LINK_FLAGS, self.tools.identity)
        return Library(keyed(self.python_dir / f"{name}.so", *facts), tuple(units), link)

    def unit(
        self,
        source: Path,
        folder: Path,
        flags: Sequence[str],
        include_dirs: Sequence[str] = (),
        versions: Sequence[str] = (),
    ) -> Unit:
        """A source with its command; `versions` are those of the libraries in `include_dirs`."""
        roots = [CSRC, self.generated] if include_dirs else [CSRC]
        inputs = frozenset(digest.included(source, roots))
        contents = {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(inputs)
        }
        flags = [*FLAGS, *flags, *(f"-I{root}" for root in roots)]
        output = folder / source.relative_to(CSRC).with_suffix(".o")
        output = keyed(output, contents, flags, self.tools.identity, versions)
        outside = [word for path in include_dirs for word in ("-isystem", path)]
        depfile = ["-MD", "-MF", str(output.with_suffix(".d"))]
        command = [*self.tools.command, *flags, *outside, *depfile, "-c", str(source)]
        return Unit(source, output, command, inputs)

    def build(self) -> dict[str, Path]:
        """Make what is missing; the paths of the shared libraries."""
        entries = [
            {
                "directory": str(Path.cwd()),
                "file": str(unit.source),
                "output": str(unit.object),
                "arguments": [*unit.command, "-o", str(unit.object)],
            }
            for unit in self.units
        ]
        (BUILD / "compile_commands.json").write_text(json.dumps(entries, indent=1))
        missing = [unit for unit in self.units if not unit.object.exists()]
        if missing or not all(library.path.exists() for library in self.libraries.values()):
            self.run_ninja(missing)
        for unit in self.units:
            refuse_unseen_headers(unit)
        refuse_spills(self.units)
        paths = {name: library.path for name, library in self.libraries.items()}
        for path in [*paths.values(), *(unit.object for unit in self.units)]:
            forget_old_versions(path)
        return paths

    def run_ninja(self, missing: Sequence[Unit]) -> None:
        """Compile some units and link all."""
        # A file gets its name when it is complete, so an interrupted build leaves no object that
        # looks right. What a compiler says is kept, and printed when it fails.
        kept = "> $log 2>&1 || { cat $log; exit 1; }; mv $out.part $out"
        lines = [
            f"builddir = {self.python_dir}",
            "rule make",
            f"  command = $run -o $out.part {kept}",
            "  description = $what",
        ]

        def make(output: Path, run: list[str], what: str, after: str = "") -> None:
            command = shlex.join(run).replace("$", "$$")
            log = output.with_suffix(".ptxas.txt")
            lines.append(f"build {output}: make {after}")
            lines.extend([f"  run = {command}", f"  log = {log}", f"  what = {what}"])

        for unit in missing:  # a source is no input of its edge: the object's name stands for it
            make(unit.object, unit.command, f"compile {unit.source}")
        for name, library in self.libraries.items():
            if not library.path.exists():
                objects = " ".join(str(unit.object) for unit in missing if unit in library.units)
                make(library.path, library.link, f"link {name}", objects)
        path = self.python_dir / "build.ninja"
        path.write_text("\n".join([*lines, ""]))
        folders = [os.environ.get("PATH", ""), sysconfig.get_path("scripts")]
        ninja = shutil.which("ninja", path=os.pathsep.join(folders))
        if ninja is None:
            fail("ninja is not found. Builds without isolation need it: `pip install ninja`.")
        if subprocess.run([ninja, "-f", path, "-j", str(jobs())]).returncode != 0:
            fail("a compiler failed; what it said stands above.")


def refuse_unseen_headers(unit: Unit) -> None:
    """An object's name must stand for every header that the compiler read."""
    listed = unit.object.with_suffix(".d").read_text().partition(" : ")[2]
    read = re.findall(r"(?:\\.|[^\s\\])+", listed)
    ours = {os.path.normpath(name) for name in read if not os.path.isabs(name)}
    unseen = ours - {os.path.normpath(path) for path in unit.inputs}
    if unseen:
        fail(f"{unit.source} includes {', '.join(sorted(unseen))} in a way that was not seen.")


def refuse_spills(units: Sequence[Unit]) -> None:
    """Kernels must keep their registers out of memory."""
    good = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    entry = rf"entry function '\S+' for '(\S+)'\n.*\n +(?!{good})(\d.*)"
    spills = [
        f"  {unit.source} on {arch}: {memory}; see {unit.object}"
        for unit in units
        for arch, memory in re.findall(entry, unit.object.with_suffix(".ptxas.txt").read_text())
    ]
    if spills and os.environ.get("FLASH_EXT_ALLOW_SPILLS") != "1":
        advice = "FLASH_EXT_ALLOW_SPILLS=1 accepts it."
        fail("\n".join(["kernels keep registers in memory:", *spills, advice]))


def forget_old_versions(path: Path) -> None:
    """Of the files that differ from `path` in the hash alone, keep the newest few."""
    versions = path.parent.glob(f"{path.name.split('.')[0]}.*{path.suffix}")
    others = sorted((x for x in versions if x != path), key=lambda x: -x.stat().st_mtime)
    for old in others[KEPT_VERSIONS - 1 :]:
        for suffix in (path.suffix, ".ptxas.txt", ".d"):
            old.with_suffix(suffix).unlink(missing_ok=True)


# --- setuptools ----------------------------------------------------------------------------------


class BuildExtension(build_ext):
    """Builds the extensions by one `Plan` and puts them where setuptools expects them."""

    def build_extensions(self) -> None:
        BUILD.mkdir(exist_ok=True)
        with (BUILD / ".lock").open("w") as lock:  # other Pythons' builds share the objects
            fcntl.flock(lock, fcntl.LOCK_EX)
            libraries = Plan(archs, self.distribution.get_version()).build()
            for ext in self.extensions:
                target = Path(self.get_ext_fullpath(ext.name))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(libraries[ext.name.rpartition(".")[2]], target)


class BuildPython(build_py):
    """Starts from an empty folder: modules that are gone must not come back in a wheel. It runs
    before the extension is built, so it is here that a missing compiler ends everything early.
    """

    def run(self) -> None:
        if archs:
            Toolchain(archs)
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


EXTENSIONS = [
    Extension("flash_ext._C", ["csrc/binding/module.cpp"]),
    Extension("flash_ext._classic", ["csrc/binding/classic/module.cpp"]),
]
archs = requested_archs()
# A front end that builds in isolation asks by egg_info for what the build requires.
asked = "egg_info" in sys.argv and bool(archs)

if __name__ == "__main__":
    setup(
        license="BSD-3-Clause",  # here and not in pyproject.toml, whose form of it has changed
        ext_modules=EXTENSIONS if archs else [],
        cmdclass={"build_ext": BuildExtension, "build_py": BuildPython},
        setup_requires=NVCC_WHEELS if asked and find_nvcc() is None else [],
        options={"build": {"build_base": str(BUILD / "setuptools")}},
    )
