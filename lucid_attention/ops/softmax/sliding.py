"""Softmax attention over a sliding window: a query sees itself and the window − 1 positions before it.

Time and memory grow with T · window. Blocks of queries are a batch, each with the rectangle of keys
that its queries can see, for one call of `scaled_dot_product_attention`.

Shapes: B batch, H key/value heads, G query heads per key/value head, T new and S past positions, D key size, E value
size, W window, n blocks of C queries and K = C + W − 1 keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import packing
from ..keys import resolved_scale
from ..precision import readout_dtype
from .attention import softmax_attention
from .strips import clean_queries, grouped_sdpa

# Queries of a block. Large blocks copy fewer keys twice; small blocks make fewer scores that are masked.
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 512


def read_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal softmax attention in which a query at position i sees positions i − window + 1 to i.

    Args:
        q: [B, H·G, T, D].
        k, v: [B, H, S + T, D] and [B, H, S + T, E]. Of the past, the last W − 1 positions are enough.
        window: W. Masked positions count too.
        key_mask: [B, S + T] bool, True where a key takes part. A query that sees no key reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); no document sees another.
        scale: of the softmax scores, default 1/√D.

    Returns:
        o: [B, H·G, T, E].
    """
    T, total = q.shape[2], k.shape[2]
    beyond = total - (T + window - 1)
    if beyond > 0:
        k, v, total = k[:, :, beyond:], v[:, :, beyond:], total - beyond
        key_mask = None if key_mask is None else key_mask[:, beyond:]
    if total <= window:
        return softmax_attention(q, k, v, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        packing.offsets(cu_seqlens, T)
    scale = resolved_scale(scale, q)
    q, k, v = (x.to(readout_dtype(x)) for x in (q, k, v))
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        q, k, v = clean_queries(q, key_mask), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    return _read_blocks(q, k, v, window, key_mask, cu_seqlens, scale)


def _read_blocks(
    q: Tensor, k: Tensor, v: Tensor, W: int, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> Tensor:
    B, heads, T, D = q.shape
    E, before = v.shape[3], k.shape[2] - T
    C = min(T, max(SMALLEST_BLOCK, min(W, LARGEST_BLOCK)))
    n = -(-T // C)
    after = n * C - T
    # Torch's fast kernels want one head size.
    widest = max(D, E)
    q = F.pad(q, (0, widest - D, 0, after))
    # Pad to W − 1 positions before the first query.
    k, v = (F.pad(x, (0, widest - x.shape[3], W - 1 - before, after)) for x in (k, v))
    visible = _visible(T, before, C, n, W, key_mask, cu_seqlens, k.device)
    # Without a mask of their own, rows of a batch are like heads: all share the masks of the blocks.
    rows = 1 if key_mask is None else B
    q, k, v = _blocks(q, C, C, rows), _blocks(k, C + W - 1, C, rows), _blocks(v, C + W - 1, C, rows)
    none = ~visible.any(-1, keepdim=True)
    # A softmax over no key is undefined: such rows read every key, and their output is dropped.
    o = grouped_sdpa(q, k, v, scale, mask=visible | none).masked_fill(none, 0)
    o = o.unflatten(0, (rows, n)).unflatten(2, (B // rows, heads)).permute(0, 2, 3, 1, 4, 5)
    return o.reshape(B, heads, n * C, widest)[:, :, :T, :E]


def _blocks(x: Tensor, size: int, step: int, rows: int) -> Tensor:
    """Pieces of `size` positions, one every `step`: [B, H, *, D] -> [rows · n, B/rows · H, size, D]."""
    pieces = x.unfold(2, size, step).unflatten(0, (rows, -1))
    return pieces.permute(0, 3, 1, 2, 5, 4).flatten(2, 3).flatten(0, 1)


def _visible(
    T: int,
    before: int,
    C: int,
    n: int,
    W: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Which keys of its block a query may read: [n or B · n, 1, C, K]."""
    query = torch.arange(C, device=device)[:, None]
    key = torch.arange(C + W - 1, device=device)
    band = (key >= query) & (key < query + W)
    # Positions are counted from the first query. None of the T queries sees those after the last one.
    position = torch.arange(n, device=device)[:, None] * C + key - (W - 1)
    visible = band & (position >= -before)[:, None, None]
    if cu_seqlens is not None:
        document = packing.document_numbers(cu_seqlens, position)
        visible = visible & (document[:, None, None] == document[:, None, W - 1 :, None])
    if key_mask is not None:
        padded = F.pad(key_mask, (W - 1 - before, n * C - T))
        visible = (visible & padded.unfold(1, C + W - 1, C)[:, :, None, None]).flatten(0, 1)
    return visible
