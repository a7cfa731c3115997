"""The functions of the `flash_attn` package, computed by `attention` and `attention_varlen`.

Names, argument order, defaults and return values are that package's, so that a program moves over
by its import:

    from flash_ext.flash_attn import flash_attn_func

What differs in meaning:

* A row that sees no key has softmax_lse -inf, where the package has +inf: parts of a result can be
  merged.
* softmax_lse has a gradient, and the head dim of v may differ from that of q and k.
* Dropout and softcap go together. dropout_p must be below 1.
* `deterministic=False` follows `torch.are_deterministic_algorithms_enabled()`.
* window_size takes None too, and no negative limit but -1.
* Without dropout S_dmask is None.

An argument that cannot be honoured raises an error. Nothing is registered or patched by an import.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_ext import attn_probs, interface, problem
from flash_ext.interface import Modifiers, attention
from flash_ext.problem import WindowSize
from flash_ext.varlen import attention_varlen
from flash_ext.varlen_problem import Packing

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# out, or with return_attn_probs (out, softmax_lse, S_dmask). Not a union: callers know which they
# asked for, and a positional flag tells no type checker.
Result: TypeAlias = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Exact attention, `flash_ext.attention` under another signature.

    Args:
        q: (B, Sq, Hq, D). On CUDA float16 or bfloat16, on CPU also float32 and float64.
        k: (B, Sk, Hk, D), Hq a multiple of Hk.
        v: (B, Sk, Hk, Dv).
        dropout_p: share of probabilities dropped, in [0, 1). 0.0 when the model is evaluated.
        softmax_scale: factor of q.k; None is 1 / sqrt(D).
        causal: query i sees no key behind position i + Sk - Sq (bottom-right alignment).
        window_size: (left, right): keys seen before and behind that position, inclusive; -1 is no
            limit.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: float32 (Hq,) or (B, Hq); subtracts slope * |i + Sk - Sq - j| from each score.
            No gradient.
        deterministic: True gives bit-equal gradients from run to run; False follows
            `torch.are_deterministic_algorithms_enabled()`.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (B, Sq, Hq, Dv). With return_attn_probs, (out, softmax_lse, S_dmask): softmax_lse is
        (B, Hq, Sq), natural logarithm, float32 (float64 for float64 inputs), differentiable, -inf
        for a row that sees no key. S_dmask is None without dropout; with it (B, Hq, Sq, Sk), the
        softmax in the dtype of softmax_lse before dropout, negative where an entry is dropped,
        without a gradient. It alone takes memory for the table of scores: it is meant for tests.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value.
        NotImplementedError: no kernel serves the call; with the reasons of `flash_ext.explain`.
    """
    modifiers = _modifiers(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    problem.check_flag("return_attn_probs", return_attn_probs)
    if not return_attn_probs:
        return attention(q, k, v, **modifiers)
    seed = _seed_to_come(q, k, v, dropout_p)
    out, lse = attention(q, k, v, return_lse=True, **modifiers)
    if seed is None:
        return out, lse, None
    return out, lse, attn_probs.signed(q, k, lse, seed, modifiers)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v that lie in one tensor.

    They are read in place. The gradient of qkv is put together from theirs by one copy.

    Args:
        qkv: (B, S, 3, H, D).
        The others are those of `flash_attn_func`.

    Returns:
        As `flash_attn_func`: out (B, S, H, D).

    Raises:
        As `flash_attn_func`, which speaks of q, k and v.
    """
    q, k, v = _unpacked("qkv", qkv, ("B", "S", "3", "H", "D"))
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap),
        *(alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of k and v that lie in one tensor.

    They are read in place. The gradient of kv is put together from theirs by one copy.

    Args:
        q: (B, Sq, Hq, D).
        kv: (B, Sk, 2, Hk, D), Hq a multiple of Hk.
        The others are those of `flash_attn_func`.

    Returns:
        As `flash_attn_func`: out (B, Sq, Hq, D).

    Raises:
        As `flash_attn_func`, which speaks of q, k and v.
    """
    k, v = _unpacked("kv", kv, ("B", "Sk", "2", "Hk", "D"))
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap),
        *(alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Exact attention in packed sequences, `flash_ext.attention_varlen` under another signature.

    Args:
        q: (Tq, Hq, D), the rows of all sequences one behind the other.
        k: (Tk, Hk, D), Hq a multiple of Hk.
        v: (Tk, Hk, Dv).
        cu_seqlens_q: int32 (B + 1,) on the device of q: sequence b has the rows from
            cu_seqlens_q[b] to before cu_seqlens_q[b + 1].
        cu_seqlens_k: the same for the rows of k and v.
        max_seqlen_q: no sequence has more queries; a hint that may be too large, or None.
        max_seqlen_k: no sequence has more keys; likewise.
        block_table: only None: keys in pages are not served.
        The others are those of `flash_attn_func`, for each sequence with its own Sq and Sk.

    Returns:
        out (Tq, Hq, Dv). With return_attn_probs, (out, softmax_lse, S_dmask): softmax_lse is
        (Hq, Tq). S_dmask is None without dropout; with it (B, Hq, max_seqlen_q, max_seqlen_k) as of
        `flash_attn_func`, 0 beyond the end of a sequence. To lay it out, the lengths are read on
        the host, which waits for the device.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value.
        NotImplementedError: a block_table; or no kernel serves the call, with the reasons of
            `flash_ext.explain`.
    """
    modifiers = _modifiers(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    problem.check_flag("return_attn_probs", return_attn_probs)
    if block_table is not None:
        raise NotImplementedError(
            "block_table is given, expected None: keys and values in pages are not served"
        )

    def call(return_lse: bool) -> Result:
        return attention_varlen(
            *(q, k, v),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            return_lse=return_lse,
            **modifiers,
        )

    if not return_attn_probs:
        return call(return_lse=False)
    seed = _seed_to_come(q, k, v, dropout_p)
    out, lse = call(return_lse=True)
    if seed is None:
        return out, lse, None
    packing = Packing(cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
    return out, lse, attn_probs.signed_varlen(q, k, lse, seed, packing, modifiers)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v that lie in one tensor.

    They are read in place. The gradient of qkv is put together from theirs by one copy.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: int32 (B + 1,), for queries and keys alike.
        max_seqlen: no sequence is longer; a hint that may be too large, or None.
        The others are those of `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`: out (T, H, D).

    Raises:
        As `flash_attn_varlen_func`, which speaks of q, k, v, cu_seqlens_q and max_seqlen_q.
    """
    q, k, v = _unpacked("qkv", qkv, ("T", "3", "H", "D"))
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        *(dropout_p, softmax_scale, causal, window_size, softcap),
        *(alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of k and v that lie in one tensor.

    They are read in place. The gradient of kv is put together from theirs by one copy.

    Args:
        q: (Tq, Hq, D).
        kv: (Tk, 2, Hk, D), Hq a multiple of Hk.
        The others are those of `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`: out (Tq, Hq, D).

    Raises:
        As `flash_attn_varlen_func`, which speaks of q, k and v.
    """
    k, v = _unpacked("kv", kv, ("Tk", "2", "Hk", "D"))
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal, window_size, softcap),
        *(alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention over a KV cache: there is none yet.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("flash_attn_with_kvcache: flash_ext has no KV cache yet")


def _modifiers(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> Modifiers:
    """Keyword arguments of `attention` and `attention_varlen`."""
    problem.check_flag("deterministic", deterministic)
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": True if deterministic else None,
    }


def _seed_to_come(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor | None:
    """The seed that the call will draw; None without dropout."""
    interface.check_tensors(q, k, v)
    problem.check_dropout(dropout_p)
    return attn_probs.next_seed(q.device) if dropout_p > 0.0 else None


def _unpacked(name: str, packed: Tensor, dims: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The parts of a packed tensor, views of it; `dims` has their number third from the end."""
    problem.check_is_tensor(name, packed)
    if packed.dim() != len(dims) or packed.shape[-3] != int(dims[-3]):
        expected = ", ".join(dims)
        raise ValueError(f"{name} has shape {problem.shape_of(packed)}, expected ({expected})")
    return torch.unbind(packed, -3)
