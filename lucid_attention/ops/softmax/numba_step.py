"""The decoding step on a CPU as one pass over keys and values, compiled by Numba for this CPU.

For a block of keys at a time: scores of all rows, their exponentials, and the sums with the values of these keys. So
each key and value comes from memory once, in the dtype of the cache, for the softmax of the queries and the row of P.
`fused_step.py` calls `step`, from several threads if there are many keys.

n = B·H heads have G query rows each and, if the new value is preconditioned, one more for the new key: R rows, and one
that is not used if R is odd. Numba has no 16-bit floats: uint16 holds the bits of a bfloat16, int16 those of a float16.

What lets LLVM vectorise: two-dimensional contiguous arrays, whose index `[j, d]` needs no check of its sign; several
rows and keys at once; a maximum of integers, because one of floats has to find NaN. The keys at once are one of each
quarter of a block, so that every load instruction goes through memory in order, which a CPU foresees: four neighbours
at once take three times as long if they come from memory, 1.5 times from the last-level cache (Zen 5).
"""

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

# Sums may be reordered; NaN and infinities keep their meaning.
FAST = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy", "nogil": True}
# For compiled callers only, and compiled faster: Python must not call these.
INNER = FAST | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Keys that are read at a time.
BLOCK = 2048
F = np.float32
ZERO, ONE, NOTHING = F(0), F(1), F(-np.inf)
# The square of the smallest norm that is not zero.
SMALLEST = float(np.finfo(np.float32).tiny) ** 2


def kept(function: Any) -> Any:
    """Compile, and keep the code next to this file or in NUMBA_CACHE_DIR where one of them can be written."""
    try:
        return njit(cache=True, **FAST)(function)
    except RuntimeError:
        return njit(**FAST)(function)


# Without "reassoc", which would join the two parts of ln 2. Coefficients of Cephes' expf.
@njit(**FAST | {"fastmath": {"contract"}})
def exponential(x: Any) -> Any:
    """exp(x), within 2e-7 of it; 0 below −87, infinite above 88.7."""
    # Truncated after an offset that makes it positive: rounded to the nearest integer.
    n = np.int32(x * F(1.4426950408889634) + F(1024.5)) - np.int32(1024)
    f = (x - F(n) * F(0.693359375)) - F(n) * F(-2.12194440e-4)
    p = F(1.9875691500e-4) * f + F(1.3981999507e-3)
    p = p * f + F(8.3334519073e-3)
    p = p * f + F(4.1665795894e-2)
    p = p * f + F(1.6666665459e-1)
    p = p * f + F(5.0000001201e-1)
    y = (p * f * f + f + ONE) * np.uint32((n + np.int32(127)) << np.int32(23)).view(np.float32)
    y = ZERO if x < F(-87.0) else y
    return F(np.inf) if x > F(88.7) else y


@njit(**FAST)
def from_half(x: Any) -> Any:
    """A float16, from its bits, as float32."""
    bits = np.uint32(x) & np.uint32(0x7FFF)
    finite = np.uint32(bits << np.uint32(13)).view(np.float32) * F(2.0**112)
    other = np.uint32(bits << np.uint32(13) | np.uint32(0x7F800000)).view(np.float32)
    size = other if bits >= np.uint32(0x7C00) else finite
    return -size if x < 0 else size


def block(cache: Any, first: int, step: int, count: int, room: Any) -> Any:
    """`count` rows of a cache, `step` rows apart, as float32: (array, first row, step). Wide copies go to `room`."""


@overload(block, jit_options=INNER)
def _block(cache: Any, first: int, step: int, count: int, room: Any) -> Any:
    def as_it_is(cache: Any, first: int, step: int, count: int, room: Any) -> Any:
        return cache, first, step

    def from_bfloat16(cache: Any, first: int, step: int, count: int, room: Any) -> Any:
        for j in range(count):
            for d in range(room.shape[1]):
                room[j, d] = np.uint32(np.uint32(cache[first + j * step, d]) << np.uint32(16)).view(np.float32)
        return room, 0, 1

    def from_float16(cache: Any, first: int, step: int, count: int, room: Any) -> Any:
        for j in range(count):
            for d in range(room.shape[1]):
                room[j, d] = from_half(cache[first + j * step, d])
        return room, 0, 1

    return {types.float32: as_it_is, types.uint16: from_bfloat16, types.int16: from_float16}[cache.dtype]


@njit(**INNER)
def scores_of_two(rows: Any, keys: Any, first: int, step: int, count: int, out: Any) -> None:
    """out[r, j] = rows[r] · key j: rows [2, D], a key of each quarter at a time."""
    row_a, row_b, quarter, last = rows[0], rows[1], -(-count // 4), count - 1
    for j in range(quarter):
        # Where the number of keys is no multiple of four, the last one is read again.
        j1, j2, j3 = min(j + quarter, last), min(j + 2 * quarter, last), min(j + 3 * quarter, last)
        k0, k1, k2, k3 = first + j * step, first + j1 * step, first + j2 * step, first + j3 * step
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
        for d in range(rows.shape[1]):
            x, y = row_a[d], row_b[d]
            a0 += x * keys[k0, d]
            a1 += x * keys[k1, d]
            a2 += x * keys[k2, d]
            a3 += x * keys[k3, d]
            b0 += y * keys[k0, d]
            b1 += y * keys[k1, d]
            b2 += y * keys[k2, d]
            b3 += y * keys[k3, d]
        out[0, j], out[0, j1], out[0, j2], out[0, j3] = a0, a1, a2, a3
        out[1, j], out[1, j1], out[1, j2], out[1, j3] = b0, b1, b2, b3


@njit(**INNER)
def add_to_four(weights: Any, values: Any, first: int, step: int, count: int, sums: Any) -> None:
    """sums[r] += Σ_j weights[r, j] · value j: sums [4, E], a value of each quarter at a time.

    Weights after the last are zero.
    """
    sum_a, sum_b, sum_c, sum_d, quarter, last = sums[0], sums[1], sums[2], sums[3], -(-count // 4), count - 1
    for j in range(quarter):
        j1, j2, j3 = j + quarter, j + 2 * quarter, j + 3 * quarter
        v0, v1 = first + j * step, first + min(j1, last) * step
        v2, v3 = first + min(j2, last) * step, first + min(j3, last) * step
        a0, a1, a2, a3 = weights[0, j], weights[0, j1], weights[0, j2], weights[0, j3]
        b0, b1, b2, b3 = weights[1, j], weights[1, j1], weights[1, j2], weights[1, j3]
        c0, c1, c2, c3 = weights[2, j], weights[2, j1], weights[2, j2], weights[2, j3]
        d0, d1, d2, d3 = weights[3, j], weights[3, j1], weights[3, j2], weights[3, j3]
        for e in range(sums.shape[1]):
            x, y, z, w = values[v0, e], values[v1, e], values[v2, e], values[v3, e]
            sum_a[e] += a0 * x + a1 * y + a2 * z + a3 * w
            sum_b[e] += b0 * x + b1 * y + b2 * z + b3 * w
            sum_c[e] += c0 * x + c1 * y + c2 * z + c3 * w
            sum_d[e] += d0 * x + d1 * y + d2 * z + d3 * w


@njit(**INNER)
def add_to_two(weights: Any, values: Any, first: int, step: int, count: int, sums: Any) -> None:
    """The same for sums [2, E]."""
    sum_a, sum_b, quarter, last = sums[0], sums[1], -(-count // 4), count - 1
    for j in range(quarter):
        j1, j2, j3 = j + quarter, j + 2 * quarter, j + 3 * quarter
        v0, v1 = first + j * step, first + min(j1, last) * step
        v2, v3 = first + min(j2, last) * step, first + min(j3, last) * step
        a0, a1, a2, a3 = weights[0, j], weights[0, j1], weights[0, j2], weights[0, j3]
        b0, b1, b2, b3 = weights[1, j], weights[1, j1], weights[1, j2], weights[1, j3]
        for e in range(sums.shape[1]):
            x, y, z, w = values[v0, e], values[v1, e], values[v2, e], values[v3, e]
            sum_a[e] += a0 * x + a1 * y + a2 * z + a3 * w
            sum_b[e] += b0 * x + b1 * y + b2 * z + b3 * w


@njit(**INNER)
def to_weights(scores: Any, bits: Any, top: Any, sums: Any) -> Any:
    """Online softmax of one row: scores of a block to weights relative to the largest score so far.

    bits: the same memory as integers; top: the largest of the blocks before; sums: [E], their weighted values. Returns
    the new one, the sum of the weights and the factor by which the sums before have changed.
    """
    # As integers floats are in order once the negative ones are reversed; NaN is the largest.
    best = np.int32(-(2**31))
    for j in range(bits.size):
        ordered = np.int32(bits[j] ^ ((bits[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        best = ordered if ordered > best else best
    largest = np.uint32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
    largest = top if top > largest else largest
    # Before the first visible key, exponentials are those of −∞.
    shift, total, change = ZERO if largest == NOTHING else largest, ZERO, ONE
    for j in range(scores.size):
        scores[j] = exponential(scores[j] - shift)
        total += scores[j]
    if largest > top:
        change = exponential(top - largest)
        for e in range(sums.size):
            sums[e] *= change
    return largest, total, change


@njit(**INNER)
def inverse_norm(x: Any) -> Any:
    """1/‖x‖ of one vector, 0 for zero; not a number stays so."""
    squares = 0.0
    for d in range(x.size):
        squares += np.float64(x[d]) * np.float64(x[d])
    return ZERO if squares < SMALLEST else F(1.0 / math.sqrt(squares))


@njit(**INNER)
def prepare(rows: Any, state: Any, q: Any, k: Any, c: Any, hidden: bool, scale: Any, kind: Any) -> None:
    """Write the rows of a head, [even, D], and their scores with the new key into `state`: see `step`.

    q: [G, D]; k: [D], the new key; hidden: whether it is masked.
    """
    D, known, qk, norm = k.size, kind[0], kind[1], inverse_norm(k)
    for r in range(state.shape[0]):
        row = rows[r]
        if r < q.shape[0]:
            factor = F(scale) * (inverse_norm(q[r]) * F(math.sqrt(D)) if qk else ONE)
            for d in range(D):
                # At a masked position, queries that are not finite read as zero.
                row[d] = ZERO if hidden and not abs(q[r, d]) < np.inf else q[r, d] * factor
        else:
            for d in range(D):
                row[d] = k[d] * (c * norm if known else c / F(D))
        score = ZERO
        for d in range(D):
            score += row[d] * k[d]
        state[r, 2] = score * norm * F(math.sqrt(D)) if qk and r < q.shape[0] else score
        state[r, 3] = norm


@njit(**INNER)
def finish(o: Any, y: Any, v: Any, state: Any, sums: Any, beta: Any, hidden: bool, strength: Any, known: bool) -> None:
    """Add the new token: see `step`. o: [G, E]; y, v: [E]; state: [R, 4]; sums: [even, E]."""
    R, (G, E) = state.shape[0], o.shape
    take = F(strength)
    if R > G and not known:
        shift = state[G, 0] - state[G, 2]
        take *= ZERO if state[G, 0] == NOTHING else exponential(ZERO if shift > ZERO else shift)
    for e in range(E):
        x = v[e] - take * sums[G, e] if R > G else v[e]
        y[e] = ZERO if hidden else x * beta
    for r in range(G):
        top, own = state[r, 0], state[r, 2]
        both = own if own > top else top
        past = ONE if top == NOTHING else exponential(top - both)
        weight = ZERO if own == NOTHING else exponential(own - both)
        divisor = state[r, 1] * past + weight
        # A query that sees no other key sees the new one, whose value is zero if it is masked.
        factor = ZERO if divisor == ZERO else ONE / divisor
        for e in range(E):
            o[r, e] = (sums[r, e] * past + weight * y[e]) * factor


@kept
def step(
    tasks: Any, heads: Any, o: Any, y: Any, state: Any, sums: Any, q: Any, keys: Any, values: Any, v: Any,
    inverse: Any, mask: Any, c: Any, beta: Any, moved: Any, recent_rows: Any, recent: Any, strides: Any, sizes: Any,
    scale: Any, strength: Any, kind: Any, room: Any, value_room: Any, scores: Any, bits: Any, own_rows: Any,
) -> None:  # fmt: skip
    """Read the cache for tasks (first, end), then finish heads (first, end), all of whose tasks are done and joined.

    A task is one of the pieces, of `size` cached keys, of a head.

    o: [n, G, E] and y: [n, E], written: the outputs of the queries and the value of the new token.
    state: [tasks, R, 4], written: largest score, sum of weights, score with the new key, 1/‖k‖ of the new key;
    sums: [tasks, even, E], written: weighted values. q: [n, G, D]; v: [n, E]; c, beta: [n].
    keys [*, D], values [*, E], inverse (1/‖k‖), mask (False for masked keys; may be empty): the memory of a cache, with
    strides (batch, head, token), (batch, head, token), (batch, head) and (batch).
    PaTH has rows of its own: moved, [n, even, D], for cached keys and recent_rows for recent: [n (live + 1), D], which
    are read instead of the keys after the cached ones, and end with the new key. Otherwise these are empty.
    sizes: (H, pieces, size, cached, place, live): cached keys are read, place is that of the new key. kind: whether c
    is the largest exponent of the key's row, and whether queries and keys are normalised for the scores. room to
    own_rows: scratch memory, of each thread. What is not made here takes no time to compile.
    """
    (H, pieces, size, cached, place, live), (known, qk) = sizes, kind
    G, D, R, even, key_step, value_step = q.shape[1], q.shape[2], state.shape[1], sums.shape[1], strides[2], strides[5]
    root = F(math.sqrt(D))
    for task in range(tasks[0], tasks[1]):
        h, piece = task // pieces, task % pieces
        b, i = h // H, h % H
        key_at, value_at = b * strides[0] + i * strides[1], b * strides[3] + i * strides[4]
        norm_at, mask_at = b * strides[6] + i * strides[7], b * strides[8]
        hidden = mask.size > 0 and not mask[mask_at + place]
        rows, later, result = own_rows, own_rows, state[task]
        if recent.shape[0] > 0:
            rows, later = moved[h], recent_rows[h]
            for r in range(R):
                result[r, 2] = ZERO
                for d in range(D):
                    result[r, 2] += later[r, d] * recent[h * (live + 1) + live, d]
        else:
            new, first, _ = block(keys, key_at + place * key_step, 1, 1, room)
            prepare(own_rows, result, q[h], new[first], c[h], hidden, scale, kind)
        for r in range(R):
            # The row of a key whose largest exponent is known does not use it.
            result[r, 0], result[r, 1] = ZERO if r == G and known else NOTHING, ZERO
            if hidden and r < G:
                result[r, 2] = NOTHING
        sums[task] = ZERO
        # Keys of the cache, then with the first piece the recent ones.
        for part in range(2 if piece == 0 else 1):
            start, stop = (piece * size, min(piece * size + size, cached)) if part == 0 else (cached, cached + live)
            for at in range(start, stop, BLOCK):
                count = min(BLOCK, stop - at)
                some, first, apart, these = recent, h * (live + 1) + at - cached, 1, later
                if part == 0:
                    some, first, apart = block(keys, key_at + at * key_step, key_step, count, room)
                    these = rows
                for r in range(0, even, 2):
                    scores_of_two(these[r : r + 2], some, first, apart, count, scores[r : r + 2])
                # As slices, whose indices need no check of their sign.
                norms, visible = inverse[norm_at + at : norm_at + at + count], mask[mask_at + at : mask_at + at + count]
                for r in range(R):
                    row, of_key = scores[r, :count], r == G and known
                    if of_key or (qk and r < G):
                        factor = ONE if of_key else root
                        for j in range(count):
                            row[j] *= norms[j] * factor
                    for j in range(visible.size):
                        row[j] = row[j] if visible[j] else NOTHING
                    if of_key:
                        for j in range(count):
                            row[j] = exponential(row[j] - c[h])
                    else:
                        result[r, 0], total, change = to_weights(row, bits[r, :count], result[r, 0], sums[task, r])
                        result[r, 1] = result[r, 1] * change + total
                    scores[r, count : count + 4] = ZERO
                some, first, apart = block(values, value_at + at * value_step, value_step, count, value_room)
                for r in range(0, even - 2, 4):
                    add_to_four(scores[r : r + 4], some, first, apart, count, sums[task, r : r + 4])
                if even % 4 == 2:
                    add_to_two(scores[even - 2 :], some, first, apart, count, sums[task, even - 2 :])
    for h in range(heads[0], heads[1]):
        hidden = mask.size > 0 and not mask[h // H * strides[8] + place]
        finish(o[h], y[h], v[h], state[h * pieces], sums[h * pieces], beta[h], hidden, strength, known)
