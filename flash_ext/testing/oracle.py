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

TABLE_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}  # scores taken at a time: cache, memory
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
        """The chunk of what is (B, Hk, ...)."""
        return x[self.batch, self.heads_k]

    def of(self, name: str, x: Tensor) -> Tensor:
        """The chunk of a value by its name."""
        return self.of_k(x) if name in ("dk", "dv") else self.of_q(x)


class _Problem:
    """The inputs heads first, cut into chunks whose table of scores fits in memory."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        private = inputs.private()
        self.scale: float = private["softmax_scale"]
        self.left: int = private["window_left"]
        self.right: int = private["window_right"]
        self.q, self.k, self.v = (
            heads_first(x, inputs).detach() for x in (inputs.q, inputs.k, inputs.v)
        )
        self.batch, self.heads_q, self.seqlen_q, _ = self.q.shape
        self.heads_k, self.seqlen_k = self.k.shape[1:3]
        self.group = self.heads_q // self.heads_k if self.heads_k else 1
        bias, sinks = inputs.attn_bias, inputs.sinks
        self.bias = None if bias is None else bias.detach()[(None,) * (4 - bias.dim())]
        self.sinks = None if sinks is None else sinks.detach()[None, :, None, None]
        slopes = inputs.alibi_slopes
        self.slopes = None if slopes is None else slopes[(None,) * (2 - slopes.dim())]
        self.dout = None if inputs.dout is None else heads_first(inputs.dout, inputs)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have a gradient, by its name."""
        leaves = {"dq": self.q, "dk": self.k, "dv": self.v}
        if self.bias is not None and self.bias.is_floating_point():
            leaves["dbias"] = self.bias
        if self.sinks is not None:
            leaves["dsinks"] = self.sinks
        return leaves

    def empty_values(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Room for the results; gradients, if there is a dout, begin at 0."""
        rows = (self.batch, self.heads_q, self.seqlen_q)
        values = {
            "out": self.q.new_zeros((*rows, self.v.shape[-1]), dtype=dtype),
            "lse": self.q.new_zeros((*rows, 1), dtype=dtype),
        }
        if self.dout is not None:
            values |= {n: x.new_zeros(x.shape, dtype=dtype) for n, x in self.leaves().items()}
        return values

    def chunks(self) -> Iterator[_Chunk]:
        table = max(1, self.group * self.seqlen_q * self.seqlen_k)
        limit = TABLE_ELEMENTS[self.q.device.type]
        heads = max(1, min(self.heads_k, limit // table))
        batches = max(1, limit // (table * max(1, self.heads_k)))
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
    values = problem.empty_values(dtype)
    for chunk in problem.chunks():
        leaves = {
            name: chunk.of(name, x).to(dtype).detach().requires_grad_(problem.dout is not None)
            for name, x in problem.leaves().items()
        }
        q, bias, sinks = leaves["dq"], leaves.get("dbias"), leaves.get("dsinks")
        k, v = (leaves[name].repeat_interleave(problem.group, 1) for name in ("dk", "dv"))
        s, _ = _scores(problem, chunk, q, k, bias, scale_on_k)
        hidden = problem.hidden(chunk).expand(s.shape)
        s = s.masked_fill(hidden, MINUS_INF)
        column = s.new_full((*s.shape[:3], 1), MINUS_INF) if sinks is None else sinks
        column = column.expand(*s.shape[:3], 1)
        empty = hidden.all(-1, keepdim=True) & (column == MINUS_INF)
        s = torch.cat((s, column.masked_fill(empty, 0)), -1)  # (b, h, Sq, Sk + 1)
        p = torch.softmax(s, -1)[..., :-1]
        factor = problem.dropout_factor(chunk, dtype)
        out = (p if factor is None else p * factor) @ v
        lse = torch.logsumexp(s, -1, keepdim=True).masked_fill(empty, MINUS_INF)
        chunk.of_q(values["out"])[:], chunk.of_q(values["lse"])[:] = out.detach(), lse.detach()
        if problem.dout is not None:
            grads = [chunk.of_q(problem.dout).to(dtype), torch.zeros_like(lse)]
            if inputs.dlse is not None:
                grads[1] = chunk.of_q(inputs.dlse).to(dtype).unsqueeze(-1)
            torch.autograd.backward((out, lse), grads)
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    chunk.of(name, values[name])[:] += leaf.grad
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
        q = chunk.of_q(problem.q).to(dtype)
        k, v = (
            chunk.of_k(x).to(dtype).repeat_interleave(problem.group, 1)
            for x in (problem.k, problem.v)
        )
        leaves = problem.leaves()
        bias = chunk.of_q(leaves["dbias"]).to(dtype) if "dbias" in leaves else None
        s, raw = _scores(problem, chunk, q, k, bias, scale_on_k=False)
        softcap, sinks = problem.inputs.softcap, problem.sinks
        return cls(
            q=q,
            k=k,
            v=v,
            raw=raw,
            scores=s.masked_fill(problem.hidden(chunk), MINUS_INF),
            cap_slope=1 - torch.tanh(raw / softcap).square() if softcap > 0 else None,
            dropout_factor=problem.dropout_factor(chunk, dtype),
            dout=None if problem.dout is None else chunk.of_q(problem.dout).to(dtype),
            sinks=None if sinks is None else chunk.of_q(sinks).to(dtype),
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
    wide = accumulator(dtype)
    out_info = torch.finfo(inputs.out_dtype or dtype)
    u = max(unit(dtype), out_info.eps / 2)  # of dS, and of O in delta
    subnormal = out_info.smallest_normal * out_info.eps
    scale, eps = abs(problem.scale), torch.finfo(wide).eps
    order_only = u if dtype == wide else 0.0  # where P is not rounded before the product with V
    for name, value in exact.items():
        floors[name] = value.new_zeros((*value.shape[:-1], 1))
    dbias_squares = torch.zeros_like(exact["dbias"]) if "dbias" in exact else None

    for chunk in problem.chunks():
        table = _Table.of(problem, chunk, torch.float64)
        lse, out = chunk.of_q(exact["lse"]), chunk.of_q(exact["out"])
        p = table.probabilities(lse)
        visible = table.scores != MINUS_INF
        score = table.scores.abs().masked_fill_(~visible, 0)
        if p.numel():
            rounded_score = (p * torch.maximum(table.raw.abs(), score)).sum(-1).max().item()
            result.noise = max(result.noise, rounded_score * torch.finfo(dtype).eps / 2)

        # Scores are rounded, too, in the accumulator: an error of s is a relative error of P, and
        # by the normaliser one of the whole row. P may also underflow.
        addends = (scale * (table.q.abs() @ table.k.abs().mT)).mul_(visible)  # behind each score
        s_error = eps * (table.before_cap(addends) + score)
        row_error = (p * s_error).sum(-1, keepdim=True)
        s_error += row_error
        underflow = visible.double() * torch.finfo(wide).smallest_normal
        largest = torch.cat((lse.abs().nan_to_num(posinf=0).clamp_min(1), addends), -1)
        chunk.of_q(floors["lse"])[:] = unit(wide) * largest.amax(-1, keepdim=True)
        p_error = p * (order_only + s_error) + underflow
        chunk.of_q(floors["out"])[:] = (p_error @ table.v.abs()).amax(-1, keepdim=True)
        if table.dout is None:
            continue

        delta = (table.dout * out).abs().sum(-1, keepdim=True)
        if inputs.dlse is not None:
            delta += chunk.of_q(inputs.dlse).abs().unsqueeze(-1)
        terms = table.dropped(table.dout @ table.v.mT).abs() + delta  # of dS / P, (b, h, Sq, Sk)
        subnormal_out = table.dout.abs().sum(-1, keepdim=True) * subnormal  # of O, in delta
        dbias = (p * (u + s_error) + underflow) * terms + p * subnormal_out
        ds = scale * table.before_cap(dbias)
        if table.cap_slope is not None:  # 1 - tanh^2 cancels, and moves with the score
            slope_error = unit(wide) + 2 * eps * table.cap_slope * addends / inputs.softcap
            ds += scale * p * terms * slope_error
        dk = _by_key_head(ds.mT @ table.q.abs(), problem.group)
        dv = _by_key_head(table.dropped(p_error).mT @ table.dout.abs(), problem.group)
        chunk.of_q(floors["dq"])[:] = (ds @ table.k.abs()).amax(-1, keepdim=True)
        chunk.of_k(floors["dk"])[:] = dk.amax(-1, keepdim=True)
        chunk.of_k(floors["dv"])[:] = dv.amax(-1, keepdim=True)
        # Sums over rows: the errors of rows are independent, so it is their squares that add up.
        if dbias_squares is not None:
            tile = chunk.of_q(dbias_squares)
            of_rows = dbias.sum_to_size(*dbias.shape[:-1], tile.shape[-1])
            tile += of_rows.square().sum_to_size(tile.shape)
        if table.sinks is not None:
            relative = u + row_error + eps * table.sinks.abs().nan_to_num(posinf=0)
            dsinks = table.sink_probabilities(lse) * (relative * delta + subnormal_out)
            chunk.of_q(floors["dsinks"])[:] += dsinks.square().sum((0, 2), keepdim=True)
    if "dsinks" in floors:
        floors["dsinks"].sqrt_()
    if dbias_squares is not None and dbias_squares.numel():
        floors["dbias"] = dbias_squares.sqrt().amax(-1, keepdim=True)


@torch.no_grad()
def _tiled_rounding(inputs: Inputs) -> Result:
    """Attention that rounds P, dS and the results to the inputs' dtype, and nothing else."""
    problem = _Problem(inputs)
    dtype = inputs.q.dtype
    wide = accumulator(dtype)
    values = problem.empty_values(wide)

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
