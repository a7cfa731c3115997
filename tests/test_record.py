"""The record of hardware runs: what it refuses, what adds up, and when it is out of date.

A small tree stands for the repository, so the whole path runs without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_ext.testing import record, shards

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "// A kernel.\n__global__ void kernel(int* a) { *a = 1; }\n"
TESTS = """
import os
import pytest
from flash_ext import dispatch
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("case", range(12))
def test_case(case):
    assert dispatch.in_force == dispatch.Forced("sm80")
"""
MARKERS = "[pytest]\nmarkers =\n    gpu: g\n    multi_gpu: m\n    sanitizer: s\n"
MACHINE = {"gpu": "some GPU", "torch": "some version"}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one kernel family whose binary is up to date, on a machine with a GPU."""
    files = {
        "csrc/sm80/dispatch.cu": KERNEL,
        "csrc/binding/module.cpp": "// The binding.\nint binding;\n",
        "csrc/common/device.cpp": "// The device.\nint device;\n",
        "flash_ext/ops.py": "value = 1\n",
        "flash_ext/testing/cases.py": "value = 1\n",
        "flash_ext/testing/numeric.py": "value = 1\n",
        "flash_ext/testing/oracle.py": "value = 1\n",
        "tests/conftest.py": "",
        "tests/test_attention.py": TESTS,
        "tests/test_binding.py": TESTS.replace('== dispatch.Forced("sm80")', "is None"),
        "pytest.ini": MARKERS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    loaded = {family: digest(tmp_path, family) for family in record.suites(tmp_path)}
    monkeypatch.setattr(record, "loaded_digest", loaded.__getitem__)
    monkeypatch.setattr(record, "machine", lambda: MACHINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digest(root: Path, family: str) -> str:
    return record.sources_digest(root / "csrc", root / "flash_ext", family)


def part(**changes: Any) -> record.Entry:
    good = {"passed": 3, "failed": [], "skipped": 0, "skip_reasons": {}, "not_run": 0}
    return {**good, "date": "2026-01-01", **changes}


def entry(root: Path, family: str, ran: tuple[str, ...] = ("1/1",), **changes: Any) -> record.Entry:
    sanitizers = {
        f"{tool} 1/1": part(findings=0, examples=[]) for tool in record.SUITES[family].sanitizers
    }
    return {
        "digest": digest(root, family),
        "tests_digest": record.tests_digest(root, family),
        "machine": MACHINE,
        "shards": {shard: part() for shard in ran},
        "sanitizers": sanitizers,
        **changes,
    }


def complete(root: Path) -> dict[str, record.Entry]:
    return {family: entry(root, family) for family in record.suites(root)}


def problems(root: Path, found: dict[str, record.Entry]) -> list[str]:
    return record.check(root, found)[0]


def test_families_are_those_of_the_tree(tree: Path) -> None:
    assert record.suites(tree) == ["sm80", "binding", "multi_gpu"]


def test_complete_record_passes(tree: Path) -> None:
    assert problems(tree, complete(tree)) == []


def test_comments_do_not_age_a_record(tree: Path) -> None:
    found = complete(tree)
    (tree / "csrc/sm80/dispatch.cu").write_text("// Better prose.\n" + KERNEL)
    assert problems(tree, found) == []


@pytest.mark.parametrize(
    ("changed", "family"),
    [
        ("csrc/sm80/dispatch.cu", "sm80"),
        ("csrc/binding/module.cpp", "binding"),
        ("flash_ext/ops.py", "binding"),
    ],
)
def test_moved_sources_are_named(tree: Path, changed: str, family: str) -> None:
    found = complete(tree)
    (tree / changed).write_text("int changed = 2;\n")
    assert problems(tree, found) == [f"{family}: the sources moved on since it ran"]


def test_moved_tests_are_noted(tree: Path) -> None:
    found = complete(tree)
    (tree / "tests/test_attention.py").write_text(TESTS + "\nadded = 1\n")
    found_problems, notes = record.check(tree, found)
    assert found_problems == []
    assert "sm80: the tests moved on since it ran" in notes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shards": {"1/2": part()}}, "sm80: shard 2/2 not run"),
        ({"shards": {"1/1": part(failed=["a::b"])}}, "sm80: 1/1: failed a::b"),
        ({"shards": {"1/1": part(not_run=4)}}, "sm80: 1/1: 4 tests had no time to run"),
        ({"shards": {"1/1": part(passed=0)}}, "sm80: no test passed"),
        ({"sanitizers": {}}, "sm80: racecheck 1/1 not run"),
    ],
)
def test_shortcomings_are_named(tree: Path, changes: record.Entry, expected: str) -> None:
    found = {**complete(tree), "sm80": entry(tree, "sm80", **changes)}
    assert expected in problems(tree, found)


def test_findings_are_named(tree: Path) -> None:
    found = complete(tree)
    found["sm80"]["sanitizers"]["memcheck 1/1"]["findings"] = 2
    assert problems(tree, found) == ["sm80: memcheck 1/1: 2 findings"]


def test_family_without_entry(tree: Path) -> None:
    assert problems(tree, {}) == ["sm80: never run", "binding: never run"]
    assert "multi_gpu: never run" in record.check(tree, {})[1]


def test_shards_of_one_state_add_up(tree: Path) -> None:
    first = {"sm80": entry(tree, "sm80", ("1/2",), sanitizers={})}
    second = {"sm80": entry(tree, "sm80", ("2/2",))}
    merged = record.merge(record.merge({}, first), second)
    assert sorted(merged["sm80"]["shards"]) == ["1/2", "2/2"]
    assert len(merged["sm80"]["sanitizers"]) == 4


@pytest.mark.parametrize("key", ["digest", "tests_digest", "machine"])
def test_results_of_another_state_start_afresh(tree: Path, key: str) -> None:
    old = {"sm80": entry(tree, "sm80", ("1/2",), **{key: "another"})}
    merged = record.merge(old, {"sm80": entry(tree, "sm80", ("2/2",), sanitizers={})})
    assert list(merged["sm80"]["shards"]) == ["2/2"]
    assert merged["sm80"]["sanitizers"] == {}


def test_another_split_replaces_the_old_one(tree: Path) -> None:
    old = {"sm80": entry(tree, "sm80", ("1/3", "2/3"))}
    merged = record.merge(old, {"sm80": entry(tree, "sm80", ("1/2",))})
    assert list(merged["sm80"]["shards"]) == ["1/2"]


def test_sanitizer_run_keeps_the_shards(tree: Path) -> None:
    old = {"sm80": entry(tree, "sm80", ("1/2", "2/2"))}
    merged = record.merge(old, {"sm80": entry(tree, "sm80", ())})
    assert sorted(merged["sm80"]["shards"]) == ["1/2", "2/2"]


def test_merge_leaves_other_families(tree: Path) -> None:
    merged = record.merge(complete(tree), {"sm80": entry(tree, "sm80")})
    assert merged == complete(tree)


def test_run_writes_what_check_accepts(tree: Path) -> None:
    for shard in ("1/2", "2/2"):
        assert record.main(["run", "--family", "sm80", "--shard", shard]) == 0
    ran = record.read(record.RECORD)["sm80"]
    assert sum(shard["passed"] for shard in ran["shards"].values()) == 12
    assert all(shard["passed"] for shard in ran["shards"].values())
    assert [p for p in problems(tree, {"sm80": ran}) if "sm80: shard" in p] == []


def test_results_written_elsewhere_merge(tree: Path) -> None:
    for family, name in (("sm80", "a.json"), ("binding", "b.json")):
        assert record.main(["run", "--family", family, "--out", name]) == 0
    assert record.main(["merge", "a.json", "b.json"]) == 0
    assert sorted(record.read(record.RECORD)) == ["binding", "sm80"]
    assert record.main(["check"]) == 1  # no sanitizer ran


def test_failure_and_crash_are_recorded(tree: Path) -> None:
    failing = (
        TESTS
        + """
def test_wrong():
    assert False

def test_skipped():
    pytest.skip("for a reason")

def test_zz_crash():
    os._exit(11)

def test_after_the_crash():
    pass
"""
    )
    (tree / "tests/test_attention.py").write_text(failing)
    assert record.main(["run", "--family", "sm80"]) == 1
    shard = record.read(record.RECORD)["sm80"]["shards"]["1/1"]
    assert shard["failed"] == [
        "tests/test_attention.py::test_wrong",
        "tests/test_attention.py::test_zz_crash (process ended with 11)",
    ]
    assert shard["skip_reasons"] == {"for a reason": 1}
    assert (shard["passed"], shard["skipped"], shard["not_run"]) == (12, 1, 1)


def test_time_limit_leaves_tests_unrun(tree: Path) -> None:
    assert record.main(["run", "--family", "sm80", "--minutes", "0"]) == 1
    shard = record.read(record.RECORD)["sm80"]["shards"]["1/1"]
    assert (shard["passed"], shard["not_run"]) == (1, 11)


def test_other_sources_than_the_loaded_ones_are_refused(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "csrc/sm80/dispatch.cu").write_text("int changed = 2;\n")
    assert record.main(["run", "--family", "sm80"]) == 2
    assert "rebuild" in capsys.readouterr().err
    assert not record.RECORD.exists()


def test_shard_without_tests_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests/test_attention.py").write_text("def test_on_cpu(): pass\n")
    assert record.main(["run", "--family", "sm80"]) == 2
    assert "no test of sm80" in capsys.readouterr().err


def test_broken_test_file_is_a_failure(tree: Path) -> None:
    (tree / "tests/test_field_cases.py").write_text("import nothing_of_that_name\n")
    assert record.main(["run", "--family", "sm80"]) == 1
    shard = record.read(record.RECORD)["sm80"]["shards"]["1/1"]
    assert shard["failed"] == ["tests/test_field_cases.py"]
    assert (shard["passed"], shard["not_run"]) == (12, 0)


def test_machine_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(record.RecordError, match="CUDA"):
        record.machine()


def test_missing_sanitizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(record.RecordError, match="compute-sanitizer"):
        record.sanitizer_command("memcheck")


def test_root_of_the_repository_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.main(["check"]) == 2


def check_without_torch(root: Path) -> subprocess.CompletedProcess[str]:
    """What `make gpu-record-check` runs, by a Python that has the standard library alone."""
    script = ROOT / "flash_ext" / "testing" / "check_record.py"
    return subprocess.run(
        [sys.executable, "-I", "-S", str(script)], cwd=root, capture_output=True, text=True
    )


def test_check_needs_no_torch(tree: Path) -> None:
    (tree / record.RECORD).write_text(json.dumps(complete(tree)))
    found = check_without_torch(tree)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "every family's record matches its sources\n"
    (tree / "csrc/sm80/dispatch.cu").write_text("int changed = 2;\n")
    found = check_without_torch(tree)
    assert (found.returncode, found.stderr) == (1, "")
    assert "sm80: the sources moved on since it ran" in found.stdout


def test_check_without_torch_needs_the_root(tmp_path: Path) -> None:
    found = check_without_torch(tmp_path)
    assert found.returncode == 2
    assert found.stderr == f"{tmp_path}: run this in the root of the repository\n"


SANITIZER_OUTPUT = """\
========= COMPUTE-SANITIZER
12 passed in 3.0s
========= Invalid __global__ write of size 4 bytes
=========     at void flash_ext::sm80::forward_kernel<Config>(Params)+0x150 in kernel.cuh:12
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f0000000000 is out of bounds
=========
========= Uninitialized __global__ memory read of size 8 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>(int)+0x1b0
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Error: Race reported between Write access at void flash_ext::sm80::f()+0x10 in a.cu:1
=========     and Read access at void flash_ext::sm80::f()+0x20 in a.cu:2 [128 hazards]
=========
========= ERROR SUMMARY: 3 errors
"""


def test_findings_of_our_kernels_only() -> None:
    found = record.findings(SANITIZER_OUTPUT)
    assert [text.split("|")[0].strip()[:25] for text in found] == [
        "Invalid __global__ write ",
        "Error: Race reported betw",
    ]
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert record.findings(clean) == []


def test_sanitizer_that_did_not_run_is_refused() -> None:
    with pytest.raises(record.RecordError, match="attach"):
        record.findings("12 passed in 3.0s\n")


def test_sanitizer_run_is_recorded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for compute-sanitizer runs what follows its options and reports a finding."""
    program = tree / "compute-sanitizer"
    report = SANITIZER_OUTPUT.replace("12 passed in 3.0s\n", "")
    program.write_text(f'#!/bin/sh\nshift 8\n"$@"\ncat <<"END"\n{report}END\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tree), prepend=os.pathsep)
    marked = TESTS.replace("def test_case", "@pytest.mark.sanitizer\ndef test_case")
    (tree / "tests/test_attention.py").write_text(marked + "\ndef test_other(): assert False\n")
    assert record.main(["run", "--family", "sm80", "--sanitizer", "memcheck"]) == 1
    found = record.read(record.RECORD)["sm80"]["sanitizers"]["memcheck 1/1"]
    assert (found["passed"], found["failed"], found["findings"]) == (12, [], 2)
    assert found["examples"][1].startswith("Invalid __global__ write of size 4 bytes | flash_ext::")


def test_shards_split_the_tests() -> None:
    tests = [f"tests/test_attention.py::test_forward[{i}]" for i in range(200)]
    parts = [[t for t in tests if shards.shard_of(t, 3) == i] for i in (1, 2, 3)]
    assert sorted(test for part in parts for test in part) == sorted(tests)
    assert min(len(part) for part in parts) > 40


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "1/0"])
def test_bad_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shard"):
        shards.parse_shard(text)


def test_committed_record_is_readable() -> None:
    path = ROOT / record.RECORD
    if not path.exists():
        pytest.skip("no hardware run is recorded yet")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) <= set(record.SUITES)
    for family in found:
        assert set(found[family]) == {"digest", "tests_digest", "machine", "shards", "sanitizers"}
