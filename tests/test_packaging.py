"""Wheels, source archives and installation, offline and without isolation."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from build_kit import Tree, copy_tree

PIP = ("-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    folder = tmp_path_factory.mktemp("packaging")
    return Tree(copy_tree(folder / "a tree"), folder / "tools")


@pytest.fixture(scope="module")
def sdist(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source archive")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    made = tree.run("-c", code, FLASH_EXT_CUDA_ARCHS="none")
    assert made.returncode == 0, made.stdout
    return next(folder.glob("*.tar.gz"))


def wheel_names(folder: Path) -> set[str]:
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def modules(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in (root / "flash_ext").rglob("*.py")}


def test_wheel_holds_the_package_and_the_binaries(tree: Tree, tmp_path: Path) -> None:
    made = tree.run(*PIP, "wheel", *OFFLINE, "-w", str(tmp_path), ".")
    assert made.returncode == 0, made.stdout
    names = wheel_names(tmp_path)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux" in next(tmp_path.glob("*.whl")).name
    binaries = {name for name in names if name.endswith(".so")}
    assert {name.split(".")[0] for name in binaries} == {"flash_ext/_C", "flash_ext/_classic"}
    other = {name for name in names if ".dist-info/" not in name} - binaries
    assert other == {*modules(tree.root), "flash_ext/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_module_that_is_gone_stays_gone(tree: Tree, tmp_path: Path) -> None:
    stale = tree.root / "flash_ext" / "stale.py"
    for there in (True, False):
        stale.touch() if there else stale.unlink()
        folder = tmp_path / str(there)
        made = tree.run(
            *PIP, "wheel", *OFFLINE, "-w", str(folder), ".", FLASH_EXT_CUDA_ARCHS="none"
        )
        assert made.returncode == 0, made.stdout
        assert ("flash_ext/stale.py" in wheel_names(folder)) == there


def test_source_archive_is_complete(tree: Tree, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "flash_ext", "tests", "docs", "bench", ".ci"):
        here = {
            path.relative_to(tree.root).as_posix()
            for path in (tree.root / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
        }
        assert not here - names
    assert {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "README.md"} <= names


def test_source_archive_installs_in_an_empty_folder(sdist: Path, tmp_path: Path) -> None:
    """With all kernels: nothing that the build reads is missing."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = Tree(next(tmp_path.glob("flash_ext-*")), tmp_path / "tools")
    made = unpacked.run(*PIP, "install", *OFFLINE, "--target", str(tmp_path / "new site"), ".")
    assert made.returncode == 0, made.stdout
    assert list(tmp_path.glob("new site/flash_ext/_C.*.so"))


def test_cpu_path_alone_needs_no_compiler(tree: Tree, tmp_path: Path) -> None:
    """A path with spaces, and neither nvcc nor a C++ compiler nor a network."""
    empty = tmp_path / "empty"
    empty.mkdir()
    tools = {"FLASH_EXT_NVCC": "", "FLASH_EXT_CUDA_ARCHS": "none", "PATH": str(empty)}
    site = tmp_path / "new site"
    made = tree.run(*PIP, "install", *OFFLINE, "--target", str(site), ".", **tools)
    assert made.returncode == 0, made.stdout
    code = "import flash_ext.build as b; print(b.build_info()); print(b.missing_reason())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**tree.environment, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    assert "archs=(), nvcc=None" in said.stdout
    assert "installed without compiled kernels" in said.stdout


def test_no_nvcc_and_no_network_is_one_clear_message(tree: Tree, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    site = tmp_path / "site"
    environment = {"FLASH_EXT_NVCC": "", "PATH": str(empty)}
    made = tree.run(*PIP, "install", *OFFLINE, "--target", str(site), ".", **environment)
    if "nvidia/cu13" in made.stdout or made.returncode == 0:
        pytest.skip("this environment holds NVIDIA's compiler wheels")
    assert made.returncode != 0
    assert made.stdout.count("flash_ext: no CUDA compiler is found") == 1
    assert "FLASH_EXT_CUDA_ARCHS=none" in made.stdout
    assert "Traceback" not in made.stdout
    assert not site.exists() or not list(site.iterdir())
    assert "copying" not in made.stdout
