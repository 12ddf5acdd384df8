"""Softmax attention over strips and rectangles of scores: padding, a cached past and packed documents in linear memory.

A strip of queries needs only its own rows of the mask. A rectangle is all queries over a part of the keys: with the
log-sum-exps of the rows, parts can be read separately and combined, and given the output and log-sum-exp of the *whole*
row, the backward of one part is exact. On a CPU each is one call of torch's flash kernel, which has no public name;
where it is missing, and on other devices, plain matrix products.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import packing
from ..blocks import LEAF, SMALL, Block, borders, from_inputs, is_causal, with_padding_masked
from ..precision import no_autocast, working_dtype
from ..triangular import LOG2E, spans

# Elements of a strip's mask, which torch widens to the dtype of the scores; of a strip's scores where they are plain.
MASK_ELEMENTS = 4 * 1024 * 1024
SCORE_ELEMENTS = 64 * 1024 * 1024
RECTANGLE_ELEMENTS = 16 * 1024 * 1024
ROWS = 512
# The square root of float32's largest number: the product of two such entries is finite.
LARGEST_QUERY = 1.8e19
LARGEST_FLASH_HEAD = 192
# Rows of several blocks that share a strip with a mask. Each score after its block is wasted, but torch's kernel is
# slower for fewer rows.
BLOCK_ROWS = 256


# Older releases have the kernel too, but it reads out of bounds when queries have more heads than keys.
CPU_KERNEL_HAS_GROUPS = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 13)


def flash_kernel_for(x: Tensor) -> bool:
    """Whether torch has its CPU flash kernel, forward and backward, for tensors like x."""
    return (
        x.device.type == "cpu"
        and CPU_KERNEL_HAS_GROUPS
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    )


class _Strip:
    """Queries [rows] of batch rows [batch] and keys [0, stop), with their mask [b or 1, 1, rows, stop]."""

    def __init__(self, batch: slice, rows: slice, stop: int, visible: Tensor | None, causal: bool) -> None:
        everything = slice(None)
        self.queries, self.keys = (batch, everything, rows), (batch, everything, slice(0, stop))
        self.causal, self.visible, self.sees_none = causal, visible, None
        if visible is not None:
            none = ~visible.any(-1, keepdim=True)
            # A softmax over no key is undefined: such rows read every key, and their output is dropped.
            self.visible = visible | none
            self.sees_none = none


def _strips(q: Tensor, k: Tensor, key_mask: Tensor | None, block: Block) -> Iterator[_Strip]:
    B, _, total, _ = k.shape
    heads, T = q.shape[1:3]
    past = total - T
    if flash_kernel_for(q):
        if key_mask is None and past == 0 and is_causal(block):
            yield _Strip(slice(0, B), slice(0, T), T, None, causal=True)
            return
        height = max(16, min(ROWS, MASK_ELEMENTS // total))
        at_once = B if key_mask is None else max(1, MASK_ELEMENTS // (min(height, T) * total))
    else:
        height = max(16, min(ROWS, SCORE_ELEMENTS // (heads * total)))
        at_once = max(1, SCORE_ELEMENTS // (heads * min(height, T) * total))
    if not is_causal(block):
        yield from _block_strips(q, k, key_mask, borders(block, T), height, at_once)
        return
    position = torch.arange(total, device=q.device)
    for batch in spans(0, B, at_once):
        for rows in spans(0, T, height):
            stop = past + rows.stop
            visible = (position[:stop] <= position[past + rows.start : stop, None])[None, None]
            if key_mask is not None:
                visible = visible & key_mask[batch, None, None, :stop]
            yield _Strip(batch, rows, stop, visible, causal=False)


def _block_strips(
    q: Tensor, k: Tensor, key_mask: Tensor | None, borders: list[int], height: int, at_once: int
) -> Iterator[_Strip]:
    """Strips of whole blocks, or of a part of one long block, whose queries need no mask but that of the keys."""
    B, past = k.shape[0], k.shape[2] - q.shape[2]
    ends = [past + stop for start, stop in pairwise(borders) for _ in range(start, stop)]
    end_of, position = torch.tensor(ends, device=q.device), torch.arange(k.shape[2], device=q.device)
    for batch in spans(0, B, at_once):
        for rows in _block_rows(borders, min(height, BLOCK_ROWS), height):
            stop = ends[rows.stop - 1]
            visible = None if ends[rows.start] == stop else (position[:stop] < end_of[rows, None])[None, None]
            if key_mask is not None:
                keys = key_mask[batch, None, None, :stop]
                visible = keys.expand(-1, 1, rows.stop - rows.start, -1) if visible is None else visible & keys
            yield _Strip(batch, rows, stop, visible, causal=False)


def _block_rows(borders: list[int], several: int, one: int) -> Iterator[slice]:
    """Blocks that fit into `several` rows together, or pieces of at most `one` row count of a longer block."""
    first = 0
    for (start, stop), after in zip(pairwise(borders), [*borders[2:], math.inf], strict=True):
        if stop - start > several:
            yield from spans(start, stop, one)
            first = stop
        elif after - first > several:
            if stop > first:
                yield slice(first, stop)
            first = stop


def grouped_sdpa(
    q: Tensor, k: Tensor, y: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """`scaled_dot_product_attention` that uses torch's fast kernels for grouped heads.

    q: [B, H·G, T, D]; k, y: [B, H, N, D]; mask: [B or 1, 1, T, N].
    """
    G = q.shape[1] // k.shape[1]
    supports_groups = CPU_KERNEL_HAS_GROUPS if q.device.type == "cpu" else q.element_size() == 2
    if G > 1 and not supports_groups:
        # Accelerators' kernels support groups in 16 bits only; otherwise torch would use dense products.
        k, y = k.repeat_interleave(G, 1), y.repeat_interleave(G, 1)
    # A literal, since a compiler with dynamic shapes has only a symbol for the comparison.
    groups = True if k.shape[1] != q.shape[1] else False  # noqa: SIM210
    return F.scaled_dot_product_attention(q, k, y, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups)


def clean(q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Zero keys and values at masked positions: a NaN there must not reach a product."""
    if key_mask is None:
        return q, k, y
    hidden = ~key_mask[:, None, :, None]
    return clean_queries(q, key_mask), k.masked_fill(hidden, 0), y.masked_fill(hidden, 0)


def clean_queries(q: Tensor, key_mask: Tensor) -> Tensor:
    """Zero broken queries at masked positions. Others still read: only keys are masked."""
    return q.masked_fill(_broken(q, key_mask), 0)


def _broken(q: Tensor, key_mask: Tensor) -> Tensor:
    """Entries at masked positions that are NaN, infinite, or so large that scores and gradients would overflow."""
    return ~key_mask[:, None, -q.shape[2] :, None] & ~(q.abs() < LARGEST_QUERY)


def attend_strips(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    given: Tensor | None = None,
    length: int = 1,
) -> tuple[Tensor, Tensor]:
    """o: [B, H·G, T, D] and the log-sum-exp of each row: [B, H·G, T]."""
    q, k, y, block = _rows(q), _rows(k), _rows(y), from_inputs(given, length)
    key_mask = with_padding_masked(key_mask, block, cu_seqlens, k)
    outputs = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=working_dtype(q))
    for part, (o, lse), _ in packing.pieces(packing.documents(cu_seqlens, q.shape[2], q.device), outputs):
        assert o is not None
        assert lse is not None
        mask = None if key_mask is None else part.take(key_mask)
        _attend(part.take(q), part.take(k), part.take(y), mask, scale, block, o, lse)
    return outputs


def _attend(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, scale: float, block: Block, o: Tensor, lse: Tensor
) -> None:
    q, k, y = clean(q, k, y, key_mask)
    later = _later_parts(q, k, key_mask, block)
    with no_autocast(q):
        for strip in _strips(q, k, key_mask, 1 if later else block):
            here, seen = strip.queries, strip.keys
            if flash_kernel_for(q):
                o[here], lse[here] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q[here],
                    k[seen],
                    y[seen],
                    0.0,
                    strip.causal,
                    attn_mask=_additive(strip.visible, q.dtype),
                    scale=scale,
                )
            else:
                o[here] = grouped_sdpa(q[here], k[seen], y[seen], scale, mask=strip.visible)
                lse[here] = 0  # not needed: the plain backward computes the weights again
            if strip.sees_none is not None:
                o[here].masked_fill_(strip.sees_none, 0)
        for rows, hidden in later:
            _read_later_(*(x[:, :, rows] for x in (q, k, y, o, lse)), scale, hidden)


def _later_parts(q: Tensor, k: Tensor, key_mask: Tensor | None, block: Block) -> list[tuple[slice, Tensor]]:
    """Where small blocks are read as causal attention, then each block's later keys: rows and, for tiles of them, −∞
    at all other keys.

    Torch's kernel needs no mask for the first, and the second is little work. 16 bits would be rounded twice.
    """
    T, parts = q.shape[2], []
    if key_mask is not None or k.shape[2] > T or not (isinstance(block, int) and 1 < block <= SMALL):
        return []
    if not flash_kernel_for(q) or q.dtype != working_dtype(q):
        return []
    tile = block * max(1, LEAF // block)
    for rows in (slice(0, T - T % tile), slice(T - T % tile, T)):
        if rows.stop > rows.start:
            key = torch.arange(min(tile, rows.stop - rows.start))
            later = (key > key[:, None]) & (key // block == key[:, None] // block)
            parts.append((rows, torch.zeros(later.shape, dtype=q.dtype).masked_fill_(~later, -math.inf)))
    return parts


def _tiles(x: Tensor, H: int, n: int) -> Tensor:
    """x: [B, H·G, T, *] as a view [B, H, T/n, G, n, *]."""
    return x.unflatten(1, (H, -1)).unflatten(3, (-1, n)).transpose(2, 3)


def _by_tile(x: Tensor, H: int, n: int) -> Tensor:
    """x: [B, H·G, T, *] as [B·H·T/n, G·n, *]."""
    return _tiles(x, H, n).flatten(0, 2).flatten(1, 2)


def _later_scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """Scores of tiles of queries and keys."""
    return torch.baddbmm(hidden.repeat(q.shape[1] // len(hidden), 1), q, k.mT, alpha=scale * LOG2E)


def _read_later_(q: Tensor, k: Tensor, y: Tensor, o: Tensor, lse: Tensor, scale: float, hidden: Tensor) -> None:
    """Add the later keys of each block to o and lse, those of causal attention."""
    H, n = k.shape[1], len(hidden)
    queries, keys, values, before, top = (_by_tile(x, H, n) for x in (q, k, y, o, lse[..., None]))
    scores, top = _later_scores(queries, keys, scale, hidden), top * LOG2E
    best = torch.maximum(top, scores.amax(-1, keepdim=True))
    weights, weight = scores.sub_(best).exp2_(), top.sub_(best).exp2_()
    total = weights.sum(-1, keepdim=True).add_(weight)
    read = torch.baddbmm(before * weight, weights, values).div_(total)
    for x, new in ((o, read), (lse, best.add_(total.log2()).div_(LOG2E))):
        _tiles(x, H, n).copy_(new.view(_tiles(x, H, n).shape))


def _add_later_grads_(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, y: Tensor, dq: Tensor, dk: Tensor, dy: Tensor,
    scale: float, hidden: Tensor,
) -> None:  # fmt: skip
    """Add the gradients of the later keys of each block; o and lse are those of the whole rows."""
    H, n = k.shape[1], len(hidden)
    do, o, lse, q, k, y = (_by_tile(x, H, n) for x in (do, o, lse[..., None], q, k, y))
    p = _later_scores(q, k, scale, hidden).sub_(lse, alpha=LOG2E).exp2_()
    ds = torch.bmm(do, y.mT).sub_((do * o).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    for x, grad in ((dq, torch.bmm(ds, k)), (dk, torch.bmm(ds.mT, q)), (dy, torch.bmm(p.mT, do))):
        _tiles(x, H, n).add_(grad.view(_tiles(x, H, n).shape))


def _rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, which the kernel assumes without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def attend_strips_backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    y: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    given: Tensor | None = None,
    length: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dy in the shapes of q, k, y."""
    block = from_inputs(given, length)
    key_mask = with_padding_masked(key_mask, block, cu_seqlens, k)
    grads = q.new_empty(q.shape), k.new_empty(k.shape), y.new_empty(y.shape)
    do, q, k, y, o = _rows(do), _rows(q), _rows(k), _rows(y), _rows(o)
    for part, (dq, dk, dy), _ in packing.pieces(packing.documents(cu_seqlens, q.shape[2], q.device), grads):
        assert dq is not None
        assert dk is not None
        assert dy is not None
        mask = None if key_mask is None else part.take(key_mask)
        part_o, part_lse, part_q, part_k, part_y = (part.take(x) for x in (o, lse, q, k, y))
        saved = part_o, part_lse, part_q, part_k, part_y
        _attend_backward(part.take_grad(do), *saved, mask, scale, block, dq, dk, dy)
    return grads


def _attend_backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    y: Tensor,
    key_mask: Tensor | None,
    scale: float,
    block: Block,
    dq: Tensor,
    dk: Tensor,
    dy: Tensor,
) -> None:
    broken = None if key_mask is None else _broken(q, key_mask)
    q, k, y = clean(q, k, y, key_mask)
    # Gradients of keys add up over strips: in working precision, narrowed once.
    wide = working_dtype(k)
    sums = [x.zero_() if x.dtype == wide else torch.zeros_like(x, dtype=wide) for x in (dk, dy)]
    later = _later_parts(q, k, key_mask, block)
    with no_autocast(q):
        for strip in _strips(q, k, key_mask, 1 if later else block):
            here, seen = strip.queries, strip.keys
            strip_do = do[here] if strip.sees_none is None else do[here].masked_fill(strip.sees_none, 0)
            args = strip_do, q[here], k[seen], y[seen]
            if flash_kernel_for(q):
                additive = _additive(strip.visible, q.dtype)
                grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *args, o[here], lse[here], 0.0, strip.causal, attn_mask=additive, scale=scale
                )
            else:
                grads = _plain_backward(*args, strip.visible, scale)
            dq[here] = grads[0]
            for total_grad, grad in zip(sums, grads[1:], strict=True):
                total_grad[seen] += grad
        for rows, hidden in later:
            _add_later_grads_(*(x[:, :, rows] for x in (do, o, lse, q, k, y, dq, *sums)), scale, hidden)
    for out, total_grad in zip((dk, dy), sums, strict=True):
        if key_mask is not None:
            total_grad.masked_fill_(~key_mask[:, None, :, None], 0)
        out.copy_(total_grad)
    if broken is not None:
        dq.masked_fill_(broken, 0)


def _plain_backward(
    do: Tensor, q: Tensor, k: Tensor, y: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of softmax attention for a strip, by its defining products."""
    wide, H = working_dtype(q), k.shape[1]
    # The heads of a group are more rows: [b, H, G, rows, *] with [b, H, 1, stop, *].
    do, q = (x.to(wide).unflatten(1, (H, -1)) for x in (do, q))
    k, y = (x.to(wide)[:, :, None] for x in (k, y))
    p = (q @ k.mT).mul_(scale)
    if mask is not None:
        p.masked_fill_(~mask[:, :, None], -math.inf)
    p = p.softmax(-1)
    ds = do @ y.mT
    ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    return (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (p.mT @ do).sum(2)


def attend_rectangle(q: Tensor, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ) y: [n, m, R, E], and its log-sum-exps: [n, m, R].

    q: [n, m, R, D]; k: [n, m, N, D]; y: [n, m, N, E].
    """
    if flash_kernel_for(q):
        E = y.shape[3]
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_one_size(q, k, y), 0.0, False, scale=1.0)
        return o[..., :E], lse
    o, lse = q.new_empty(*q.shape[:3], y.shape[3]), q.new_empty(q.shape[:3])
    for rows in _row_strips(q, k):
        scores = q[:, :, rows] @ k.mT
        lse[:, :, rows] = scores.logsumexp(-1)
        o[:, :, rows] = scores.sub_(lse[:, :, rows, None]).exp_() @ y
    return o, lse


def attend_rectangle_backward(
    do: Tensor, q: Tensor, k: Tensor, y: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dy of one rectangle. o: [n, m, R, E] and lse: [n, m, R] are those of the whole rows."""
    if flash_kernel_for(q):
        D, E = q.shape[3], y.shape[3]
        (q, k, y), (do, o) = _one_size(q, k, y), _one_size(do, o, like=q)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dy = backward(do, q, k, y, o, lse, 0.0, False, scale=1.0)
        return dq[..., :D], dk[..., :D], dy[..., :E]
    dq, dk, dy = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(y)
    for rows in _row_strips(q, k):
        p = (q[:, :, rows] @ k.mT).sub_(lse[:, :, rows, None]).exp_()
        dy += p.mT @ do[:, :, rows]
        along = (do[:, :, rows] * o[:, :, rows]).sum(-1, keepdim=True)
        p.mul_((do[:, :, rows] @ y.mT).sub_(along))
        dq[:, :, rows] = p @ k
        dk += p.mT @ q[:, :, rows]
    return dq, dk, dy


# The same by the kernels of an accelerator, which have no public names either: flash attention in 16 bit, the
# memory-efficient one in float32, whose products are as exact as float32. For both R is a multiple of 32.


def accelerated_rectangle(q: Tensor, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return attend_rectangle(q, k, y)
    E, (q, k, y) = y.shape[3], _one_size(q, k, y)
    if _flash_takes(q):
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, y, scale=1.0)[:2]
    else:
        o, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, y, None, True, scale=1.0)[:2]
    return o[..., :E], lse


def accelerated_rectangle_backward(
    do: Tensor, q: Tensor, k: Tensor, y: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        return attend_rectangle_backward(do, q, k, y, o, lse)
    D, E = q.shape[3], y.shape[3]
    (q, k, y), (do, o), lse = _one_size(q, k, y), _one_size(do, o, like=q), lse.contiguous()
    # Without dropout nothing reads the state of the random numbers.
    states = [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2)]
    if _flash_takes(q):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        rest = None, None, q.shape[2], k.shape[2], 0.0, False, *states
        dq, dk, dy = backward(do, q, k, y, o, lse, *rest, scale=1.0)
    else:
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dy, _ = backward(do, q, k, y, None, o, lse, *states, 0.0, [True, True, True, False], scale=1.0)
    return dq[..., :D], dk[..., :D], dy[..., :E]


def _flash_takes(q: Tensor) -> bool:
    """Not every GPU has the backward of larger heads."""
    return q.element_size() == 2 and q.shape[3] <= LARGEST_FLASH_HEAD


def _one_size(*tensors: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Tensors of one head size with a contiguous last dimension, as the kernel needs them.

    The padding is zero, so scores and outputs stay the same.
    """
    widest = max(x.shape[3] for x in (*tensors, *([] if like is None else [like])))
    padded = (F.pad(x, (0, widest - x.shape[3])) if x.shape[3] < widest else x for x in tensors)
    return tuple(x if x.stride(3) == 1 else x.contiguous() for x in padded)


def _row_strips(q: Tensor, k: Tensor) -> list[slice]:
    across = q.shape[0] * q.shape[1] * k.shape[2]
    return list(spans(0, q.shape[2], max(1, RECTANGLE_ELEMENTS // across)))
