"""1/‖k‖ of a few keys, compiled by Numba: for one new token, torch's operations take longer to start than to run."""

import math
from typing import Any

import numpy as np
from numba import cfunc, types

from .numba_parts import EXAMPLES, FAST, SMALLEST, ZERO, F, pointer, sources, wide


def _kernel(example: Any, version: int) -> Any:
    """For keys of numbers like `example`. version: see `sources`."""

    def norms(keys: int, out: int, B: int, H: int, T: int, D: int, key_b: int, key_h: int, key_t: int) -> None:
        if version == 0:
            return
        k, inverse = pointer(keys, example), pointer(out, ZERO)
        for b in range(B):
            for h in range(H):
                for t in range(T):
                    first, squares = b * key_b + h * key_h + t * key_t, 0.0
                    for d in range(D):
                        x = np.float64(wide(k[first + d]))
                        squares += x * x
                    # Not a number stays so.
                    inverse[(b * H + h) * T + t] = ZERO if squares < SMALLEST else F(1.0 / math.sqrt(squares))

    return norms


def compiled(dtype: str, cache: bool) -> Any:
    """A C function of the addresses of k: [B, H, T, D] and of the norms: [B, H, T], the sizes and k's strides."""
    return cfunc(types.void(*[types.int64] * 9), cache=cache, **FAST)(_kernel(EXAMPLES[dtype], sources()))
