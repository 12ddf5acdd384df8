"""`numba_step.step` for tensors: when it runs, and its arguments."""

import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .one_token import Decoded, Token, at_position

IMPLEMENTATIONS = ("auto", "torch", "numba")
# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Numba has no 16-bit floats. For every dtype of a cache: the dtype with the same bits, and `bits` of `numba_step.step`.
STORED = {torch.float32: (torch.float32, 32), torch.bfloat16: (torch.uint16, 8), torch.float16: (torch.int16, 16)}


@cache
def _kernel() -> Any:
    """`step` and `set_threads` of `numba_step`, or the reason why there are none."""
    try:
        from . import numba_step
    except ImportError as missing:
        return f'{missing.name or missing} is not installed: pip install "lucid-attention[cpu]"'
    # Numba's threads do not survive a fork, and it would end the process.
    os.register_at_fork(after_in_child=lambda: _stop("this process was forked from one that had decoded"))
    return numba_step.step, numba_step.set_threads


# Set to a reason when the kernel must not be used any more.
_stopped: list[str] = []


def _stop(reason: str) -> None:
    _stopped[:] = [reason]


def chosen(impl: str, token: Token) -> bool:
    """Whether the step runs for this token. "numba" is obeyed or refused."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    # "auto" is torch: the first compilation for a dtype on a machine takes Numba tens of seconds.
    if impl != "numba":
        return False
    reason = _obstacle(token)
    if reason:
        raise ValueError(f"impl='numba' cannot run: {reason}. Expected 'auto' or 'torch'")
    return True


def _obstacle(token: Token) -> str:
    """Why the step cannot run; empty if it can."""
    k = token.k
    if torch.compiler.is_compiling() or type(k) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
        return "it is not part of graphs and transforms"
    if k.device.type != "cpu":
        return f"it is for CPUs, got tensors on {k.device.type}"
    if k.dtype not in STORED:
        return f"it is for float32, bfloat16 and float16, got {k.dtype}"
    if k.stride(-1) != 1 or token.y_past.stride(-1) != 1:
        return "the entries of a key and of a value must lie side by side"
    if _stopped:
        return _stopped[0]
    kernel = _kernel()
    return kernel if isinstance(kernel, str) else ""


def run(
    token: Token, rows: Tensor, cached: int, recent_rows: Tensor | None = None, recent: Tensor | None = None
) -> Decoded:
    """One token.

    rows, cached, recent_rows, recent: as in `numba_step.step`, float32.
    """
    (B, H, total, D), n, G = token.k.shape, rows.shape[0], token.groups
    E, position = token.v.shape[3], token.position
    step, set_threads = _kernel()
    stored, bits = STORED[token.k.dtype]
    place = total - 1 if position is None else int(position)
    known = token.norm != "row_max"
    inverse = token.inverse_norms if known else None
    inverse = rows.new_empty(n, 0) if inverse is None else inverse.reshape(n, total).float()
    hidden = rows.new_empty(B, 0, dtype=torch.bool) if token.key_mask is None else ~token.key_mask
    c = token.sharpness if known else math.inf
    c = c.float().reshape(n) if isinstance(c, Tensor) else rows.new_full((n,), c)
    beta = rows.new_ones(n) if token.beta is None else token.beta.reshape(n).float()
    new = at_position(token.k, position, 2).reshape(n, D).float() if recent is None else recent[:, -1]
    none = rows.new_empty(n, 0, D)
    o, y = rows.new_empty(n, G, E), rows.new_empty(n, E)
    threads = torch.get_num_threads()
    pieces = 1 if n % threads == 0 else max(1, min(threads, cached // LEAST_KEYS))
    try:
        set_threads(threads)
        step(
            H,
            _array(rows),
            _memory(token.k, stored),
            token.k.stride()[:3],
            cached,
            _array(none if recent_rows is None else recent_rows),
            _array(none if recent is None else recent),
            _memory(token.y_past, stored),
            token.y_past.stride()[:3],
            _array(inverse),
            _array(hidden),
            place,
            _array(new),
            _array(token.v.reshape(n, E).float()),
            _array(beta),
            _array(c),
            float(token.strength),
            G,
            math.sqrt(D) if token.norm == "qk" else 0.0,
            bits,
            pieces,
            _array(o),
            _array(y),
        )
    # Errors of a compiler have no common base class.
    except Exception as error:
        _stop(f"Numba failed: {error}")
        raise RuntimeError(f"impl='numba' failed, 'torch' works everywhere: {error}") from error
    return Decoded(o.view(B, H * G, 1, E).to(token.q.dtype), y.view(B, H, 1, E).to(token.y_past.dtype))


def _array(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()


def _memory(x: Tensor, stored: torch.dtype) -> Any:
    """The memory of x, [B, H, S, D] in any strides, as one array from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().view(stored).as_strided((last + 1 if x.numel() else 0,), (1,)).numpy()
