"""Digests of source files: what a binary was built from and what a recorded test run proves.

Comments and white space do not count, so prose can be edited without a new build or a new run on
hardware. The module needs the standard library alone and no other part of the package: `setup.py`
loads it by path, and so the digest in a binary and the digest of a source tree are the same
function.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

CPP = (".h", ".cuh", ".cu", ".cpp")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_CPP_TOKEN = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|(?P<blank>//[^\n]*|/\*.*?\*/|\s+)",
    re.DOTALL,
)


def cpp_files(folder: Path) -> list[Path]:
    """C++ and CUDA sources and headers below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix in CPP)


def included(source: Path, roots: Sequence[Path]) -> set[Path]:
    """A source file and everything it includes, directly or not, from its own folder or `roots`.

    Includes under an `#if` count whether or not they are active; files outside, such as those of
    the standard library, do not.
    """
    found: set[Path] = set()
    todo = [source]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            places = [folder / name for folder in (path.parent, *roots)]
            todo += [place for place in places if place.is_file()][:1]
    return found


def bare_cpp(text: str) -> str:
    """C++ text without comments and white space; string and character literals keep theirs."""
    return _CPP_TOKEN.sub(lambda match: match.group("text") or "", text)


def bare_python(text: str) -> str:
    """Python text without comment lines, blank lines and trailing white space."""
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def files_digest(paths: Iterable[Path], root: Path) -> str:
    """Digest of the names below `root` and the bare text of some files, in hexadecimal."""
    total = hashlib.sha256()
    for path in sorted(set(paths)):
        text = path.read_text(encoding="utf-8")
        bare = {**dict.fromkeys(CPP, bare_cpp), ".py": bare_python}.get(path.suffix, str)(text)
        total.update(f"{path.relative_to(root).as_posix()}\0{bare}\0".encode())
    return total.hexdigest()[:16]


def families(csrc: Path) -> list[str]:
    """Kernel families: the folders that hold a `dispatch.cu`."""
    return sorted(path.parent.name for path in csrc.glob("*/dispatch.cu"))


def digests(csrc: Path) -> dict[str, str]:
    """Digest of every kernel family, of the host code around them (`binding`) and of all (`csrc`).

    A family's digest covers its folder and every header that its sources include.
    """

    def covering(*folders: str) -> str:
        own = [path for folder in folders for path in cpp_files(csrc / folder)]
        return files_digest({file for path in own for file in included(path, [csrc])}, csrc)

    parts = {family: covering(family) for family in families(csrc)}
    return {
        **parts,
        "binding": covering("binding", "common"),
        "csrc": files_digest(cpp_files(csrc), csrc),
    }


def python_digest(package: Path) -> str:
    """Digest of a package's own Python sources."""
    return files_digest(package.rglob("*.py"), package.parent)
