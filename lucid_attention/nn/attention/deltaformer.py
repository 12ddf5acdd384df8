"""DeltaFormer as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.precision import no_autocast
from ...ops.softmax.attention import visible_keys
from ...ops.triangular import solve_unit_lower
from ..causal import CausalAttention, Past


class DeltaFormerAttention(CausalAttention):
    """Softmax attention over values from which earlier ones were taken (DeltaFormer, arXiv 2505.19488).

    u_t = v_t − β_t Σ_{s<t} a_ts u_s, where a_t is a softmax over the earlier keys: the rows of LUCID's L on raw keys,
    normalised, and β only before the sum. As in flash-linear-attention keys are compared with keys; β = σ(W x + b),
    which flash-linear-attention leaves unbounded. The solve is dense: memory grows with T², unlike LUCID's.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, rope_base, qk_norm, bias: as in `CausalAttention`.
        double_beta: β = 2σ(W x + b), so that a write can reverse a stored value.
    """

    title = "DeltaFormer"

    def __init__(self, hidden_size: int, num_heads: int, *, double_beta: bool = False, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        self.double_beta = double_beta
        self.b_proj = nn.Linear(hidden_size, self.num_kv_heads)

    def beta(self, x: Tensor) -> Tensor:
        """β of every token: [B, H, T] in (0, 1), or in (0, 2) with `double_beta`."""
        beta = self.b_proj(x).sigmoid().transpose(1, 2)
        return 2 * beta if self.double_beta else beta

    def values(
        self, x: Tensor, k: Tensor, v: Tensor, past: Past | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        B, _, T, D = k.shape
        keys = k if past is None else torch.cat([past.k, k], 2)
        total, wide = keys.shape[2], torch.promote_types(k.dtype, torch.float32)
        earlier = visible_keys(B, T, total, key_mask, cu_seqlens, k.device).tril(total - T - 1)
        if key_mask is not None:
            # A masked token is ignored: it takes nothing from others, and its own key may hold anything.
            keys = keys.masked_fill(~key_mask[:, None, :, None], 0)
        with no_autocast(k):
            scores = keys[:, :, total - T :].to(wide) @ keys.to(wide).mT * D**-0.5
            weights = scores.masked_fill(~earlier, torch.finfo(wide).min).softmax(-1).masked_fill(~earlier, 0)
            weights = weights * self.beta(x).to(wide)[..., None]
            y = v.to(wide)
            if past is not None:
                y = y - weights[..., : total - T] @ past.y.to(wide)
            return solve_unit_lower(weights[..., total - T :], y).to(v.dtype)
