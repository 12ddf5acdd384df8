"""LUCID attention of several requests over one paged cache, which keeps y = P⁻¹v next to every key.

y of a token depends on the tokens before it alone and never changes. So blocks may be shared, copied, dropped and
computed again like those of any other attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..models.attention import gated
from ..models.preconditioner import Preconditioner
from ..ops.lucid.api import precondition
from ..ops.lucid.decode import inverse_key_norms, lucid_decode
from ..ops.softmax.attention import softmax_attention


class Cache(NamedTuple):
    """The paged cache of a layer.

    rows: [blocks, H, block size, 2·D], keys and y next to each other.
    inverse_norms: [blocks, H, block size], 1/‖u‖ of the keys u that P is made of.
    """

    rows: Tensor
    inverse_norms: Tensor


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


class Step(NamedTuple):
    """One pass of one layer. q, o: [T, H·G, D]; k, v: [T, H, D] of the new tokens; scale: of the softmax."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    cache: Cache
    batch: Batch
    lucid: Preconditioner
    scale: float


def attend(step: Step) -> None:
    """Store k and y of the new tokens, and write what their queries read into o."""
    norms = inverse_key_norms(step.k.transpose(0, 1)[None], step.lucid.key_map)[0].mT
    _store(step.cache.rows, step.batch.slots, step.k)
    _store(step.cache.inverse_norms[..., None], step.batch.slots, norms[..., None])
    single, chunks = _by_kind(step.batch)
    for requests in single:
        _decode(step, requests)
    for request in chunks:
        _extend(step, request)


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


def _decode(step: Step, requests: list[int]) -> None:
    """One new token of every request in one step. Shorter requests are padded on the left."""
    (rows, inverse_norms), batch, D, device = step.cache, step.batch, step.k.shape[2], step.k.device
    tokens = torch.tensor([batch.starts[request] for request in requests], device=device)
    lengths = torch.tensor([batch.lengths[request] for request in requests], device=device)
    longest = max(batch.lengths[request] for request in requests)
    places = torch.arange(longest, device=device) - (longest - lengths)[:, None]
    key_mask = None if min(batch.lengths[request] for request in requests) == longest else places >= 0
    # Padding reads the first token of its request: any finite numbers will do. A group with padding has no request of
    # one token, whose y is not there yet.
    places = places.clamp(min=0)
    block = rows.shape[2]
    ids = batch.blocks[torch.tensor(requests, device=device)].gather(1, places // block)
    past = rows[ids, :, places % block].transpose(1, 2)
    keys, y_past = past[..., :D], past[:, :, :-1, D:]
    v, options = gated(step.v[tokens, :, None], step.lucid(keys))
    out = lucid_decode(
        step.q[tokens, :, None],
        keys,
        v,
        y_past,
        inverse_norms[ids, :, places % block].transpose(1, 2),
        key_mask=key_mask,
        scale=step.scale,
        **options,
    )
    _store(rows, batch.slots[tokens], out.y[:, :, 0], at=D)
    step.o[tokens] = out.o[:, :, 0].to(step.o.dtype)


def _extend(step: Step, request: int) -> None:
    """A chunk of new tokens of one request, after the tokens that its blocks hold."""
    batch, rows, D = step.batch, step.cache.rows, step.k.shape[2]
    new = slice(batch.starts[request], batch.starts[request + 1])
    S = batch.lengths[request] - (new.stop - new.start)
    q, k, v = (x[new].transpose(0, 1)[None] for x in (step.q, step.k, step.v))
    past = None
    if S:
        held = rows[batch.blocks[request, : -(-S // rows.shape[2])]].transpose(0, 1).flatten(1, 2)[None, :, :S]
        past = (held[..., :D], held[..., D:])
    v, options = gated(v, step.lucid(k))
    y = precondition(k, v, past=past, **options).to(k.dtype)
    _store(rows, batch.slots[new], y[0].transpose(0, 1), at=D)
    if past is not None:
        k, y = torch.cat([past[0], k], 2), torch.cat([past[1], y], 2)
    step.o[new] = softmax_attention(q, k, y, scale=step.scale)[0].transpose(0, 1).to(step.o.dtype)


def _store(rows: Tensor, slots: Tensor, x: Tensor, at: int = 0) -> None:
    """x: [T, H, *], into the features from `at` on."""
    block = rows.shape[2]
    rows[slots // block, :, slots % block, at : at + x.shape[2]] = x.to(rows.dtype)
