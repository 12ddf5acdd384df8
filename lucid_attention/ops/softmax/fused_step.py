"""`numba_step` for tensors: when it runs, its arguments and its threads, which are torch's own."""

from typing import Any

import torch
from torch import Tensor

from .. import native
from .job import Job, scratch_size
from .one_token import Decoded, Token

IMPLEMENTATIONS = ("auto", "torch", "numba")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Numbers of a cache below which waking a second thread costs more than it saves.
LEAST_NUMBERS = 64 * 1024


def chosen(impl: str, token: Token) -> bool:
    """Whether the step runs for this token. "auto" takes it where it can; "numba" is obeyed or refused."""
    if impl not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, (*IMPLEMENTATIONS, "triton")))
        raise ValueError(f"impl must be one of {known}, got {impl!r}")
    if impl == "torch":
        return False
    reason = _obstacle(token)
    if reason and impl == "numba":
        raise ValueError(f"impl='numba' cannot run: {reason}. Expected 'auto' or 'torch'")
    return not reason


def _obstacle(token: Token) -> str:
    """Why the step cannot run; empty if it can."""
    k, y = token.k, token.y_past
    if reason := native.obstacle(k, y, token.q, token.v):
        return reason
    if k.dtype not in DTYPES:
        return f"it is for float32, bfloat16 and float16, got {k.dtype}"
    if not token.q.dtype == token.v.dtype == y.dtype == k.dtype:
        return f"all must have the dtype of the keys, {k.dtype}: q has {token.q.dtype}, v {token.v.dtype}, y {y.dtype}"
    if k.stride(-1) != 1 or y.stride(-1) != 1:
        return "the entries of a key and of a value must lie side by side"
    if native.threads() < torch.get_num_threads():
        return "torch's threads cannot be had here, so it is for torch.set_num_threads(1)"
    function = _function(k.dtype)
    return function if isinstance(function, str) else ""


def _function(dtype: torch.dtype) -> Any:
    return native.compiled(".softmax.numba_step", DTYPES[dtype])


def run(
    token: Token, pending: int | None = None, rows: tuple[Tensor, Tensor] | None = None, recent: Tensor | None = None
) -> Decoded:
    """One token.

    pending, rows, recent: where the keys after the first `pending` are not those of the cache: `cached`, (`rows`,
    `recent_rows`) and `recent` of `Job`, float32 and contiguous.
    """
    q, k, v, past, position = token.q.contiguous(), token.k, token.v.contiguous(), token.y_past, token.position
    (B, H, total, D), G, E, n = k.shape, token.groups, v.shape[3], k.shape[0] * k.shape[1]
    R = G if token.inverse_norms is None else G + 1
    place = total - 1 if position is None else int(position)
    if not 0 <= place < total:
        raise IndexError(f"position must be in [0, M) = [0, {total}), got {place}")
    # In a buffer, what stands behind the new key is masked.
    cached = place if pending is None else pending
    inverse = None if token.norm == "row_max" else _side_by_side(token.inverse_norms)
    mask = token.key_mask
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    beta = None if token.beta is None else token.beta.float().contiguous()
    c = token.sharpness.float().contiguous() if isinstance(token.sharpness, Tensor) else None
    o, y = q.new_empty(B, H * G, 1, E), v.new_empty(B, H, 1, E)

    threads = native.threads() if n * total * (D + E) >= LEAST_NUMBERS else 1
    pieces = 1 if n % threads == 0 else max(1, min(threads, cached // LEAST_KEYS))
    even = R + R % 2
    size = scratch_size(even, D)
    memory = torch.empty(threads * size + n * pieces * even * (E + 3))
    scratch = memory.data_ptr()
    moving, meeting = rows or (None, None)
    addresses = (q, moving, k, meeting, recent, past, inverse, mask, v, c, beta, o, y)
    job = Job(
        *(0 if x is None else x.data_ptr() for x in addresses),
        *(
            n,
            H,
            G,
            R,
            even,
            D,
            E,
            k.element_size(),
            cached,
            0 if recent is None else recent.shape[1] - 1,
            place,
            pieces,
        ),
        *(token.norm != "row_max", token.norm == "qk", *k.stride()[:3], *past.stride()[:3]),
        *((0, 0) if inverse is None else inverse.stride()[:2]),
        *(0 if mask is None else mask.stride(0), scratch, size, scratch + 4 * threads * size),
        *(0, 0, 0, 0, token.scale, 0.0 if c is not None else token.sharpness, token.strength),
    )
    native.run(_function(k.dtype), job, threads)
    return Decoded(o, y)


def _side_by_side(inverse: Tensor | None) -> Tensor | None:
    """inverse: [B, H, total], as float32 with unit stride."""
    if inverse is None:
        return None
    inverse = inverse.float()
    return inverse if inverse.stride(-1) == 1 else inverse.contiguous()
