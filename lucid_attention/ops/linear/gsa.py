"""Gated slot attention: the operator and its chunk-wise form.

Chunk by chunk: gated linear attention to the slots' keys, softmax, then gated linear attention to their values.

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
        key_mask: [B, T] bool, True where a token takes part. A masked token leaves the state as it is, whatever it
            holds, and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); no document sees another. The
            returned state is that of the last document with a token. Excludes `state`.
        scale: of the scores of the slots, default 1/√D.
        impl: "auto", "chunkwise" (linear time), "reference" (token by token) or "fla" (flash-linear-attention's
            kernels, on CUDA only).

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
    attend = reference.gsa if impl == "reference" else partial(attend_in_chunks, _step, _attend_chunks)
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


def _step(memory: Memory, q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor) -> tuple[Tensor, Memory]:
    """Return o: [B, H, G, E] and the new memory.

    memory: [B, H, D, M] and [B, H, M, E]; q: [B, H, G, D]; k: [B, H, D]; v: [B, H, E]; s, log_decay: [B, H, M].
    """
    keys, values = memory
    decay = log_decay.exp()
    keys = torch.addcmul(keys * decay.unsqueeze(-2), k[..., None], s.unsqueeze(-2))
    values = torch.addcmul(values * decay[..., None], s[..., None], v.unsqueeze(-2))
    return (q @ keys).softmax(-1) @ values, (keys, values)


def _attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: Memory
) -> tuple[Tensor, Memory]:
    B, H, T = k.shape[:3]
    C = chunk_length(T)
    q, k, v, s, log_decay = (cut(x, C).flatten(0, 1) for x in (q, k, v, s, log_decay))
    # A write decays equally in both memories, so a chunk is halved once.
    chunk = halve(s, log_decay.exp())
    scores, keys = read_columns(q, k, s, chunk, memory[0].flatten(0, 1))
    o, values = read_rows(scores.softmax(-1), s, v, chunk, memory[1].flatten(0, 1))
    return join(o.unflatten(0, (B * H, -1)), B, T), (keys.unflatten(0, (B, H)), values.unflatten(0, (B, H)))
