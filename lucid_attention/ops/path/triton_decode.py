"""One decoding step of PaTH and LUCID-PaTH by Triton kernels. Triton is imported when a step runs."""

import torch
from torch import Tensor

from ..dispatch import DTYPES, unusable
from ..precision import working_dtype
from ..softmax.one_token import Token

LARGEST_HEAD = 256


def obstacle(token: Token, product: Tensor) -> str | None:
    """Why the kernels cannot decode this token; None if they can."""
    for name in ("q", "v", "y_past"):
        dtype = getattr(token, name).dtype
        if dtype != token.k.dtype:
            return f"it needs one dtype: expected {name} in {token.k.dtype}, got {dtype}"
    if product.dtype not in DTYPES:
        return f"it is for bfloat16, float16 and float32, got product in {product.dtype}"
    for letter, size in (("D", token.k.shape[3]), ("E", token.v.shape[3])):
        if size > LARGEST_HEAD:
            return f"it is for head sizes up to {LARGEST_HEAD}, got {letter} = {size}"
    return unusable(token.k.device, token.k.dtype)


def decode(
    token: Token, w: Tensor, beta: Tensor, product: Tensor, pending: int, live: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, y, live and product of `PathDecoded`; `obstacle` has said that it can run."""
    learned = token.sharpness if isinstance(token.sharpness, Tensor) else None
    fixed = 0.0 if isinstance(token.sharpness, Tensor) else token.sharpness
    return _decode_op(
        token.q, token.k, token.v, w, beta, token.y_past, product, live, token.inverse_norms, token.key_mask, learned,
        pending, token.scale, fixed,
    )  # fmt: skip


@torch.library.custom_op("lucid_attention::path_decode_triton", mutates_args=())
def _decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    y_past: Tensor,
    product: Tensor,
    live: Tensor,
    inverse_norms: Tensor | None,
    key_mask: Tensor | None,
    sharpness: Tensor | None,
    pending: int,
    scale: float,
    fixed_sharpness: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .triton_launch import Made, step

    c = fixed_sharpness if sharpness is None else sharpness
    token = Token(q, k, v, y_past, inverse_norms, key_mask, None, "key", c, 1.0, scale, None)
    made = Made(*_outputs(q, k, v, live))
    step(token, w, beta, product, live, pending, made)
    return made.o, made.y, made.live, made.product


def _outputs(q: Tensor, k: Tensor, v: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, H, _, D), wide = k.shape, working_dtype(k)
    moved = k.new_empty(B, H, live.shape[2] + 1, D, dtype=wide)
    return q.new_empty(*q.shape[:3], v.shape[3]), v.new_empty(v.shape), moved, k.new_empty(B, H, D, D, dtype=wide)


@_decode_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, y_past: Tensor, product: Tensor, live: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(q, k, v, live)
