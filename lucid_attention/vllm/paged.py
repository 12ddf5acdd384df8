"""LUCID attention of several requests over one paged cache, which keeps y = P⁻¹v beside every key.

y of a token depends on the tokens before it alone and never changes. So blocks may be shared, copied, dropped and
computed again like those of any other attention.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.lucid.api import precondition
from ..ops.lucid.decode import inverse_key_norms, lucid_decode
from ..ops.softmax.attention import softmax_attention


class Batch(NamedTuple):
    """The new tokens of n requests, one request after the other.

    starts: n + 1 borders of the requests among the T new tokens.
    lengths: n, the tokens of each request so far, with the new ones.
    blocks: int [n, *], the blocks of each request in the cache.
    slots: int [T], the places of the new tokens: block · block size + offset.
    """

    starts: list[int]
    lengths: list[int]
    blocks: Tensor
    slots: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, o: Tensor, *, scale: float, **options: Any
) -> None:
    """Store k and y of the new tokens, and write what their queries read into o.

    q, o: [T, H·G, D]; k, v: [T, H, D]; cache: [blocks, H, block size, 2·D], keys and y side by side. scale: of the
    softmax. options: strength and sharpness, as in `lucid_attention`.
    """
    _store(cache, batch.slots, k, at=0)
    single, chunks = _by_kind(batch)
    for requests in single:
        _decode(q, k, v, cache, batch, requests, o, scale=scale, **options)
    for request in chunks:
        _extend(q, k, v, cache, batch, request, o, scale=scale, **options)


def _by_kind(batch: Batch) -> tuple[list[list[int]], list[int]]:
    """Requests with one new token, in groups whose lengths differ by less than a factor of two, and all others."""
    groups: dict[int, list[int]] = {}
    chunks = []
    for request, length in enumerate(batch.lengths):
        if batch.starts[request + 1] - batch.starts[request] == 1:
            groups.setdefault(length.bit_length(), []).append(request)
        else:
            chunks.append(request)
    return list(groups.values()), chunks


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    batch: Batch,
    requests: list[int],
    o: Tensor,
    *,
    scale: float,
    **options: Any,
) -> None:
    """One new token of every request in one step. Shorter requests are padded on the left."""
    block, D = cache.shape[2], k.shape[2]
    rows = torch.tensor(requests, device=k.device)
    tokens = torch.tensor([batch.starts[request] for request in requests], device=k.device)
    lengths = [batch.lengths[request] for request in requests]
    longest = max(lengths)
    padding = torch.tensor([longest - length for length in lengths], device=k.device)
    places = torch.arange(longest, device=k.device) - padding[:, None]
    key_mask = None if min(lengths) == longest else places >= 0
    # Padding reads the first token of its request: any finite numbers will do. A group with padding has no request of
    # one token, whose y is not there yet.
    places = places.clamp(min=0)
    ids = batch.blocks[rows].gather(1, places // block)
    past = cache[ids, :, places % block].transpose(1, 2)
    keys, y_past = past[..., :D], past[:, :, :-1, D:]
    step = lucid_decode(
        q[tokens, :, None],
        keys,
        v[tokens, :, None],
        y_past,
        inverse_key_norms(keys),
        key_mask=key_mask,
        scale=scale,
        **options,
    )
    _store(cache, batch.slots[tokens], step.y[:, :, 0], at=D)
    o[tokens] = step.o[:, :, 0].to(o.dtype)


def _extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    batch: Batch,
    request: int,
    o: Tensor,
    *,
    scale: float,
    **options: Any,
) -> None:
    """A chunk of new tokens of one request, after the tokens that its blocks hold."""
    block, D = cache.shape[2], k.shape[2]
    new = slice(batch.starts[request], batch.starts[request + 1])
    S = batch.lengths[request] - (new.stop - new.start)
    chunk_q, chunk_k, chunk_v = (x[new].transpose(0, 1)[None] for x in (q, k, v))
    past = None
    if S:
        held = cache[batch.blocks[request, : -(-S // block)]].transpose(0, 1).flatten(1, 2)[None, :, :S]
        past = (held[..., :D], held[..., D:])
    y = precondition(chunk_k, chunk_v, past=past, **options)
    _store(cache, batch.slots[new], y[0].transpose(0, 1), at=D)
    if past is not None:
        chunk_k, y = torch.cat([past[0], chunk_k], 2), torch.cat([past[1], y], 2)
    o[new] = softmax_attention(chunk_q, chunk_k, y, scale=scale)[0].transpose(0, 1).to(o.dtype)


def _store(cache: Tensor, slots: Tensor, x: Tensor, at: int) -> None:
    """x: [T, H, D], into the features from `at` on."""
    block = cache.shape[2]
    cache[slots // block, :, slots % block, at : at + x.shape[2]] = x.to(cache.dtype)
