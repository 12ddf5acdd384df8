"""One new token and a cache: what the decoding steps of all attentions with a softmax share.

Rows of scores are those of the G query heads of a key/value head and, where the new value is preconditioned, one more
for its key, so that keys and values are each read once for both.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..checks import context_parallel_is_active
from ..keys import resolved_scale, resolved_sharpness
from ..precision import working_dtype
from ..triangular import spans

# Keys widened at a time when the cache is 16-bit, so that the wide copy stays in the processor's cache.
WIDENED_KEYS = 1024
# Up to this many scores stay in the processor's cache, where single passes over them are faster than torch's softmax.
CACHED_SCORES = 768 * 1024


class Decoded(NamedTuple):
    """o: [B, H·G, 1, E], the output; y: [B, H, 1, E], to be written after `y_past`."""

    o: Tensor
    y: Tensor


class Token(NamedTuple):
    """One new token and its cache, checked.

    q: [B, H·G, 1, D]; k: [B, H, S + 1, D]; v: [B, H, 1, E]; y_past: [B, H, S, E]; inverse_norms: [B, H, S + 1], 1/‖k‖,
    None where v is stored without being preconditioned; key_mask: [B, S + 1]; beta: [B, H, 1]; norm: "key", "qk" or
    "row_max"; sharpness: c, a number or [n, 1, 1]; strength: s; scale: of the scores of q; position: [1], the place of
    the new token in buffers of M places, in which case S and S + 1 are both M.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    y_past: Tensor
    inverse_norms: Tensor | None
    key_mask: Tensor | None
    beta: Tensor | None
    norm: str
    sharpness: float | Tensor
    strength: float
    scale: float
    position: Tensor | None


def groups_of(token: Token) -> int:
    """G, query heads per key/value head. A function, because torch 2.7 cannot compile a property of a named tuple."""
    return token.q.shape[1] // token.k.shape[1]


def checked_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    *,
    inverse_norms: Tensor | None,
    key_mask: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    scale: float | None = None,
    position: Tensor | None = None,
) -> Token:
    """The token of arguments as the decoding functions take them; raises where one of them is wrong."""
    if not _plainly_right(q, k, v, y_past, inverse_norms, key_mask, position):
        _check_tensors(q, k, v, y_past, inverse_norms, key_mask, position)
    checks.check_beta(beta, v)
    checks.check_norm(norm)
    checks.check_sharpness(sharpness, k)
    checks.check_strength(strength)
    checks.check_scale(scale)
    c = resolved_sharpness(sharpness, k)
    if isinstance(c, Tensor):
        c = c.to(working_dtype(k)).reshape(-1, 1, 1)
    position = None if position is None else position.reshape(1)
    return Token(q, k, v, y_past, inverse_norms, key_mask, beta, norm, c, strength, resolved_scale(scale, k), position)


def _plainly_right(
    q: Any, k: Any, v: Any, y_past: Any, inverse_norms: Any, key_mask: Any, position: Tensor | None
) -> bool:
    """Whether `_check_tensors` would accept these, at a fraction of its cost, which every token pays.

    Only for plain tensors of one dtype on a CPU. False means unknown.
    """
    if torch.compiler.is_compiling() or context_parallel_is_active():
        return False
    if not (_plain(q) and _plain(k) and _plain(v) and _plain(y_past)):
        return False
    keys, new, queries, dtype = k.shape, v.shape, q.shape, k.dtype
    if not len(keys) == len(new) == len(queries) == 4 or not q.dtype == v.dtype == y_past.dtype == dtype:
        return False
    (B, H, total, D), E, heads = keys, new[3], queries[1]
    if dtype not in checks.FLOATS or 0 in (B, H, total, D, E, heads) or heads % H:
        return False
    if new != (B, H, 1, E) or queries != (B, heads, 1, D):
        return False
    if y_past.shape != (B, H, total - 1 if position is None else total, E):
        return False
    if inverse_norms is not None and not (
        _plain(inverse_norms) and inverse_norms.shape == (B, H, total) and inverse_norms.dtype in checks.FLOATS
    ):
        return False
    if key_mask is not None and not (
        _plain(key_mask) and key_mask.shape == (B, total) and key_mask.dtype == torch.bool
    ):
        return False
    if position is None:
        return True
    return _plain(position) and position.dtype == torch.int64 and position.shape in ((), (1,)) and key_mask is not None


def _plain(x: Any) -> bool:
    return type(x) is Tensor and x.is_cpu and x.layout == torch.strided


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    inverse_norms: Tensor | None,
    key_mask: Tensor | None,
    position: Tensor | None,
) -> None:
    """Raise where one of them is wrong. `_plainly_right` knows these checks."""
    before, whole = ("S", "S + 1") if position is None else ("M", "M")
    checks.check_heads_first("k", k, f"[B, H, {whole}, D]")
    if position is not None:
        _check_position(position, k, key_mask)
    checks.check_heads_first("v", v, "[B, H, 1, E]")
    B, H, total, _ = k.shape
    new = k[:, :, -1:]
    checks.check_shape("v", v, (B, H, 1, v.shape[3]), "[B, H, 1, E]")
    checks.check_q(q, new)
    checks.check_device("v", v, k)
    checks.check_same_dtype("v", v, k)
    checks.check_tensor("y_past", y_past)
    checks.check_float("y_past", y_past)
    checks.check_device("y_past", y_past, k)
    checks.check_same_dtype("y_past", y_past, v, "v")
    length = total - 1 if position is None else total
    checks.check_shape("y_past", y_past, (B, H, length, v.shape[3]), f"[B, H, {before}, E]")
    if inverse_norms is not None:
        checks.check_inverse_norms(inverse_norms, k, f"[B, H, {whole}]")
    checks.check_key_mask(key_mask, new, total - 1, "[B, S + T]" if position is None else "[B, M]")


def _check_position(position: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
    checks.check_tensor("position", position)
    if position.dtype != torch.int64:
        raise TypeError(f"position must be torch.int64, got {position.dtype}")
    if tuple(position.shape) not in ((), (1,)):
        raise ValueError(f"position must be [] or [1], got shape {list(position.shape)}")
    checks.check_device("position", position, k)
    if key_mask is None:
        raise TypeError("key_mask must be [B, M] if there is a position: got None")


def finish_step(scores: Tensor, token: Token) -> Decoded:
    """The output and the stored value, from scores.

    scores: [n, G or G + 1, S + 1], overwritten: scaled scores of the queries, then the exponents of the key's row of P
    if the new value is preconditioned; without that row the value is stored as it is. The last column, or that of
    `token.position`, is the new key.
    """
    v, y_past, key_mask, position, G = token.v, token.y_past, token.key_mask, token.position, groups_of(token)
    B, H = v.shape[:2]
    n, wide = B * H, scores.dtype
    if key_mask is not None:
        _hide_masked_(scores.unflatten(0, (B, H)), key_mask[:, None, None], G, position)
    total = _weights_(scores, G, None if token.norm == "row_max" else token.sharpness)
    own = at_position(scores[:, :G], position)
    # A buffer has a place for the new key, but not its value yet.
    past = scores[:, :, :-1] if position is None else scores.index_fill_(2, position, 0)
    read = cache_product(past, y_past.flatten(0, 1))
    y = v.reshape(n, 1, -1).to(wide)
    if scores.shape[1] > G:
        y = y - token.strength * read[:, G:]
    if token.beta is not None:
        y = y * token.beta.reshape(n, 1, 1).to(wide)
    if key_mask is not None:
        y = y.masked_fill(~at_position(key_mask, position).repeat_interleave(H, 0)[:, None], 0)
    o = torch.addcmul(read[:, :G], own, y.to(y_past.dtype).to(wide)).div_(total)
    return Decoded(o.view(B, H * G, 1, -1).to(token.q.dtype), y.view(B, H, 1, -1).to(y_past.dtype))


def _weights_(scores: Tensor, G: int, sharpness: float | Tensor | None) -> float | Tensor:
    """Turn scores into softmax weights and, in the key's row, into P. Returns the divisor of the outputs.

    The largest exponent of the key's row is its own, c, where keys are normalised.
    """
    rows, key_row = scores[:, :G], scores[:, G:]
    if scores.numel() > CACHED_SCORES:
        torch.softmax(scores, -1, out=scores)
        if key_row.shape[1]:
            key_row.div_(key_row.amax(-1, keepdim=True))
        return 1.0
    if key_row.shape[1]:
        key_row.sub_(key_row.amax(-1, keepdim=True) if sharpness is None else sharpness).exp_()
    return rows.sub_(rows.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True)


def at_position(x: Tensor, position: Tensor | None, dim: int = -1) -> Tensor:
    """The entry of the new key, the last one without a position: x with `dim` of size 1."""
    return x.narrow(dim, x.shape[dim] - 1, 1) if position is None else x.index_select(dim, position)


def put_at_position_(x: Tensor, position: Tensor | None, column: Tensor | float) -> None:
    """Overwrite what `at_position` reads. column: a number, or a tensor that expands to [..., 1]."""
    if position is None:
        x[..., -1:] = column
    elif isinstance(column, Tensor):
        x.index_copy_(-1, position, column.expand(*x.shape[:-1], 1))
    else:
        x.index_fill_(-1, position, column)


def _hide_masked_(scores: Tensor, taking_part: Tensor, G: int, position: Tensor | None) -> None:
    """Hide masked keys. The new key sees itself. A query that sees no other key sees the new one, whose y is zero.

    scores: [B, H, G or G + 1, S + 1]; taking_part: [B, 1, 1, S + 1].
    """
    hidden = ~taking_part
    column = at_position(scores, position)
    put_at_position_(scores, position, column.masked_fill(at_position(hidden, position) & ~column.isfinite(), 0))
    own = torch.zeros_like(hidden)
    put_at_position_(own, position, True)
    scores[:, :, G:].masked_fill_(hidden & ~own, -math.inf)
    scores[:, :, :G].masked_fill_(hidden & ~(own & hidden.all(-1, keepdim=True)), -math.inf)


def cache_product(rows: Tensor, cache: Tensor) -> Tensor:
    """rows @ cache in the precision of rows: [n, R, K] · [n, K, N], where one of K and N is the number of keys."""
    if cache.dtype != rows.dtype:
        return _widening_product(rows, cache)
    return torch.bmm(rows, cache)


def _widening_product(rows: Tensor, cache: Tensor) -> Tensor:
    if cache.stride(-1) != 1:  # the keys, transposed
        wide = (cache[:, :, s].to(rows.dtype) for s in spans(0, cache.shape[2], WIDENED_KEYS))
        return torch.cat([torch.bmm(rows, part) for part in wide], -1)
    out = rows.new_zeros(*rows.shape[:2], cache.shape[2])
    for s in spans(0, cache.shape[1], WIDENED_KEYS):
        out.baddbmm_(rows[:, :, s], cache[:, s].to(rows.dtype))
    return out
