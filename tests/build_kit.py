"""A copy of the source tree and a compiler that compiles nothing, to test the build with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Answers as nvcc does, writes small files instead of objects, and notes the sources it was given.
FAKE_NVCC = r"""#!/bin/sh
case "$*" in
  *--version*) v=${FAKE_VERSION:-13.0}; echo "Cuda compilation tools, release $v, V$v.88";;
  *--list-gpu-code*) printf 'sm_80\nsm_90\nsm_120\n';;
  *--help*) echo '-compress-mode';;
  *)
    what=link
    all="$*"
    while [ $# -gt 0 ]; do
      case "$1" in -o) out=$2;; -MF) dep=$2;; -c) what=$2;; esac
      shift
    done
    echo "$what | $all" >> "$(dirname "$0")/calls"
    case "$what" in *"${FAKE_FAILS:-none}"*)
      echo "half" > "$out"; echo "bad code in $what"; exit 1;;
    esac
    case "$what" in *.cu)
      echo "ptxas info    : Compiling entry function 'kernel' for 'sm_80'"
      echo "ptxas info    : Function properties for kernel"
      echo "    0 bytes stack frame, ${FAKE_SPILL:-0} bytes spill stores, 0 bytes spill loads";;
    esac
    [ "$what" = link ] || echo "$out : $what ${FAKE_READS:-}" > "$dep"
    echo "made" > "$out";;
esac
"""


def copy_tree(target: Path) -> Path:
    """The sources of this repository, without anything that was built."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "tmp")
    for name in ("csrc", "flash_ext", "tests", "bench", "docs", ".ci"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target / path.name)
    return target


@dataclass
class Tree:
    """A source tree that is built with a compiler that compiles nothing."""

    root: Path
    tools: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tools.mkdir(parents=True, exist_ok=True)
        nvcc = self.tools / "nvcc"
        nvcc.write_text(FAKE_NVCC)
        nvcc.chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASH_EXT", "CUDA"))}
        self.environment = {**kept, "FLASH_EXT_NVCC": str(nvcc), "MAX_JOBS": "2"}
        self.environment["FLASH_EXT_CUDA_ARCHS"] = "80;90a;80+PTX"

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this Python in the tree; standard error joins standard output."""
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.root,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def build(self, **environment: str) -> list[str]:
        """Build in place; the sources that were compiled, and "link", in alphabetical order."""
        calls = self.tools / "calls"
        calls.unlink(missing_ok=True)
        result = self.run("setup.py", "build_ext", "--inplace", **environment)
        assert result.returncode == 0, result.stdout
        return sorted(line.split(" | ")[0] for line in self.calls())

    def calls(self) -> list[str]:
        """What the compiler was asked for in the last build: "source | arguments"."""
        calls = self.tools / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def fails(self, **environment: str) -> str:
        """What a build says that has to fail, and in one message instead of a traceback."""
        result = self.run("setup.py", "build_ext", "--inplace", **environment)
        assert result.returncode != 0, result.stdout
        assert "Traceback" not in result.stdout
        return result.stdout
