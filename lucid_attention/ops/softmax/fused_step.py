"""`numba_step` for tensors: when it runs, its arguments and its threads, which are torch's own.

The arguments of a step are one block of memory (`ARGUMENTS`) that compiled code reads.
Addresses are integers, 0 for absent ones; strides are in elements; n = B·H heads.

    q: [n, G, D]; v: [n, E]; o: [n, G, E]; y: [n, E], all in the dtype of the cache, of `itemsize` bytes.
    keys, values: [B, H, *, D or E], with the strides of their first three dimensions.
    cached: how many keys are read from `keys`. The `live` ones after them, and the new one, are in recent:
        [n, live + 1, D], float32. Without it the new key is number `place` of `keys`.
    rows: [n, R, D], float32, the rows for `keys`; recent_rows: those for `recent`. Without them they are computed from
        q and the new key. R = G + 1 with a row for the new key, whose value is to be preconditioned; else R = G.
    even: R, or R + 1 if R is odd.
    inverse: [B, H, total], float32, 1/‖k‖, with the strides of its first two dimensions; mask: [B, total],
        bool, False for masked keys, with the stride of its first one.
    c, beta: [n], float32; without c it is `sharpness` for all heads. known: whether c is the largest exponent of the
        key's row.
    qk: whether queries and keys are normalised for the scores. writes_norm: whether 1/‖k‖ of the new key is missing in
        `inverse` and has to be written there.
    place: of the new key in the sequence. pieces: into which the keys of a head are divided.
    counters: address of slots, next and done, which threads count up from 0.
    scratch: `scratch_size` floats a thread; results: even · (E + 3) floats for each piece of each head.
"""

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from .. import numba_runtime
from ..numba_runtime import COUNTERS
from .one_token import Decoded, Token

IMPLEMENTATIONS = ("auto", "torch", "numba")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Elements of a cache below which waking a second thread costs more than it saves.
LEAST_ELEMENTS = 64 * 1024
# Elements of new keys up to which one thread finds their norms sooner than torch's operations start.
FEW_ELEMENTS = 16 * 1024


# Keys that are read at a time, at most: their scores stay in the first cache of a core.
MOST_KEYS = 256

INTEGERS = (
    *("q", "rows", "keys", "recent_rows", "recent", "values", "inverse", "mask", "v", "c", "beta", "o", "y"),
    *("n", "H", "G", "R", "even", "D", "E", "itemsize", "cached", "live", "place", "pieces", "known", "qk"),
    "writes_norm",
    *("key_b", "key_h", "key_t", "value_b", "value_h", "value_t", "inverse_b", "inverse_h", "mask_b"),
    *("scratch", "scratch_size", "results"),
    *COUNTERS,
)
NUMBERS = ("scale", "sharpness", "strength")
# The integers, then the floats; the memory after it is aligned like a vector.
ARGUMENTS = struct.Struct(f"{len(INTEGERS)}q{len(NUMBERS)}d")
ARGUMENTS_SIZE = -(-ARGUMENTS.size // 64) * 64
# Where `counters` points to.
COUNTED = 8 * INTEGERS.index("slots")


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
    # All that it reads by address: a wrapper has no memory of its own, and a negative view the wrong sign.
    if reason := numba_runtime.obstacle(k, *(x for x in token if isinstance(x, Tensor))):
        return reason
    if k.dtype not in DTYPES:
        return f"it is for float32, bfloat16 and float16, got {k.dtype}"
    if not token.q.dtype == token.v.dtype == y.dtype == k.dtype:
        return f"all must have the dtype of the keys, {k.dtype}: q has {token.q.dtype}, v {token.v.dtype}, y {y.dtype}"
    if k.stride(-1) != 1 or y.stride(-1) != 1:
        return "the last dimension of keys and values must be contiguous"
    if numba_runtime.threads() < torch.get_num_threads():
        return "torch's threads are not available here, so it needs torch.set_num_threads(1)"
    function = _function(k.dtype)
    return function if isinstance(function, str) else ""


def _function(dtype: torch.dtype) -> Any:
    return numba_runtime.compiled(".softmax.numba_step", DTYPES[dtype])


def can_write_norm(token: Token) -> bool:
    """Whether `run` can write 1/‖k‖ of the new key: it uses the norms as they are, without overlap."""
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
    `recent_rows`) and `recent` of `ARGUMENTS`, float32 and contiguous.
    """
    q, k, v, past, position = token.q.contiguous(), token.k, token.v.contiguous(), token.y_past, token.position
    (B, H, total, D), E = k.shape, v.shape[3]
    n, G = B * H, q.shape[1] // H
    R = G if token.inverse_norms is None else G + 1
    place = total - 1 if position is None else int(position)
    if not 0 <= place < total:
        raise IndexError(f"position must be in [0, M) = [0, {total}), got {place}")
    # In a buffer, places after the new key are masked.
    cached = place if pending is None else pending
    inverse = None if token.norm == "row_max" else _contiguous_float32(token.inverse_norms)
    mask = token.key_mask
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    beta = None if token.beta is None else token.beta.float().contiguous()
    c = token.sharpness.float().contiguous() if isinstance(token.sharpness, Tensor) else None
    o, y = q.new_empty(B, H * G, 1, E), v.new_empty(B, H, 1, E)

    threads = numba_runtime.threads() if n * total * (D + E) >= LEAST_ELEMENTS else 1
    pieces = 1 if n % threads == 0 else max(1, min(threads, cached // LEAST_KEYS))
    even = R + R % 2
    size = scratch_size(even, D)
    # Arguments, scratch and results. As a copy of q it is on the CPU, whatever the default device is.
    memory = q.new_empty(ARGUMENTS_SIZE + 4 * (threads * size + n * pieces * even * (E + 3)), dtype=torch.uint8)
    address = memory.data_ptr()
    scratch = address + ARGUMENTS_SIZE
    moving, meeting = (0, 0) if rows is None else (rows[0].data_ptr(), rows[1].data_ptr())
    live, recent_at = (0, 0) if recent is None else (recent.shape[1] - 1, recent.data_ptr())
    key_b, key_h, key_t, _ = k.stride()
    value_b, value_h, value_t, _ = past.stride()
    inverse_at, inverse_b, inverse_h = (0, 0, 0) if inverse is None else (inverse.data_ptr(), *inverse.stride()[:2])
    mask_at, mask_b = (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0))
    c_at, beta_at = (0 if x is None else x.data_ptr() for x in (c, beta))
    # fmt: off
    packed = ARGUMENTS.pack(
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
    ctypes.memmove(address, packed, ARGUMENTS.size)
    numba_runtime.run(_function(k.dtype), address, threads)
    return Decoded(o, y)


def inverse_norms(k: Tensor) -> Tensor | None:
    """1/‖k‖ of the keys of a few tokens, [B, H, T, D] -> [B, H, T], float32; None where torch has to do it."""
    if k.numel() > FEW_ELEMENTS or k.dtype not in DTYPES or (k.requires_grad and torch.is_grad_enabled()):
        return None
    if numba_runtime.obstacle(k) or k.stride(-1) != 1:
        return None
    function = numba_runtime.compiled(".numba_kernels", f"norms_{DTYPES[k.dtype]}")
    if isinstance(function, str):
        return None
    (B, H, T, D), (key_b, key_h, key_t, _) = k.shape, k.stride()
    norms = k.new_empty(B, H, T, dtype=torch.float32)
    function.ctypes(k.data_ptr(), norms.data_ptr(), B, H, T, D, key_b, key_h, key_t)
    return norms


def _contiguous_float32(inverse: Tensor | None) -> Tensor | None:
    """inverse: [B, H, total], as float32 with unit stride."""
    if inverse is None:
        return None
    if inverse.dtype != torch.float32:
        inverse = inverse.float()
    return inverse if inverse.stride(-1) == 1 else inverse.contiguous()


def scratch_size(even: int, D: int) -> int:
    """Floats of a thread: rows for cached and for recent keys, scores of a block, scores of the new key."""
    return even * (2 * D + MOST_KEYS + 1)
