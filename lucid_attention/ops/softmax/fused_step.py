"""`one_pass.step` for tensors: when it can run, and its arguments."""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .one_token import Decoded, Token, at_position

# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Numba has no 16-bit floats: their bits, and how many of them `one_pass` rounds to.
STORED = {torch.float32: (torch.float32, 32), torch.bfloat16: (torch.uint16, 8), torch.float16: (torch.int16, 16)}


@cache
def kernel() -> Any:
    """`one_pass.step`, or None where Numba is not installed."""
    try:
        import numba

        from . import one_pass
    except ImportError:
        return None
    return one_pass.step, numba


def can_run(token: Token) -> bool:
    """Whether the step can run for these tensors: on a CPU, outside of graphs, up to 32 bits."""
    return (
        token.k.device.type == "cpu"
        and token.k.dtype in STORED
        and token.k.stride(-1) == 1
        and token.y_past.stride(-1) == 1
        and not torch.compiler.is_compiling()
        and type(token.k) is Tensor
        and type(token.q) is Tensor
        and torch._C._functorch.maybe_current_level() is None
        and kernel() is not None
    )


def run(
    token: Token, rows: Tensor, cached: int, recent_rows: Tensor | None = None, recent: Tensor | None = None
) -> Decoded:
    """One token. rows, cached, recent_rows, recent: as in `one_pass.step`, float32."""
    (B, H, total, D), (n, R, _), G = token.k.shape, rows.shape, token.groups
    E, position = token.v.shape[3], token.position
    step, numba = kernel()
    stored, bits = STORED[token.k.dtype]
    place = total - 1 if position is None else int(position)
    inverse = token.inverse_norms
    known = token.norm != "row_max"
    inverse = rows.new_empty(n, 0) if inverse is None or not known else inverse.reshape(n, total).float()
    hidden = rows.new_empty(B, 0, dtype=torch.bool) if token.key_mask is None else ~token.key_mask
    c = token.sharpness if known else math.inf
    c = c.float().expand(B, H, 1).reshape(n) if isinstance(c, Tensor) else rows.new_full((n,), c)
    beta = rows.new_ones(n) if token.beta is None else token.beta.reshape(n).float()
    new = at_position(token.k, position, 2).reshape(n, D).float() if recent is None else recent[:, -1]
    none = rows.new_empty(n, 0, D)
    o, y = rows.new_empty(n, G, E), rows.new_empty(n, E)
    threads = torch.get_num_threads()
    pieces = 1 if n % threads == 0 else max(1, min(threads, cached // LEAST_KEYS))
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    step(
        H,
        rows.contiguous().numpy(),
        _memory(token.k, stored),
        _strides(token.k),
        cached,
        (none if recent_rows is None else recent_rows.contiguous()).numpy(),
        (none if recent is None else recent.contiguous()).numpy(),
        _memory(token.y_past, stored),
        _strides(token.y_past),
        inverse.contiguous().numpy(),
        hidden.contiguous().numpy(),
        place,
        new.contiguous().numpy(),
        token.v.reshape(n, E).float().contiguous().numpy(),
        beta.contiguous().numpy(),
        c.contiguous().numpy(),
        np.float32(token.strength),
        G,
        np.float32(math.sqrt(D) if token.norm == "qk" else 0.0),
        bits,
        pieces,
        o.numpy(),
        y.numpy(),
    )
    return Decoded(o.view(B, H * G, 1, E).to(token.q.dtype), y.view(B, H, 1, E).to(token.y_past.dtype))


def _memory(x: Tensor, stored: torch.dtype) -> Any:
    """The memory of x, [B, H, S, D] in any strides, as one array from its first element to its last."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.view(stored).as_strided((length,), (1,)).numpy()


def _strides(x: Tensor) -> Any:
    return x.stride()[:3]
