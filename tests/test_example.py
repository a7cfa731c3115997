"""docs/examples/train_gpt.py: it trains through flash_ext, and as PyTorch's attention does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flash_ext

PATH = Path(__file__).resolve().parents[1] / "docs" / "examples" / "train_gpt.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example with a model of a few thousand parameters for the CPU."""
    pytest.importorskip("tqdm")
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_gpt", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    small = module.Config(
        layers=2, heads=2, head_dim=16, seqlen=96, batch=4, steps=30, learning_rate=3e-3
    )
    monkeypatch.setattr(module, "CPU", small)
    return module


def train(example: ModuleType, **changes: object):  # type: ignore[no-untyped-def]
    arguments = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float32, **changes}
    name = arguments.pop("name", "flash_ext")
    text = example.standard_library_text(2**18)
    return example.train(name, example.CPU, text, **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_agree_with_sdpa(
    dtype: str, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "loss.png"
    steps = example.AGREEMENT[dtype][1] if dtype == "float32" else 30
    code = example.main(
        f"--compare --device cpu --dtype {dtype} --steps {steps} --plot {picture}".split()
    )
    text = capsys.readouterr().out
    assert code == 0, text
    assert "max |delta loss| per step" in text
    assert text.count("tokens/s") == 2
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_attention_is_noticed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def scaled(q, k, v):  # type: ignore[no-untyped-def]
        return flash_ext.attention(q, k, v, causal=True, softmax_scale=0.3)

    monkeypatch.setitem(example.ATTENTIONS, "sdpa", scaled)
    argv = ["--compare", "--device", "cpu", "--steps", "30", "--plot", str(tmp_path / "loss.png")]
    assert example.main(argv) == 1


def test_it_learns_through_flash_ext(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attention = flash_ext.attention

    def counted(q, k, v, **arguments):  # type: ignore[no-untyped-def]
        calls.append(q.requires_grad)
        return attention(q, k, v, **arguments)

    monkeypatch.setattr(flash_ext, "attention", counted)
    run = train(example)
    assert len(run.losses) == 30
    assert run.losses[-1] < run.losses[0] - 1
    assert calls == [True] * (30 * example.CPU.layers)
    assert run.tokens_per_second > 0
    assert run.peak_bytes is None


def test_seed_decides_everything(example: ModuleType) -> None:
    first, second, other = train(example), train(example), train(example, seed=1)
    assert first.losses == second.losses
    assert first.losses != other.losses


def test_text_is_the_same_every_time(example: ModuleType) -> None:
    text = example.standard_library_text()
    assert text.dtype == torch.uint8
    assert len(text) > 2**20
    assert torch.equal(text, example.standard_library_text())
    assert b"import" in bytes(text[:100_000].tolist())


def test_without_matplotlib(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "loss.png"
    assert example.main(["--device", "cpu", "--steps", "1", "--plot", str(picture)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not picture.exists()


@pytest.mark.parametrize(
    ("argument", "named"),
    [("--steps 0", "--steps"), ("--attention flash", "--attention"), ("--dtype int8", "--dtype")],
)
def test_bad_arguments_are_named(
    argument: str, named: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(argument.split())
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.gpu
def test_losses_agree_on_the_gpu(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = example.AGREEMENT["bfloat16"][1]
    code = example.main(f"--compare --steps {steps} --plot {tmp_path / 'loss.png'}".split())
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.count("MiB") == 2


def test_map_of_the_trained_model(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plot_attention.py draws rows that sum to 1 and look back only."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location(
        "plot_attention", PATH.with_name("plot_attention.py")
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(script)

    model = train(example).model
    tokens = example.standard_library_text(96).long()[None]
    expected = model(tokens)
    table = script.look(model, 1, tokens, torch.float32)
    assert table.shape == (2, 48, 48)
    assert not table.triu(1).any()
    assert bool((table.sum(-1) <= 1 + 1e-5).all())
    torch.testing.assert_close(model(tokens), expected)  # the recorder is gone again

    script.plot(table, bytes(tokens[0, -48:].tolist()), "a title", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="--layer must be one of 0 to 1, not 2"):
        script.main(["--layer", "2", "--device", "cpu"])
