"""The profilers' command lines, tables and files, with programs in their place, without a GPU."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_kit import CELL, ENVIRONMENT

from bench import cli, ncu, profile, roofline
from bench.ncu import Kernel

WAIT, BARRIER, BRANCH = (ncu.STALL.format(name) for name in ("wait", "barrier", "branch_resolving"))
HEADER = ("ID", "Kernel Name", ncu.DRAM_READ, ncu.TIME, ncu.TENSOR_BUSY, ncu.HOPPER_ONLY,
          WAIT, BARRIER, BRANCH)  # fmt: skip
OUTPUT = "\n".join([
    "==PROF== Connected to process 12",
    ",".join(f'"{name}"' for name in HEADER),
    '"","","byte","ns","%","inst","","",""',
    '"0","flash_backward","1,572,864","450,432","61.3","n/a","1.25","2.5","0.1"',
    '"1","flash_backward_convert","0","1000","0","0","9","0","0"',
    "==PROF== Disconnected",
])  # fmt: skip
FORBIDDEN = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"

# A profiler that writes a report where it was told to, or the table of one that it is given.
STUB = """#!{python}
import json, sys
from pathlib import Path
said, code, ending = {said!r}, {code}, {ending!r}
Path(sys.argv[0]).with_suffix(".argv").write_text(json.dumps(sys.argv[1:]))
if "--import" in sys.argv:
    assert Path(sys.argv[sys.argv.index("--import") + 1]).read_text() == "report"
    print({output!r})
    raise SystemExit
print(said)
if {writes}:
    words = [word.removeprefix("--output=") for word in sys.argv]
    name = words[words.index("-o") + 1] if "-o" in words else words[words.index("-m") - 2]
    Path(name + ending).write_text("report" if code == 0 else "half a report")
sys.exit(code)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a profiler on PATH and a GPU into the machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(cli, "environment", lambda device: ENVIRONMENT)

    def install(
        tool: str, said: str = "", code: int = 0, writes: bool = True, output: str = OUTPUT
    ) -> Path:
        path = folder / tool
        ending = ".nsys-rep" if tool == "nsys" else ""
        path.write_text(STUB.format(python=sys.executable, said=said, code=code, ending=ending,
                                    writes=writes, output=output))  # fmt: skip
        path.chmod(0o755)
        return path

    return install


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        profile.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def lines(table: str) -> list[list[str]]:
    return [[word.strip() for word in line.split("|")[1:-1]] for line in table.splitlines()]


def kernel(name: str = "flash_forward", **counters: float) -> Kernel:
    return Kernel(ENVIRONMENT, CELL, "flash_ext", name, counters)


def test_counters_are_read_by_kernel() -> None:
    found = ncu.read_counters(OUTPUT)
    assert [name for name, _ in found] == ["flash_backward", "flash_backward_convert"]
    assert found[0][1][ncu.DRAM_READ] == 1572864
    assert ncu.HOPPER_ONLY not in found[0][1]
    assert found[1][1][ncu.HOPPER_ONLY] == 0
    with pytest.raises(ValueError, match="printed no table of counters:\n==ERROR== something"):
        ncu.read_counters("==ERROR== something\n")
    with pytest.raises(ValueError, match="no kernel ran within the range profile_target"):
        ncu.read_counters("\n".join(OUTPUT.splitlines()[:3]))


def test_a_line_for_each_kernel() -> None:
    kernels = [kernel(name, **counters) for name, counters in ncu.read_counters(OUTPUT)]
    header, _, first, second = lines(ncu.kernels_table(kernels))
    found = dict(zip(header, first, strict=True))
    assert (found["kernel"], found["time us"], found["DRAM read MiB"]) == (
        "flash_backward", "450.4", "1.5",
    )  # fmt: skip
    assert (found["tensor %"], found["registers"]) == ("61", "–")
    assert found["stalls"] == "barrier 2.50, wait 1.25, branch resolving 0.10"
    assert second[0] == "flash_backward_convert"
    assert second[-1] == "wait 9.00"
    assert lines(ncu.kernels_table([kernel()]))[2][-1] == "–"


def test_kernels_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    kernels = [kernel("a, b", **{ncu.TIME: 1e6 / 3}), kernel("c")]
    ncu.write_kernels(path, kernels)
    assert ncu.read_kernels(path) == kernels
    text = path.read_text()
    path.write_text(text.replace("bfloat16,False", "bfloat16,maybe"))
    with pytest.raises(ValueError, match="cannot read a field"):
        ncu.read_kernels(path)
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="got columns .'a', 'b'., expected"):
        ncu.read_kernels(path)


def test_words_of_a_case() -> None:
    words = ["backward", "S16k", "sdpa-flash", "full", "D64", "float16"]
    args = profile.parser().parse_args([*words, "--tokens", "4k"])
    found = (args.provider, args.pass_name, args.mask, args.dtype, args.head_dim, args.seqlen)
    assert found == ("sdpa-flash", "backward", "full", "float16", 64, 16384)
    assert args.tokens == 4096
    assert profile.parser().parse_args(["--pass", "both"]).pass_name == "both"
    assert profile.parser().parse_args(["fa1"]).provider == "fa1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sideways"], "got 'sideways', expected D64, S4k or one of flash_ext, "),
        (["Dx"], "got 'x', expected a positive integer"),
        (["D4k"], "hidden: got 2048, expected at least the head dim 4096"),
        (["--device", "cpu"], "--device cpu: the Nsight tools need a CUDA device"),
        (["--timeline", "torch", "--print-command"], "--timeline torch starts no other program"),
        (["--only-run", "--out", "a"], "no profiler runs and no file is written"),
        (["--timeline", "torch", "--device", "cpu", "sdpa-flash"], "--provider sdpa-flash: needs"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(arguments, capsys)


def test_ncu_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--print-command", "--out", "a/case"]
    assert profile.main([*arguments, "backward", "S4k"]) == 0
    command = capsys.readouterr().out
    assert " --clock-control none " in command
    assert " --nvtx --nvtx-include profile_target/ --kernel-name 'regex:^flash_' " in command
    assert " --set full " in command
    assert " -o a/case.ncu-rep " in command
    metrics = command.split(" --metrics ")[1].split()[0].split(",")
    assert metrics == [name for name in ncu.COUNTERS if name not in ncu.FROM_SECTIONS]
    case = shlex.split(command.split(" -m bench.profile ")[1])
    again = profile.parser().parse_args(case)
    assert again.only_run
    assert (again.pass_name, again.seqlen, again.provider) == ("backward", 4096, "flash_ext")
    assert profile.main([*arguments, "plain"]) == 0
    assert "--kernel-name" not in capsys.readouterr().out


def test_one_command_leaves_a_table_and_a_report(
    stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("ncu")
    out = tmp_path / "out" / "case"
    assert profile.main(["backward", "D64", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("backward D64 causal S4096, flash_ext\n\n| kernel ")
    assert "flash_backward_convert" in printed
    assert printed.endswith(f"{out}.csv\n{out}.ncu-rep\n")
    assert sorted(path.name for path in out.parent.iterdir()) == ["case.csv", "case.ncu-rep"]
    kernels = ncu.read_kernels(out.parent / "case.csv")
    assert [k.name for k in kernels] == ["flash_backward", "flash_backward_convert"]
    assert (kernels[0].provider, kernels[0].cell.D) == ("flash_ext", 64)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"said": FORBIDDEN}, "no profile: this user may not read the GPU's counters: an admin"),
        ({"said": FORBIDDEN, "code": 1}, "no profile: this user may not read the GPU's counters"),
        ({"said": "==ERROR== no such metric", "code": 2}, "ncu ended with 2:\n==ERROR== no such"),
        ({"said": "==WARNING== No kernels", "writes": False}, "ncu wrote no report:\n==WARN"),
        ({"output": "nothing"}, "ncu printed no table of counters"),
    ],
)
def test_a_profiler_that_fails_leaves_nothing(
    behaviour: dict[str, object],
    said: str,
    stub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stub("ncu", **behaviour)
    out = tmp_path / "out"
    assert profile.main(["--out", str(out / "case")]) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_an_absent_profiler(
    tool: str,
    stub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ncu, "find_tool", lambda name: None)
    arguments = ["--out", str(tmp_path / "out" / "case")]
    arguments += ["--timeline", "nsys"] if tool == "nsys" else []
    assert f"{tool} is not found on PATH or in CUDA_HOME: install Nsight" in refused(
        arguments, capsys
    )
    assert not (tmp_path / "out").exists()


def test_tools_are_found_on_the_path(stub) -> None:
    path = stub("nsys")
    assert ncu.find_tool("nsys") == str(path)


def test_nsys(stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stub("nsys")
    out = tmp_path / "out" / "case"
    arguments = ["sdpa-flash", "S1k", "--timeline", "nsys", "--out", str(out)]
    assert profile.main(arguments) == 0
    assert capsys.readouterr().out == f"{out}.nsys-rep\n"
    assert [path.name for path in out.parent.iterdir()] == ["case.nsys-rep"]
    argv = json.loads(path.with_suffix(".argv").read_text())
    assert argv[:2] == ["profile", "--trace=cuda,nvtx"]
    program = argv[argv.index("-m") - 1 :]
    assert program[:4] == [sys.executable, "-m", "bench.profile", "--only-run"]
    again = profile.parser().parse_args(program[3:])
    assert (again.provider, again.seqlen) == ("sdpa-flash", 1024)
    stub("nsys", said="no driver", code=1)
    (out.parent / "case.nsys-rep").unlink()
    assert profile.main(arguments) == 1
    assert "no profile: nsys ended with 1:\nno driver" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    stub("nsys", writes=False)
    assert profile.main(arguments) == 1
    assert "nsys wrote no report" in capsys.readouterr().err


def test_only_run_opens_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    cell = replace(CELL, B=1, Hq=1, Hk=1, Sq=8, Sk=8, D=8, Dv=8, dtype="float32")
    recorded = torch.cuda.nvtx.range(ncu.RANGE)
    profile.run_case(cell, "plain", torch.device("cpu"), recorded)
    assert seen == [ncu.RANGE, "pop"]


@pytest.mark.parametrize("provider", ["flash_ext", "plain"])
def test_timeline_by_torch(
    provider: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "case"
    case = [provider, "both", "D16", "S48", "float32", "--tokens", "96", "--hidden", "32"]
    where = ["--timeline", "torch", "--device", "cpu", "--out", str(out)]
    assert profile.main([*case, *where]) == 0
    assert capsys.readouterr().out == f"{out}.json\n"
    assert [path.name for path in out.parent.iterdir()] == ["case.json"]
    events = json.loads(out.with_suffix(".json").read_text())["traceEvents"]
    (whole,) = (event for event in events if event.get("name") == ncu.RANGE)
    names = {e["name"] for e in events if e.get("cat") == "cpu_op"
             and whole["ts"] <= e["ts"] <= whole["ts"] + whole["dur"]}  # fmt: skip
    assert len(names) > 1
    if provider == "flash_ext":
        assert {"flash_ext::forward", "flash_ext::backward"} <= names


def measured(ns: float, read: float, busy: float, name: str = "flash_forward") -> Kernel:
    return kernel(name, **{ncu.TIME: ns, ncu.DRAM_READ: read, ncu.DRAM_WRITTEN: 1e6,
                           ncu.TENSOR_BUSY: busy})  # fmt: skip


def test_points_of_a_roofline() -> None:
    """Two kernels share a case's FLOPs as three to one; one without tensor cores has none."""
    kernels = [measured(1e6, 9e6, 60.0), measured(5e5, 1e6, 40.0), measured(1e6, 1e6, 0.0)]
    first, second = roofline.points(kernels)
    assert first.intensity == pytest.approx(0.75 * CELL.flops / 1e7)
    assert first.tflops == pytest.approx(0.75 * CELL.flops / 1e-3 / 1e12)
    assert second.intensity == pytest.approx(0.25 * CELL.flops / 2e6)
    roofs = roofline.ROOFS["NVIDIA H200"]
    assert roofs.at(1.0) == 4.66
    assert roofs.at(1e6) == 868.0
    assert roofs.tensor["mma.sync, two thirds of it"] == pytest.approx(868 * 2 / 3, rel=1e-3)
    with pytest.raises(ValueError, match="none of 1 kernels has DRAM bytes and a busy tensor pipe"):
        roofline.points(kernels[2:])


def test_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "a.csv", tmp_path / "plots" / "roofline.png"
    h200 = replace(ENVIRONMENT, card="NVIDIA H200")
    idle = measured(1e6, 1e6, 0.0, "other")
    kernels = [replace(k, environment=h200) for k in (measured(1e6, 9e6, 60.0), idle)]
    ncu.write_kernels(source, kernels)
    assert roofline.main([str(source), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.endswith(f"{out}\n")
    share = f"{100 * CELL.flops / 1e-3 / 1e12 / 868:.0f} %"
    assert lines(printed)[2][-4:] == ["flash_forward", f"{CELL.flops / 1e7:,.0f}",
                                      f"{CELL.flops / 1e9:.0f}", share]  # fmt: skip
    assert "other" not in printed

    other = tmp_path / "b.csv"
    ncu.write_kernels(other, [measured(1e6, 9e6, 60.0)])
    assert roofline.main([str(other), "--out", str(out), "--roofs", "300", "2"]) == 0
    for arguments, said in (
        ([str(other)], "no measured roofs of A card, with a comma, expected NVIDIA H200, or --roo"),
        ([str(source), str(other)], "kernels of 2 cards, expected one"),
        ([str(other), "--roofs", "0", "2"], "--roofs: got"),
        ([str(tmp_path / "none.csv")], "No such file"),
    ):
        out.unlink(missing_ok=True)
        with pytest.raises(SystemExit):
            roofline.main([*arguments, "--out", str(out)])
        assert said in capsys.readouterr().err
        assert not out.exists()
