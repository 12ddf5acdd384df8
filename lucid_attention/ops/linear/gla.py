"""Gated linear attention: the operator and its chunk-wise form.

Chunk by chunk: states only at the borders of chunks, decays within them by halving (`chunks.py`).

Shapes: B batch, H key/value heads, G query heads per key/value head, T positions, D key size, E value size.
"""

from functools import partial

import torch
from torch import Tensor

from ..dispatch import RECURRENT, choose
from ..keys import resolved_scale
from . import fla, reference
from .chunks import attend_in_chunks, chunk_length, cut, halve, join, read_rows
from .recurrent import (
    Recurrent,
    check_per_token,
    check_sequence,
    check_state,
    empty_state,
    forget_at_borders,
    mask_tokens,
    run,
)


def gla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Recurrent[Tensor]:
    """Gated linear attention: S_t = diag(exp(log_decay_t)) S_{t−1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

    Args:
        q: [B, H·G, T, D]. Query heads are a multiple of key/value heads; there is one state per key/value head.
        k: [B, H, T, D].
        v: [B, H, T, E].
        log_decay: [B, H, T, D], at most 0; −∞ forgets a row of the state completely.
        state: [B, H, D, E], as an earlier call returned it; default zero.
        key_mask: [B, T] bool, True where a token takes part. A masked token leaves the state as it is, whatever it
            holds, and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); no document sees another. The
            returned state is that of the last document with a token. Excludes `state`.
        scale: of what is read, default 1/√D.
        impl: "auto", "chunkwise" (linear time), "reference" (token by token) or "fla" (flash-linear-attention's
            kernels, on CUDA only).

    Returns:
        o: [B, H·G, T, E], state: [B, H, D, E].
    """
    check_sequence(q, k, v, key_mask, cu_seqlens, state, scale)
    D, E = k.shape[-1], v.shape[-1]
    check_per_token("log_decay", log_decay, k, D, "D")
    if state is not None:
        check_state("state", state, k, (D, E), "D, E")
    impl = choose(impl, RECURRENT)
    scale = resolved_scale(scale, k)
    attend = reference.gla if impl == "reference" else partial(attend_in_chunks, _step, _attend_chunks)
    q, k, v, log_decay = mask_tokens(key_mask, q, k, v, log_decay)
    if impl == "fla":
        return fla.run("gla.chunk_gla", q, {"k": k, "v": v}, {"g": log_decay}, state, cu_seqlens, scale)
    log_decay = forget_at_borders(log_decay, cu_seqlens)
    state = empty_state(k, D, E) if state is None else state
    return run(attend, q, (k, v, log_decay), state, scale)


def _step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, G, E] and the new state.

    S: [B, H, D, E]; q: [B, H, G, D]; k, log_decay: [B, H, D]; v: [B, H, E].
    """
    S = torch.addcmul(log_decay.exp()[..., None] * S, k[..., None], v.unsqueeze(-2))
    return q @ S, S


def _attend_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T = k.shape[:3]
    C = chunk_length(T)
    q, k, v, log_decay = (cut(x, C).flatten(0, 1) for x in (q, k, v, log_decay))
    o, state = read_rows(q, k, v, halve(k, log_decay.exp()), state.flatten(0, 1))
    return join(o.unflatten(0, (B * H, -1)), B, T), state.unflatten(0, (B, H))
