"""Gated slot attention chunk by chunk: gated linear attention to the slots' keys, softmax, then to their values."""

from torch import Tensor

from ..linear.chunks import along, chunk_length, cut, in_segments, join
from ..linear.decays import halve, read_columns, read_rows
from .step import Memory, step


def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """Return o: [B, H, T, G, E] and the last memory.

    q: [B, H, T, G, D]; k: [B, H, T, D]; v: [B, H, T, E]; s, log_decay: [B, H, T, M]; memory: [B, H, D, M] and
    [B, H, M, E].
    """
    tensors = q, k, v, s, log_decay
    if k.shape[2] > 1:
        return in_segments(_attend, tensors, memory)
    (token,) = along(tensors, lambda x: x.unbind(2))
    o, memory = step(memory, *token)
    return o.unsqueeze(2), memory


def _attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    B, H, T = k.shape[:3]
    C = chunk_length(T)
    q, k, v, s, log_decay = (cut(x, C).flatten(0, 1) for x in (q, k, v, s, log_decay))
    # What a token writes decays alike in both memories: a chunk is taken apart once.
    chunk = halve(s, log_decay.exp())
    scores, keys = read_columns(q, k, s, chunk, memory[0].flatten(0, 1))
    o, values = read_rows(scores.softmax(-1), s, v, chunk, memory[1].flatten(0, 1))
    return join(o.unflatten(0, (B * H, -1)), B, T), (keys.unflatten(0, (B, H)), values.unflatten(0, (B, H)))
