"""House rules of the source tree, each with a sample that must break it.

A rule is a function from a file's path and text to the lines that break it. Every rule is tested
twice: over all files of the repository, and on a bad sample, so a rule that can never fail fails.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    *("setup.py", "pyproject.toml", "csrc", "flash_ext", "tests", "bench", "docs", "Makefile"),
    *("README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", ".ci"),
    *(".gitignore", ".gitattributes", ".clang-format"),
}
CPP = (".h", ".cuh", ".cu", ".cpp")
COLUMNS = 100
MOST_LINES = 500  # a file reads in one sitting; most have 200-450 lines or fewer
MOST_BYTES = 400_000  # of any tracked file, plots included
INSTANCE_LINES = 20
TYPES = ("__half", "__nv_bfloat16")

Broken = Iterator[str]


def tracked_files() -> list[Path]:
    """Files that are, or would be, in the repository; all of a source archive without git."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        paths = [Path(name) for name in listed.split("\0") if name]
    else:
        made = {"__pycache__", "build", "dist"}
        paths = [
            path.relative_to(ROOT)
            for top in TOP_LEVEL
            for path in [ROOT / top, *(ROOT / top).rglob("*")]
            if not made & set(path.parts) and path.suffix not in (".so", ".pyc")
        ]
    return sorted(path for path in paths if (ROOT / path).is_file())


FILES = tracked_files()


def is_text(path: Path) -> bool:
    return b"\0" not in (ROOT / path).read_bytes()[:4096]


def cpp_code(text: str) -> str:
    """C++ with comments and the inside of strings blanked; line numbers are kept."""
    token = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return '""' if found.startswith('"') else "\n" * found.count("\n")

    return re.sub(token, blank, text, flags=re.DOTALL)


def matching(pattern: str, text: str, what: str) -> Broken:
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield f"line {number}: {what}: {found.group()!r}"


def cpp(path: Path) -> bool:
    return path.parts[0] == "csrc" and path.suffix in CPP


def instance(path: Path) -> bool:
    return cpp(path) and "inst" in path.parts


def described(path: Path) -> bool:
    return cpp(path) and not instance(path)


def build_file(path: Path) -> bool:
    return str(path) in ("setup.py", "pyproject.toml", "Makefile")


def python(path: Path) -> bool:
    return path.suffix == ".py"


def code(path: Path) -> bool:
    return path.suffix in (*CPP, ".py", ".toml", ".sh") or path.name in ("Makefile", "run")


def test_module(path: Path) -> bool:
    return path.parts[0] == "tests" and python(path)


test_module.__test__ = False  # type: ignore[attr-defined]


def no_framework(path: Path, text: str) -> Broken:
    yield from matching(r'#\s*include\s*[<"](torch|ATen|c10)/', text, "framework header")
    if path.parts[:2] != ("csrc", "binding"):
        yield from matching(
            r'#\s*include\s*[<"](pybind11/|Python\.h)', text, "Python below the binding"
        )


def no_kernels_in_binding(path: Path, text: str) -> Broken:
    yield from matching(r'#\s*include\s*"[^"]*(sm80|sm90|core|ptx)/', text, "not the seam")
    yield from matching(r"#\s*include\s*<cuda_(fp16|bf16)", text, "kernel types in the binding")


def asm_in_ptx_only(path: Path, text: str) -> Broken:
    yield from matching(r"\b(asm|__asm__)\b", cpp_code(text), "inline assembly outside csrc/ptx")


def no_sync_no_allocation(path: Path, text: str) -> Broken:
    calls = r"\bcuda(Malloc\w*|Free\w*|Memcpy|(Device|Stream|Event)Synchronize|HostAlloc)\b"
    yield from matching(calls, cpp_code(text), "synchronises or allocates")


def launches_are_checked(path: Path, text: str) -> Broken:
    body = cpp_code(text)
    if not re.search(r"check_launch|cudaGetLastError", body):
        yield from matching(r"<<<", body, "launch whose error nobody reads")


def opens_with_comment(path: Path, text: str) -> Broken:
    if not text.startswith(("// ", "/*")):
        yield "line 1: no leading comment that says what the file is"
    if path.suffix in (".h", ".cuh") and "#pragma once" not in text:
        yield "line 1: no #pragma once"


def ptx_names_its_section(path: Path, text: str) -> Broken:
    leading = re.match(r"(//[^\n]*\n)*", text)
    assert leading is not None
    if "PTX" not in leading.group():
        yield "line 1: the leading comment does not name the section of the PTX manual"


def no_dead_cpp(path: Path, text: str) -> Broken:
    # An example of use, indented by three blanks or more, is prose.
    statement = r"[\w:<>*&\s.\[\]-]+=[^=].*;|[\w:.]+\([^)]*\);|(?:if|for|while) ?\(.*"
    yield from matching(rf"^\s*//\s{{0,2}}(?=\S)(?:{statement})$", text, "commented-out code")
    yield from matching(r"^\s*#\s*if\s+0\b", text, "commented-out code")


def instances_are_short(path: Path, text: str) -> Broken:
    lines = text.count("\n")
    if lines > INSTANCE_LINES:
        yield f"{lines} lines: an instantiation file has at most {INSTANCE_LINES}"


def instances_hold_both_types(path: Path, text: str) -> Broken:
    """Two files would take nearly twice the bytes of one in the binary."""
    fp16, bf16 = (re.findall(rf"^template .*<{name}, (.*)", text, re.M) for name in TYPES)
    if not fp16 or fp16 != bf16:
        yield f"instantiates {fp16} for fp16 and {bf16} for bf16, expected the same of both"


def columns(path: Path, text: str) -> Broken:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS:
            yield f"line {number}: {len(line)} columns, at most {COLUMNS}"


def readable_length(path: Path, text: str) -> Broken:
    lines = text.count("\n")
    if lines > MOST_LINES:
        yield f"{lines} lines, at most {MOST_LINES}"


def tidy_text(path: Path, text: str) -> Broken:
    yield from matching(r"[ \t]+$", text, "trailing blank")
    if path.name != "Makefile":
        yield from matching(r"\t", text, "tab")
    if text and not text.endswith("\n"):
        yield "last line: no newline at the end"


def speaks_of_itself(path: Path, text: str) -> Broken:
    """No path of one machine, no private host, no word about how the work was organised."""
    yield from matching(r"(?<![\w.$\"}])/(home|root|work|mnt|Users|private)/", text, "machine path")
    yield from matching(r"https?://[^/\s]*(\d+\.\d+\.\d+\.\d+|:\d|\.(internal|corp|lan)\b)",
                        text, "private host")  # fmt: skip
    yield from matching(r"[s]hared/(design|tools|hooks)|[f]ield-cases\.md|\bSPEC[.]md",
                        text, "private document")  # fmt: skip
    yield from matching(r"(?i)\b(this|another|next|last|each) [s]ession\b|\bissue #?\d+ item\b",
                        text, "how the work was organised")  # fmt: skip


def no_fast_math(path: Path, text: str) -> Broken:
    yield from matching(r"use_fast_math", text, "global fast maths")


def has_docstring(path: Path, text: str) -> Broken:
    tree = ast.parse(text)
    if tree.body and not ast.get_docstring(tree):
        yield "line 1: module without a docstring"


def no_timing_assertion(path: Path, text: str) -> Broken:
    clocks = {"perf_counter", "perf_counter_ns", "monotonic", "process_time", "elapsed_time"}
    clocks |= {"elapsed", "duration", "seconds", "wall_time", "milliseconds"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
            if names & clocks:
                yield f"line {node.lineno}: asserts on a clock: {sorted(names & clocks)}"


def dispatch_is_pure(path: Path, text: str) -> Broken:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            yield f"line {node.lineno}: touches CUDA"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names}
            if names & {"_C", "flash_ext._C", "ops", "autograd", "interface"}:
                yield f"line {node.lineno}: imports {sorted(names)}"


@dataclass(frozen=True)
class Rule:
    check: Callable[[Path, str], Broken]
    applies: Callable[[Path], bool]
    sample_path: str
    sample: str  # breaks the rule


def under(*folders: str) -> Callable[[Path], bool]:
    return lambda path: cpp(path) and path.parts[1] in folders


def outside(*folders: str) -> Callable[[Path], bool]:
    return lambda path: cpp(path) and path.parts[1] not in folders


HEADER = "// What it is.\n#pragma once\n"
RULES = [
    Rule(no_framework, cpp, "csrc/core/a.h", HEADER + "#include <torch/extension.h>\n"),
    Rule(no_framework, cpp, "csrc/core/a.h", HEADER + "#include <pybind11/pybind11.h>\n"),
    Rule(no_kernels_in_binding, under("binding"), "csrc/binding/a.h", '#include "../sm80/a.h"\n'),
    Rule(asm_in_ptx_only, outside("ptx"), "csrc/core/a.h", 'void f() { asm volatile("nop;"); }\n'),
    Rule(no_sync_no_allocation, cpp, "csrc/a.h", "void f() { cudaDeviceSynchronize(); }\n"),
    Rule(launches_are_checked, cpp, "csrc/sm80/a.cu", "void f() { g<<<1, 1>>>(); }\n"),
    Rule(opens_with_comment, described, "csrc/core/a.h", "#pragma once\n"),
    Rule(opens_with_comment, described, "csrc/core/a.h", "// What it is.\nint f();\n"),
    Rule(ptx_names_its_section, under("ptx"), "csrc/ptx/a.h", HEADER),
    Rule(no_dead_cpp, cpp, "csrc/core/a.h", HEADER + "  // acc = acc * scale;\n"),
    Rule(no_dead_cpp, cpp, "csrc/core/a.h", HEADER + "#if 0\n#endif\n"),
    Rule(instances_are_short, instance, "csrc/sm80/inst/a.cu", "\n" * 40),
    Rule(instances_hold_both_types, instance, "csrc/sm80/inst/a.cu", "template f<__half, 64>();\n"),
    Rule(columns, code, "setup.py", "#" * 101 + "\n"),
    Rule(readable_length, lambda p: cpp(p) or python(p), "setup.py", "\n" * 501),
    Rule(tidy_text, code, "setup.py", "a = 1 \n"),
    Rule(tidy_text, code, "setup.py", "a = 1"),
    Rule(speaks_of_itself, is_text, "README.md", "in /" + "home/someone/tree\n"),
    Rule(speaks_of_itself, is_text, "README.md", "see http://10.1." + "2.3/simple\n"),
    Rule(speaks_of_itself, is_text, "README.md", "done by the next" + " session\n"),
    Rule(no_fast_math, build_file, "setup.py", "--use_fast_math\n"),
    Rule(has_docstring, python, "flash_ext/a.py", "import os\n"),
    Rule(no_timing_assertion, test_module, "tests/a.py", "assert perf_counter() - start < 1\n"),
    Rule(
        dispatch_is_pure,
        lambda p: p.name in ("dispatch.py", "problem.py"),
        "flash_ext/dispatch.py",
        "import torch\ntorch.cuda.current_device()\n",
    ),  # fmt: skip
]


@pytest.mark.parametrize("check", dict.fromkeys(rule.check for rule in RULES))
def test_rule_holds(check: Callable[[Path, str], Broken]) -> None:
    applies = next(rule.applies for rule in RULES if rule.check is check)
    broken = [
        f"{path}: {line}"
        for path in FILES
        if is_text(path) and applies(path)
        for line in check(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_rule_can_fail(rule: Rule) -> None:
    assert list(rule.check(Path(rule.sample_path), rule.sample))


def test_comments_and_strings_are_not_code() -> None:
    text = '// asm\n/* asm\n asm */ const char* s = "asm"; int asmx;\n'
    assert not list(asm_in_ptx_only(Path("csrc/core/a.h"), text))
    assert cpp_code(text).count("\n") == text.count("\n")


def test_top_level_is_fixed() -> None:
    assert {path.parts[0] for path in FILES} <= TOP_LEVEL


def test_no_large_file() -> None:
    sizes = {str(path): (ROOT / path).stat().st_size for path in FILES}
    assert not {path: size for path, size in sizes.items() if size > MOST_BYTES}


def test_no_built_file() -> None:
    built = {".so", ".o", ".a", ".whl", ".cubin", ".ptx", ".pyc", ".pt", ".npy"}
    assert not [str(path) for path in FILES if path.suffix in built]
