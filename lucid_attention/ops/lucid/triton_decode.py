"""One decoding step by Triton kernels: growing caches, preallocated buffers and pages.

Two launches, whose number and shapes depend on the shapes of the cache only. Triton is imported when a step runs.
"""

import torch
from torch import Tensor

from .. import checks
from ..dispatch import unusable
from ..keys import resolved_scale, resolved_sharpness
from ..softmax.one_token import Decoded, Token


def obstacle(token: Token) -> str | None:
    """Why the kernels cannot decode this token; None if they can."""
    if token.norm == "row_max":
        return "its kernels have no norm='row_max'"
    for name in ("q", "v", "y_past"):
        dtype = getattr(token, name).dtype
        if dtype != token.k.dtype:
            return f"it needs one dtype: expected {name} in {token.k.dtype}, got {dtype}"
    for letter, size in (("D", token.k.shape[3]), ("E", token.v.shape[3])):
        if size > 256:
            return f"it is for head sizes up to 256, got {letter} = {size}"
    return unusable(token.k.device, token.k.dtype)


def decode(token: Token) -> Decoded:
    """One token; `obstacle` has said that it can run."""
    learned = token.sharpness if isinstance(token.sharpness, Tensor) else None
    fixed = 0.0 if isinstance(token.sharpness, Tensor) else token.sharpness
    assert token.inverse_norms is not None
    return Decoded(
        *_decode_op(
            token.q, token.k, token.v, token.y_past, token.inverse_norms, token.key_mask, token.beta, learned,
            token.position, token.strength, token.scale, fixed, token.norm,
        )
    )  # fmt: skip


@torch.library.custom_op("lucid_attention::decode_triton", mutates_args=())
def _decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    inverse_norms: Tensor,
    key_mask: Tensor | None,
    beta: Tensor | None,
    sharpness: Tensor | None,
    position: Tensor | None,
    strength: float,
    scale: float,
    fixed_sharpness: float,
    norm: str,
) -> tuple[Tensor, Tensor]:
    from . import triton_launch

    n = k.shape[0] * k.shape[1]
    c = q.new_full((n,), fixed_sharpness, dtype=torch.float32) if sharpness is None else sharpness.reshape(n).float()
    o, y = _outputs(q, v)
    triton_launch.step(
        q, k, v, y_past, y, inverse_norms, o, c, key_mask=key_mask, beta=beta, count=k.shape[2] - 1, counts=position,
        table=None, strength=strength, scale=scale, norm=norm,
    )  # fmt: skip
    return o, y


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), v.new_empty(v.shape)


@_decode_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _outputs(q, v)


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
    """LUCID attention of one new token per sequence against pages; writes y of the token into `y_pages`.

    The new key and its inverse norm are in the pages already, at place `lengths`. CUDA and ROCm devices only.

    Args:
        q: [B, H·G, 1, D].
        k_pages: [pages, page size, H, D]. y_pages: [pages, page size, H, E]. norm_pages: [pages, page size, H],
            `inverse_key_norms` in float32.
        v: [B, H, 1, E].
        block_table: int32 [B, P], the pages of every sequence in order.
        lengths: int64 [B], how many tokens of each sequence lie before the new one. Not negative and below P · page
            size: they are not read on the host, and not checked.
        beta, norm, sharpness, strength, scale: as in `lucid_decode`.

    Returns:
        o: [B, H·G, 1, E].
    """
    from . import triton_launch

    pages, size, H, _ = k_pages.shape
    checks.check_shape("norm_pages", norm_pages, (pages, size, H), "[pages, page size, H]")
    checks.check_shape("y_pages", y_pages, (pages, size, H, v.shape[3]), "[pages, page size, H, E]")
    checks.check_shape("v", v, (q.shape[0], H, 1, v.shape[3]), "[B, H, 1, E]")
    checks.check_shape("lengths", lengths, (q.shape[0],), "[B]")
    checks.check_shape("block_table", block_table, (q.shape[0], block_table.shape[1]), "[B, P]")
    for name, x in (("k_pages", k_pages), ("y_pages", y_pages)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must have its entries side by side, got strides {list(x.stride())}")
    # The cache as [B, H, places, *], where the pages take the place of B.
    k, y, norms = k_pages.transpose(1, 2), y_pages.transpose(1, 2), norm_pages.transpose(1, 2)
    c = resolved_sharpness(sharpness, q[:, :H])
    token = Token(q, k, v, y, norms, None, beta, norm, c, strength, resolved_scale(scale, k), lengths)
    reason = obstacle(token)
    if reason:
        raise ValueError(f"paged decoding cannot run: {reason}")
    n = q.shape[0] * H
    c = c.reshape(n).float() if isinstance(c, Tensor) else q.new_full((n,), c, dtype=torch.float32)
    o = _outputs(q, v)[0]
    triton_launch.step(
        q, k, v, y, y, norms, o, c, key_mask=None, beta=beta, count=0, counts=lengths, table=block_table,
        strength=strength, scale=token.scale, norm=norm,
    )  # fmt: skip
    return o
