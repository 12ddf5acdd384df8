"""The drop-in's layers in continuous batching: LUCID in a paged cache, and sliding windows beside it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.lucid.api import precondition
from ...ops.lucid.decode import inverse_key_norms, lucid_decode
from ..dropin.masks import Visibility
from .engine import paged_layer, update_window
from .ragged import attend_ragged, new_tokens
from .requests import Request

# Queries of a window that are read together: their mask has this many rows, and never T.
ROWS = 512


class PagedLucid(NamedTuple):
    """A layer with full attention. readout: its softmax; options: strength and sharpness."""

    readout: Any
    options: dict[str, Any]

    def step(
        self, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As in `Attend`."""
        past = k[:, :, :-1], y[:, :, :-1]
        if self.readout.plain and self.options["strength"] > 0:
            norms = inverse_key_norms(k)
            return lucid_decode(q, k, v, past[1], norms, key_mask=mask, scale=self.readout.scale, **self.options)
        y_new = precondition(k[:, :, -1:], v, past=past, key_mask=mask, **self.options)
        y[:, :, -1:] = y_new
        return self.readout(q, k, y, Visibility(key_mask=mask)), y_new

    def extend(
        self, tokens: slice, q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """As in `Attend`."""
        y = precondition(k, v, past=past, **self.options)
        if past is None:
            return self.readout(q, k, y, Visibility()), y
        return self.readout(q, torch.cat([past[0], k], 2), torch.cat([past[1], y], 2), Visibility()), y


def paged_lucid(
    q: Tensor, k: Tensor, v: Tensor, index: int, arguments: dict[str, Any], readout: Any, options: dict[str, Any]
) -> Tensor:
    """LUCID attention of all requests. q: [1, H·G, T, D]; k, v: [1, H, T, *] -> [1, H·G, T, E]."""
    layer = paged_layer(arguments["cache"], index, arguments, options)
    return attend_ragged(layer, q, k, v, PagedLucid(readout, options))


@torch.compiler.disable
def paged_window(
    q: Tensor, k: Tensor, v: Tensor, index: int, arguments: dict[str, Any], readout: Any, window: int
) -> Tensor:
    """Softmax attention in a sliding window, of all requests, in the same shapes."""
    k, v, plan = update_window(arguments["cache"], index, k, v, arguments)
    o = q.new_empty(1, q.shape[1], q.shape[2], v.shape[3])
    for request, _ in plan.alone:
        for start in range(0, request.new, ROWS):
            tokens, keys, mask = _window(request, start, window, q.device)
            o[:, :, tokens] = readout.stock(q[:, :, tokens], k[:, :, keys], v[:, :, keys], mask)
    for places, rows, known in plan.groups:
        key, value = (rows.gather(x[0].transpose(0, 1)) for x in (k, v))
        # One token sees all that the cache has of its window.
        shown = None if known is None else known[:, None, None]
        o[:, :, places] = readout.stock(new_tokens(q, places), key, value, shown).transpose(0, 2)
    return o


def _window(request: Request, start: int, window: int, device: torch.device) -> tuple[slice, slice, Tensor]:
    """The places of a few queries, from the start-th of a request, of the keys that they see, and the mask of both."""
    stop = min(start + ROWS, request.new)
    first = max(0, request.past + start - window + 1)
    key = torch.arange(first, request.past + stop, device=device)
    query = torch.arange(request.past + start, request.past + stop, device=device)[:, None]
    mask = (key <= query) & (key > query - window)
    tokens = slice(request.start + start, request.start + stop)
    return tokens, slice(request.first + first, request.first + request.past + stop), mask[None, None]
