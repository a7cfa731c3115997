"""Attention with the whole table of scores, in any precision: the oracle and the yardsticks.

Softmax is written out and differentiated by autograd, independently of the tiled algorithm. A
column of sinks (-inf without sinks) joins the table. For a row that sees no key the column is 0,
so it takes all of the weight: out and every gradient are exactly 0 without a special case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flash_ext.philox import keep_mask, keep_scale
from flash_ext.testing.cases import Inputs

TABLE_ELEMENTS = 2**25  # scores held at a time
MINUS_INF = float("-inf")


@dataclass
class Result:
    """Values and floors by name: out, lse, dq, dk, dv, dbias, dsinks. Heads before sequence.

    Values are (B, H, S, D), lse (B, Hq, Sq, 1), dbias padded to four dims, dsinks (1, Hq, 1, 1).
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    floors: dict[str, Tensor] = field(default_factory=dict)  # per row, last dim 1; oracle only
    noise: float = (
        0.0  # error of a row's scores if they were rounded to the input dtype; oracle only
    )


def oracle(inputs: Inputs) -> Result:
    """Softmax attention in fp64 from the inputs as they are, gradients, and each row's floor."""
    result = _whole_table(inputs, torch.float64, scale_on_k=False)
    _add_floors(inputs, result)
    return result


def lowp(inputs: Inputs, rounding: str = "plain") -> Result:
    """A yardstick: plain PyTorch in the inputs' dtype, or "tiled", rounding as a kernel does.

    The plain run puts the scale on k, not on q, so that even in fp64 it differs from the oracle by
    rounding. lse is that of plain PyTorch in fp32 (fp64 for fp64), in which kernels hold scores.
    """
    if rounding == "tiled":
        return _tiled_rounding(inputs)
    dtype = inputs.q.dtype
    result = _whole_table(inputs, dtype, scale_on_k=True)
    if dtype != accumulator(dtype):
        forward_only = replace(inputs, dout=None, dlse=None)
        single = _whole_table(forward_only, accumulator(dtype), scale_on_k=True)
        result.values["lse"] = single.values["lse"]
    return result


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What scores are computed in, and lse returned in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit(dtype: torch.dtype) -> float:
    """Half the dtype's eps; 16 times that for fp32 and fp64, where only summation order differs."""
    return torch.finfo(dtype).eps / 2 * (16 if dtype == accumulator(dtype) else 1)


def heads_first(x: Tensor, inputs: Inputs) -> Tensor:
    """(B, H, S, D) view of a tensor in the layout of the inputs."""
    return x if inputs.layout == "bhsd" else x.transpose(1, 2)


@dataclass
class _Chunk:
    """Some batch entries and key heads, with the query heads that belong to them."""

    batch: slice
    heads_q: slice
    heads_k: slice

    def of_q(self, x: Tensor) -> Tensor:
        """The chunk of what is (B|1, Hq|1, ...)."""
        x = x if x.shape[0] == 1 else x[self.batch]
        return x if x.shape[1] == 1 else x[:, self.heads_q]

    def of_k(self, x: Tensor) -> Tensor:
        return x[self.batch, self.heads_k]


class _Problem:
    """The inputs heads first, cut into chunks whose table of scores fits in memory."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        private = inputs.private()
        self.scale: float = private["softmax_scale"]
        self.left: int = private["window_left"]
        self.right: int = private["window_right"]
        self.q, self.k, self.v = (heads_first(x, inputs).detach() for x in _qkv(inputs))
        self.batch, self.heads_q, self.seqlen_q, _ = self.q.shape
        self.heads_k, self.seqlen_k = self.k.shape[1:3]
        self.group = self.heads_q // self.heads_k if self.heads_k else 1
        bias = inputs.attn_bias
        self.bias = None if bias is None else bias.detach()[(None,) * (4 - bias.dim())]
        slopes = inputs.alibi_slopes
        self.slopes = None if slopes is None else slopes[(None,) * (2 - slopes.dim())]
        self.dout = None if inputs.dout is None else heads_first(inputs.dout, inputs)

    def chunks(self) -> Iterator[_Chunk]:
        table = max(1, self.group * self.seqlen_q * self.seqlen_k)
        heads = max(1, min(self.heads_k, TABLE_ELEMENTS // table))
        batches = max(1, TABLE_ELEMENTS // (table * max(1, self.heads_k)))
        for b in range(0, self.batch, batches):
            for h in range(0, self.heads_k, heads):
                stop = min(h + heads, self.heads_k)
                query_heads = slice(h * self.group, stop * self.group)
                yield _Chunk(slice(b, min(b + batches, self.batch)), query_heads, slice(h, stop))

    def distance(self) -> Tensor:
        """Key position less query position, (Sq, Sk)."""
        device = self.q.device
        queries = torch.arange(self.seqlen_q, device=device) + self.seqlen_k - self.seqlen_q
        return torch.arange(self.seqlen_k, device=device) - queries[:, None]

    def hidden(self, chunk: _Chunk) -> Tensor:
        """What is masked, bool (b|1, h|1, Sq, Sk)."""
        distance = self.distance()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.right >= 0:
            hidden |= distance > self.right
        if self.left >= 0:
            hidden |= distance < -self.left
        hidden = hidden[None, None]
        if self.bias is not None:
            bias = chunk.of_q(self.bias)
            hidden = hidden | (~bias if bias.dtype == torch.bool else bias == MINUS_INF)
        return hidden

    def dropout_factor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor | None:
        """(b, h, Sq, Sk): 0 or 1 / (1 - p)."""
        seed, dropout_p = self.inputs.seed, self.inputs.dropout_p
        if dropout_p == 0 or seed is None:
            return None
        heads = slice(chunk.batch.start * self.heads_q, chunk.batch.stop * self.heads_q)
        rows, cols = slice(0, self.seqlen_q), slice(0, self.seqlen_k)
        keep = keep_mask(seed, heads, rows, cols, dropout_p).unflatten(0, (-1, self.heads_q))
        return keep[:, chunk.heads_q].to(dtype) * keep_scale(dropout_p)


def _qkv(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.q, inputs.k, inputs.v


def _scores(
    problem: _Problem, chunk: _Chunk, q: Tensor, k: Tensor, bias: Tensor | None, scale_on_k: bool
) -> tuple[Tensor, Tensor]:
    """Scores before masking and their soft cap slope's argument, both (b, h, Sq, Sk)."""
    scale, softcap = problem.scale, problem.inputs.softcap
    raw = q @ (k * scale).mT if scale_on_k else (q * scale) @ k.mT
    s = softcap * torch.tanh(raw / softcap) if softcap > 0 else raw
    if problem.slopes is not None:
        slopes = chunk.of_q(problem.slopes).to(q.dtype)[..., None, None]
        s = s - slopes * problem.distance().abs().to(q.dtype)
    if bias is not None:
        s = s + bias
    return s, raw


def _whole_table(inputs: Inputs, dtype: torch.dtype, scale_on_k: bool) -> Result:
    """Attention and gradients in one dtype by autograd, chunk after chunk."""
    problem = _Problem(inputs)
    backward = problem.dout is not None
    q, k, v = (x.to(dtype).requires_grad_(backward) for x in (problem.q, problem.k, problem.v))
    bias = sinks = None
    if problem.bias is not None and problem.bias.is_floating_point():
        bias = problem.bias.to(dtype).requires_grad_(backward)
    if inputs.sinks is not None:
        sinks = inputs.sinks.detach().to(dtype)[None, :, None, None].requires_grad_(backward)

    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty((*q.shape[:3], 1))
    for chunk in problem.chunks():
        group = problem.group
        k_c, v_c = (chunk.of_k(x).repeat_interleave(group, 1) for x in (k, v))
        bias_c = None if bias is None else chunk.of_q(bias)
        s, _ = _scores(problem, chunk, chunk.of_q(q), k_c, bias_c, scale_on_k)
        hidden = problem.hidden(chunk).expand(s.shape)
        s = s.masked_fill(hidden, MINUS_INF)
        column = s.new_full((*s.shape[:3], 1), MINUS_INF)
        if sinks is not None:
            column = chunk.of_q(sinks).expand_as(column)
        empty = hidden.all(-1, keepdim=True) & (column == MINUS_INF)
        s = torch.cat((s, column.masked_fill(empty, 0)), -1)  # (b, h, Sq, Sk + 1)
        p = torch.softmax(s, -1)[..., :-1]
        factor = problem.dropout_factor(chunk, dtype)
        out_c = (p if factor is None else p * factor) @ v_c
        lse_c = torch.logsumexp(s, -1, keepdim=True).masked_fill(empty, MINUS_INF)
        if problem.dout is not None:
            grads = [chunk.of_q(problem.dout).to(dtype), torch.zeros_like(lse_c)]
            if inputs.dlse is not None:
                grads[1] = chunk.of_q(inputs.dlse).to(dtype).unsqueeze(-1)
            torch.autograd.backward((out_c, lse_c), grads)
        chunk.of_q(out)[:], chunk.of_q(lse)[:] = out_c.detach(), lse_c.detach()

    values = {"out": out.detach(), "lse": lse.detach()}
    if backward:
        leaves = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": sinks}
        for name, leaf in leaves.items():
            if leaf is not None:
                values[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return Result(values)


@dataclass
class _Table:
    """One chunk in one dtype, keys expanded to query heads, no autograd."""

    q: Tensor  # (b, h, Sq, D)
    k: Tensor  # (b, h, Sk, D)
    v: Tensor  # (b, h, Sk, Dv)
    raw: Tensor  # scale * q.k, (b, h, Sq, Sk)
    scores: Tensor  # with every modifier, -inf where hidden
    cap_slope: Tensor | None
    dropout_factor: Tensor | None
    dout: Tensor | None  # (b, h, Sq, Dv)
    sinks: Tensor | None  # (1, h, 1, 1)

    @classmethod
    def of(cls, problem: _Problem, chunk: _Chunk, dtype: torch.dtype) -> _Table:
        inputs = problem.inputs
        q = chunk.of_q(problem.q).to(dtype)
        k, v = (
            chunk.of_k(x).to(dtype).repeat_interleave(problem.group, 1)
            for x in (problem.k, problem.v)
        )
        bias = None
        if problem.bias is not None and problem.bias.is_floating_point():
            bias = chunk.of_q(problem.bias).to(dtype)
        s, raw = _scores(problem, chunk, q, k, bias, scale_on_k=False)
        softcap = inputs.softcap
        sinks = inputs.sinks
        return cls(
            q=q,
            k=k,
            v=v,
            raw=raw,
            scores=s.masked_fill(problem.hidden(chunk), MINUS_INF),
            cap_slope=1 - torch.tanh(raw / softcap).square() if softcap > 0 else None,
            dropout_factor=problem.dropout_factor(chunk, dtype),
            dout=None if problem.dout is None else chunk.of_q(problem.dout).to(dtype),
            sinks=None if sinks is None else sinks[None, chunk.heads_q, None, None].to(dtype),
        )

    def probabilities(self, lse: Tensor) -> Tensor:
        """exp(scores - lse); 0 where hidden and in a row that sees no key."""
        return torch.exp(self.scores - lse.masked_fill(lse == MINUS_INF, 0))

    def sink_probabilities(self, lse: Tensor) -> Tensor:
        """exp(sink - lse), (b, h, Sq, 1), 0 in a row that lacks both keys and a sink."""
        assert self.sinks is not None
        return torch.exp(self.sinks - lse.masked_fill(lse == MINUS_INF, 0))

    def dropped(self, p: Tensor) -> Tensor:
        return p if self.dropout_factor is None else p * self.dropout_factor

    def before_cap(self, dscores: Tensor) -> Tensor:
        return dscores if self.cap_slope is None else dscores * self.cap_slope


def _by_key_head(x: Tensor, group: int) -> Tensor:
    """Sum over the query heads that share a key head."""
    return x.unflatten(1, (-1, group)).sum(2)


@torch.no_grad()
def _add_floors(inputs: Inputs, result: Result) -> None:
    """Floors of every value but the rounding of the value itself, and the noise of the scores."""
    problem, floors, exact = _Problem(inputs), result.floors, result.values
    dtype = inputs.q.dtype
    u, scale = unit(dtype), abs(problem.scale)
    order_only = u if dtype == accumulator(dtype) else 0.0  # where nothing is rounded on the way
    for name, value in exact.items():
        floors[name] = value.new_zeros((*value.shape[:-1], 1))
    dbias_sum = torch.zeros_like(exact["dbias"]) if "dbias" in exact else None

    for chunk in problem.chunks():
        table = _Table.of(problem, chunk, torch.float64)
        lse, out = chunk.of_q(exact["lse"]), chunk.of_q(exact["out"])
        p = table.probabilities(lse)
        score = torch.maximum(table.raw.abs(), table.scores.abs().nan_to_num(posinf=0))
        if p.numel():
            noise = (p * score).sum(-1).max().item() * torch.finfo(dtype).eps / 2
            result.noise = max(result.noise, noise)

        addends = scale * (table.q.abs() @ table.k.abs().mT)  # sum of |q||k| behind each score
        seen = addends.masked_fill_(table.scores == MINUS_INF, 0)
        largest = torch.cat((lse.abs().nan_to_num(posinf=0).clamp_min(1), seen), -1)
        lse_floor = unit(accumulator(dtype)) * largest.amax(-1, keepdim=True)
        chunk.of_q(floors["lse"])[:] = lse_floor
        chunk.of_q(floors["out"])[:] = order_only * (p @ table.v.abs()).amax(-1, keepdim=True)
        if table.dout is None:
            continue

        dp = table.dropped(table.dout @ table.v.mT)
        delta = (table.dout * out).abs().sum(-1, keepdim=True)
        dbias = p * (dp.abs() + delta)  # (b, h, Sq, Sk)
        ds = scale * table.before_cap(dbias)
        dk = _by_key_head(ds.mT @ table.q.abs(), problem.group)
        dv = _by_key_head(table.dropped(p).mT @ table.dout.abs(), problem.group)
        chunk.of_q(floors["dq"])[:] = u * (ds @ table.k.abs()).amax(-1, keepdim=True)
        chunk.of_k(floors["dk"])[:] = u * dk.amax(-1, keepdim=True)
        chunk.of_k(floors["dv"])[:] = order_only * dv.amax(-1, keepdim=True)
        if dbias_sum is not None:
            tile = chunk.of_q(dbias_sum)
            tile += dbias.sum_to_size(tile.shape)
        if "dsinks" in floors:
            dsinks = table.sink_probabilities(lse) * delta
            chunk.of_q(floors["dsinks"])[:] += u * dsinks.sum((0, 2), keepdim=True)
    if dbias_sum is not None and dbias_sum.numel():
        floors["dbias"] = u * dbias_sum.amax(-1, keepdim=True)


@torch.no_grad()
def _tiled_rounding(inputs: Inputs) -> Result:
    """Attention that rounds P, dS and the results to the inputs' dtype, and nothing else."""
    problem = _Problem(inputs)
    dtype = inputs.q.dtype
    wide = accumulator(dtype)
    values = {
        "out": problem.q.new_empty((*problem.q.shape[:3], problem.v.shape[-1]), dtype=wide),
        "lse": problem.q.new_empty((*problem.q.shape[:3], 1), dtype=wide),
    }
    if problem.dout is not None:
        values |= {"dq": torch.zeros_like(problem.q, dtype=wide)}
        values |= {"dk": torch.zeros_like(problem.k, dtype=wide)}
        values |= {"dv": torch.zeros_like(problem.v, dtype=wide)}
        if problem.bias is not None and problem.bias.is_floating_point():
            values["dbias"] = torch.zeros_like(problem.bias, dtype=wide)
        if inputs.sinks is not None:
            values["dsinks"] = torch.zeros_like(inputs.sinks, dtype=wide)[None, :, None, None]

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    for chunk in problem.chunks():
        table = _Table.of(problem, chunk, wide)
        column = table.raw.new_full((*table.raw.shape[:3], 1), MINUS_INF)
        if table.sinks is not None:
            column = table.sinks.expand_as(column)
        everything = torch.cat((table.scores, column), -1)
        maximum = everything.amax(-1, keepdim=True)
        finite_maximum = maximum.masked_fill(maximum == MINUS_INF, 0)
        weights = torch.exp(everything - finite_maximum)
        total = weights.sum(-1, keepdim=True)
        lse = maximum + total.log()
        out = rounded(table.dropped(weights[..., :-1])) @ table.v / total.masked_fill(total == 0, 1)
        out = out.to(inputs.out_dtype or dtype).to(wide)
        chunk.of_q(values["out"])[:], chunk.of_q(values["lse"])[:] = out, lse
        if table.dout is None:
            continue

        p = table.probabilities(lse)
        delta = (table.dout * out).sum(-1, keepdim=True)
        if inputs.dlse is not None:
            delta -= chunk.of_q(inputs.dlse).unsqueeze(-1)
        dbias = p * (table.dropped(table.dout @ table.v.mT) - delta)
        ds = rounded(table.before_cap(dbias))
        dk = _by_key_head(ds.mT @ table.q, problem.group)
        dv = _by_key_head(rounded(table.dropped(p)).mT @ table.dout, problem.group)
        chunk.of_q(values["dq"])[:] = rounded(ds @ table.k * problem.scale)
        chunk.of_k(values["dk"])[:] = rounded(dk * problem.scale)
        chunk.of_k(values["dv"])[:] = rounded(dv)
        if "dbias" in values:
            tile = chunk.of_q(values["dbias"])
            tile += dbias.sum_to_size(tile.shape)
        if "dsinks" in values:
            dsinks = -table.sink_probabilities(lse) * delta
            chunk.of_q(values["dsinks"])[:] += dsinks.sum((0, 2), keepdim=True)
    for name, tensor in (("dbias", inputs.attn_bias), ("dsinks", inputs.sinks)):
        if name in values and tensor is not None:
            values[name] = values[name].to(tensor.dtype).to(wide)
    return Result(values)
