"""One new token and a cache of keys and preconditioned values.

Decoding is bound by memory traffic, so K and Y are each read once, for both the attention and the preconditioner:
the new key is one more query row of its group. Its scores, times the cached 1/‖k_j‖, are c · cos θ_j; the
exponentials of these minus c are P_j, and the same product with Y that reads the values for the queries also gives
Σ_j P_j y_j (`docs/mathematics.md`).

With a `KeyMap` of center μ and matrix M the cache keeps k, not u = (k − μ) M: for a = M Mᵀ (k_i − μ), u_i·u_j is
a·k_j − a·μ. So a is the row instead of the new key, and the cached norms are those of u.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..dispatch import decodes_by_triton, step_obstacle
from ..keys import KeyMap, map_keys, resolved_scale, resolved_sharpness, rms_normalize
from ..keys import inverse_norms as inverse_norms_of
from ..precision import no_autocast, working_dtype
from ..softmax import fused_step
from ..softmax.one_token import (
    Decoded,
    Token,
    at_position,
    cache_product,
    checked_token,
    finish_step,
    groups_of,
    put_at_position_,
)
from ..softmax.strips import clean_queries


def inverse_key_norms(k: Tensor, key_map: KeyMap | None = None) -> Tensor:
    """1/‖k‖ of every key, [B, H, T, D] -> [B, H, T] in at least float32: what a cache keeps next to the keys.

    key_map: as in `lucid_attention`; the norms are those of the mapped keys.
    """
    checks.check_heads_first("k", k, "[B, H, T, D]")
    checks.check_key_map(key_map, k)
    k = map_keys(k, key_map)
    return inverse_norms_of(k.to(working_dtype(k)))[..., 0]


def lucid_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    inverse_norms: Tensor,
    *,
    key_mask: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    key_map: KeyMap | None = None,
    scale: float | None = None,
    position: Tensor | None = None,
    norm_known: bool = True,
    impl: str = "auto",
) -> Decoded:
    """LUCID attention of one new token. No gradients.

    Args:
        q: [B, H·G, 1, D], the new query.
        k: [B, H, S + 1, D], the cached keys with the new one at the end. Caches append keys first.
        v: [B, H, 1, E], the new value.
        y_past: [B, H, S, E], cached preconditioned values. Finite everywhere, also at masked keys (where ours are
            zero): cleaning them would read the cache twice.
        inverse_norms: [B, H, S + 1], `inverse_key_norms` of k with the same key_map. Not read for norm="row_max".
        key_mask, beta, norm, sharpness, strength, key_map, scale: as in `lucid_attention`, with key_mask: [B, S + 1]
            and beta: [B, H, 1].
        position: int64 [] or [1], for preallocated buffers: k: [B, H, M, D], y_past: [B, H, M, E] and
            inverse_norms: [B, H, M] of M places are passed whole, with the new key and its norm at `position`.
            key_mask: [B, M] is needed; places after `position` take no part, whatever it says. What y_past holds at
            `position` and at masked keys does not matter as long as it is finite. Only the result depends on the value
            of `position`: one compiled graph serves all.
        norm_known: False if `inverse_norms` has no entry for the new key yet: it is written there. No other argument is
            changed.
        impl: "torch"; "triton": two kernels on CUDA and ROCm devices, the cache split over programs; "numba": one pass
            over a cache of float32 or 16 bits on a CPU, with the extra `cpu`; "auto": one of the last two where it can
            run; neither has a key_map. The first use of "numba" for a dtype on a machine compiles for a few seconds;
            later ones read the cache.
    """
    if inverse_norms is None:
        checks.check_tensor("inverse_norms", inverse_norms)
    token = checked_token(
        q,
        k,
        v,
        y_past,
        inverse_norms=inverse_norms,
        key_mask=key_mask,
        beta=beta,
        norm=norm,
        sharpness=sharpness,
        strength=strength,
        scale=scale,
        position=position,
    )
    checks.check_key_map(key_map, k)
    if key_map is not None and impl == "auto":
        impl = "torch"
    by_triton = decodes_by_triton(impl, k.device, lambda: kernel_obstacle(token, key_map))
    if not by_triton and fused_step.chosen(impl, token):
        if key_map is not None:
            raise ValueError("impl='numba' cannot run: it has no key_map. Expected 'auto' or 'torch'")
        return fused_step.run(token, norm_known=norm_known)
    if token.position is not None and token.key_mask is not None:
        places = torch.arange(k.shape[2], device=k.device)
        token = token._replace(key_mask=token.key_mask & (places <= token.position))
    with torch.no_grad(), no_autocast(k):
        if not norm_known:
            _write_norm_(token, key_map)
        return _decode_by_triton(token) if by_triton else _decode(token, key_map)


def _write_norm_(token: Token, key_map: KeyMap | None = None) -> None:
    assert token.inverse_norms is not None
    new = inverse_key_norms(at_position(token.k, token.position, 2), key_map)
    put_at_position_(token.inverse_norms, token.position, new.to(token.inverse_norms.dtype))


def _decode(token: Token, key_map: KeyMap | None) -> Decoded:
    (B, H, total, D), position, c = token.k.shape, token.position, token.sharpness
    n, G, wide = B * H, groups_of(token), working_dtype(token.k)
    assert token.inverse_norms is not None
    inverse = token.inverse_norms.reshape(n, 1, total).to(wide)
    q = token.q
    if token.key_mask is not None:
        q = clean_queries(q, at_position(token.key_mask, position))
    keys, queries = token.k.flatten(0, 1), q.reshape(n, G, D).to(wide)
    if token.norm == "qk":
        queries = rms_normalize(queries)
    weight = c / D if token.norm == "row_max" else c * at_position(inverse, position)
    row, offset = _row_of_key(at_position(token.k, position, 2).to(wide), key_map)
    rows = torch.cat([queries * token.scale, row.reshape(n, 1, D) * weight], 1)
    scores = cache_product(rows, keys.mT)
    if offset is not None:
        scores[:, G:].sub_(offset.reshape(n, 1, 1) * weight)
    if token.norm == "qk":
        # Cached norms are those of mapped keys, and the softmax normalises the keys themselves.
        lengths = inverse if key_map is None else inverse_norms_of(keys.to(wide)).mT
        scores[:, :G].mul_(lengths * math.sqrt(D))
    if token.norm != "row_max":
        scores[:, G:].mul_(inverse)
        put_at_position_(scores[:, G:], position, c)  # exactly, also for a zero key
    return finish_step(scores, token)


def _row_of_key(k: Tensor, key_map: KeyMap | None) -> tuple[Tensor, Tensor | None]:
    """a and a·μ of the new key: [B, H, 1, D] and [B, H, 1], in the dtype of k; None for zero."""
    a = map_keys(k, key_map)
    if key_map is None:
        return a, None
    if key_map.matrix is not None:
        a = a @ key_map.matrix.to(k.dtype).mT
    return a, None if key_map.center is None else (a * key_map.center[:, None].to(k.dtype)).sum(-1)


def kernel_obstacle(token: Token, key_map: KeyMap | None = None) -> str | None:
    """Why the Triton kernels cannot decode this token; None if they can."""
    if key_map is not None:
        return "its kernels have no key_map"
    if token.norm == "row_max":
        return "its kernels have no norm='row_max'"
    return step_obstacle(token.k, q=token.q, v=token.v, y_past=token.y_past)


def _decode_by_triton(token: Token) -> Decoded:
    fixed = 0.0 if isinstance(token.sharpness, Tensor) else token.sharpness
    learned = token.sharpness if isinstance(token.sharpness, Tensor) else None
    return Decoded(*_decode_op(*token._replace(sharpness=learned), fixed))  # type: ignore[arg-type]


def _run_kernels(*inputs: Any) -> tuple[Tensor, Tensor]:
    from . import triton_decode

    token, fixed = Token(*inputs[:-1]), inputs[-1]
    o, y = _outputs(*token)
    triton_decode.step(token if token.sharpness is not None else token._replace(sharpness=fixed), y, o)
    return o, y


def _outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), v.new_empty(v.shape)


# The fields of `Token`, where sharpness is a tensor or fixed.
_decode_op = torch.library.custom_op(
    "lucid_attention::decode_triton",
    _run_kernels,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor y_past, Tensor inverse_norms, Tensor? key_mask, Tensor? beta, "
    "str norm, Tensor? sharpness, float strength, float scale, Tensor? position, float fixed_sharpness) "
    "-> (Tensor, Tensor)",
)
_decode_op.register_fake(_outputs)


def paged_decode_(
    q: Tensor,
    k_pages: Tensor,
    y_pages: Tensor,
    norm_pages: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    scale: float | None = None,
) -> Tensor:
    """LUCID attention of one new token per sequence with a paged cache; writes y of the token into `y_pages`.

    The new key and its inverse norm are already in the pages, at place `lengths`. CUDA and ROCm devices only.

    Args:
        q: [B, H·G, 1, D].
        k_pages: [pages, page size, H, D]. y_pages: [pages, page size, H, E]. norm_pages: [pages, page size, H],
            `inverse_key_norms` in float32.
        v: [B, H, 1, E].
        block_table: int32 [B, P], the pages of every sequence in order.
        lengths: int64 [B], how many tokens of each sequence are before the new one. Not negative and below P · page
            size: they are not read on the host, so not checked.
        beta, norm, sharpness, strength, scale: as in `lucid_decode`.

    Returns:
        o: [B, H·G, 1, E].
    """
    pages, size, H, _ = k_pages.shape
    checks.check_shape("norm_pages", norm_pages, (pages, size, H), "[pages, page size, H]")
    checks.check_shape("y_pages", y_pages, (pages, size, H, v.shape[3]), "[pages, page size, H, E]")
    checks.check_shape("v", v, (q.shape[0], H, 1, v.shape[3]), "[B, H, 1, E]")
    checks.check_shape("lengths", lengths, (q.shape[0],), "[B]")
    checks.check_shape("block_table", block_table, (q.shape[0], block_table.shape[1]), "[B, P]")
    for name, x in (("k_pages", k_pages), ("y_pages", y_pages)):
        if x.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {list(x.stride())}")
    # The cache as [B, H, places, *], where the pages take the place of B.
    k, y, norms = k_pages.transpose(1, 2), y_pages.transpose(1, 2), norm_pages.transpose(1, 2)
    c = resolved_sharpness(sharpness, q[:, :H])
    token = Token(q, k, v, y, norms, None, beta, norm, c, strength, resolved_scale(scale, k), lengths)
    reason = kernel_obstacle(token)
    if reason:
        raise ValueError(f"paged decoding cannot run: {reason}")
    learned, fixed = (c, 0.0) if isinstance(c, Tensor) else (None, c)
    given = beta, norm, learned, strength, token.scale, fixed
    out: Tensor = _paged_decode_op(q, k_pages, y_pages, norm_pages, v, block_table, lengths, *given)
    return out


def _run_paged_kernels(
    q: Tensor, k: Tensor, y: Tensor, norms: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor,
    beta: Tensor | None, norm: str, sharpness: Tensor | None, strength: float, scale: float, fixed: float,
) -> Tensor:  # fmt: skip
    from . import triton_decode

    k, y, norms = (x.transpose(1, 2) for x in (k, y, norms))
    c = fixed if sharpness is None else sharpness
    o, _ = _outputs(q, k, v)
    triton_decode.step(Token(q, k, v, y, norms, None, beta, norm, c, strength, scale, lengths), y, o, block_table)
    return o


_paged_decode_op = torch.library.custom_op(
    "lucid_attention::paged_decode_triton",
    _run_paged_kernels,
    mutates_args=("y_pages",),
    schema="(Tensor q, Tensor k_pages, Tensor(a!) y_pages, Tensor norm_pages, Tensor v, Tensor block_table, "
    "Tensor lengths, Tensor? beta, str norm, Tensor? sharpness, float strength, float scale, float fixed_sharpness) "
    "-> Tensor",
)
_paged_decode_op.register_fake(lambda q, k_pages, y_pages, norm_pages, v, *rest: _outputs(q, k_pages, v)[0])
