"""One new token against a cache of keys and preconditioned values.

Decoding is bound by memory traffic, so K and Y are each read once, for the attention and the preconditioner together:
the new key rides along as one more query row of its group. Its scores, times the cached 1/‖k_j‖, are c · cos θ_j;
after one softmax over all rows, its row divided by the row's largest weight is P_j, and the same product with Y that
reads the values for the queries also gives Σ_j P_j y_j (`docs/mathematics.md`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..keys import inverse_norms, rms_normalize
from ..precision import no_autocast, working_dtype
from ..strips import clean_queries
from ..triangular import spans

# Keys widened at a time when the cache is 16-bit, so that the wide copy stays in the processor's cache.
WIDENED_KEYS = 1024


class DecodeStep(NamedTuple):
    """o: [B, H·G, 1, E], the output; y: [B, H, 1, E], to be written behind `y_past`."""

    o: Tensor
    y: Tensor


def key_scalars(k: Tensor) -> Tensor:
    """1/‖k‖ of every key, [B, H, T, D] -> [B, H, T] in at least float32: what a cache keeps beside the keys."""
    checks.check_heads_first("k", k, "[B, H, T, D]")
    return inverse_norms(k.to(working_dtype(k)))[..., 0]


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    scalars: Tensor,
    *,
    key_mask: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
) -> DecodeStep:
    """LUCID attention of one new token. No gradients.

    Args:
        q: [B, H·G, 1, D], the new query.
        k: [B, H, S + 1, D], the cached keys with the new one at the end. Caches append keys first.
        v: [B, H, 1, E], the new value.
        y_past: [B, H, S, E], cached preconditioned values. Finite everywhere, also at masked keys (where ours are
            zero): cleaning them would mean to read the cache twice.
        scalars: [B, H, S + 1], `key_scalars` of k. Not read for norm="row_max".
        key_mask, beta, norm, sharpness, scale: as in `lucid_attention`, with key_mask: [B, S + 1], beta: [B, H, 1].
    """
    _check(q, k, v, y_past, scalars, key_mask, beta, norm, sharpness, scale)
    with torch.no_grad(), no_autocast(k):
        return _decode(q, k, v, y_past, scalars, key_mask, beta, norm, sharpness, scale)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    scalars: Tensor,
    key_mask: Tensor | None,
    beta: Tensor | None,
    norm: str,
    sharpness: float | Tensor | None,
    scale: float | None,
) -> None:
    checks.check_heads_first("k", k, "[B, H, S + 1, D]")
    checks.check_heads_first("v", v, "[B, H, 1, E]")
    B, H, total, _ = k.shape
    new = k[:, :, -1:]
    checks.check_shape("v", v, (B, H, 1, v.shape[3]), "[B, H, 1, E]")
    checks.check_q(q, new)
    checks.check_device("v", v, k)
    checks.check_same_dtype("v", v, k)
    for name, x in (("y_past", y_past), ("scalars", scalars)):
        checks.check_tensor(name, x)
        checks.check_float(name, x)
        checks.check_device(name, x, k)
    checks.check_same_dtype("y_past", y_past, v, "v")
    checks.check_shape("y_past", y_past, (B, H, total - 1, v.shape[3]), "[B, H, S, E]")
    checks.check_shape("scalars", scalars, (B, H, total), "[B, H, S + 1]")
    checks.check_key_mask(key_mask, new, total - 1)
    checks.check_beta(beta, new)
    checks.check_norm(norm)
    checks.check_sharpness(sharpness, k)
    checks.check_scale(scale)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    scalars: Tensor,
    key_mask: Tensor | None,
    beta: Tensor | None,
    norm: str,
    sharpness: float | Tensor | None,
    scale: float | None,
) -> DecodeStep:
    B, H, total, D = k.shape
    n, G, wide = B * H, q.shape[1] // H, working_dtype(k)
    scale = D**-0.5 if scale is None else float(scale)
    c: float | Tensor = math.sqrt(D) if sharpness is None else sharpness
    if isinstance(c, Tensor):
        c = c.to(wide).repeat(B)[:, None, None]
    scalars = scalars.reshape(n, 1, total).to(wide)
    if key_mask is not None:
        q = clean_queries(q, key_mask)
    keys, queries = k.flatten(0, 1), q.reshape(n, G, D).to(wide)
    if norm == "qk":
        queries = rms_normalize(queries)
    weight = c / D if norm == "row_max" else c * scalars[:, :, -1:]
    scores = _product(torch.cat([queries * scale, keys[:, -1:].to(wide) * weight], 1), keys.mT)
    if norm == "qk":
        scores[:, :G].mul_(scalars * math.sqrt(D))
    key_scores = scores[:, G:]
    if norm != "row_max":
        key_scores.mul_(scalars)
        key_scores[:, :, -1:] = c  # exactly, also for a zero key
    if key_mask is not None:
        _mask_(scores, key_mask.repeat_interleave(H, 0)[:, None], G)
    p = torch.softmax(scores, -1, out=scores)
    own = p[:, :, -1:]
    read = _product(p[:, :, :-1], y_past.flatten(0, 1))
    # The largest exponent of the key's row is subtracted in P. With normalised keys it is its own.
    top = p[:, G:].amax(-1, keepdim=True) if norm == "row_max" else own[:, G:]
    y = torch.addcdiv(v.reshape(n, 1, -1).to(wide), read[:, G:], top, value=-1)
    if beta is not None:
        y = y * beta.reshape(n, 1, 1).to(wide)
    if key_mask is not None:
        y = y.masked_fill(~key_mask[:, -1:].repeat_interleave(H, 0)[:, None], 0)
    o = torch.addcmul(read[:, :G], own[:, :G], y.to(y_past.dtype).to(wide))
    return DecodeStep(o.view(B, H * G, 1, -1).to(q.dtype), y.view(B, H, 1, -1).to(y_past.dtype))


def _mask_(scores: Tensor, taking_part: Tensor, G: int) -> None:
    """Hide masked keys. The new key always sees itself; a query that sees nothing does too, where y is then zero."""
    hidden = ~taking_part
    scores[:, :, -1:].masked_fill_(hidden[..., -1:] & ~scores[:, :, -1:].isfinite(), 0)
    own = torch.zeros_like(hidden)
    own[..., -1] = True
    scores[:, G:].masked_fill_(hidden & ~own, -math.inf)
    scores[:, :G].masked_fill_(hidden & ~(own & hidden.all(-1, keepdim=True)), -math.inf)


def _product(rows: Tensor, cache: Tensor) -> Tensor:
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
