"""One new token against a cache: what the decoding steps of softmax-read members share.

Rows of scores are those of the G query heads of a key/value head and, where the new value is preconditioned, one more
for its key, so that keys and values are each read once for both.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..triangular import spans

# Keys widened at a time when the cache is 16-bit, so that the wide copy stays in the processor's cache.
WIDENED_KEYS = 1024
# Up to so many scores, which stay in the processor's cache, single passes over them are faster than torch's softmax.
CACHED_SCORES = 768 * 1024


class DecodeStep(NamedTuple):
    """o: [B, H·G, 1, E], the output; y: [B, H, 1, E], to be written behind `y_past`."""

    o: Tensor
    y: Tensor


def finish_step(
    scores: Tensor,
    G: int,
    v: Tensor,
    y_past: Tensor,
    key_mask: Tensor | None,
    *,
    dtype: torch.dtype,
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    beta: Tensor | None = None,
    position: Tensor | None = None,
) -> DecodeStep:
    """From scores to output and stored value.

    scores: [n, G or G + 1, S + 1], overwritten: scaled scores of the queries, then the exponents of the key's row of
    P, if the new value v: [B, H, 1, E] is preconditioned; without that row it is stored as it is. The last column is
    the new key. y_past: [B, H, S, E]; key_mask: [B, S + 1]; beta: [B, H, 1]. dtype: of the output. sharpness: what is
    subtracted from the key's exponents, a number or [n, 1, 1]; None for the largest of them. strength: s of P.
    position: [1], the column of the new key where it is not the last one. Then y_past is as long as scores are.
    """
    B, H = v.shape[:2]
    n, wide = B * H, scores.dtype
    if key_mask is not None:
        _hide_masked_(scores.unflatten(0, (B, H)), key_mask[:, None, None], G, position)
    total = _weights_(scores, G, sharpness)
    own = at_position(scores[:, :G], position)
    # In a buffer the new key has a place, but its value does not stand there yet.
    past = scores[:, :, :-1] if position is None else scores.index_fill_(2, position, 0)
    read = cache_product(past, y_past.flatten(0, 1))
    y = v.reshape(n, 1, -1).to(wide)
    if scores.shape[1] > G:
        y = y - strength * read[:, G:]
    if beta is not None:
        y = y * beta.reshape(n, 1, 1).to(wide)
    if key_mask is not None:
        y = y.masked_fill(~at_position(key_mask, position).repeat_interleave(H, 0)[:, None], 0)
    o = torch.addcmul(read[:, :G], own, y.to(y_past.dtype).to(wide)).div_(total)
    return DecodeStep(o.view(B, H * G, 1, -1).to(dtype), y.view(B, H, 1, -1).to(y_past.dtype))


def _weights_(scores: Tensor, G: int, sharpness: float | Tensor | None) -> float | Tensor:
    """Scores into weights of the softmax and, in the key's row, into P. Outputs are to be divided by what is returned.

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
    """What belongs to the new key, the last one if no position is given: x with `dim` of size 1."""
    return x.narrow(dim, x.shape[dim] - 1, 1) if position is None else x.index_select(dim, position)


def put_at_position_(x: Tensor, position: Tensor | None, column: Tensor | float) -> None:
    """Overwrite what `at_position` reads. column: a number or whatever expands to [..., 1]."""
    if position is None:
        x[..., -1:] = column
    elif isinstance(column, Tensor):
        x.index_copy_(-1, position, column.expand(*x.shape[:-1], 1))
    else:
        x.index_fill_(-1, position, column)


def _hide_masked_(scores: Tensor, taking_part: Tensor, G: int, position: Tensor | None) -> None:
    """Hide masked keys. The new key always sees itself; a query that sees nothing does too, where y is then zero.

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
