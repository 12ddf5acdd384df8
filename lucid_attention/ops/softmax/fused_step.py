"""`numba_step` for tensors: when it runs, its arguments and its threads, which are torch's own."""

import ctypes
import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .job import Job, scratch_size
from .one_token import Decoded, Token

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "torch", "numba")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Numbers of a cache below which waking a second thread costs more than it saves.
LEAST_NUMBERS = 64 * 1024
# Whether this process was forked: OpenMP's threads do not survive that.
_forked: list[bool] = []


@cache
def _kernel(dtype: torch.dtype) -> Any:
    """The compiled step, or the reason why there is none. The first one of a machine compiles, later ones are read."""
    try:
        from . import numba_step
    except ImportError as missing:
        return f'{missing.name or missing} is not installed: pip install "lucid-attention[cpu]"'
    # Errors of a compiler have no common base class, and a folder where nothing can be written is one of them.
    try:
        return numba_step.compiled(DTYPES[dtype], cache=True)
    except Exception:
        logger.debug("Numba could not keep or read its compiled code", exc_info=True)
    try:
        return numba_step.compiled(DTYPES[dtype], cache=False)
    except Exception as error:
        logger.warning("lucid_attention decodes by torch, because Numba failed: %s", error)
        return f"Numba failed: {error}"


@cache
def _parallel() -> Any:
    """OpenMP's entry that runs a function in several threads, out of the library that torch itself uses; or None."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    os.register_at_fork(after_in_child=lambda: _forked.append(True))
    return parallel


def chosen(impl: str, token: Token) -> bool:
    """Whether the step runs for this token. "auto" takes it where it can; "numba" is obeyed or refused."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if impl == "torch":
        return False
    reason = _obstacle(token)
    if reason and impl == "numba":
        raise ValueError(f"impl='numba' cannot run: {reason}. Expected 'auto' or 'torch'")
    return not reason


def _obstacle(token: Token) -> str:
    """Why the step cannot run; empty if it can."""
    k, y = token.k, token.y_past
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return "it is not part of graphs"
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "it is not part of transforms"
    if not all(type(x) is Tensor and not x.is_neg() for x in (token.q, k, token.v, y)):
        return "it is for plain tensors"
    if k.device.type != "cpu":
        return f"it is for CPUs, got tensors on {k.device.type}"
    if k.dtype not in DTYPES:
        return f"it is for float32, bfloat16 and float16, got {k.dtype}"
    if token.q.dtype != k.dtype:
        return f"queries must have the dtype of the keys, {k.dtype}, got {token.q.dtype}"
    if k.stride(-1) != 1 or y.stride(-1) != 1:
        return "the entries of a key and of a value must lie side by side"
    if torch.get_num_threads() > 1 and _parallel() is None:
        return "this torch has no OpenMP for its threads, so it is for torch.set_num_threads(1)"
    kernel = _kernel(k.dtype)
    return kernel if isinstance(kernel, str) else ""


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
    cached = pending if pending is not None else total if position is not None else total - 1
    inverse = None if token.norm == "row_max" else _side_by_side(token.inverse_norms)
    mask = token.key_mask
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    beta = None if token.beta is None else token.beta.float().contiguous()
    c = token.sharpness.float().contiguous() if isinstance(token.sharpness, Tensor) else None
    o, y = q.new_empty(B, H * G, 1, E), v.new_empty(B, H, 1, E)

    threads = 1 if _forked or n * total * (D + E) < LEAST_NUMBERS else torch.get_num_threads()
    pieces = 1 if n % threads == 0 else max(1, min(threads, cached // LEAST_KEYS))
    size = scratch_size(R, D, E)
    memory = torch.empty(threads * size + n * pieces * R * (E + 3))
    scratch = memory.data_ptr()
    moving, meeting = rows or (None, None)
    addresses = (q, moving, k, meeting, recent, past, inverse, mask, v, c, beta, o, y)
    job = Job(
        *(0 if x is None else x.data_ptr() for x in addresses),
        *(n, H, G, R, D, E, k.element_size(), cached, 0 if recent is None else recent.shape[1] - 1, place, pieces),
        *(token.norm != "row_max", token.norm == "qk", *k.stride()[:3], *past.stride()[:3]),
        *((0, 0) if inverse is None else inverse.stride()[:2]),
        *(0 if mask is None else mask.stride(0), scratch, size, scratch + 4 * threads * size),
        *(0, 0, 0, 0, token.scale, 0.0 if c is not None else token.sharpness, token.strength),
    )
    address = ctypes.addressof(job)
    job.counters = address + Job.slots.offset
    kernel = _kernel(k.dtype)
    if threads == 1:
        kernel.ctypes(address)
    else:
        _parallel()(kernel.address, address, threads, 0)
    return Decoded(o, y)


def _side_by_side(inverse: Tensor | None) -> Tensor | None:
    """inverse: [B, H, total], as float32 with unit stride."""
    if inverse is None:
        return None
    inverse = inverse.float()
    return inverse if inverse.stride(-1) == 1 else inverse.contiguous()
