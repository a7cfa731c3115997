"""The build: what is compiled when, with which flags, and what it says when it cannot.

The compiler is a script that compiles nothing, so nothing here needs CUDA. The last tests read the
binary that is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest
from build_kit import ROOT, Tree, copy_tree

from flash_ext import build
from flash_ext.testing import digest

WHEEL_BYTES = 10_000_000
DIMS = sorted({path.stem.split("_hdim")[1] for path in ROOT.glob("csrc/*/inst/*.cu")}, key=int)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(copy_tree(tmp_path / "a tree"), tmp_path / "tools")


def instances(*dims: int) -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/sm80/inst/*.cu"))
    return sorted(path for path in found if any(f"_hdim{dim}." in path for dim in dims))


def load_setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The functions of setup.py."""
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("flash_ext_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, setup)
    spec.loader.exec_module(setup)
    return setup


def test_first_build_makes_everything_and_the_second_nothing(tree: Tree) -> None:
    made = tree.build()
    assert made.count("link") == 2  # _C and _classic
    assert set(instances(64, 128)) < set(made)
    assert {"csrc/binding/module.cpp", "csrc/common/registry.cpp", "csrc/sm80/dispatch.cu"} < set(
        made
    )
    for name in ("_C", "_classic"):
        assert list(tree.root.glob(f"flash_ext/{name}.*.so"))
    assert tree.build() == []


def test_same_content_is_not_built_again(tree: Tree) -> None:
    tree.build()
    for path in tree.root.rglob("csrc/**/*.*"):
        os.utime(path)
    assert tree.build() == []
    other = Tree(tree.root, tree.tools.parent / "another place")
    assert other.build() == []


def test_edit_rebuilds_what_reads_the_file(tree: Tree) -> None:
    tree.build()
    instance = instances(64)[0]
    with (tree.root / instance).open("a") as file:
        file.write("int more;\n")
    assert tree.build() == ["csrc/binding/build_info.cpp", instance, "link"]

    with (tree.root / "csrc/classic/fa1.cu").open("a") as file:
        file.write("int more;\n")
    apart = ["csrc/binding/classic/module.cpp", "csrc/classic/fa1.cu"]  # its digest is in both
    assert tree.build() == ["csrc/binding/build_info.cpp", *apart, "link", "link"]

    with (tree.root / "csrc/common/instance.h").open("a") as file:
        file.write("// more\n")
    assert {*instances(64, 128), "csrc/common/registry.cpp", "link"} <= set(tree.build())


def test_flags_decide_too(tree: Tree) -> None:
    tree.build()
    assert set(instances(64, 128)) < set(tree.build(FLASH_EXT_CUDA_ARCHS="90a"))
    assert tree.build(FLASH_EXT_CUDA_ARCHS="90a") == []
    assert set(instances(64, 128)) < set(tree.build(NVCC_APPEND_FLAGS="-G"))
    assert set(instances(64, 128)) < set(tree.build(FAKE_VERSION="13.1"))
    assert tree.build() == []


def test_failed_or_interrupted_compilation_leaves_no_object(tree: Tree) -> None:
    bad = instances(64)[0]
    said = tree.fails(FAKE_FAILS=bad)
    assert f"bad code in {bad}" in said
    assert "a compiler failed" in said
    assert not list(tree.root.glob("flash_ext/_C.*.so"))
    assert bad in tree.build()
    assert tree.build() == []


def test_compile_commands_list_the_objects_and_their_reports(tree: Tree) -> None:
    tree.build()
    entries = json.loads((tree.root / "build/compile_commands.json").read_text())
    assert set(instances(64, 128)) < {entry["file"] for entry in entries}
    for entry in entries:
        built = tree.root / entry["output"]
        assert built.exists()
        assert ("ptxas" in built.with_suffix(".ptxas.txt").read_text()) == (
            entry["file"].endswith(".cu")
        )


def test_old_versions_of_an_object_go(tree: Tree) -> None:
    instance = tree.root / instances(64)[0]
    for number in range(7):
        instance.write_text(instance.read_text() + f"// {number}\n")
        tree.build()
    folder = tree.root / "build/kernels/80_90a_80+PTX/sm80/inst"
    assert len(list(folder.glob(f"{instance.stem}.*.o"))) == 4
    assert len(list(folder.glob(f"{instance.stem}.*.ptxas.txt"))) == 4


def flags_of(tree: Tree, source: str) -> str:
    return next(line for line in tree.calls() if line.startswith(source + " "))


def test_head_dims_choose_instances_and_tell_the_table(tree: Tree) -> None:
    made = tree.build(FLASH_EXT_HEAD_DIMS="64")
    assert set(instances(64)) < set(made)
    assert not set(instances(128)) & set(made)
    assert "-DFLASH_EXT_HEAD_DIMS=64 " in flags_of(tree, "csrc/sm80/dispatch.cu")
    assert "HEAD_DIMS=" not in flags_of(tree, instances(64)[0])

    made = tree.build(FLASH_EXT_HEAD_DIMS=" 128; 64 ")
    assert not set(instances(64)) & set(made)
    assert r"-DFLASH_EXT_HEAD_DIMS=64\,128 " in flags_of(tree, "csrc/sm80/dispatch.cu")


def test_every_architecture_gets_native_code(tree: Tree) -> None:
    tree.build(FLASH_EXT_CUDA_ARCHS="80;90a;80+PTX")
    flags = flags_of(tree, instances(64)[0])
    for arch, code in (("80", "sm_80"), ("90a", "sm_90a"), ("80", "compute_80")):
        assert f"-gencode=arch=compute_{arch},code={code}" in flags
    tree.build(FLASH_EXT_CUDA_ARCHS="120")
    flags = flags_of(tree, instances(64)[0])
    assert flags.count("-gencode") == 1
    assert "-gencode=arch=compute_120,code=sm_120" in flags
    assert "-DFLASH_EXT_WITH_SM90=0" in flags_of(tree, "csrc/common/registry.cpp")


@pytest.mark.parametrize(
    ("visible", "archs"),
    [
        ("12.0 9.0 9.0", "90a;120"),
        ("7.5 8.6", "86"),
        ("7.5", "80;90a;80+PTX"),
        ("no devices were found", "80;90a;80+PTX"),
    ],
)
def test_unset_architectures_are_those_of_the_gpus(
    visible: str, archs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text(f"#!/bin/sh\necho '{visible}'\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("FLASH_EXT_CUDA_ARCHS", raising=False)
    assert load_setup(monkeypatch).requested_archs() == tuple(archs.split(";"))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLASH_EXT_CUDA_ARCHS", "80;volta", "'volta' is no architecture"),
        ("FLASH_EXT_CUDA_ARCHS", "75", "80 or newer"),
        ("FLASH_EXT_CUDA_ARCHS", "none;80", "'none' is no architecture"),
        ("FLASH_EXT_CUDA_ARCHS", "99", "has no architecture '99'"),
        ("FLASH_EXT_HEAD_DIMS", "65", f"expected some of the head dims {','.join(DIMS)!r}"),
        ("FLASH_EXT_HEAD_DIMS", "64,x", "FLASH_EXT_HEAD_DIMS='64,x'"),
        ("FLASH_EXT_NVCC", "missing/nvcc", "missing/nvcc is no program"),
        ("CXX", "no-such-compiler", "'no-such-compiler' is not found"),
        ("MAX_JOBS", "many", "MAX_JOBS='many'"),
        ("FAKE_VERSION", "12.4", "12.5 or newer is needed"),
    ],
)
def test_bad_values_are_named(tree: Tree, variable: str, value: str, said: str) -> None:
    message = tree.fails(**{variable: value})
    assert said in message
    assert "flash_ext: " in message
    assert tree.calls() == []


def test_wrong_cuda_home_is_not_passed_over(tree: Tree) -> None:
    del tree.environment["FLASH_EXT_NVCC"]
    assert "CUDA_HOME='/nowhere'" in tree.fails(CUDA_HOME="/nowhere")


def test_spills_are_refused(tree: Tree) -> None:
    said = tree.fails(FAKE_SPILL="16")
    assert "kernels keep registers in memory" in said
    for source in instances(64, 128):
        assert f"{source} on sm_80: 0 bytes stack frame, 16 bytes spill stores" in said
    assert not list(tree.root.glob("flash_ext/_C.*.so"))
    tree.build(FAKE_SPILL="16", FLASH_EXT_ALLOW_SPILLS="1")
    assert list(tree.root.glob("flash_ext/_C.*.so"))


def test_header_that_the_scan_missed_is_an_error(tree: Tree) -> None:
    assert "csrc/secret.h" in tree.fails(FAKE_READS="csrc/secret.h")


def test_jobs_follow_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = load_setup(monkeypatch)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert 1 <= setup.jobs() <= 64
    monkeypatch.setattr(setup, "MEMORY_PER_JOB", 1 << 60)
    assert setup.jobs() == 1
    monkeypatch.setenv("MAX_JOBS", "7")
    assert setup.jobs() == 7


# --- The digests ---


def test_digest_ignores_comments_and_white_space(tmp_path: Path) -> None:
    text = 'int a = 1;  // one\n/* two\n lines */ const char* s = "// kept  blanks";\n'
    assert digest.bare_cpp(text) == 'inta=1;constchar*s="// kept  blanks";'
    assert digest.bare_python("# a\nx = 1  \n\n    # b\n    y = '#'\n") == "x = 1\n    y = '#'"


def test_family_digest_covers_the_headers_it_includes(tmp_path: Path) -> None:
    csrc = copy_tree(tmp_path) / "csrc"
    before = digest.digests(csrc)
    assert before == digest.digests(ROOT / "csrc")

    def changed(path: str) -> set[str]:
        (csrc / path).write_text((csrc / path).read_text() + "int more;\n")
        after = digest.digests(csrc)
        names = {name for name in after if after[name] != before[name]}
        before.update(after)
        return names

    assert changed("params.h") == {*digest.families(csrc), "binding", "csrc"}
    assert changed("binding/module.cpp") == {"binding", "csrc"}
    assert changed("sm80/config.h") == {"sm80", "csrc"}
    assert changed("classic/table.cuh") == {"classic", "csrc"}


# --- Loading the binary ---


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (None, "", "without compiled kernels"),
        ("_C.so", "no machine code", "does not load"),
        ("_C.py", "def build_info(): return {'version': '0.0.0'}", "is of version 0.0.0"),
        ("_C.py", "raise RuntimeError('wrong machine')", "wrong machine"),
    ],
)
def test_unusable_binary_is_explained(
    name: str | None,
    content: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Import succeeds, and one readable message says what is wrong and how to rebuild."""
    package = tmp_path / "pretender"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "build.py").write_text(Path(build.__file__).read_text())
    if name is not None:
        (package / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("pretender", "pretender.build", "pretender._C"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    loaded = importlib.import_module("pretender.build")
    assert loaded.extension() is None
    assert reason in loaded.missing_reason()
    assert "build_ext --inplace" in loaded.missing_reason()
    assert loaded.build_info() == loaded.BuildInfo()
    assert (loaded.build_info().archs, loaded.build_info().nvcc) == ((), None)


def needed_libraries(path: Path) -> list[str]:
    """DT_NEEDED of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (offset,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    segments = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    dynamic = next(segment for segment in segments if segment[0] == 2)
    entries = [struct.unpack_from("<QQ", data, dynamic[2] + at) for at in range(0, dynamic[5], 16)]
    names = next(value for tag, value in entries if tag == 5)
    start = next(s[2] + names - s[3] for s in segments if s[0] == 1 and s[3] <= names < s[3] + s[5])
    offsets = [start + value for tag, value in entries if tag == 1]
    return [data[at : data.index(b"\0", at)].decode() for at in offsets]


@pytest.fixture
def binary() -> Path:
    module = build.extension()
    if module is None:
        pytest.skip(build.missing_reason())
    assert module.__file__ is not None
    return Path(module.__file__)


def test_binary_needs_only_the_system(binary: Path) -> None:
    """One binary serves every torch, and imports where there is no driver."""
    needed = needed_libraries(binary)
    assert any(name.startswith("libc.so") for name in needed)
    system = r"lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so(\.\d+)*|ld-linux.*"
    assert not [name for name in needed if not re.fullmatch(system, name)]


def test_binaries_fit_the_wheel(binary: Path) -> None:
    binaries = [binary, binary.with_name(binary.name.replace("_C", "_classic"))]
    assert sum(len(zlib.compress(path.read_bytes())) for path in binaries) < WHEEL_BYTES


def test_build_info_tells_what_was_built(binary: Path) -> None:
    info = build.build_info()
    assert info.version == build.__version__
    assert info.archs
    assert info.nvcc is not None
    assert set(info.digests) == {*digest.families(ROOT / "csrc"), "binding", "csrc"}
    assert all(len(value) == 16 for value in info.digests.values())
    assert {row["head_dim"] for row in build.extension().kernels()} == set(info.head_dims)
