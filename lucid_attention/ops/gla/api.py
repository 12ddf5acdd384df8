"""The public operator.

Shapes: B batch, H key/value heads, G query heads per key/value head, T positions, D key size, E value size.
"""

from torch import Tensor

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
        key_mask: [B, T] bool, True where a token takes part. A masked token leaves the state as it is, whatever stands
            there, and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1): none sees another. The state
            returned is that of the last document with a token. Excludes `state`.
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
    scale = D**-0.5 if scale is None else scale
    attend = reference.attend if impl == "reference" else chunkwise.attend
    q, k, v, log_decay = mask_tokens(key_mask, q, k, v, log_decay)
    if impl == "fla":
        return Recurrent(*fla.gla(q, k, v, log_decay, state, cu_seqlens, scale))
    log_decay = forget_at_borders(log_decay, cu_seqlens)
    state = empty_state(k, D, E) if state is None else state
    return run(attend, q, (k, v, log_decay), state, scale)
