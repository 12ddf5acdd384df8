"""The decoding step on a CPU as one pass over keys and values, compiled by Numba for the CPU that it meets.

For a block of keys at a time: scores of all rows, their exponentials, and the sums with the values of these keys. So
each key and value comes from memory once, in the dtype of the cache. 16-bit entries are widened in registers. Indices
are unsigned, because Numba compiles signed ones with a test for negative values, which LLVM does not vectorise.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

# Keys of a block: its scores and values stay in the first cache of a core.
BLOCK = 128
# Everything that lets LLVM vectorise sums, but NaN and infinities keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}
U = np.uint64
F = np.float32


@intrinsic
def _bits_to_float(context: Any, bits: Any) -> Any:
    """The float32 with these bits."""
    return types.float32(types.uint32), lambda _, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _float_to_bits(context: Any, x: Any) -> Any:
    return types.uint32(types.float32), lambda _, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def wide(context: Any, x: Any) -> Any:
    """A stored number as float32. uint16 holds the bits of a bfloat16, int16 those of a float16."""

    def widen(_: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0] == types.uint16:
            bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(bits, ir.FloatType())
        if sig.args[0] == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return args[0]

    return types.float32(x), widen


@intrinsic
def _through_half(context: Any, x: Any) -> Any:
    def round_(_: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.fptrunc(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.float32), round_


@njit(inline="always")
def _rounded(x: Any, bits: int) -> Any:
    """x as the cache will hold it. bits: 32, 16 for float16, 8 for bfloat16, the number of bits of its fraction + 1."""
    if bits == 16:
        return _through_half(x)
    if bits == 8 and x == x:
        u = _float_to_bits(x)
        u = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return _bits_to_float(u)
    return x


@njit(fastmath=FAST, inline="always")
def exponential(x: Any) -> Any:
    """exp(x) for x ≤ 0 (a little more does no harm), within 3e-7 of it; 0 below −87. In a form that LLVM vectorises."""
    n = np.int32(x * F(1.4426950408889634) - F(0.5))
    f = (x - F(n) * F(0.693359375)) - F(n) * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * f + F(1.3981999507e-3)
    p = p * f + F(8.3334519073e-3)
    p = p * f + F(4.1665795894e-2)
    p = p * f + F(1.6666665459e-1)
    p = p * f + F(5.0000001201e-1)
    p = p * f * f + f + F(1.0)
    return F(0.0) if x < F(-87.0) else p * _bits_to_float(np.uint32((n + np.int32(127)) << np.int32(23)))


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _scores(rows: Any, keys: Any, first: Any, stride: Any, count: Any, scores: Any) -> None:
    """scores[r, j] = rows[r] · key j, for the `count` keys from index `first` on, four at a time."""
    R, D = U(rows.shape[0]), U(rows.shape[1])
    fours = count // U(4)
    for r in range(R):
        for four in range(fours):
            j = four * U(4)
            k0 = first + j * stride
            k1 = k0 + stride
            k2 = k1 + stride
            k3 = k2 + stride
            s0 = s1 = s2 = s3 = F(0.0)
            for d in range(D):
                x = rows[r, d]
                s0 += x * wide(keys[k0 + d])
                s1 += x * wide(keys[k1 + d])
                s2 += x * wide(keys[k2 + d])
                s3 += x * wide(keys[k3 + d])
            scores[r, j] = s0
            scores[r, j + U(1)] = s1
            scores[r, j + U(2)] = s2
            scores[r, j + U(3)] = s3
        for rest in range(fours * U(4), count):
            k0 = first + rest * stride
            s0 = F(0.0)
            for d in range(D):
                s0 += rows[r, d] * wide(keys[k0 + d])
            scores[r, rest] = s0


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _add_values(weights: Any, values: Any, first: Any, stride: Any, count: Any, sums: Any) -> None:
    """sums[r] += Σ_j weights[r, j] · value j, for the `count` values from index `first` on, four at a time."""
    R, E = U(sums.shape[0]), U(sums.shape[1])
    fours = count // U(4)
    for r in range(R):
        for four in range(fours):
            j = four * U(4)
            v0 = first + j * stride
            v1 = v0 + stride
            v2 = v1 + stride
            v3 = v2 + stride
            w0, w1 = weights[r, j], weights[r, j + U(1)]
            w2, w3 = weights[r, j + U(2)], weights[r, j + U(3)]
            for e in range(E):
                sums[r, e] += (w0 * wide(values[v0 + e]) + w1 * wide(values[v1 + e])) + (
                    w2 * wide(values[v2 + e]) + w3 * wide(values[v3 + e])
                )
        for rest in range(fours * U(4), count):
            v0 = first + rest * stride
            for e in range(E):
                sums[r, e] += weights[r, rest] * wide(values[v0 + e])


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _to_weights(scores: Any, r: Any, count: Any, maxima: Any, totals: Any, sums: Any) -> None:
    """Online softmax of one row: scores of a block to weights relative to the largest score so far."""
    top = maxima[r]
    for j in range(count):
        s = scores[r, j]
        top = s if s > top else top
    if top == F(-np.inf):
        for j in range(count):
            # Nothing visible so far. A NaN stays one.
            scores[r, j] = F(0.0) if scores[r, j] == top else scores[r, j]
            totals[r] += scores[r, j]
        return
    if top > maxima[r]:
        change = exponential(maxima[r] - top)
        totals[r] *= change
        for e in range(U(sums.shape[1])):
            sums[r, e] *= change
        maxima[r] = top
    total = F(0.0)
    for j in range(count):
        w = exponential(scores[r, j] - top)
        scores[r, j] = w
        total += w
    totals[r] += total


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _read_piece(
    rows: Any,
    keys: Any,
    first_key: Any,
    key_stride: Any,
    values: Any,
    first_value: Any,
    value_stride: Any,
    inverse: Any,
    hidden: Any,
    begin: Any,
    end: Any,
    shift: Any,
    groups: Any,
    c: Any,
    query_factor: Any,
    maxima: Any,
    totals: Any,
    sums: Any,
) -> None:
    """Add the keys `begin` to `end` to the running maxima, totals and sums of a head.

    inverse: [S] or empty; hidden: [S] or empty, both counted from `shift` keys before key 0. c: infinite where the
    largest exponent of the key's row is not known before.
    """
    R = U(rows.shape[0])
    scores = np.empty((rows.shape[0], BLOCK), np.float32)
    for b in range(begin, end, U(BLOCK)):
        count = min(U(BLOCK), end - b)
        _scores(rows, keys, first_key + b * key_stride, key_stride, count, scores)
        at = shift + b
        for r in range(R):
            if inverse.size > 0 and r == groups:
                for j in range(count):
                    scores[r, j] *= inverse[at + j]
            elif query_factor > F(0.0):
                for j in range(count):
                    scores[r, j] *= inverse[at + j] * query_factor
            if hidden.size > 0:
                for j in range(count):
                    scores[r, j] = F(-np.inf) if hidden[at + j] else scores[r, j]
            if r == groups and c < F(np.inf):
                for j in range(count):
                    scores[r, j] = exponential(scores[r, j] - c)
            else:
                _to_weights(scores, r, count, maxima, totals, sums)
        _add_values(scores, values, first_value + at * value_stride, value_stride, count, sums)


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _combine(G: int, pieces: int, maxima: Any, totals: Any, sums: Any) -> None:
    """Join the pieces of a head into its first one. maxima, totals: [pieces, R]; sums: [pieces, R, E]."""
    for r in range(U(maxima.shape[1])):
        top = F(-np.inf)
        for p in range(U(pieces)):
            top = max(top, maxima[p, r])
        if top == F(-np.inf):
            continue
        for p in range(U(pieces)):
            factor = exponential(maxima[p, r] - top)
            if p == U(0):
                totals[p, r] *= factor
            else:
                totals[U(0), r] += totals[p, r] * factor
            for e in range(U(sums.shape[2])):
                if p == U(0):
                    sums[p, r, e] *= factor
                else:
                    sums[U(0), r, e] += sums[p, r, e] * factor
        maxima[U(0), r] = top


@njit(fastmath=FAST, nogil=True, error_model="numpy")
def _finish(
    rows: Any,
    new: Any,
    v: Any,
    own_inverse: Any,
    hidden: bool,
    beta: Any,
    strength: Any,
    groups: Any,
    c: Any,
    query_factor: Any,
    bits: int,
    maxima: Any,
    totals: Any,
    sums: Any,
    o: Any,
    y: Any,
) -> None:
    """The new token itself: its stored value y: [E], and the outputs o: [G, E] of its queries."""
    D, E, R = U(new.size), U(v.size), U(rows.shape[0])
    for e in range(E):
        y[e] = v[e]
    if groups < R:
        factor = strength
        if not c < F(np.inf):
            own = F(0.0)
            for d in range(D):
                own += rows[groups, d] * new[d]
            factor *= exponential(min(F(0.0), maxima[groups] - own)) if maxima[groups] > F(-np.inf) else F(0.0)
        for e in range(E):
            y[e] -= factor * sums[groups, e]
    for e in range(E):
        y[e] = F(0.0) if hidden else _rounded(y[e] * beta, bits)
    for g in range(U(groups)):
        own = F(0.0)
        for d in range(D):
            own += rows[g, d] * new[d]
        if query_factor > F(0.0):
            own *= own_inverse * query_factor
        if hidden:
            # A query that sees no other key sees the new one, whose y is zero.
            if totals[g] == F(0.0):
                for e in range(E):
                    o[g, e] = F(0.0)
                continue
            own = F(-np.inf)
        top = own if own > maxima[g] else maxima[g]
        past = exponential(maxima[g] - top) if maxima[g] > F(-np.inf) else F(1.0)
        weight = exponential(own - top) if own > F(-np.inf) else F(0.0)
        total = totals[g] * past + weight
        for e in range(E):
            o[g, e] = (sums[g, e] * past + weight * y[e]) / total


@njit(fastmath=FAST, nogil=True, parallel=True, error_model="numpy", cache=True)
def step(
    H: int,
    rows: Any,
    keys: Any,
    key_strides: Any,
    cached: int,
    recent_rows: Any,
    recent: Any,
    values: Any,
    value_strides: Any,
    inverse: Any,
    hidden: Any,
    place: int,
    new: Any,
    v: Any,
    beta: Any,
    c: Any,
    strength: float,
    groups: int,
    query_factor: float,
    bits: int,
    pieces: int,
    o: Any,
    y: Any,
) -> None:
    """One token of n = B·H heads.

    Args:
        H: key/value heads of a sequence.
        rows: [n, R, D], the G = `groups` scaled queries of a head and, if R = G + 1, its key with c and 1/‖k‖.
        keys: the memory of the cached keys; key_strides: [3], elements from one sequence, head and key to the next.
        cached: how many of them are read with `rows`. The keys after them are in recent: [n, L, D], read with
            recent_rows: [n, R, D]. Its last one is the new key. For L = 0 the new key is read with `rows`.
        values, value_strides: of y, with a place for each past key.
        inverse: [n, S + 1] or [n, 0], 1/‖k‖; hidden: [B, S + 1] or [B, 0], masked keys.
        place: of the new key among S + 1.
        new: [n, D]; v: [n, E]; beta: [n]; c: [n], infinite where the largest exponent is not known before.
        query_factor: what scores of queries are multiplied with besides 1/‖k‖; 0 for neither.
        bits: see `_rounded`.
        pieces: parts that the keys of a head are divided into.
        o: [n, G, E], y: [n, E], the results.
    """
    n, R = rows.shape[0], rows.shape[1]
    factor = F(query_factor)
    E = v.shape[1]
    maxima = np.full((n, pieces, R), F(-np.inf), np.float32)
    totals = np.zeros((n, pieces, R), np.float32)
    sums = np.zeros((n, pieces, R, E), np.float32)
    live = max(0, recent.shape[1] - 1)
    memory = recent.reshape(recent.size)
    size = (cached + pieces - 1) // pieces
    for task in prange(n * pieces):
        h, p = task // pieces, task % pieces
        begin, end = p * size, min(cached, (p + 1) * size)
        b = h // H
        k0 = U(b * key_strides[0] + (h % H) * key_strides[1])
        v0 = U(b * value_strides[0] + (h % H) * value_strides[1])
        for part in range(3):
            # In a buffer the new key stands among the past ones, and is left out: the keys before it, then after it.
            low, high = begin, end
            if part == 0:
                high = min(end, place)
            elif part == 1:
                low = max(begin, place + 1)
            elif p > 0:
                break
            if part < 2 and low < high:
                _read_piece(
                    rows[h], keys, k0, U(key_strides[2]), values, v0, U(value_strides[2]), inverse[h], hidden[b],
                    U(low), U(high), U(0), U(groups), c[h], factor, maxima[h, p], totals[h, p], sums[h, p],
                )  # fmt: skip
            if part == 2 and live > 0:
                _read_piece(
                    recent_rows[h], memory, U(h * recent.shape[1] * recent.shape[2]), U(recent.shape[2]), values, v0,
                    U(value_strides[2]), inverse[h], hidden[b], U(0), U(live), U(cached), U(groups), c[h],
                    factor, maxima[h, p], totals[h, p], sums[h, p],
                )  # fmt: skip
    for h in range(n):
        if pieces > 1:
            known = groups < R and c[h] < F(np.inf)
            if known:
                # These weights are not relative to a largest score of the piece.
                for p in range(pieces):
                    maxima[h, p, groups] = F(0.0)
            _combine(groups, pieces, maxima[h], totals[h], sums[h])
        own_inverse = inverse[h, place] if inverse.shape[1] > 0 else F(1.0)
        _finish(
            recent_rows[h] if recent.shape[1] > 0 else rows[h], new[h], v[h], own_inverse,
            hidden.shape[1] > 0 and hidden[h // H, place], beta[h], F(strength), U(groups), c[h], factor, bits,
            maxima[h, 0], totals[h, 0], sums[h, 0], o[h], y[h],
        )  # fmt: skip


def set_threads(count: int) -> None:
    """Use that many threads, at most those that Numba has."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
