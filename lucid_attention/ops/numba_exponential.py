"""The exponential of many numbers in place, compiled by Numba: faster than torch's and as exact as float32 needs."""

from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, types

from .numba_parts import FAST, ZERO, exponential, pointer, ticket

# Numbers that a thread takes at a time.
PIECE = 16384
FIELDS = ("address", "count", "counters", "slots", "next", "done")
JOB = from_dtype(np.dtype([(name, np.int64) for name in FIELDS]))


def float32(address: Any) -> None:
    job = carray(address, 1)[0]
    x, begin = pointer(job.address, ZERO), ticket(job.counters) * PIECE
    while begin < job.count:
        for i in range(begin, min(begin + PIECE, job.count)):
            x[i] = exponential(x[i])
        begin = ticket(job.counters) * PIECE


def compiled(name: str, cache: bool) -> Any:
    return cfunc(types.void(types.CPointer(JOB)), cache=cache, **FAST)({"float32": float32}[name])
