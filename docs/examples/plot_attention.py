"""Draw what the example GPT looks at: train it for a moment, then show rows of its attention.

    python docs/examples/plot_attention.py                       # build/attention.png
    python docs/examples/plot_attention.py --layer 2 --steps 600

FlashAttention never holds the table of probabilities; `flash_ext.attention_map` computes the rows
that are asked for, exactly, from q, k and the lse of the call. The model is that of train_gpt.py,
the text shown is the last part of its training text. Needs tqdm and matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import flash_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_gpt import CPU, GPT, GPU, Block, Config, standard_library_text, train

SHOWN = 48  # bytes of text on the axes


class Recorder:
    """Attention that keeps q, k and lse of its last call."""

    q: Tensor  # (B, S, H, D)
    k: Tensor  # (B, S, H, D)
    lse: Tensor  # (B, H, S)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, self.lse = flash_ext.attention(q, k, v, causal=True, return_lse=True)
        self.q, self.k = q, k
        return out

    def rows(self, rows: slice) -> Tensor:
        """(heads, rows, S) of the first batch entry."""
        return flash_ext.attention_map(self.q, self.k, rows=rows, lse=self.lse, causal=True)[0]


@torch.no_grad()
def look(model: GPT, layer: int, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Probabilities of the last SHOWN queries over the last SHOWN keys, (heads, SHOWN, SHOWN)."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    recorder, before = Recorder(), block.attention
    block.attention = recorder
    try:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            model(tokens)
    finally:
        block.attention = before
    return recorder.rows(slice(-SHOWN, None))[..., -SHOWN:]


def plot(table: Tensor, text: bytes, title: str, path: Path) -> None:
    """A panel a head, brighter where a query looks."""
    from matplotlib.figure import Figure

    heads = len(table)
    columns = min(heads, 4)
    rows = -(-heads // columns)
    figure = Figure(figsize=(4.5 * columns, 4.8 * rows), layout="constrained")
    letters = [chr(byte) if 32 < byte < 127 else "·" for byte in text]
    for head, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        if head >= heads:
            axes.set_axis_off()
            continue
        axes.imshow(table[head].sqrt().cpu().numpy(), cmap="magma", vmin=0, vmax=1)
        axes.set_title(f"head {head}", fontsize=10)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(letters)), letters, fontsize=5, fontfamily="monospace")
        axes.tick_params(length=0)
        axes.set(xlabel="key", ylabel="query")
    figure.suptitle(f"{title}; brightness is the square root of the probability", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--steps", type=int, help=f"default {CPU.steps} on CPU, {GPU.steps} on GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is a GPU, else cpu")
    parser.add_argument("--out", type=Path, default=Path("build/attention.png"))
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, not {options.steps}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, look, draw."""
    options = arguments(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    config = GPU if on_gpu else CPU
    if not 0 <= options.layer < config.layers:
        raise SystemExit(f"--layer must be one of 0 to {config.layers - 1}, not {options.layer}")
    if options.steps is not None:
        config = Config(**{**vars(config), "steps": options.steps})
    dtype = torch.bfloat16 if on_gpu else torch.float32
    text = standard_library_text()
    run = train("flash_ext", config, text, seed=options.seed, device=device, dtype=dtype)
    tokens = text[-config.seqlen :].long()[None].to(device)  # (1, S)
    table = look(run.model, options.layer, tokens, dtype)
    title = f"layer {options.layer} after {config.steps} steps, loss {run.losses[-1]:.2f}"
    plot(table, bytes(text[-SHOWN:].tolist()), title, options.out)
    print(f"attention of {title}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
