"""Attention of many requests in one pass: every new token against the past of its own request, and nothing else."""

from typing import Any, Protocol

import torch
from torch import Tensor

from .engine import PagedLayer


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
    T, known = q.shape[2], layer.plan.tokens
    if known != T or layer.write.shape[0] != T:
        raise ValueError(f"the new tokens of all requests must be the {T} of the pass, without padding, got {known}")
    keys, values = layer.keys, layer.values.view(-1, v.shape[1], v.shape[3])
    keys.index_copy_(0, layer.write, _rows(k))
    parts: list[tuple[Any, Tensor, Tensor]] = []
    for request, past in layer.plan.alone:
        tokens = slice(request.start, request.stop)
        before = None if past is None else (past.gather(keys), past.gather(values))
        parts.append((tokens, *attend.extend(tokens, q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], before)))
    for places, rows, mask in layer.plan.groups:
        query, value = (new_tokens(x, places) for x in (q, v))
        o, y = attend.step(places, query, rows.gather(keys), value, rows.gather(values), mask)
        parts.append((places, o.transpose(0, 2), y.transpose(0, 2)))
    _, heads, _, width = parts[0][1].shape
    # Every token belongs to one request, so that every place is written.
    output, stored = q.new_empty(1, heads, T, width), torch.empty_like(v)
    for tokens, o, y in parts:
        output[:, :, tokens], stored[:, :, tokens] = o, y
    values.index_copy_(0, layer.write, _rows(stored))
    return output


def new_tokens(x: Tensor, places: Tensor) -> Tensor:
    """One token each of R requests. x: [1, H, T, D]; places: [R] -> [R, H, 1, D]."""
    return x[0].index_select(1, places).transpose(0, 1)[:, :, None]


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D], the layout of the cache."""
    return x[0].transpose(0, 1)
