"""Kernels of PaTH and LUCID-PaTH for the rectangles of the tree.

A rectangle is what a join of the tree (`tree.py`) gives: rows of a right node, moved to its start, against keys of a
left node, moved to its end. Everything is float32 in memory, and padded: positions to whole leaves of 64 (LEAF), head
sizes to powers of two, so no kernel needs a mask for the border. Tensors are [n, pairs, R, FEATURES]: heads, rectangles
of one level, rows. Strides of the first two are counted in rows. A leaf of rows holds SETS sets (the query heads of a
group) of its positions, one after the other; a leaf of keys holds one.

`target` and `source` are the two sides of a rectangle. A program owns a tile of the target and goes along the source,
so rows may be the target and keys the source, or the other way round: the tile is made transposed then, by exchanging
the operands.

ids: for each row of the batch and position, which document it is in, −1 if it takes no part: [B, positions], int32.
bounds: for packed documents, per position, where its document starts (if rows are the target) or ends.
"""

import triton
import triton.language as tl

from ..triton_tiles import LOG2_E, key_rows, score_tile


@triton.jit
def position_of(row, SETS: tl.constexpr, LEAF: tl.constexpr):
    """The position, within its node, of a row that is the first of a tile."""
    return row // (SETS * LEAF) * LEAF + row % LEAF


@triton.jit
def same_document(target_ids, source_ids, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether a source takes part for a target: [ROWS, COLUMNS]."""
    target = tl.load(target_ids + tl.arange(0, ROWS))[:, None]
    source = tl.load(source_ids + tl.arange(0, COLUMNS))[None, :]
    return (target == source) & (source >= 0)


@triton.jit
def source_range(
    bounds,
    target_position,
    source_position,
    sources,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SETS: tl.constexpr,
    LEAF: tl.constexpr,
    ROW_TARGET: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The rows of the source that documents leave to a tile of the target. Positions are those of the whole row."""
    low = sources * 0
    high = sources
    if PACKED:
        if ROW_TARGET:
            start = tl.maximum(tl.load(bounds + target_position) - source_position, 0)
            low = tl.minimum(start // COLUMNS * COLUMNS, sources)
        else:
            stop = tl.maximum(tl.load(bounds + target_position + ROWS - 1) - source_position, 0)
            high = tl.minimum((stop + LEAF - 1) // LEAF * (SETS * LEAF), sources)
    return low, high


@triton.jit(
    do_not_specialize=[
        "H", "pairs", "tiles", "sources", "target_n", "target_pair", "source_n", "source_pair", "value_n", "value_pair",
        "out_n", "out_pair", "lse_n", "lse_pair", "target_ids_row", "source_ids_row", "target_position", "target_step",
        "source_position", "source_step",
    ]
)  # fmt: skip
def path_attend_kernel(
    target,
    source,
    values,
    out,
    lse,
    new_lse,
    target_ids,
    source_ids,
    bounds,
    H,
    pairs,
    tiles,
    sources,
    target_n,
    target_pair,
    source_n,
    source_pair,
    value_n,
    value_pair,
    out_n,
    out_pair,
    lse_n,
    lse_pair,
    target_ids_row,
    source_ids_row,
    target_position,
    target_step,
    source_position,
    source_step,
    FEATURES: tl.constexpr,
    VALUES: tl.constexpr,
    SETS: tl.constexpr,
    LEAF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Softmax attention of a rectangle, put into what other rectangles gave: out and lse, both finite.

    out is written in place, the log-sum-exps to new_lse [n, pairs, R], since programs of all pieces of the values read
    lse.
    """
    pid = tl.program_id(0)
    head = (pid // (pairs * tiles)).to(tl.int64)
    pair = (pid // tiles % pairs).to(tl.int64)
    i = pid % tiles * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    wide = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first_source = head * source_n + pair * source_pair
    first_value = head * value_n + pair * value_pair
    at = target_position + pair * target_step + position_of(i, SETS, LEAF)
    begin = source_position + pair * source_step
    low, high = source_range(bounds, at, begin, sources, ROWS, COLUMNS, 1, LEAF, True, PACKED)
    here = out + (head * out_n + pair * out_pair + i + rows)[:, None] * VALUES + wide[None, :]
    acc = tl.load(here)
    top = tl.load(lse + head * lse_n + pair * lse_pair + i + rows) * LOG2_E
    total = tl.full((ROWS,), 1.0, tl.float32)
    for j in range(low, high, COLUMNS):
        scores = score_tile(
            target, head * target_n + pair * target_pair + i, source, first_source + j,
            ROWS, COLUMNS, FEATURES, PIECE, PRECISION, False,
        )  # fmt: skip
        scores *= LOG2_E
        if MASKED:
            same = same_document(
                target_ids + head // H * target_ids_row + at,
                source_ids + head // H * source_ids_row + begin + j,
                ROWS,
                COLUMNS,
            )
            scores = tl.where(same, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        factor = tl.exp2(top - higher)
        total = total * factor + tl.sum(p, 1)
        y = tl.load(values + (first_value + j + columns)[:, None] * VALUES + wide[None, :])
        acc = tl.dot(p, y, acc * factor[:, None], input_precision=PRODUCT)
        top = higher
    tl.store(here, acc / total[:, None])
    if tl.program_id(1) == 0:
        tl.store(new_lse + (head * pairs + pair) * (tiles * ROWS) + i + rows, (top + tl.log2(total)) / LOG2_E)


@triton.jit(
    do_not_specialize=[
        "alpha", "H", "pairs", "tiles", "sources", "target_n", "target_pair", "source_n", "source_pair", "value_n",
        "value_pair", "out_n", "out_pair", "shift_n", "shift_pair", "target_ids_row", "source_ids_row",
        "target_position", "target_step", "source_position", "source_step",
    ]
)  # fmt: skip
def path_apply_kernel(
    target,
    source,
    shifts,
    values,
    out,
    target_ids,
    source_ids,
    bounds,
    alpha,
    H,
    pairs,
    tiles,
    sources,
    target_n,
    target_pair,
    source_n,
    source_pair,
    value_n,
    value_pair,
    out_n,
    out_pair,
    shift_n,
    shift_pair,
    target_ids_row,
    source_ids_row,
    target_position,
    target_step,
    source_position,
    source_step,
    SHIFT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUES: tl.constexpr,
    SETS: tl.constexpr,
    LEAF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_TARGET: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """out += alpha · exp(target · sourceᵀ − shift) · values. The shifts belong to the rows, on whichever side."""
    pid = tl.program_id(0)
    head = (pid // (pairs * tiles)).to(tl.int64)
    pair = (pid // tiles % pairs).to(tl.int64)
    i = pid % tiles * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    wide = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first_source = head * source_n + pair * source_pair
    first_value = head * value_n + pair * value_pair
    shifts += head * shift_n + pair * shift_pair
    at = target_position + pair * target_step + (position_of(i, SETS, LEAF) if ROW_TARGET else i)
    begin = source_position + pair * source_step
    low, high = source_range(bounds, at, begin, sources, ROWS, COLUMNS, SETS, LEAF, ROW_TARGET, PACKED)
    if ROW_TARGET:
        shift = tl.load(shifts + (i + rows) * SHIFT_STRIDE)[:, None]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for j in range(low, high, COLUMNS):
        scores = score_tile(
            target, head * target_n + pair * target_pair + i, source, first_source + j,
            ROWS, COLUMNS, FEATURES, PIECE, PRECISION, False,
        )  # fmt: skip
        if not ROW_TARGET:
            shift = tl.load(shifts + (j + columns) * SHIFT_STRIDE)[None, :]
        tile = tl.exp2((scores - shift) * LOG2_E)
        if MASKED:
            there = j if ROW_TARGET else position_of(j, SETS, LEAF)
            same = same_document(
                target_ids + head // H * target_ids_row + at,
                source_ids + head // H * source_ids_row + begin + there,
                ROWS,
                COLUMNS,
            )
            tile = tl.where(same, tile, 0.0)
        y = tl.load(values + (first_value + j + columns)[:, None] * VALUES + wide[None, :])
        acc = tl.dot(tile, y, acc, input_precision=PRODUCT)
    here = out + (head * out_n + pair * out_pair + i + rows)[:, None] * VALUES + wide[None, :]
    tl.store(here, tl.load(here) + alpha * acc)


@triton.jit(
    do_not_specialize=[
        "alpha", "H", "pairs", "tiles", "sources", "target_n", "target_pair", "source_n", "source_pair", "left_n",
        "left_pair", "right_n", "right_pair", "out_n", "out_pair", "shift_n", "shift_pair", "along_n", "along_pair",
        "target_ids_row", "source_ids_row", "target_position", "target_step", "source_position", "source_step",
    ]
)  # fmt: skip
def path_pull_kernel(
    target,
    source,
    shifts,
    along,
    left,
    right,
    out,
    sums,
    target_ids,
    source_ids,
    bounds,
    alpha,
    H,
    pairs,
    tiles,
    sources,
    target_n,
    target_pair,
    source_n,
    source_pair,
    left_n,
    left_pair,
    right_n,
    right_pair,
    out_n,
    out_pair,
    shift_n,
    shift_pair,
    along_n,
    along_pair,
    target_ids_row,
    source_ids_row,
    target_position,
    target_step,
    source_position,
    source_step,
    SHIFT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUES: tl.constexpr,
    SETS: tl.constexpr,
    LEAF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    ROW_TARGET: tl.constexpr,
    ALONG: tl.constexpr,
    SUMS: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """out += alpha · W · source, W = exp(target · sourceᵀ − shift) ∘ (left · rightᵀ − along): gradients of the target.

    left, right: of target and source, [*, VALUES]. The shifts and the numbers along belong to the rows. With SUMS the
    sums of alpha · W along the source are written to sums [n, pairs, R].
    """
    pid = tl.program_id(0)
    head = (pid // (pairs * tiles)).to(tl.int64)
    pair = (pid // tiles % pairs).to(tl.int64)
    i = pid % tiles * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    first_source = head * source_n + pair * source_pair
    shifts += head * shift_n + pair * shift_pair
    along += head * along_n + pair * along_pair
    at = target_position + pair * target_step + (position_of(i, SETS, LEAF) if ROW_TARGET else i)
    begin = source_position + pair * source_step
    low, high = source_range(bounds, at, begin, sources, ROWS, COLUMNS, SETS, LEAF, ROW_TARGET, PACKED)
    if ROW_TARGET:
        shift = tl.load(shifts + (i + rows) * SHIFT_STRIDE)[:, None]
        if ALONG:
            less = tl.load(along + i + rows)[:, None]
    acc = tl.zeros((ROWS, OUT), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for j in range(low, high, COLUMNS):
        scores = score_tile(
            target, head * target_n + pair * target_pair + i, source, first_source + j,
            ROWS, COLUMNS, FEATURES, PIECE, PRECISION, False,
        )  # fmt: skip
        w = score_tile(
            left, head * left_n + pair * left_pair + i, right, head * right_n + pair * right_pair + j,
            ROWS, COLUMNS, VALUES, WIDTH, PRODUCT, False,
        )  # fmt: skip
        if not ROW_TARGET:
            shift = tl.load(shifts + (j + columns) * SHIFT_STRIDE)[None, :]
            if ALONG:
                less = tl.load(along + j + columns)[None, :]
        if ALONG:
            w -= less
        w *= tl.exp2((scores - shift) * LOG2_E)
        if MASKED:
            there = j if ROW_TARGET else position_of(j, SETS, LEAF)
            same = same_document(
                target_ids + head // H * target_ids_row + at,
                source_ids + head // H * source_ids_row + begin + there,
                ROWS,
                COLUMNS,
            )
            w = tl.where(same, w, 0.0)
        if SUMS:
            total += tl.sum(w, 1)
        moved = key_rows(source, first_source + j, FEATURES, tl.program_id(1) * OUT, COLUMNS, OUT)
        acc = tl.dot(w, moved, acc, input_precision=PRODUCT)
    features = tl.program_id(1) * OUT + tl.arange(0, OUT)
    here = out + (head * out_n + pair * out_pair + i + rows)[:, None] * FEATURES + features[None, :]
    tl.store(here, tl.load(here) + alpha * acc)
    if SUMS and tl.program_id(1) == 0:
        tl.store(sums + (head * pairs + pair) * (tiles * ROWS) + i + rows, alpha * total)
