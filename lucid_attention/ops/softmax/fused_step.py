"""`numba_step` for tensors: when it runs, its arguments and its threads, which are torch's own."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from .. import native
from .job import COUNTED, JOB, JOB_SIZE, scratch_size
from .one_token import Decoded, Token

IMPLEMENTATIONS = ("auto", "torch", "numba")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Numbers of a cache below which waking a second thread costs more than it saves.
LEAST_NUMBERS = 64 * 1024
# Numbers of new keys up to which one thread finds their norms sooner than torch's operations start.
FEW_NUMBERS = 16 * 1024


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


def can_write_norm(token: Token) -> bool:
    """Whether `run` can write 1/‖k‖ of the new key: it uses the given norms, each in a place of its own."""
    inverse = token.inverse_norms
    if token.norm == "row_max" or inverse is None or type(inverse) is not Tensor or inverse.dtype != torch.float32:
        return False
    (B, H, total), (batch, head, one) = inverse.shape, inverse.stride()
    return one == 1 and (head >= total or H == 1) and (batch >= H * head or B == 1)


def run(
    token: Token,
    pending: int | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    recent: Tensor | None = None,
    writes_norm: bool = False,
) -> Decoded:
    """One token.

    writes_norm: whether it writes 1/‖k‖ of the new key into the norms (see `can_write_norm`).
    pending, rows, recent: where the keys after the first `pending` are not those of the cache: `cached`, (`rows`,
    `recent_rows`) and `recent` of `Job`, float32 and contiguous.
    """
    q, k, v, past, position = token.q.contiguous(), token.k, token.v.contiguous(), token.y_past, token.position
    (B, H, total, D), E = k.shape, v.shape[3]
    n, G = B * H, q.shape[1] // H
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
    # The job, scratch and results. As a copy of q it is on the CPU, whatever the default device is.
    memory = q.new_empty(JOB_SIZE + 4 * (threads * size + n * pieces * even * (E + 3)), dtype=torch.uint8)
    address = memory.data_ptr()
    scratch = address + JOB_SIZE
    moving, meeting = (0, 0) if rows is None else (rows[0].data_ptr(), rows[1].data_ptr())
    live, recent_at = (0, 0) if recent is None else (recent.shape[1] - 1, recent.data_ptr())
    key_b, key_h, key_t, _ = k.stride()
    value_b, value_h, value_t, _ = past.stride()
    inverse_at, inverse_b, inverse_h = (0, 0, 0) if inverse is None else (inverse.data_ptr(), *inverse.stride()[:2])
    mask_at, mask_b = (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0))
    c_at, beta_at = (0 if x is None else x.data_ptr() for x in (c, beta))
    # fmt: off
    job = JOB.pack(
        q.data_ptr(), moving, k.data_ptr(), meeting, recent_at, past.data_ptr(), inverse_at, mask_at, v.data_ptr(),
        c_at, beta_at, o.data_ptr(), y.data_ptr(),
        n, H, G, R, even, D, E, k.element_size(), cached, live, place, pieces, token.norm != "row_max",
        token.norm == "qk", writes_norm,
        key_b, key_h, key_t, value_b, value_h, value_t, inverse_b, inverse_h, mask_b,
        scratch, size, scratch + 4 * threads * size,
        address + COUNTED, 0, 0, 0,
        token.scale, 0.0 if c is not None else token.sharpness, token.strength,
    )
    # fmt: on
    ctypes.memmove(address, job, JOB.size)
    native.run(_function(k.dtype), address, threads)
    return Decoded(o, y)


def inverse_norms(k: Tensor) -> Tensor | None:
    """1/‖k‖ of the keys of a few tokens, [B, H, T, D] -> [B, H, T], float32; None where torch has to do it."""
    if k.numel() > FEW_NUMBERS or k.dtype not in DTYPES or (k.requires_grad and torch.is_grad_enabled()):
        return None
    if native.obstacle(k) or k.stride(-1) != 1:
        return None
    function = native.compiled(".numba_norms", DTYPES[k.dtype])
    if isinstance(function, str):
        return None
    (B, H, T, D), (key_b, key_h, key_t, _) = k.shape, k.stride()
    norms = k.new_empty(B, H, T, dtype=torch.float32)
    function.ctypes(k.data_ptr(), norms.data_ptr(), B, H, T, D, key_b, key_h, key_t)
    return norms


def _side_by_side(inverse: Tensor | None) -> Tensor | None:
    """inverse: [B, H, total], as float32 with unit stride."""
    if inverse is None:
        return None
    if inverse.dtype != torch.float32:
        inverse = inverse.float()
    return inverse if inverse.stride(-1) == 1 else inverse.contiguous()
