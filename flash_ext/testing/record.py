"""The record of what ran on hardware: `tests/gpu_record.json`, committed with what it proves.

    python -m flash_ext.testing.record run --family sm80 --shard 1/2
    python -m flash_ext.testing.record run --family sm80 --sanitizer memcheck
    python -m flash_ext.testing.record merge FILE...
    python -m flash_ext.testing.record check

One entry per family holds the digest of the sources that were tested (the loaded binary must report
the same one), the digest of the tests, the counts of every shard, the findings of every sanitizer
and the machine. Results for other sources, other tests or another machine start the entry afresh:
they do not add up. `run` needs only the repository's tree with a built extension, torch and pytest;
`check` needs the tree alone, see `check_record.py` for a Python without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flash_ext.testing.digest import digests, files_digest
from flash_ext.testing.machine import driver_version
from flash_ext.testing.shards import parse_shard

RECORD = Path("tests/gpu_record.json")
SANITIZERS = ("memcheck", "initcheck", "racecheck", "synccheck")
MINUTES = 8.0  # that one call may take
LISTED_FINDINGS = 20

# Run on each kernel family.
KERNEL_TESTS = (
    *("test_attention.py", "test_field_cases.py", "test_modifiers.py", "test_group_split.py"),
    *("test_varlen.py", "test_varlen_gpu.py"),
)
CLASSIC = "classic"
CLASSIC_TESTS = ("test_classic.py",)  # run on the kernels of classic alone
KIT = ("cases", "numeric", "oracle")  # modules of flash_ext.testing that decide what passes
Entry = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """The hardware tests of one family."""

    sources: str  # family whose digest the run proves
    marker: str  # pytest's -m
    kernels: bool  # tests of the kernels of this family, or all other tests
    sanitizers: tuple[str, ...] = ()
    optional: bool = False  # its absence is worth a note only

    def tests(self, root: Path) -> list[Path]:
        files = sorted((root / "tests").glob("test_*.py"))
        if self.marker == "multi_gpu":
            return files
        if self.sources == CLASSIC:
            return [path for path in files if path.name in CLASSIC_TESTS]
        files = [path for path in files if path.name not in CLASSIC_TESTS]
        return [path for path in files if (path.name in KERNEL_TESTS) == self.kernels]


SUITES = {
    "sm80": Suite("sm80", "gpu and not multi_gpu", kernels=True, sanitizers=SANITIZERS),
    "sm90": Suite("sm90", "gpu and not multi_gpu", kernels=True, sanitizers=SANITIZERS),
    CLASSIC: Suite(CLASSIC, "gpu and not multi_gpu", kernels=True, sanitizers=SANITIZERS),
    "binding": Suite("binding", "gpu and not multi_gpu", kernels=False),
    "multi_gpu": Suite("binding", "multi_gpu", kernels=False, optional=True),
}


class RecordError(Exception):
    """A result that must not be recorded, with the reason."""


def suites(root: Path) -> list[str]:
    """Families whose sources are in the tree."""
    return [
        name
        for name, suite in SUITES.items()
        if not suite.kernels or (root / "csrc" / suite.sources).is_dir()
    ]


def sources_digest(csrc: Path, package: Path, family: str) -> str:
    """Digest of what a family's run proves: its C++ and, for the binding, the Python layer."""
    cpp = digests(csrc)[SUITES[family].sources]
    return _with_python(cpp, package, family)


def loaded_digest(family: str) -> str:
    """The same digest of what is loaded: the C++ as the binary reports it, the Python imported."""
    import flash_ext

    if family == CLASSIC:
        return flash_ext.classic.source_digest()
    cpp = flash_ext.build_info().digests.get(SUITES[family].sources, "absent")
    return _with_python(cpp, Path(flash_ext.__file__).parent, family)


def _with_python(cpp: str, package: Path, family: str) -> str:
    if SUITES[family].kernels:
        return cpp
    layer = [path for path in package.rglob("*.py") if path.parent.name != "testing"]
    return f"{cpp}+{files_digest(layer, package)}"


def tests_digest(root: Path, family: str) -> str:
    """Digest of a family's tests and of what they share."""
    kit = [root / "flash_ext" / "testing" / f"{name}.py" for name in KIT]
    shared = [root / "tests" / "conftest.py", *(root / "tests").glob("*_kit.py")]
    return files_digest([*SUITES[family].tests(root), *kit, *shared], root)


def machine() -> dict[str, Any]:
    """GPU, driver, torch and compiler of this machine."""
    import torch

    import flash_ext

    if not torch.cuda.is_available():
        raise RecordError("no CUDA device: the record holds hardware runs only")
    info = flash_ext.build_info()
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "nvcc": info.nvcc,
        "archs": list(info.archs),
    }


def sanitizer_command(tool: str) -> list[str]:
    """compute-sanitizer with one of its tools, looking at our kernels only."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home, "bin")) for home in (*homes, "/usr/local/cuda") if home]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    program = shutil.which("compute-sanitizer", path=path)
    if program is None:
        raise RecordError("compute-sanitizer is neither on PATH nor under CUDA_HOME")
    ours = ("--kernel-regex", "kns=flash")
    # Where a tool reports much, as initcheck does, backtraces take longer than the tests.
    brief = ("--print-limit", "1000", "--show-backtrace", "no")
    return [program, "--tool", tool, *ours, *brief]


def findings(output: str) -> list[str]:
    """What a sanitizer reported about our kernels: its first line and the place, one a finding.

    Raises:
        RecordError: the output has no summary of a sanitizer, so none looked.
    """
    if not re.search(r"^========= (ERROR|RACECHECK) SUMMARY", output, flags=re.MULTILINE):
        raise RecordError("compute-sanitizer printed no summary: it did not attach")
    found = []
    # A report is a run of "=========" lines: a headline, then indented lines about it.
    for report in re.split(r"^=========(?! {2,})", output, flags=re.MULTILINE)[1:]:
        headline = " ".join(report.split("\n", 1)[0].split())
        place = re.search(r"\bflash_ext::[^\n]*", report)
        if place:
            found.append(f"{headline} | {place.group()}")
    return found


def run_tests(
    root: Path, family: str, shard: str, seconds: float, sanitizer: str | None
) -> tuple[Entry, str]:
    """Run the tests in a process of their own; their summary and what they printed."""
    suite = SUITES[family]
    marker = f"{suite.marker} and sanitizer" if sanitizer else suite.marker
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), *sys.path]))
    if sanitizer:
        # A tensor of its own allocation each, so that a byte past its end is a byte out of bounds.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [
            *(sanitizer_command(sanitizer) if sanitizer else []),
            *(sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-m", marker),
            "--continue-on-collection-errors",
            *("-p", "flash_ext.testing.sharding", "--shard", shard, "--summary", str(summary)),
            *("--stop-after", str(seconds), "-p", "no:cacheprovider"),
            *(["--kernel-family", family] if suite.kernels and family != CLASSIC else []),
            *(str(path.relative_to(root)) for path in suite.tests(root)),
        ]
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        code = process.wait()
        if not summary.exists():
            raise RecordError(f"pytest ended with {code} before it collected a test")
        outcome: Entry = json.loads(summary.read_text(encoding="utf-8"))
    # The test that was running when the process died has failed.
    outcome["failed"] += [f"{test} (process ended with {code})" for test in outcome.pop("running")]
    if not (outcome["passed"] or outcome["failed"] or outcome["skipped"] or outcome["not_run"]):
        raise RecordError(f"no test of {family} is in shard {shard} with -m {marker!r}")
    return outcome, "".join(lines)


def run(
    root: Path, family: str, shard: str, minutes: float, sanitizer: str | None
) -> dict[str, Entry]:
    """Run one shard, or the sanitizer subset, of a family; its part of the record."""
    parse_shard(shard)
    sources = sources_digest(root / "csrc", root / "flash_ext", family)
    loaded = loaded_digest(family)
    if loaded != sources:
        raise RecordError(
            f"{family}: the sources' digest is {sources}, the loaded binary reports {loaded}: "
            "rebuild, then run again"
        )
    entry: Entry = {
        "digest": sources,
        "tests_digest": tests_digest(root, family),
        "machine": machine(),
        "shards": {},
        "sanitizers": {},
    }
    outcome, output = run_tests(root, family, shard, 60 * minutes, sanitizer)
    outcome["date"] = datetime.now(timezone.utc).date().isoformat()
    if sanitizer:
        found = findings(output)
        outcome["findings"] = len(found)
        outcome["examples"] = sorted(set(found))[:LISTED_FINDINGS]
        entry["sanitizers"][f"{sanitizer} {shard}"] = outcome
    else:
        entry["shards"][shard] = outcome
    return {family: entry}


def merge(record: dict[str, Entry], new: dict[str, Entry]) -> dict[str, Entry]:
    """`record` with the results of `new`, which win where both have the same part."""
    merged = dict(record)
    for family, entry in new.items():
        old = record.get(family)
        same = ("digest", "tests_digest", "machine")
        if old is None or any(old[key] != entry[key] for key in same):
            merged[family] = entry
            continue
        merged[family] = {
            **entry,
            "shards": _one_split({**old["shards"], **entry["shards"]}, entry["shards"]),
            "sanitizers": {**old["sanitizers"], **entry["sanitizers"]},
        }
    return dict(sorted(merged.items()))


def _one_split(shards: Entry, newest: Iterable[str]) -> Entry:
    """The shards that split the tests into as many parts as the newest one does."""
    counts = {parse_shard(name)[1] for name in newest} or {parse_shard(s)[1] for s in shards}
    return {name: shards[name] for name in sorted(shards) if parse_shard(name)[1] in counts}


def missing_shards(names: Iterable[str]) -> list[str]:
    """Parts of the split that nobody has run."""
    ran = {parse_shard(name) for name in names}
    count = max((n for _, n in ran), default=1)
    return [f"{i}/{count}" for i in range(1, count + 1) if (i, count) not in ran]


def check(root: Path, record: dict[str, Entry]) -> tuple[list[str], list[str]]:
    """(problems, notes): what makes the record no proof of this tree, and what one should know."""
    problems: list[str] = []
    notes: list[str] = []
    for family in suites(root):
        entry = record.get(family)
        found = notes if SUITES[family].optional else problems
        if entry is None:
            found.append(f"{family}: never run")
            continue
        if entry["digest"] != sources_digest(root / "csrc", root / "flash_ext", family):
            found.append(f"{family}: the sources moved on since it ran")
        if entry["tests_digest"] != tests_digest(root, family):
            notes.append(f"{family}: the tests moved on since it ran")
        found += [f"{family}: {what}" for what in shortcomings(entry, SUITES[family].sanitizers)]
        for name, part in _parts(entry).items():
            for reason, count in part["skip_reasons"].items():
                notes.append(f"{family}: {name}: {count} skipped: {reason}")
    return problems, notes


def shortcomings(entry: Entry, sanitizers: Iterable[str]) -> Iterator[str]:
    """What one entry's runs left out or found wrong."""
    for shard in missing_shards(entry["shards"]):
        yield f"shard {shard} not run"
    for tool in sanitizers:
        ran = [name.split()[1] for name in entry["sanitizers"] if name.split()[0] == tool]
        for shard in missing_shards(ran):
            yield f"{tool} {shard} not run"
    for name, part in _parts(entry).items():
        for test in part["failed"]:
            yield f"{name}: failed {test}"
        if part["not_run"]:
            yield f"{name}: {part['not_run']} tests had no time to run"
        if part.get("findings"):
            yield f"{name}: {part['findings']} findings"
    if not any(part["passed"] for part in entry["shards"].values()):
        yield "no test passed"


def _parts(entry: Entry) -> dict[str, Entry]:
    return {**entry["shards"], **entry["sanitizers"]}


def read(path: Path) -> dict[str, Entry]:
    if not path.exists():
        return {}
    record: dict[str, Entry] = json.loads(path.read_text(encoding="utf-8"))
    return record


def write(path: Path, record: dict[str, Entry]) -> None:
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m flash_ext.testing.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run one shard of a family and merge the outcome")
    running.add_argument("--family", required=True, choices=SUITES)
    running.add_argument("--shard", default="1/1", help="i/n")
    running.add_argument("--sanitizer", choices=SANITIZERS, help="run the sanitizer subset with it")
    running.add_argument("--minutes", type=float, default=MINUTES, help="start no test after that")
    running.add_argument("--out", type=Path, default=RECORD, help="JSON file to merge into")
    merging = commands.add_parser("merge", help="merge files that `run --out` wrote elsewhere")
    merging.add_argument("files", type=Path, nargs="+")
    merging.add_argument("--out", type=Path, default=RECORD, help="JSON file to merge into")
    checking = commands.add_parser("check", help="name the families that must run again")
    checking.add_argument("--record", type=Path, default=RECORD)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: recorded and good; 1: recorded, or checked, and not good; 2: refused."""
    options = parser().parse_args(arguments)
    root = Path.cwd()
    if not (root / "csrc").is_dir() or not (root / "tests").is_dir():
        print(f"{root}: run this in the root of the repository", file=sys.stderr)
        return 2
    if options.command == "check":
        problems, notes = check(root, read(options.record))
        print("\n".join([*notes, *problems]) or "every family's record matches its sources")
        return 1 if problems else 0
    if options.command == "merge":
        record = read(options.out)
        for path in options.files:
            record = merge(record, read(path))
        write(options.out, record)
        return 0
    try:
        new = run(root, options.family, options.shard, options.minutes, options.sanitizer)
    except RecordError as error:
        print(f"not recorded: {error}", file=sys.stderr)
        return 2
    write(options.out, merge(read(options.out), new))
    (part,) = _parts(new[options.family]).values()
    return 1 if part["failed"] or part["not_run"] or part.get("findings") else 0


if __name__ == "__main__":
    sys.exit(main())
