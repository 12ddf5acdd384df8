"""What a decoding step on a CPU needs, as one block of memory that compiled code reads.

Addresses are integers, 0 for what is not there; strides are in elements; n = B·H heads.

    q: [n, G, D]; v: [n, E]; o: [n, G, E]; y: [n, E], all in the dtype of the cache, of `itemsize` bytes.
    keys, values: [B, H, *, D or E], with the strides of their first three dimensions.
    cached: how many keys are read from `keys`. The `live` ones after them, and the new one, are in recent:
        [n, live + 1, D], float32. Without it the new key is number `place` of `keys`.
    rows: [n, R, D], float32, what meets `keys`; recent_rows: what meets `recent`. Without them they are made of q and
        the new key. R = G + 1 with a row for the new key, whose value is to be preconditioned; else R = G.
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

import struct

from ..native import COUNTERS

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


# The integers, then the numbers; the memory after it is aligned as that of a vector.
JOB = struct.Struct(f"{len(INTEGERS)}q{len(NUMBERS)}d")
JOB_SIZE = -(-JOB.size // 64) * 64
# Where `counters` points to.
COUNTED = 8 * INTEGERS.index("slots")


def scratch_size(even: int, D: int) -> int:
    """Floats of a thread: rows for cached and for recent keys, scores of a block, scores of the new key."""
    return even * (2 * D + MOST_KEYS + 1)
