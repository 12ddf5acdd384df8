"""Chunk-wise computing for states of fixed size: chunks as batches, states from chunk to chunk, decays within a chunk.

Letters beyond the usual: n = B · H heads, N chunks of C tokens each.

Decays of single features within a chunk are computed by halving it: no quotient of decays, so nothing over- or
underflows early. Between a token j of the left half of a block and a token i of the right half, the decay is the
product of the decays from j to the border and from the border to i. Both are at most 1, and exactly 0 after a complete
forgetting; a pair of tokens meets at exactly one border. One matrix product over the whole chunk would need
exp(−Σ log decay) instead, which is soon infinite.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Measured on a CPU for D = 64: loops over smaller chunks cost more, and so do products within larger ones.
CHUNK = 64
# Tokens of all heads that are computed at once: on a CPU, as many as its cache holds.
CPU_SEGMENT = 4 * 1024
ACCELERATOR_SEGMENT = 1024 * 1024


def attend_in_chunks(
    step: Callable[..., tuple[Tensor, Any]], chunks: Callable[..., tuple[Tensor, Any]], *inputs: Any
) -> tuple[Tensor, Any]:
    """o: [B, H, T, G, E] and the last state. inputs: tensors [B, H, T, ...] or None, then the state before them.

    One token is `step(state, *tensors)` without T; more are `chunks(*tensors, state)`, one segment of the sequence
    after another. The tensors between chunks then do not grow with the sequence, and the time per token is constant.
    """
    *tensors, state = inputs
    B, H, T = tensors[0].shape[:3]
    if T == 1:
        (token,) = along(tensors, lambda x: x.unbind(2))
        o, state = step(state, *token)
        return o.unsqueeze(2), state
    budget = CPU_SEGMENT if tensors[0].device.type == "cpu" else ACCELERATOR_SEGMENT
    length = max(1, budget // (B * H * CHUNK)) * CHUNK
    if length >= T:
        return chunks(*tensors, state)
    outputs = []
    for segment in along(tensors, lambda x: x.split(length, 2)):
        o, state = chunks(*segment, state)
        outputs.append(o)
    return torch.cat(outputs, 2), state


def along(tensors: Sequence[Tensor | None], split: Callable[[Tensor], Sequence[Tensor]]) -> list[tuple[Any, ...]]:
    """Tensors split in the same way, piece by piece; None stays None.

    Each tensor is split in one call: the gradient of a slice is as large as its tensor, so a loop of slices would
    take quadratic time.
    """
    columns = [None if x is None else split(x) for x in tensors]
    pieces = next(len(column) for column in columns if column is not None)
    return list(zip(*([None] * pieces if column is None else column for column in columns), strict=True))


def chunk_length(T: int) -> int:
    """A power of two, so that a chunk can be halved down to single tokens."""
    return min(CHUNK, 1 << (T - 1).bit_length())


def cut(x: Tensor, C: int) -> Tensor:
    """[B, H, T, ...] -> [n, N, C, ...], padded with zeros: a token of zeros does not change a state."""
    x = x.flatten(0, 1)
    missing = -x.shape[1] % C
    if missing:
        x = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, missing))
    return x.unflatten(1, (-1, C)).contiguous()


def join(x: Tensor, B: int, T: int) -> Tensor:
    """[n, N, C, ...] -> [B, H, T, ...]: undo `cut`."""
    return x.flatten(1, 2)[:, :T].unflatten(0, (B, -1))


def carry(state: Tensor, decay: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """state ← decay · state + write along the chunks: the states before each chunk [n, N, D, E], and the last one.

    state: [n, D, E]; decay: [n, N, D, 1] or [n, N, 1, E]; write: [n, N, D, E].
    """
    before = []
    for a, w in zip(decay.unbind(1), write.unbind(1), strict=True):
        before.append(state)
        state = torch.addcmul(w, a, state)
    return torch.stack(before, 1), state


class Border(NamedTuple):
    """Both sides of the borders of one size of block, [m, blocks, h, D] each, for halves of h tokens.

    arriving: decay from the border up to and with each token of the right half. left: what the tokens of the left half
    wrote, decayed to the border.
    """

    arriving: Tensor
    left: Tensor


class Halves(NamedTuple):
    """A chunk in halves. borders: from pairs of tokens up to the two halves of the chunk.

    arriving: decay from the start of the chunk up to and with each token; left: what each token wrote, decayed to the
    end of the chunk: [m, C, D]. total: decay over the whole chunk, [m, 1, D].
    """

    borders: list[Border]
    arriving: Tensor
    left: Tensor
    total: Tensor


def halve(written: Tensor, decay: Tensor) -> Halves:
    """Halve m chunks of C tokens, a power of two, down to single tokens. written, decay: [m, C, D]."""
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
