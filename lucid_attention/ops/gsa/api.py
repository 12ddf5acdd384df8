"""The public operator.

Shapes: B batch, H key/value heads, G query heads per key/value head, T positions, D key size, E value size, M slots.
"""

from torch import Tensor

from .. import checks
from ..dispatch import RECURRENT, choose
from ..linear import fla
from ..linear.recurrent import (
    Recurrent,
    check_per_token,
    check_sequence,
    check_state,
    empty_state,
    forget_at_borders,
    mask_tokens,
    run,
)
from . import chunkwise, reference

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
        key_mask: [B, T] bool, True where a token takes part. A masked token leaves the state as it is, whatever stands
            there, and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1): none sees another. The state
            returned is that of the last document with a token. Excludes `state`.
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
    scale = D**-0.5 if scale is None else scale
    attend = reference.attend if impl == "reference" else chunkwise.attend
    q, k, v, s, log_decay = mask_tokens(key_mask, q, k, v, s, log_decay)
    if impl == "fla":
        o, memory = fla.gsa(q, k, v, s, log_decay, state, cu_seqlens, scale)
    else:
        log_decay = forget_at_borders(log_decay, cu_seqlens)
        memory = (empty_state(k, D, M), empty_state(k, M, E)) if state is None else state
        o, memory = run(attend, q, (k, v, s, log_decay), memory, scale)
    # A query of zeros reads the mean of the slots: unlike its siblings, this operator has to be told.
    return Recurrent(mask_tokens(key_mask, o)[0], memory)


def _check_memory(state: Memory | None, k: Tensor, E: int, M: int) -> Memory | None:
    if state is None:
        return None
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        came = f"{type(state).__name__} of length {len(state)}" if hasattr(state, "__len__") else type(state).__name__
        raise TypeError(f"state must be a pair (K̃ [B, H, D, M], Ṽ [B, H, M, E]), got {came}")
    check_state("state[0]", state[0], k, (k.shape[-1], M), "D, M")
    check_state("state[1]", state[1], k, (M, E), "M, E")
    return state[0], state[1]
