"""Attention of many requests in one pass: every new token against the past of its own request, and nothing else."""

from typing import Any, Protocol

import torch
from torch import Tensor

from .engine import PagedLayer
from .requests import Request, split, together


class Attend(Protocol):
    """How one layer attends."""

    def step(
        self, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One new token each of R requests.

        tokens: [R], their places in the pass; q: [R, H·G, 1, D]; k: [R, H, S + 1, D]; v: [R, H, 1, E];
        y: [R, H, S + 1, E], whose last row is not y yet; mask: [R, S + 1] -> o: [R, H·G, 1, E], y: [R, H, 1, E].
        """
        ...

    def extend(
        self, tokens: slice, q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The T new tokens of one request, in the shapes of a batch of 1. past: keys and y of S tokens."""
        ...


@torch.compiler.disable
def attend_ragged(layer: PagedLayer, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
    """Attend, and write the new keys and y to the cache.

    q: [1, H·G, T, D]; k: [1, H, T, D]; v: [1, H', T, E], with H·D = H'·E, all requests one behind the other
    -> [1, H·G, T, E].
    """
    T = q.shape[2]
    known = layer.requests[-1].stop
    if known != T or layer.write.shape[0] != T:
        raise ValueError(f"the new tokens of all requests must be the {T} of the pass, without padding, got {known}")
    values = layer.values.view(-1, v.shape[1], v.shape[3])
    layer.keys.index_copy_(0, layer.write, _rows(k))
    parts: list[tuple[Any, Tensor, Tensor]] = []
    alone, groups = split(layer.requests)
    for request in alone:
        tokens = slice(request.start, request.stop)
        past = _past(layer, values, request)
        parts.append((tokens, *attend.extend(tokens, q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], past)))
    for group in groups:
        places = together(group, q.device)
        rows = layer.read[places.rows]
        new = (x[0].index_select(1, places.tokens).transpose(0, 1)[:, :, None] for x in (q, v))
        query, value = new
        o, y = attend.step(places.tokens, query, gather(layer.keys, rows), value, gather(values, rows), places.mask)
        parts.append((places.tokens, _one_behind_the_other(o), _one_behind_the_other(y)))
    _, heads, _, width = parts[0][1].shape
    # Every token belongs to one request, so that every place is written.
    output, stored = q.new_empty(1, heads, T, width), torch.empty_like(v)
    for tokens, o, y in parts:
        output[:, :, tokens], stored[:, :, tokens] = o, y
    values.index_copy_(0, layer.write, _rows(stored))
    return output


def _past(layer: PagedLayer, values: Tensor, request: Request) -> tuple[Tensor, Tensor] | None:
    if request.past == 0:
        return None
    rows = layer.read[None, request.first : request.first + request.past]
    return gather(layer.keys, rows), gather(values, rows)


def gather(cache: Tensor, rows: Tensor) -> Tensor:
    """Rows of a layer's cache, in the layout of the operators. cache: [n, H, D]; rows: [R, M] -> [R, H, M, D]."""
    _, H, D = cache.shape
    places = rows[:, None] * H + torch.arange(H, device=rows.device)[:, None]
    return cache.view(-1, D).index_select(0, places.flatten()).view(*places.shape, D)


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D], the layout of the cache."""
    return x[0].transpose(0, 1)


def _one_behind_the_other(x: Tensor) -> Tensor:
    """[R, H, 1, D] -> [1, H, R, D]."""
    return x.transpose(0, 2)
