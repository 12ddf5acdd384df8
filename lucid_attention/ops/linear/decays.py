"""Decays of single features within a chunk, by halving it: no quotient of decays, so nothing over- or underflows early.

Between a token j of the left half of a block and a token i of the right half, the decay is the product of what happens
from j to the border and from the border to i. Both are products of decays, at most 1 where those are, and exactly 0
after a complete forgetting; a pair of tokens meets at exactly one border. Writing one matrix product over the whole
chunk would need exp(−Σ log decay) instead, which is infinite soon.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import carry


class Border(NamedTuple):
    """What meets at the borders of one size of block, [m, blocks, h, D] each, for halves of h tokens.

    arriving: decay from the border up to and with each token of the right half. left: what the tokens of the left half
    wrote, decayed to the border.
    """

    arriving: Tensor
    left: Tensor


class Halves(NamedTuple):
    """A chunk taken apart. borders: from pairs of tokens up to the two halves of the chunk.

    arriving: decay from the start of the chunk up to and with each token; left: what each token wrote, decayed to the
    end of the chunk: [m, C, D]. total: decay over the whole chunk, [m, 1, D].
    """

    borders: list[Border]
    arriving: Tensor
    left: Tensor
    total: Tensor


def halve(written: Tensor, decay: Tensor) -> Halves:
    """Take apart m chunks of C tokens, a power of two. written, decay: [m, C, D]."""
    borders = []
    arriving, left, total = (x.unsqueeze(2) for x in (decay, written, decay))
    while arriving.shape[1] > 1:
        (a0, a1), (l0, l1), (t0, t1) = (x.unflatten(1, (-1, 2)).unbind(2) for x in (arriving, left, total))
        borders.append(Border(a1, l0))
        arriving, left, total = torch.cat([a0, a1 * t0], 2), torch.cat([l0 * t1, l1], 2), t0 * t1
    return Halves(borders, arriving.squeeze(1), left.squeeze(1), total.squeeze(1))


def read_rows(q: Tensor, k: Tensor, v: Tensor, chunk: Halves, state: Tensor) -> tuple[Tensor, Tensor]:
    """o: [m, C, G, E] and the last state, where the decays belong to the rows of S: `chunk` is of k.

    q: [m, C, G, D]; k: [m, C, D]; v: [m, C, E]; state: [n, D, E]; the chunks of a head follow each other.
    """
    o = (q * k.unsqueeze(2)).sum(-1, keepdim=True) * v.unsqueeze(2)
    for arriving, left in chunk.borders:
        h = arriving.shape[2]
        asking, values = _halves(q, h)[1] * arriving.unsqueeze(3), _halves(v, h)[0]
        o = _add_right(o, asking.flatten(2, 3) @ left.mT @ values)
    n, D, E = state.shape
    decay, write = chunk.total.mT, chunk.left.mT @ v
    before, state = carry(state, decay.view(n, -1, D, 1), write.view(n, -1, D, E))
    return o + _read(q * chunk.arriving.unsqueeze(2), before), state


def read_columns(q: Tensor, k: Tensor, v: Tensor, chunk: Halves, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same where the decays belong to the columns of S: `chunk` is of v."""
    o = (q * k.unsqueeze(2)).sum(-1, keepdim=True) * v.unsqueeze(2)
    for arriving, left in chunk.borders:
        h = arriving.shape[2]
        read = _halves(q, h)[1].flatten(2, 3) @ _halves(k, h)[0].mT @ left
        o = _add_right(o, (read.unflatten(2, (h, -1)) * arriving.unsqueeze(3)).flatten(2, 3))
    n, D, E = state.shape
    decay, write = chunk.total, k.mT @ chunk.left
    before, state = carry(state, decay.view(n, -1, 1, E), write.view(n, -1, D, E))
    return o + _read(q, before) * chunk.arriving.unsqueeze(2), state


def _read(q: Tensor, before: Tensor) -> Tensor:
    """Sᵀ q of the states before each chunk. q: [m, C, G, D]; before: [n, N, D, E]."""
    return (q.flatten(1, 2) @ before.flatten(0, 1)).unflatten(1, q.shape[1:3])


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """[m, C, ...] -> left and right halves of the blocks of 2 h tokens, [m, blocks, h, ...] each."""
    left, right = x.unflatten(1, (-1, 2, h)).unbind(2)
    return left, right


def _add_right(o: Tensor, right: Tensor) -> Tensor:
    """Add [m, blocks, h·G, E] to the right halves of the blocks of 2 h tokens of o: [m, C, G, E]."""
    m, blocks, rows, E = right.shape
    left, old = o.view(m, blocks, 2, rows, E).unbind(2)
    return torch.stack([left, old + right], 2).view(o.shape)
