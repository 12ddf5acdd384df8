"""The Forgetting Transformer (FoX) as a module."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.checks import check_shape
from ...ops.precision import no_autocast, readout_dtype
from ...ops.softmax.attention import softmax_attention
from ..causal import CausalAttention


class ForgettingPast(NamedTuple):
    """The S positions so far. k: [B, H, S, D]; y: [B, H, S, E]; log_decay: [B, H·G, S], Σ log f after each position."""

    k: Tensor
    y: Tensor
    log_decay: Tensor

    @property
    def length(self) -> int:
        """S, padding included."""
        return self.k.shape[2]


class ForgettingAttention(CausalAttention):
    """Softmax attention that forgets (FoX, Lin et al. 2025): every later token t adds log f_t to a key's score.

    f = σ(W x + b), one per query head. The softmax of a row does not see log f after its query, which is the same for
    all keys. So a key's sum may run to the last token: one more feature of the keys for every query head of a group.
    As published, FoX has no rotary embedding: the decay encodes positions.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, qk_norm, bias: as in `CausalAttention`.
        rope_base: None, as published; a number adds a rotary embedding.
    """

    title = "FoX"
    takes_rotary = False
    past_type = ForgettingPast

    def __init__(self, hidden_size: int, num_heads: int, *, rope_base: float | None = None, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, rope_base=rope_base, **options)
        self.f_proj = nn.Linear(hidden_size, num_heads)

    def check_past(self, past: ForgettingPast, k: Tensor, v: Tensor) -> None:
        super().check_past(past, k, v)
        B, _, S, _ = past.k.shape
        check_shape("past.log_decay", past.log_decay, (B, self.num_heads, S), "[B, H·G, S]")

    def log_decay(self, x: Tensor, past: ForgettingPast | None, key_mask: Tensor | None) -> Tensor:
        """Σ log f over the tokens after each of the S + T, in at least float32: [B, H·G, S + T]."""
        gate = self.f_proj(x).transpose(1, 2)
        log_f = F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        S = 0 if past is None else past.length
        if key_mask is not None:
            log_f = log_f.masked_fill(~key_mask[:, None, S:], 0)
        # Summed from the end, so that the sums of near tokens stay small and precise.
        after = log_f.flip(2).cumsum(2).flip(2)
        new = F.pad(after[:, :, 1:], (0, 1))
        return new if past is None else torch.cat([past.log_decay + after[:, :, :1], new], 2)

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: ForgettingPast | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, ForgettingPast]:
        log_decay = self.log_decay(x, past, key_mask)
        if past is not None:
            k, v = torch.cat([past.k, k], 2), torch.cat([past.y, v], 2)
        return self._read(q, k, v, log_decay, key_mask, cu_seqlens), ForgettingPast(k, v, log_decay)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        B, _, T, D = q.shape
        H, G = self.num_kv_heads, self.num_heads // self.num_kv_heads
        wide, dtype = log_decay.dtype, readout_dtype(q)
        bias = log_decay.unflatten(1, (H, G)).transpose(2, 3)
        # Feature g of the keys is the sum of query head g of the group; √D undoes the scale of the scores.
        chosen = torch.eye(G, dtype=wide, device=q.device).mul(D**0.5).repeat(H, 1)[None, :, None].expand(B, -1, T, -1)
        with no_autocast(q):
            wide_q, wide_k = torch.cat([q.to(wide), chosen], -1), torch.cat([k.to(wide), bias], -1)
            o = softmax_attention(wide_q, wide_k, v.to(wide), key_mask=key_mask, cu_seqlens=cu_seqlens, scale=D**-0.5)
        return o.to(dtype)
