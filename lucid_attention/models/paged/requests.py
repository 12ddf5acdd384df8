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


class Together(NamedTuple):
    """One new token each of R requests.

    tokens: [R], places of the new tokens; rows: [R, M], places of all tokens that each sees, the new one last; mask:
    [R, M] bool, False where `rows` repeats a place because the request has fewer tokens; None if all have M.
    """

    tokens: Tensor
    rows: Tensor
    mask: Tensor | None


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


def together(group: list[Request], device: torch.device) -> Together:
    """The places of a group's tokens."""
    first, end = (
        torch.tensor([getattr(one, name) for one in group], device=device)[:, None] for name in ("first", "end")
    )
    longest = max(one.end - one.first for one in group)
    rows = end + torch.arange(-longest, 0, device=device)
    mask = None if all(one.end - one.first == longest for one in group) else rows >= first
    return Together(torch.tensor([one.start for one in group], device=device), rows.maximum(first), mask)
