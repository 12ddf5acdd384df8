"""The decoding step on a CPU as one pass over keys and values, compiled by Numba for this CPU.

For a block of keys at a time: scores of all rows, their exponentials, and the sums with the values of these keys. So
each key and value comes from memory once, in the dtype of the cache. 16-bit entries are widened in registers.

Work is a list of tasks, a head and a piece of its keys each. Threads with the same arguments take tasks until none is
left; the thread that ends the last one joins the pieces. Compiling stays short: memory is passed as addresses, and
the functions that the kernel calls call no others: Numba optimises each of them with all that it calls.
The fields of `ARGUMENTS` (`fused_step.py`) are read by their names.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from ..numba_kernels import (
    EXAMPLES,
    FAST,
    INNER,
    LANES,
    MORE,
    SMALLEST,
    WIDE,
    WIDEST,
    ZERO,
    F,
    add_few_to_two,
    add_to_more,
    add_to_one,
    add_to_two,
    exponential,
    pointer,
    scores_of_more,
    scores_of_two,
    sources,
    ticket,
    wide,
)
from .fused_step import INTEGERS, MOST_KEYS, NUMBERS

# Keys that are read at a time. Short vectors read the values of a block once for each row.
BLOCK = MOST_KEYS if LANES == 16 else MOST_KEYS // 2

INFINITE, NOTHING, BYTE = F(np.inf), F(-np.inf), np.uint8(0)
ARGUMENTS = from_dtype(np.dtype([(name, np.int64) for name in INTEGERS] + [(name, np.float64) for name in NUMBERS]))


@intrinsic
def _narrow(context: Any, x: Any, example: Any) -> Any:
    """A float32 as it is stored, rounded to the nearest, ties to even."""

    def store(_: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.return_type == types.uint16:
            return _bfloat16_bits(builder, args[0])
        if sig.return_type == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return args[0]

    return example(types.float32, example), store


def _bfloat16_bits(builder: Any, x: Any) -> Any:
    i32 = ir.IntType(32)
    bits = builder.bitcast(x, i32)
    odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
    rounded = builder.add(builder.add(bits, i32(0x7FFF)), odd)
    kept = builder.select(builder.fcmp_unordered("uno", x, x), i32(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, i32(16)), ir.IntType(16))


@njit(**INNER)
def _scores(
    rows: int, R: int, D: int, keys: int, stride: int, count: int, scores: int, size: int, example: Any
) -> None:
    """scores[r, j] = rows[r] · key j, four keys at a time. R is even; elements of a key have `size` bytes."""
    whole, fours = D - D % LANES, count - count % 4
    for j in range(0, fours, 4):
        four, r = keys + size * j * stride, 0
        while r < R:
            at = scores + 4 * (r * BLOCK + j)
            if r + MORE <= R:
                scores_of_more(rows + 4 * r * D, D, whole, four, stride, at, BLOCK, example)
                r += MORE
            else:
                scores_of_two(rows + 4 * r * D, D, whole, four, stride, at, BLOCK, example)
                r += 2
    # What does not fill vectors: all of the last keys, the last elements of the others.
    row, key, out = pointer(rows, ZERO), pointer(keys, example), pointer(scores, ZERO)
    for j in range(fours if whole == D else 0, count):
        for r in range(R):
            first = 0 if j >= fours else whole
            s = ZERO if j >= fours else out[r * BLOCK + j]
            for d in range(first, D):
                s += row[r * D + d] * wide(key[j * stride + d])
            out[r * BLOCK + j] = s


@njit(**INNER)
def _add_values(
    weights: int, R: int, E: int, values: int, stride: int, count: int, sums: int, size: int, example: Any
) -> None:
    """sums[r] += Σ_j weights[r, j] · value j. R is even."""
    e = 0
    while LANES == 8 and R == 2 and e + WIDEST <= E:
        for r in range(R):
            into = sums + 4 * (r * E + e)
            add_to_one(weights + 4 * r * BLOCK, BLOCK, values + size * e, stride, count, into, E, example)
        e += WIDEST
    while e + WIDE <= E:
        r = 0
        while r < R:
            w, into = weights + 4 * r * BLOCK, sums + 4 * (r * E + e)
            if r + MORE <= R:
                add_to_more(w, BLOCK, values + size * e, stride, count, into, E, example)
                r += MORE
            else:
                add_to_two(w, BLOCK, values + size * e, stride, count, into, E, example)
                r += 2
        e += WIDE
    while e + LANES <= E:
        for r in range(0, R, 2):
            w, into = weights + 4 * r * BLOCK, sums + 4 * (r * E + e)
            add_few_to_two(w, BLOCK, values + size * e, stride, count, into, E, example)
        e += LANES
    if E % LANES > 0:
        weight, value, out = pointer(weights, ZERO), pointer(values, example), pointer(sums, ZERO)
        for j in range(count):
            for r in range(R):
                for e in range(E - E % LANES, E):
                    out[r * E + e] += weight[r * BLOCK + j] * wide(value[j * stride + e])


@njit(**INNER)
def _to_weights(scores: Any, count: int, state: Any, sums: Any, E: int) -> None:
    """Online softmax of one row: scores of a block to weights relative to the largest score so far.

    state: that score and the sum of all weights; sums: [E], the sum of weighted values. Both follow.
    """
    before = top = state[0]
    for j in range(count):
        top = scores[j] if scores[j] > top else top
    # Before the first visible key, exponentials are those of −∞. A NaN stays one.
    shift = ZERO if top == NOTHING else top
    total = ZERO
    for j in range(count):
        w = exponential(scores[j] - shift)
        scores[j] = w
        total += w
    if top > before:
        change = exponential(before - top)
        state[0] = top
        state[1] *= change
        for e in range(E):
            sums[e] *= change
    state[1] += total


@njit(**INNER)
def _to_row(scores: Any, count: int, c: Any) -> None:
    """The key's row of P, where its largest exponent is known."""
    for j in range(count):
        scores[j] = exponential(scores[j] - c)


@njit(**INNER)
def _prepare(a: Any, h: int, rows: int, recent_rows: int, own: Any, example: Any) -> None:
    """Write the rows for the cached keys of a head, those for its recent ones, and the scores of its new key.

    rows, recent_rows: addresses of [R, D]; own: [R].
    """
    b, i, G, R, D = h // a.H, h % a.H, a.G, a.R, a.D
    q = a.q + a.itemsize * h * G * D
    key = b * a.key_b + i * a.key_h + a.place * a.key_t
    k = pointer(a.keys + a.itemsize * key, example)
    recent = pointer(a.recent + 4 * (h * (a.live + 1) + a.live) * D, ZERO)
    hidden = a.mask != 0 and pointer(a.mask, BYTE)[b * a.mask_b + a.place] == 0
    inverse = F(1.0)
    if a.inverse != 0:
        inverses = pointer(a.inverse + 4 * (b * a.inverse_b + i * a.inverse_h + a.place), ZERO)
        if a.writes_norm != 0:
            squares = 0.0
            for d in range(D):
                squares += np.float64(wide(k[d])) * np.float64(wide(k[d]))
            # All pieces of a head write the same number.
            inverses[0] = ZERO if squares < SMALLEST else F(1.0 / math.sqrt(squares))
        inverse = inverses[0]
    for r in range(R):
        row, meeting = pointer(rows + 4 * r * D, ZERO), pointer(recent_rows + 4 * r * D, ZERO)
        score = ZERO
        if a.rows != 0:
            at = 4 * (h * R + r) * D
            source, source_recent = pointer(a.rows + at, ZERO), pointer(a.recent_rows + at, ZERO)
            for d in range(D):
                row[d] = source[d]
            for d in range(D):
                meeting[d] = source_recent[d]
                score += source_recent[d] * recent[d]
        elif r == G:
            c = F(a.sharpness) if a.c == 0 else pointer(a.c, ZERO)[h]
            factor = c * inverse if a.known != 0 else c / F(D)
            for d in range(D):
                row[d] = wide(k[d]) * factor
                score += wide(k[d]) * wide(k[d]) * factor
        else:
            x, factor = pointer(q + a.itemsize * r * D, example), F(a.scale)
            if a.qk != 0:
                squares = 0.0
                for d in range(D):
                    squares += np.float64(wide(x[d])) * np.float64(wide(x[d]))
                factor = F(a.scale * math.sqrt(D / squares)) if squares >= SMALLEST else ZERO
            for d in range(D):
                # At a masked position, queries that are not finite read as zero.
                broken = hidden and not abs(wide(x[d])) < INFINITE
                row[d] = ZERO if broken else wide(x[d]) * factor
            for d in range(D):
                score += row[d] * wide(k[d])
        if a.qk != 0 and r < G:
            score *= inverse * F(math.sqrt(D))
        own[r] = NOTHING if hidden and r < G else score


@njit(**INNER)
def _start(a: Any, sums: Any, own: Any) -> None:
    """The results of a task before it has read anything."""
    state = a.even * a.E
    for e in range(state):
        sums[e] = ZERO
    for r in range(a.R):
        # What is known of the key's row needs no largest score.
        sums[state + 3 * r] = ZERO if r == a.G and a.known != 0 else NOTHING
        sums[state + 3 * r + 1] = ZERO
        sums[state + 3 * r + 2] = own[r]


@njit(**INNER)
def _join(a: Any, h: int) -> None:
    """Join the pieces of a head into its first one."""
    R, E, size = a.R, a.E, a.even * (a.E + 3)
    results = pointer(a.results + 4 * h * a.pieces * size, ZERO)
    for r in range(R):
        at = a.even * E + 3 * r
        top = results[at]
        for p in range(1, a.pieces):
            largest = results[p * size + at]
            top = largest if largest > top else top
        for p in range(a.pieces):
            largest = results[p * size + at]
            factor = F(1.0) if largest == top else exponential(largest - top)
            if p == 0:
                results[at + 1] *= factor
            else:
                results[at + 1] += results[p * size + at + 1] * factor
            kept = factor if p == 0 else F(1.0)
            added = ZERO if p == 0 else factor
            for e in range(r * E, r * E + E):
                results[e] = results[e] * kept + (results[p * size + e] * added if p > 0 else ZERO)
        results[at] = top


@njit(**INNER)
def _finish(a: Any, h: int, example: Any) -> None:
    """The new token itself: its stored value, and the outputs of its queries."""
    G, R, E = a.G, a.R, a.E
    sums = pointer(a.results + 4 * h * a.pieces * a.even * (E + 3), ZERO)
    v, y = pointer(a.v + a.itemsize * h * E, example), pointer(a.y + a.itemsize * h * E, example)
    hidden = a.mask != 0 and pointer(a.mask, BYTE)[h // a.H * a.mask_b + a.place] == 0
    beta = F(1.0) if a.beta == 0 else pointer(a.beta, ZERO)[h]
    take, at = F(a.strength), a.even * E + 3 * G
    if R > G and a.known == 0:
        shift = sums[at] - sums[at + 2]
        take *= ZERO if sums[at] == NOTHING else exponential(ZERO if shift > ZERO else shift)
    for e in range(E):
        x = wide(v[e])
        if R > G:
            x -= take * sums[G * E + e]
        y[e] = _narrow(ZERO if hidden else x * beta, example)
    for r in range(G):
        at = a.even * E + 3 * r
        top, total, own = sums[at], sums[at + 1], sums[at + 2]
        both = own if own > top else top
        past = F(1.0) if top == NOTHING else exponential(top - both)
        weight = ZERO if own == NOTHING else exponential(own - both)
        total = total * past + weight
        # A query that sees no other key sees the new one, whose value is zero if it is masked.
        factor = ZERO if total == ZERO else F(1.0) / total
        o = pointer(a.o + a.itemsize * (h * G + r) * E, example)
        for e in range(E):
            o[e] = _narrow((sums[r * E + e] * past + weight * wide(y[e])) * factor, example)


def _kernel(example: Any, version: int) -> Any:
    """The step for caches of elements like `example`. version: see `sources`."""

    def step(address: Any) -> None:
        if version == 0:
            return
        a = carray(address, 1)[0]
        R, D, E, H, pieces, bytes_ = a.R, a.D, a.E, a.H, a.pieces, a.itemsize
        even = a.even
        tasks, root, size = a.n * pieces, F(math.sqrt(a.D)), -(-a.cached // pieces)
        scratch = a.scratch + 4 * ticket(a.counters) * a.scratch_size
        rows, recent_rows = scratch, scratch + 4 * even * D
        weights = scratch + 8 * even * D
        own = weights + 4 * even * BLOCK
        for i in range(D if even > R else 0):
            # A row of zeros makes their number even.
            pointer(rows + 4 * R * D, ZERO)[i] = pointer(recent_rows + 4 * R * D, ZERO)[i] = ZERO
        task = ticket(a.counters + 8)
        while task < tasks:
            h, p = task // pieces, task % pieces
            b, i = h // H, h % H
            results = a.results + 4 * task * even * (E + 3)
            sums = pointer(results, ZERO)
            _prepare(a, h, rows, recent_rows, pointer(own, ZERO), example)
            _start(a, sums, pointer(own, ZERO))
            keys = a.keys + bytes_ * (b * a.key_b + i * a.key_h)
            values = a.values + bytes_ * (b * a.value_b + i * a.value_h)
            recent = a.recent + 4 * h * (a.live + 1) * D
            c = F(a.sharpness) if a.c == 0 else pointer(a.c, ZERO)[h]
            for part in range(2):
                # Keys of the cache, then recent ones.
                begin, end, shift, width = p * size, p * size + size, 0, bytes_
                end = end if end < a.cached else a.cached
                if part == 1:
                    # Not as the literal 4, for which Numba would compile `_scores` once more.
                    begin, end, shift, width = 0, a.live if p == 0 else 0, a.cached, 4
                for first in range(begin, end, BLOCK):
                    count, place = BLOCK if first + BLOCK < end else end - first, shift + first
                    if part == 1:
                        _scores(recent_rows, even, D, recent + 4 * first * D, D, count, weights, width, ZERO)
                    else:
                        at = keys + bytes_ * first * a.key_t
                        _scores(rows, even, D, at, a.key_t, count, weights, width, example)
                    inverse = pointer(a.inverse + 4 * (b * a.inverse_b + i * a.inverse_h + place), ZERO)
                    mask = pointer(a.mask + b * a.mask_b + place, BYTE)
                    for r in range(R):
                        row, known = pointer(weights + 4 * r * BLOCK, ZERO), r == a.G and a.known != 0
                        if known or (a.qk != 0 and r < a.G):
                            factor = F(1.0) if known else root
                            for j in range(count):
                                row[j] *= inverse[j] * factor
                        if a.mask != 0:
                            for j in range(count):
                                row[j] = NOTHING if mask[j] == 0 else row[j]
                        if known:
                            _to_row(row, count, c)
                        else:
                            state = pointer(results + 4 * (even * E + 3 * r), ZERO)
                            _to_weights(row, count, state, pointer(results + 4 * r * E, ZERO), E)
                    at = values + bytes_ * place * a.value_t
                    _add_values(weights, even, E, at, a.value_t, count, results, bytes_, example)
            if ticket(a.counters + 16) == tasks - 1:
                for done in range(a.n):
                    if pieces > 1:
                        _join(a, done)
                    _finish(a, done, example)
            task = ticket(a.counters + 8)

    return step


def compiled(dtype: str, cache: bool) -> Any:
    """A C function that takes the address of its arguments and works until all of it is done, from any thread."""
    return cfunc(types.void(types.CPointer(ARGUMENTS)), cache=cache, **FAST)(_kernel(EXAMPLES[dtype], sources()))
