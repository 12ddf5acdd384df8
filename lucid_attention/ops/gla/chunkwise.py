"""Gated linear attention chunk by chunk: states only at the borders of chunks, decays within them by halving."""

from torch import Tensor

from ..linear.chunks import along, chunk_length, cut, in_segments, join
from ..linear.decays import halve, read_rows
from .step import step


def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, T, G, E] and the last state.

    q: [B, H, T, G, D]; k, log_decay: [B, H, T, D]; v: [B, H, T, E]; state: [B, H, D, E].
    """
    tensors = q, k, v, log_decay
    if k.shape[2] > 1:
        return in_segments(_attend, tensors, state)
    (token,) = along(tensors, lambda x: x.unbind(2))
    o, state = step(state, *token)
    return o.unsqueeze(2), state


def _attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T = k.shape[:3]
    C = chunk_length(T)
    q, k, v, log_decay = (cut(x, C).flatten(0, 1) for x in (q, k, v, log_decay))
    o, state = read_rows(q, k, v, halve(k, log_decay.exp()), state.flatten(0, 1))
    return join(o.unflatten(0, (B * H, -1)), B, T), state.unflatten(0, (B, H))
