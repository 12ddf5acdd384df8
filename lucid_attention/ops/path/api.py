"""The public operators on PaTH scores.

A_ij = k_jᵀ (H_{j+1} … H_i) q_i with H_s = I − β_s w_s w_sᵀ: a key is moved by the Householder factors of all later
positions, so the past is kept with its keys *re-based* to its end (`rebase_keys`).

Shapes: B batch, H key/value heads, G query heads per key/value head, T new and S past positions, D key size, E value
size.
"""

import math

import torch
from torch import Tensor

from .. import checks, packing
from ..dispatch import choose
from ..forward_mode import refuse_forward_mode
from ..keys import inverse_norms
from ..precision import no_autocast, read_out_dtype, working_dtype
from . import reference
from .torch_op import path_op

Past = tuple[Tensor, Tensor]
LucidPast = tuple[Tensor, Tensor, Tensor]


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal PaTH attention: softmax(A · scale) v with A_ij = k_jᵀ (∏_{s=j+1..i} (I − β_s w_s w_sᵀ)) q_i.

    Args:
        q: [B, H·G, T, D]. No rotary embedding: w and beta say where a token is.
        k: [B, H, T, D].
        v: [B, H, T, E].
        w: [B, H, T, D], directions of the Householder factors, used as they come (PaTH normalises them to length 1). In
            float32 beside 16-bit q, k, v they keep that length.
        beta: [B, H, T], their strengths, in [0, 2] for length 1: nothing can grow then. 0 leaves everything as it is.
        past: (k_past [B, H, S, D], v_past [B, H, S, E]) of earlier positions, keys re-based to the end of the past, as
            `rebase_keys` returns them.
        key_mask: [B, S + T] bool, True where a position takes part. A masked position is as if it were not there
            (its w and beta, too) and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1): none sees another.
        scale: of the scores, default 1/√D.
        impl: "auto", "blockwise" (a binary tree, linear memory) or "reference" (the dense formula).

    Returns:
        o: [B, H·G, T, E].
    """
    past = _check(k, v, w, beta, past, key_mask, cu_seqlens)
    checks.check_q(q, k)
    checks.check_scale(scale)
    if choose(impl) == "reference":
        return _reference_attention(q, k, v, w, beta, past, key_mask, cu_seqlens, scale)
    triple = None if past is None else (*past, None)
    return _blockwise(q, k, v, w, beta, triple, key_mask, cu_seqlens, None, scale, solves=False)[0]


def lucid_path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: LucidPast | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal LUCID-PaTH attention: the read-out of `path_attention` over y of `path_precondition`.

    past: (k_past, y_past, scalars_past), as in `path_precondition`. Other arguments as in `path_attention`.

    Returns:
        o: [B, H·G, T, E].
    """
    o, _ = lucid_path_pass(
        q,
        k,
        v,
        w,
        beta,
        past=past,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        sharpness=sharpness,
        scale=scale,
        impl=impl,
    )
    return o


def lucid_path_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: LucidPast | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """o of `lucid_path_attention` and y of `path_precondition`, on one tree: what a module with a cache needs."""
    past = _check_lucid(k, v, w, beta, past, key_mask, cu_seqlens, sharpness)
    checks.check_q(q, k)
    checks.check_scale(scale)
    if choose(impl) == "reference":
        y = _reference_precondition(k, v, w, beta, past, key_mask, cu_seqlens, sharpness)
        read = None if past is None else past[:2]
        return _reference_attention(q, k, y, w, beta, read, key_mask, cu_seqlens, scale), y
    return _blockwise(q, k, v, w, beta, past, key_mask, cu_seqlens, sharpness, scale, solves=True)


def path_precondition(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: LucidPast | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Y = P⁻¹ V with P_ij = exp(c (k̂_jᵀ (∏_{s=j+1..i} H_s) k̂_i − 1)), k̂ = k/‖k‖: what LUCID-PaTH reads and caches.

    With w of length 1 and beta in [0, 2], ‖P⁻¹‖ ≤ 2 for any keys and any length.

    Args:
        k, v, w, beta, key_mask, cu_seqlens, impl: as in `path_attention`.
        past: (k_past, y_past, scalars_past): keys re-based to the end of the past, their y, and `key_scalars` of the
            keys as they were, [B, H, S].
        sharpness: c, a positive number or a tensor [H]; default √D, the paper's matrix.

    Returns:
        y: [B, H, T, E], zero at masked positions.
    """
    past = _check_lucid(k, v, w, beta, past, key_mask, cu_seqlens, sharpness)
    if choose(impl) == "reference":
        return _reference_precondition(k, v, w, beta, past, key_mask, cu_seqlens, sharpness)
    return _blockwise(None, k, v, w, beta, past, key_mask, cu_seqlens, sharpness, None, solves=True)[1]


def _check(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    past: Past | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Past | None:
    checks.check_kv(k, v)
    checks.check_factors(k, w, beta)
    past = checks.check_past(past, k, v)
    checks.check_key_mask(key_mask, k, 0 if past is None else past[0].shape[2])
    checks.check_cu_seqlens(cu_seqlens, k, past)
    return past


def _check_lucid(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    past: LucidPast | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sharpness: float | Tensor | None,
) -> LucidPast | None:
    if past is None:
        _check(k, v, w, beta, None, key_mask, cu_seqlens)
        checks.check_sharpness(sharpness, k)
        return None
    if not isinstance(past, (tuple, list)) or len(past) != 3:
        came = f"{type(past).__name__} of length {len(past)}" if hasattr(past, "__len__") else type(past).__name__
        raise TypeError(f"past must be a triple (k_past, y_past, scalars_past), got {came}")
    pair = _check(k, v, w, beta, (past[0], past[1]), key_mask, cu_seqlens)
    checks.check_sharpness(sharpness, k)
    scalars = past[2]
    checks.check_tensor("scalars_past", scalars)
    checks.check_float("scalars_past", scalars)
    checks.check_shape("scalars_past", scalars, tuple(past[0].shape[:3]), "[B, H, S]")
    checks.check_device("scalars_past", scalars, k)
    return None if pair is None else (*pair, scalars)


def _blockwise(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    past: tuple[Tensor, Tensor, Tensor | None] | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sharpness: float | Tensor | None,
    scale: float | None,
    *,
    solves: bool,
) -> tuple[Tensor, Tensor]:
    """o and y, each empty if not asked for."""
    k_past, y_past, scalars_past = (None, None, None) if past is None else past
    c = math.sqrt(k.shape[-1]) if sharpness is None else sharpness
    learned = c.to(working_dtype(k)).expand(k.shape[0], -1) if isinstance(c, Tensor) else None
    tensors = q, k, v, w, beta, k_past, y_past, scalars_past, learned
    refuse_forward_mode(*tensors)
    numbers = k.shape[-1] ** -0.5 if scale is None else float(scale), 0.0 if isinstance(c, Tensor) else float(c)
    o, _, y = path_op(*tensors, key_mask, cu_seqlens, *numbers, solves)
    return o if q is None else o.to(read_out_dtype(q)), y


def _reference_attention(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    w: Tensor,
    beta: Tensor,
    past: Past | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    k_past, y_past = past if past is not None else (None, None)
    out_dtype, wide = read_out_dtype(q), working_dtype(q)
    if cu_seqlens is not None:
        packing.offsets(cu_seqlens, k.shape[2])
    with no_autocast(q):
        q, k, y, w, beta = (x.to(wide) for x in (q, k, y, w, beta))
        k_past, y_past = (None if x is None else x.to(wide) for x in (k_past, y_past))
        o = reference.attention(q, k, y, w, beta, k_past, y_past, key_mask, cu_seqlens, scale)
        return o.to(out_dtype)


def _reference_precondition(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    past: LucidPast | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sharpness: float | Tensor | None,
) -> Tensor:
    wide = working_dtype(k)
    c: float | Tensor = math.sqrt(k.shape[-1]) if sharpness is None else sharpness
    c = c.to(wide) if isinstance(c, Tensor) else float(c)
    root = c.sqrt()[:, None, None] if isinstance(c, Tensor) else math.sqrt(c)
    if cu_seqlens is not None:
        packing.offsets(cu_seqlens, k.shape[2])
    with no_autocast(k):
        keys = k.to(wide)
        if key_mask is not None:
            # Before the norm: the gradient of a masked NaN is NaN, not zero.
            keys = keys.masked_fill(~key_mask[:, None, -k.shape[2] :, None], 0)
        u = keys * (inverse_norms(keys) * root)
        u_past = y_past = None
        if past is not None:
            k_past, y_past, scalars = past
            y_past = y_past.to(wide)
            if key_mask is not None:
                hidden = ~key_mask[:, None, : k_past.shape[2]]
                k_past, scalars = k_past.masked_fill(hidden[..., None], 0), scalars.masked_fill(hidden, 0)
            u_past = k_past.to(wide) * (scalars.to(wide)[..., None] * root)
        y = reference.precondition(u, v.to(wide), w.to(wide), beta.to(wide), u_past, y_past, key_mask, cu_seqlens, c)
        return y.to(v.dtype)


def rebase_keys(
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Keys as a later position meets them: each moved by the Householder factors of all positions after it.

    k, w: [B, H, T, D]; beta: [B, H, T]; past: [B, H, S, D], keys re-based to the end of the past; key_mask: [B, S + T]
    -> [B, H, S + T, D], zero at masked positions: what a cache keeps, and `past` of the operators takes.
    """
    checks.check_heads_first("k", k, "[B, H, T, D]")
    checks.check_factors(k, w, beta)
    S = 0
    if past is not None:
        checks.check_tensor("past", past)
        if past.ndim != 4:
            raise ValueError(f"past must be [B, H, S, D] (4 dimensions), got shape {list(past.shape)}")
        S = past.shape[2]
        checks.check_shape("past", past, (*k.shape[:2], S, k.shape[3]), "[B, H, S, D]")
        checks.check_float("past", past)
        checks.check_device("past", past, k)
        checks.check_same_dtype("past", past, k)
    checks.check_key_mask(key_mask, k, S)
    wide = working_dtype(k)
    with no_autocast(k):
        new, w, beta = (x.to(wide) for x in (k, w, beta))
        old = k.new_empty(*k.shape[:2], 0, k.shape[3], dtype=wide) if past is None else past.to(wide)
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            new, w = new.masked_fill(hidden[:, :, S:], 0), w.masked_fill(hidden[:, :, S:], 0)
            beta = beta.masked_fill(hidden[:, :, S:, 0], 0)
            old = old.masked_fill(hidden[:, :, :S], 0)
        return torch.cat(_rebase(old, new, w, beta), 2).to(k.dtype)


# Positions that are re-based in one go. Products of larger pieces would cost more than they save.
PIECE = 64


def _rebase(old: Tensor, new: Tensor, w: Tensor, beta: Tensor) -> list[Tensor]:
    """From the last piece to the first, with the product of all later factors."""
    D = new.shape[3]
    later = torch.eye(D, dtype=new.dtype, device=new.device)
    done: list[Tensor] = []
    for k, w_, b in reversed(list(zip(*(x.split(PIECE, 2) for x in (new, w, beta)), strict=True))):
        below = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril(-1)
        solved = reference.solve_factors(k, w_, b, below)
        done.append((k - solved[..., D:].mT @ w_) @ later.mT)
        later = later - (later @ w_.mT) @ solved[..., :D]
    done.append(old @ later.mT)
    return done[::-1]
