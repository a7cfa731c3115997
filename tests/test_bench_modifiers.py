"""The benchmark of modifiers on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_kit import CELL, ENVIRONMENT, TINY, without_tools

from bench import modifiers, schema, tables
from bench.modifiers import BACKWARD_ONLY, MODIFIERS, PLAIN, WINDOW
from bench.providers import Inputs, Pass, make_inputs
from bench.schema import Result, Row

SMALL = replace(CELL, dtype="float32", B=2, Hq=4, Hk=2, Sq=24, Sk=24, D=8, Dv=8)
CPU = torch.device("cpu")


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return without_tools(monkeypatch)


def columns(line: str) -> list[str]:
    return [word.strip() for word in line.split("|")[1:-1]]


def test_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    window = ["--window", "8", "--window-seqlens", "48", "96"]
    assert modifiers.main([*TINY, "--group", "2", *window, "--out", str(path)]) == 0
    rows = schema.read_csv(path)
    assert {(row.result.status, row.result.rounds) for row in rows} == {("ok", 2)}
    found: dict[tuple[str, str, int], list[str]] = {}
    for row in rows:
        key = (row.cell.pass_name, row.cell.mask, row.cell.Sq)
        found.setdefault(key, []).append(row.result.provider)
    both = [name for name in MODIFIERS if name not in BACKWARD_ONLY]
    for mask in schema.MASKS:
        assert found.pop(("forward", mask, 48)) == [PLAIN, *both]
        assert found.pop(("backward", mask, 48)) == [PLAIN, *MODIFIERS]
        for pass_name in modifiers.PASSES:
            assert found.pop((pass_name, mask, 96)) == [PLAIN, WINDOW]
    assert not found
    shown = capsys.readouterr().out
    assert "CPU, a dry run" in shown
    assert "| backward          |" in shown
    assert sum(line.startswith(("| forward  |  16", "| backward |  16"))
               for line in shown.splitlines()) == 8  # fmt: skip


def test_chosen_modifiers_and_no_more_lengths(tmp_path: Path, no_tool: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    chosen = ["--masks", "full", "--modifiers", "bias-grad-bh", "softcap"]
    assert modifiers.main([*TINY, *chosen, "--out", str(path)]) == 0  # without the window
    rows = schema.read_csv(path)
    assert [row.result.provider for row in rows] == [
        *(PLAIN, "softcap"),
        *(PLAIN, "softcap", "bias-grad-bh"),
    ]
    assert {row.cell.Sq for row in rows} == {48}


@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs(causal: bool) -> None:
    cell = replace(SMALL, causal=causal)
    rows, keys = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    plain = keys <= rows if causal else torch.ones(24, 24, dtype=torch.bool)
    for width in (1, 2, 7, 8, 24, 100):
        left, right = modifiers.window_limits(causal, width)
        assert left + 1 + right == width
        seen = plain & (keys >= rows - left) & (keys <= rows + right)
        assert modifiers.visible_share(cell, width) == int(seen.sum()) / int(plain.sum())


@pytest.mark.parametrize("name", MODIFIERS)
@pytest.mark.parametrize("causal", [False, True])
def test_each_modifier_is_in_force(name: str, causal: bool) -> None:
    """Each changes the result, except the one that must not; gradients are those it says."""
    x = make_inputs(replace(SMALL, causal=causal), CPU)
    options = MODIFIERS[name](x, 8)
    assert len(options) == 1
    plain = modifiers.prepare("forward", x, {})()["out"]
    call = modifiers.prepare("forward", x, options)
    found = call()["out"]
    assert not found.requires_grad
    assert torch.equal(found, plain) == (name == "deterministic")
    gradients = modifiers.prepare("backward", x, options)
    first, second = gradients(), gradients()  # the graph is kept
    extra = {"sinks": ["dsinks"]}.get(name, ["dattn_bias"] if name.startswith("bias-grad") else [])
    assert list(first) == list(second) == ["dq", "dk", "dv", *extra]
    assert not modifiers.not_finite(first)


def test_shapes_of_biases() -> None:
    x = make_inputs(SMALL, CPU)

    def made(name: str) -> Any:
        return MODIFIERS[name](x, 8)["attn_bias"]

    for name in ("bias-11", "bias-1h", "bias-grad-11", "bias-grad-1h", "bias-grad-bh"):
        shape = {"11": (1, 1), "1h": (1, 4), "bh": (2, 4)}[name[-2:]]
        assert made(name).shape == (*shape, 24, 24)
        assert made(name).dtype == x.q.dtype
        assert made(name).requires_grad == ("grad" in name)
    assert made("mask").dtype == torch.bool
    assert made("mask").shape == (1, 1, 24, 24)


def test_faults_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tool: pytest.MonkeyPatch
) -> None:
    prepare = modifiers.prepare

    def harmed(pass_name: str, x: Inputs, options: dict[str, Any]) -> Pass:
        if "softcap" in options:
            raise ValueError("no\nsuch thing")
        if "sinks" in options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        call = prepare(pass_name, x, options)
        if "dropout_p" in options:
            return lambda: {name: t * float("nan") for name, t in call().items()}
        return call

    no_tool.setattr(modifiers, "prepare", harmed)
    path = tmp_path / "a.csv"
    few = ["--passes", "forward", "--masks", "full", "--window-seqlens", "--out", str(path)]
    for names, code in ((["softcap"], 1), (["dropout", "alibi"], 1), (["sinks", "alibi"], 0)):
        assert modifiers.main([*TINY, *few, "--modifiers", *names]) == code
    statuses = {row.result.provider: row.result.status for row in schema.read_csv(path)}
    assert statuses == {PLAIN: "ok", "alibi": "ok", "sinks": "unavailable"}
    shown = capsys.readouterr().out
    assert "* softcap, failed in forward D16 full S48: ValueError: no\n" in shown
    assert "* dropout, wrong in forward D16 full S48: not finite: out\n" in shown
    assert f"* sinks, unavailable in forward D16 full S48: {tables.OUT_OF_MEMORY}" in shown


def test_tables_by_hand() -> None:
    def result(name: str, ms: float, tflops: float) -> Result:
        return Result(name, "ok", ms=ms, tflops=tflops)

    long = replace(CELL, Sq=16384, Sk=16384, B=1)
    rows = [
        Row(ENVIRONMENT, CELL, result(PLAIN, 1.0, 400.0)),
        Row(ENVIRONMENT, CELL, result("softcap", 1.25, 320.0)),
        Row(ENVIRONMENT, CELL, result(WINDOW, 0.275, 363.6363)),  # a quarter of the pairs
        Row(ENVIRONMENT, CELL, Result("sinks", "failed", "no")),
        Row(ENVIRONMENT, long, result(PLAIN, 4.0, 400.0)),
        Row(ENVIRONMENT, long, result(WINDOW, 0.3, 333.3333)),  # a sixteenth
    ]
    header, _, *lines = modifiers.costs_table(rows).splitlines()
    assert columns(header) == ["forward", "D128 full S4096", "D128 full S16384"]
    assert [columns(line) for line in lines] == [
        [PLAIN, "400 (1.00)", "400 (1.00)"],
        ["softcap", "320 (1.25)", "–"],
        ["sinks", "–", "–"],
        [WINDOW, "364 (1.10)", "333 (1.20)"],
    ]
    assert [columns(line) for line in modifiers.summary(rows).splitlines()[2:]] == [
        ["forward", "softcap", "1.250", "1.250", "D128 full S4096", "1"],
        ["forward", "window", "1.149", "1.200", "D128 full S16384", "2"],
    ]
    assert [columns(line)[6:] for line in modifiers.window_table(rows).splitlines()[2:]] == [
        ["1", "0.275", "0.250", "0.275", "1.100", "1.000"],
        ["4", "0.3", "0.062", "0.075", "1.200", "1.091"],
    ]
    failed = rows[3:4]
    assert modifiers.summary(failed) == modifiers.window_table(failed) == ""
