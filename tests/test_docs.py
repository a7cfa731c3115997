"""The documentation says what is true: links, commands, examples, names, and the API page."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flash_ext
from flash_ext import dispatch, flash_attn, ops
from flash_ext.dispatch import Hardware

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(text: str, language: str) -> list[str]:
    """Fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The page without fenced code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def names_in_code(text: str) -> set[str]:
    """What stands in backticks in the prose."""
    return set(re.findall(r"`([^`\n]+)`", prose(text)))


def script(name: str) -> ModuleType:
    """A script of docs as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def generator() -> ModuleType:
    return script("generate_api")


@each_page
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), target


@each_page
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    code = [*blocks(text, "sh"), *names_in_code(text)]
    named = {name for part in code for name in re.findall(r"^make ([\w-]+)", part, re.MULTILINE)}
    assert named <= targets
    if page.name == "README.md":
        assert {"demo", "test"} <= named


@pytest.mark.parametrize(
    "code", blocks(README, "python"), ids=lambda code: code.split("\n")[3][:30]
)
def test_readme_examples_run(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(compile(code, "README.md", "exec"), {})


def test_readme_first_screen_has_an_example() -> None:
    assert README.index("```python") < README.index("## What is supported")


@each_page
def test_files_and_variables_exist(page: Path) -> None:
    """Files, environment variables and functions of the package that the prose names."""
    names = names_in_code(page.read_text(encoding="utf-8"))
    sources = [*ROOT.glob("*.py"), *(ROOT / "flash_ext").rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    for name in names:
        if re.fullmatch(r"[\w./-]+\.(py|h|cuh|cu|cpp|md|toml)", name):
            assert any(ROOT.glob(f"**/{name}")), f"{page.name} names {name}"
        for variable in re.findall(r"\bFLASH_EXT_\w+", name):
            assert variable in code, f"{page.name} names {variable}"
        for attribute in re.findall(r"^flash_ext((?:\.\w+)+)", name):
            found = flash_ext
            for part in attribute.strip(".").split("."):
                assert hasattr(found, part) or importlib.util.find_spec(
                    f"{found.__name__}.{part}"
                ), f"{page.name} names {name}"
                found = getattr(found, part, None) or importlib.import_module(
                    f"{found.__name__}.{part}"
                )


def test_requirements_are_those_of_the_build() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    python = re.findall(r'requires-python = ">=([\d.]+)"', project)[0]
    torch_version = re.findall(r'"torch>=([\d.]+)"', project)[0]
    major, minor = re.findall(r"OLDEST_NVCC = \((\d+), (\d+)\)", setup)[0]
    for claim in (
        f"Python ≥ {python}",
        f"PyTorch ≥ {torch_version}",
        f"`nvcc` (≥ {major}.{minor})",
    ):
        assert claim in README


def test_reason_for_no_torch_header_is_the_same_in_both() -> None:
    """One paragraph, in the README and in the design page."""
    start, end = "The compiled extension includes no torch header", "cannot call them."
    first, second = (
        " ".join(text[text.index(start) : text.index(end)].split()) for text in (README, DESIGN)
    )
    assert first == second


def test_tested_on_hardware_means_recorded() -> None:
    """A row of the support table may say so only of GPUs that the record names."""
    record = ROOT / "tests" / "gpu_record.json"
    recorded = record.read_text(encoding="utf-8") if record.exists() else ""
    for row in re.findall(r"^\|.*tested on hardware.*$", README, flags=re.MULTILINE):
        gpu = re.findall(r"tested on hardware \(([^)]+)\)", row)
        assert gpu, f"name the GPU: 'tested on hardware (H200)': {row}"
        assert gpu[0] in recorded, f"{gpu[0]} is not in tests/gpu_record.json"


def test_support_table_is_that_of_the_kernels() -> None:
    """Largest head dim of each pass on each compute capability, for a build of everything."""
    kernels = ops.compiled_kernels()
    instances = (ROOT / "csrc" / "sm80" / "inst").glob("*_hdim*.cu")
    dims = {int(path.stem.split("_hdim")[1]) for path in instances}
    if not kernels or set(flash_ext.build_info().head_dims) != dims:
        pytest.skip("the table is of a build with all kernels")
    rows = re.findall(r"^\| (\d+\.\d.*?) \| up to (\d+) \| up to (\d+) \|", README, re.MULTILINE)
    assert len(rows) == 5

    def served(capability: tuple[int, int], head_dim: int) -> list[bool]:
        q = torch.empty(1, 1, 1, head_dim, dtype=torch.float16)
        problem = flash_ext.explain(q, q, q).problem
        archs = ("80", "90a", "80+PTX")
        plan = dispatch.plan(problem, kernels, archs, Hardware.absent(capability))
        return [plan.forward.kernel is not None, plan.backward.kernel is not None]

    for named, *claims in rows:
        for major, minor in re.findall(r"(\d+)\.(\d)", named):
            for index, head_dim in enumerate(map(int, claims)):
                capability = (int(major), int(minor))
                assert served(capability, head_dim)[index], f"{named}: {head_dim}"
                assert not served(capability, head_dim + 1)[index], f"{named}: {head_dim + 1}"


def test_changelog_starts_with_this_version() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changelog, flags=re.MULTILINE)[0] == flash_ext.__version__


def test_api_page_is_current() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == generator().page(), "run: python docs/generate_api.py"


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for package in (flash_ext, flash_ext.testing, flash_attn):
        documented = [n for n in package.__all__ if callable(getattr(package, n))]
        assert documented
        assert all(f"### `{name}`" in page for name in documented)


def test_stale_api_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = generator()
    monkeypatch.setattr(module, "PAGE", tmp_path / "api.md")
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    (tmp_path / "api.md").write_text("old")
    assert module.main(["--check"]) == 1
    assert "not current" in capsys.readouterr().err


def test_hopper_figure_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = script("hopper_timeline")
    assert timeline.main(["--check"]) == 0, "run: python docs/hopper_timeline.py"
    monkeypatch.setattr(timeline, "FIGURE", tmp_path / "figures" / "figure.svg")
    assert timeline.main(["--check"]) == 1
    assert timeline.main([]) == 0
    assert timeline.main(["--check"]) == 0


def test_hopper_budget_is_that_of_the_tiles() -> None:
    """The table of clocks has the tiles of config.h, and nothing else."""
    page = (ROOT / "docs" / "hopper.md").read_text(encoding="utf-8")
    section = page[page.index("### One key tile") : page.index("* tensor cores:")]
    table = [line for line in section.splitlines() if line.startswith("|")]
    lines = script("hopper_timeline").budget_lines()
    assert table[2:] == lines, "run: python docs/hopper_timeline.py, which prints the rows"


def test_hopper_budget_by_hand() -> None:
    """128 queries, 176 keys, D 128: 2816 clocks of products, half of that for exponentials."""
    tile = script("hopper_timeline").Tile(128, 128, 176, 2, 1)
    assert (tile.tensor_clocks, tile.exp_clocks, tile.smem_clocks) == (2816, 1408, 2368)
    assert (tile.issue_clocks, tile.l2_bytes) == (616, 32)


def test_hopper_model_keeps_its_rules() -> None:
    """One product at a time, softmax after its scores, as many loads as there are key tiles."""
    timeline = script("hopper_timeline")
    blocks = timeline.Model().run()
    for kinds, lanes in ((("QK", "PV"), ("products 0", "products 1")), (("load",), ("producer",))):
        busy = sorted((b.start, b.end) for b in blocks if b.kind in kinds)
        assert {b.lane for b in blocks if b.kind in kinds} == set(lanes)
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))
    keys = sum(timeline.KEY_TILES)
    count = {kind: sum(b.kind == kind for b in blocks) for kind in timeline.COLOURS}
    assert count == {
        "load": 2 * keys + 2, "QK": 2 * keys, "PV": 2 * keys, "softmax": 2 * keys,
        "finish": 4, "store": 4,
    }  # fmt: skip
    for consumer in range(2):
        scores = [b for b in blocks if b.lane == f"products {consumer}" and b.kind == "QK"]
        softmaxes = [b for b in blocks if b.lane == f"consumer {consumer}" and b.kind == "softmax"]
        assert all(s.end <= p.start for s, p in zip(scores, softmaxes, strict=True))
    (first, second) = (
        next(b for b in blocks if b.label == "Q" and b.tile == tile) for tile in (0, 1)
    )
    assert second.start < min(b.start for b in blocks if b.kind == "finish"), "Q is there early"
    assert first.start < second.start


def test_docstring_sections_become_lists() -> None:
    source = '''
def f(a: int, b: int) -> int:
    """Add.

        formula

    Args:
        a: one
            that goes on.
        b, c: others: here.

    Returns:
        The sum: always.
    """
'''
    node = ast.parse(source).body[0]
    text = generator().prose(node)
    assert "Add.\n\n    formula\n" in text
    assert "**Args**\n\n- `a`: one\n  that goes on.\n- `b, c`: others: here.\n" in text
    assert text.endswith("**Returns**\n\nThe sum: always.")
    assert generator().signature(source, node) == "def f(a: int, b: int) -> int"


def test_public_name_without_docstring_is_refused() -> None:
    with pytest.raises(SystemExit, match="no docstring"):
        generator().prose(ast.parse("def f(): ...").body[0])
