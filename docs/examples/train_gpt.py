"""Train a small byte-level GPT on the Python standard library's own source.

    python docs/examples/train_gpt.py                    # flash_ext.attention
    python docs/examples/train_gpt.py --attention sdpa   # PyTorch's, all else equal
    python docs/examples/train_gpt.py --compare          # both, and how far their losses differ

The text is on every machine that can run this file, so nothing is downloaded. Forward and backward
of every layer go through the chosen attention; model, batches and optimizer depend on --seed alone.
Needs tqdm; draws the loss curve when matplotlib is installed.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import flash_ext

VOCABULARY = 256  # one token a byte
TEXT_BYTES = 4 * 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Largest |loss difference| allowed between two attentions, and over how many first steps.
AGREEMENT = {"float32": (1e-4, 50), "bfloat16": (0.02, 200)}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training. Tokens a step: batch * seqlen."""

    layers: int
    heads: int
    head_dim: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float
    warmup: int = 20

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


CPU = Config(layers=3, heads=4, head_dim=32, seqlen=256, batch=8, steps=300, learning_rate=2e-3)
GPU = Config(layers=8, heads=8, head_dim=64, seqlen=1024, batch=16, steps=300, learning_rate=5e-4)


def flash_ext_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, S, H, D) tensors through flash_ext."""
    return flash_ext.attention(q, k, v, causal=True)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same through PyTorch, which wants heads before sequence."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864, section 3.2) of x (B, S, H, D)."""
    positions = torch.arange(x.shape[1], device=x.device)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, device=x.device)
    angles = (positions[:, None] * frequencies)[:, None]  # (S, 1, D / 2)
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, Attention] = {"flash_ext": flash_ext_attention, "sdpa": sdpa_attention}


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        width = config.width
        self.attention, self.heads, self.head_dim = attention, config.heads, config.head_dim
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, S, width)
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, self.head_dim))
        q, k, v = qkv.unbind(dim=2)  # (B, S, H, D) each
        x = x + self.project(self.attention(rotate(q), rotate(k), v).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.Sequential(*(Block(config, attention) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, VOCABULARY)
        return self.head(self.norm(self.blocks(self.token(tokens))))


def standard_library_text(limit: int = TEXT_BYTES) -> Tensor:
    """The first `limit` bytes of the standard library's modules, in order of name, as uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:limit]
    if not text:
        raise SystemExit("found no standard library source beside this Python")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class Run:
    """What one training left behind."""

    losses: list[float]  # one a step, nats per byte
    tokens_per_second: float
    peak_bytes: int | None  # device memory, None on CPU
    model: GPT


def train(
    name: str, config: Config, text: Tensor, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Run:
    """Train from scratch with the attention called `name`; equal seeds see equal batches."""
    torch.manual_seed(seed)
    model = GPT(config, ATTENTIONS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / config.warmup)
    )
    text = text.to(device)
    window = torch.arange(config.seqlen + 1, device=device)
    batches = torch.Generator().manual_seed(seed)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)

    losses: list[Tensor] = []
    untimed = min(5, config.steps - 1)  # first steps load kernels and warm caches
    started = time.perf_counter()
    progress = tqdm(range(config.steps), desc=f"{name:>9}", unit="step", mininterval=1.0)
    for step in progress:
        if step == untimed:
            if on_gpu:
                torch.cuda.synchronize(device)
            started = time.perf_counter()
        starts = torch.randint(len(text) - config.seqlen, (config.batch, 1), generator=batches)
        tokens = text[starts.to(device) + window].long()  # (B, S + 1)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 10 == 0 or step == config.steps - 1:  # reading the loss waits for the device
            progress.set_postfix(loss=f"{loss.item():.3f}")
    seconds = time.perf_counter() - started
    return Run(
        losses=torch.stack(losses).tolist(),
        tokens_per_second=(config.steps - untimed) * config.batch * config.seqlen / seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        model=model,
    )


def report(name: str, run: Run) -> str:
    """One line: loss, speed, memory."""
    loss = run.losses[-1]
    line = f"{name:>9}: loss {run.losses[0]:.3f} -> {loss:.3f} ({loss / math.log(2):.2f} bits/byte)"
    line += f", {run.tokens_per_second:,.0f} tokens/s"
    return line if run.peak_bytes is None else f"{line}, peak {run.peak_bytes / 2**20:,.0f} MiB"


def compare(runs: dict[str, Run], dtype: str) -> bool:
    """Print how far the two loss curves are apart, and whether that is within bounds."""
    first, second = (run.losses for run in runs.values())
    limit, steps = AGREEMENT[dtype]
    deltas = [abs(a - b) for a, b in zip(first, second, strict=True)]
    worst, checked = max(deltas), max(deltas[:steps])
    print(f"max |delta loss| per step: {worst:.2e} over {len(deltas)} steps")
    verdict = "within" if checked <= limit else "ABOVE"
    print(f"  first {min(steps, len(deltas))}: {checked:.2e}, {verdict} the limit of {limit:g}")
    return checked <= limit


def plot(runs: dict[str, Run], path: Path) -> None:
    """Draw the loss curves, if matplotlib is there to do it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no loss plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT on stdlib source")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"loss plot: {path}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attention", choices=ATTENTIONS, default="flash_ext")
    parser.add_argument("--compare", action="store_true", help="train with both, one by one")
    parser.add_argument("--steps", type=int, help=f"default {CPU.steps} on CPU, {GPU.steps} on GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on GPU, else float32")
    parser.add_argument("--plot", type=Path, default=Path("build/train_gpt.png"))
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, not {options.steps}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, plot; 1 if --compare found the losses too far apart."""
    options = arguments(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    config = GPU if on_gpu else CPU
    if options.steps is not None:
        config = Config(**{**vars(config), "steps": options.steps})
    names = list(ATTENTIONS) if options.compare else [options.attention]

    text = standard_library_text()
    print(f"{len(text):,} bytes of text; {config}; {dtype} on {device}")
    runs = {}
    for name in names:
        runs[name] = train(
            name, config, text, seed=options.seed, device=device, dtype=DTYPES[dtype]
        )
    for name, run in runs.items():
        print(report(name, run))
    plot(runs, options.plot)
    return 0 if not options.compare or compare(runs, dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
