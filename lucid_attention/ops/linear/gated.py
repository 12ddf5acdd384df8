"""Gated linear attention and gated slot attention: the operators and their chunk-wise forms.

Chunk by chunk: states only at the borders of chunks, decays within them by halving (`chunks.py`). Gated slot attention
is gated linear attention to the slots' keys, softmax, then gated linear attention to their values.

Shapes: B batch, H key/value heads, G query heads per key/value head, T positions, D key size, E value size, M slots.
"""

from functools import partial

import torch
from torch import Tensor

from .. import checks
from ..dispatch import RECURRENT, choose
from ..keys import resolved_scale
from . import fla, reference
from .chunks import attend_in_chunks, chunk_length, cut, halve, join, read_columns, read_rows
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

Memory = tuple[Tensor, Tensor]


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
        key_mask, cu_seqlens, scale, impl: as in `delta_attention`.

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
    attend = reference.gla if impl == "reference" else partial(attend_in_chunks, _gla_step, _gla_chunks)
    q, k, v, log_decay = mask_tokens(key_mask, q, k, v, log_decay)
    if impl == "fla":
        return fla.run("gla.chunk_gla", q, {"k": k, "v": v}, {"g": log_decay}, state, cu_seqlens, scale)
    log_decay = forget_at_borders(log_decay, cu_seqlens)
    state = empty_state(k, D, E) if state is None else state
    return run(attend, q, (k, v, log_decay), state, scale)


def _gla_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, G, E] and the new state.

    S: [B, H, D, E]; q: [B, H, G, D]; k, log_decay: [B, H, D]; v: [B, H, E].
    """
    S = torch.addcmul(log_decay.exp()[..., None] * S, k[..., None], v.unsqueeze(-2))
    return q @ S, S


def _gla_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T = k.shape[:3]
    C = chunk_length(T)
    q, k, v, log_decay = (cut(x, C).flatten(0, 1) for x in (q, k, v, log_decay))
    o, state = read_rows(q, k, v, halve(k, log_decay.exp()), state.flatten(0, 1))
    return join(o.unflatten(0, (B * H, -1)), B, T), state.unflatten(0, (B, H))


def gsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    log_decay: Tensor,
    *,
    state: Memory | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Recurrent[Memory]:
    """Gated slot attention: softmax attention to M slots, into which keys and values are written with decay.

        K̃_t = K̃_{t−1} diag(a_t) + k_t s_tᵀ,   Ṽ_t = diag(a_t) Ṽ_{t−1} + s_t v_tᵀ,   a_t = exp(log_decay_t)
        o_t = Ṽ_tᵀ softmax(scale · K̃_tᵀ q_t)

    Args:
        q: [B, H·G, T, D]. Query heads are a multiple of key/value heads; there is one memory per key/value head.
        k: [B, H, T, D].
        v: [B, H, T, E].
        s: [B, H, T, M], how much of a token is written to each slot; 1 − exp(log_decay) in the paper of the operator.
        log_decay: [B, H, T, M], at most 0; −∞ forgets a slot completely.
        state: (K̃ [B, H, D, M], Ṽ [B, H, M, E]), as an earlier call returned it; default zero.
        key_mask, cu_seqlens, impl: as in `delta_attention`.
        scale: of the scores of the slots, default 1/√D.

    Returns:
        o: [B, H·G, T, E], state: (K̃ [B, H, D, M], Ṽ [B, H, M, E]).
    """
    check_sequence(q, k, v, key_mask, cu_seqlens, state, scale)
    checks.check_heads_first("s", s, "[B, H, T, M]")
    D, E, M = k.shape[-1], v.shape[-1], s.shape[-1]
    check_per_token("s", s, k, M, "M")
    check_per_token("log_decay", log_decay, k, M, "M")
    state = _check_memory(state, k, E, M)
    impl = choose(impl, RECURRENT)
    scale = resolved_scale(scale, k)
    attend = reference.gsa if impl == "reference" else partial(attend_in_chunks, _gsa_step, _gsa_chunks)
    q, k, v, s, log_decay = mask_tokens(key_mask, q, k, v, s, log_decay)
    if impl == "fla":
        tensors = {"k": k, "v": v, "s": s}
        o, memory = fla.run("gsa.chunk_gsa", q, tensors, {"g": log_decay}, state, cu_seqlens, scale)
    else:
        log_decay = forget_at_borders(log_decay, cu_seqlens)
        memory = (empty_state(k, D, M), empty_state(k, M, E)) if state is None else state
        o, memory = run(attend, q, (k, v, s, log_decay), memory, scale)
    # A query of zeros reads the mean of the slots, so masked positions need a mask of their own here.
    return Recurrent(mask_tokens(key_mask, o)[0], memory)


def _check_memory(state: Memory | None, k: Tensor, E: int, M: int) -> Memory | None:
    if state is None:
        return None
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(f"state must be a pair (K̃ [B, H, D, M], Ṽ [B, H, M, E]), got {checks.described(state)}")
    check_state("state[0]", state[0], k, (k.shape[-1], M), "D, M")
    check_state("state[1]", state[1], k, (M, E), "M, E")
    return state[0], state[1]


def _gsa_step(memory: Memory, q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor) -> tuple[Tensor, Memory]:
    """Return o: [B, H, G, E] and the new memory.

    memory: [B, H, D, M] and [B, H, M, E]; q: [B, H, G, D]; k: [B, H, D]; v: [B, H, E]; s, log_decay: [B, H, M].
    """
    keys, values = memory
    decay = log_decay.exp()
    keys = torch.addcmul(keys * decay.unsqueeze(-2), k[..., None], s.unsqueeze(-2))
    values = torch.addcmul(values * decay[..., None], s[..., None], v.unsqueeze(-2))
    return (q @ keys).softmax(-1) @ values, (keys, values)


def _gsa_chunks(q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    B, H, T = k.shape[:3]
    C = chunk_length(T)
    q, k, v, s, log_decay = (cut(x, C).flatten(0, 1) for x in (q, k, v, s, log_decay))
    # A write decays equally in both memories, so a chunk is halved once.
    chunk = halve(s, log_decay.exp())
    scores, keys = read_columns(q, k, s, chunk, memory[0].flatten(0, 1))
    o, values = read_rows(scores.softmax(-1), s, v, chunk, memory[1].flatten(0, 1))
    return join(o.unflatten(0, (B * H, -1)), B, T), (keys.unflatten(0, (B, H)), values.unflatten(0, (B, H)))
