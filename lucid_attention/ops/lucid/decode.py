"""One new token against a cache of keys and preconditioned values.

Decoding is bound by memory traffic, so K and Y are each read once, for the attention and the preconditioner together:
the new key rides along as one more query row of its group. Its scores, times the cached 1/‖k_j‖, are c · cos θ_j; the
exponentials of these minus c are P_j, and the same product with Y that reads the values for the queries also gives
Σ_j P_j y_j (`docs/mathematics.md`).
"""

import math

import torch
from torch import Tensor

from .. import checks
from ..keys import inverse_norms, rms_normalize
from ..precision import no_autocast, working_dtype
from ..softmax.one_token import DecodeStep, at_position, cache_product, finish_step, put_at_position_
from ..softmax.strips import clean_queries


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
    strength: float = 1.0,
    scale: float | None = None,
    position: Tensor | None = None,
) -> DecodeStep:
    """LUCID attention of one new token. No gradients.

    Args:
        q: [B, H·G, 1, D], the new query.
        k: [B, H, S + 1, D], the cached keys with the new one at the end. Caches append keys first.
        v: [B, H, 1, E], the new value.
        y_past: [B, H, S, E], cached preconditioned values. Finite everywhere, also at masked keys (where ours are
            zero): cleaning them would mean to read the cache twice.
        scalars: [B, H, S + 1], `key_scalars` of k. Not read for norm="row_max".
        key_mask, beta, norm, sharpness, strength, scale: as in `lucid_attention`, with key_mask: [B, S + 1] and
            beta: [B, H, 1].
        position: int64 [] or [1], for preallocated buffers: k: [B, H, M, D], y_past: [B, H, M, E] and scalars:
            [B, H, M] of M places are then handed over whole, with the new key and its scalar at `position` already.
            key_mask: [B, M] is needed and must be False behind `position`. What y_past holds at `position` and at
            masked keys does not matter as long as it is finite. Nothing depends on the value of `position` but the
            result: one compiled graph serves all.
    """
    _check(q, k, v, y_past, scalars, key_mask, beta, position)
    checks.check_norm(norm)
    checks.check_sharpness(sharpness, k)
    checks.check_strength(strength)
    checks.check_scale(scale)
    position = None if position is None else position.reshape(1)
    with torch.no_grad(), no_autocast(k):
        return _decode(q, k, v, y_past, scalars, key_mask, beta, norm, sharpness, strength, scale, position)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    scalars: Tensor,
    key_mask: Tensor | None,
    beta: Tensor | None,
    position: Tensor | None,
) -> None:
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
    for name, x in (("y_past", y_past), ("scalars", scalars)):
        checks.check_tensor(name, x)
        checks.check_float(name, x)
        checks.check_device(name, x, k)
    checks.check_same_dtype("y_past", y_past, v, "v")
    length = total - 1 if position is None else total
    checks.check_shape("y_past", y_past, (B, H, length, v.shape[3]), f"[B, H, {before}, E]")
    checks.check_shape("scalars", scalars, (B, H, total), f"[B, H, {whole}]")
    checks.check_beta(beta, new)
    checks.check_key_mask(key_mask, new, total - 1, "[B, S + T]" if position is None else "[B, M]")


def _check_position(position: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
    checks.check_tensor("position", position)
    if position.dtype != torch.int64:
        raise TypeError(f"position must be torch.int64, got {position.dtype}")
    if tuple(position.shape) not in ((), (1,)):
        raise ValueError(f"position must be [] or [1], got shape {list(position.shape)}")
    checks.check_device("position", position, k)
    if key_mask is None:
        raise TypeError("key_mask must be [B, M], False behind `position`, where a position is given: got None")


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
    strength: float,
    scale: float | None,
    position: Tensor | None,
) -> DecodeStep:
    B, H, total, D = k.shape
    n, G, wide = B * H, q.shape[1] // H, working_dtype(k)
    scale = D**-0.5 if scale is None else float(scale)
    c: float | Tensor = math.sqrt(D) if sharpness is None else sharpness
    if isinstance(c, Tensor):
        c = c.to(wide).repeat(B)[:, None, None]
    scalars = scalars.reshape(n, 1, total).to(wide)
    if key_mask is not None:
        q = clean_queries(q, at_position(key_mask, position))
    keys, queries = k.flatten(0, 1), q.reshape(n, G, D).to(wide)
    if norm == "qk":
        queries = rms_normalize(queries)
    weight = c / D if norm == "row_max" else c * at_position(scalars, position)
    new = at_position(keys, position, 1).to(wide)
    scores = cache_product(torch.cat([queries * scale, new * weight], 1), keys.mT)
    if norm == "qk":
        scores[:, :G].mul_(scalars * math.sqrt(D))
    key_scores = scores[:, G:]
    if norm != "row_max":
        key_scores.mul_(scalars)
        put_at_position_(key_scores, position, c)  # exactly, also for a zero key
    return finish_step(
        scores,
        G,
        v,
        y_past,
        key_mask,
        dtype=q.dtype,
        sharpness=None if norm == "row_max" else c,
        strength=strength,
        beta=beta,
        position=position,
    )
