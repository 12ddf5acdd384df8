"""The requests of one step of continuous batching: new tokens of different numbers after pasts of different lengths."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Pasts are read together up to this ratio of their lengths, and up to this difference: the rest of a row is padding.
RATIO, DIFFERENCE = 1.25, 32


class Request(NamedTuple):
    """Places among the new tokens of all requests, and among these tokens with their pasts."""

    start: int
    stop: int
    first: int
    end: int

    @property
    def new(self) -> int:
        """T, the number of new tokens."""
        return self.stop - self.start

    @property
    def past(self) -> int:
        """S, the number of tokens before them."""
        return self.end - self.first - self.new


class Rows:
    """Rows of a cache [n, H, D], for R requests: [R, M]."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._places: dict[int, Tensor] = {}

    def gather(self, cache: Tensor) -> Tensor:
        """cache: [n, H, D] -> [R, H, M, D], the layout of the operators."""
        H, D = cache.shape[1:]
        if H not in self._places:
            head = torch.arange(H, device=self.rows.device)[:, None]
            # The layers of a pass read the same places.
            self._places[H] = (self.rows[:, None] * H + head).flatten()
        R, M = self.rows.shape
        return cache.reshape(-1, D).index_select(0, self._places[H]).view(R, H, M, D)


class Alone(NamedTuple):
    """A request that is computed alone. past: the rows of its past, [1, S]; None without one."""

    request: Request
    past: Rows | None


class Together(NamedTuple):
    """One new token each of R requests.

    tokens: [R], places of the new tokens; rows: [R, M], of all tokens that each sees, the new one last; mask: [R, M]
    bool, False where `rows` repeats a row because the request has fewer tokens; None if all have M.
    """

    tokens: Tensor
    rows: Rows
    mask: Tensor | None


class Plan:
    """What is computed alone and what together in a pass; the same for all its layers.

    read: [N], rows in the cache of the tokens of all requests, one behind the other; None if these are the rows. Empty
    if no request has a past.
    """

    def __init__(self, requests: list[Request], device: torch.device, read: Tensor | None = None) -> None:
        self.tokens = requests[-1].stop
        alone, groups = split(requests)
        self.alone = [Alone(one, _past(one, read)) for one in alone]
        self.groups = [_together(group, device, read) for group in groups]


def split(requests: list[Request]) -> tuple[list[Request], list[list[Request]]]:
    """Requests that are computed alone, and groups of those with one new token and pasts of similar lengths."""
    alone = [request for request in requests if request.new > 1 or (request.new == 1 and request.past == 0)]
    steps = sorted((request for request in requests if request.new == 1 and request.past > 0), key=lambda one: one.past)
    return alone, list(_similar(steps))


def _similar(steps: list[Request]) -> Iterator[list[Request]]:
    group: list[Request] = []
    for request in steps:
        if group and request.past > max(RATIO * group[0].past, group[0].past + DIFFERENCE):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _past(request: Request, read: Tensor | None) -> Rows | None:
    if request.past == 0 or read is None:
        return None
    return Rows(read[None, request.first : request.first + request.past])


def _together(group: list[Request], device: torch.device, read: Tensor | None) -> Together:
    first = torch.tensor([one.first for one in group], device=device)[:, None]
    end = torch.tensor([one.end for one in group], device=device)[:, None]
    longest = max(one.end - one.first for one in group)
    rows = end + torch.arange(-longest, 0, device=device)
    mask = None if all(one.end - one.first == longest for one in group) else rows >= first
    rows = rows.maximum(first)
    tokens = torch.tensor([one.start for one in group], device=device)
    return Together(tokens, Rows(rows if read is None else read[rows]), mask)
