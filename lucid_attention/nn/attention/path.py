"""PaTH attention as a module."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.dispatch import choose
from ...ops.path.api import path_attention
from ...ops.path.decode import APPLY_EVERY, PathDecoded, apply_factors, identity_factors, keys_at_end, path_decode
from ..causal import CausalAttention, check_size, split_heads
from ..short_convolution import ShortConvolution


class PathPast(NamedTuple):
    """The S positions so far.

    k: [B, H, S, D]; y: [B, H, S, E], stored values; inverse_norms: [B, H, S], 1/‖k‖ before keys were moved, for
    LUCID-PaTH; tail: of the convolution of w.

    Each position moves the keys before it. The moves are applied late, when keys are read:
    w, beta: [B, H, T, D] and [B, H, T] of the last T positions, if their moves are not yet in k;
    product: [B, H, D, D], moves that single-token steps have not yet applied to the first `pending` keys;
    live: [B, H, S − pending, D] in at least float32, the keys after those, which replace the same rows of k.
    """

    k: Tensor
    y: Tensor
    inverse_norms: Tensor | None = None
    tail: Tensor | None = None
    w: Tensor | None = None
    beta: Tensor | None = None
    product: Tensor | None = None
    live: Tensor | None = None
    pending: int = 0

    @property
    def length(self) -> int:
        """S, padding included."""
        return self.k.shape[2]

    def keys_at_end(self) -> Tensor:
        """Keys with all moves of the past applied: [B, H, S, D]."""
        if self.w is not None and self.beta is not None:
            S, T = self.k.shape[2], self.w.shape[2]
            return keys_at_end(self.k[:, :, S - T :], self.w, self.beta, past=self.k[:, :, : S - T])
        if self.product is not None and self.live is not None:
            pending_keys = apply_factors(self.k[:, :, : self.pending], self.product)
            return torch.cat([pending_keys, self.live.to(self.k.dtype)], 2)
        return self.k


class PathAttention(CausalAttention):
    """PaTH: softmax attention whose positions are data-dependent Householder factors I − β w wᵀ, instead of rotations.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, qk_norm, bias: as in `CausalAttention`.
        w_rank: rank of the projection of w, None for a full one.
        conv_size: tokens that the short convolution of w sees; None for none.
        rope_base: must be None. w and β encode positions.
        impl: "auto", "blockwise" or "reference".
    """

    title = "PaTH"
    takes_rotary = False
    past_type = PathPast

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        w_rank: int | None = 32,
        conv_size: int | None = 3,
        rope_base: None = None,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        if rope_base is not None:
            raise ValueError(
                f"rope_base must be None: {type(self).__name__} has no rotary embedding, got {rope_base!r}"
            )
        super().__init__(hidden_size, num_heads, rope_base=None, **options)
        choose(impl)
        self.impl = impl
        size = self.num_kv_heads * self.head_dim
        if w_rank is None:
            self.w_proj: nn.Module = nn.Linear(hidden_size, size, bias=False)
        else:
            check_size("w_rank", w_rank)
            self.w_proj = nn.Sequential(nn.Linear(hidden_size, w_rank, bias=False), nn.Linear(w_rank, size, bias=False))
        self.w_conv = None
        if conv_size is not None:
            check_size("conv_size", conv_size)
            self.w_conv = ShortConvolution(size, conv_size)
        self.b_proj = nn.Linear(hidden_size, self.num_kv_heads)

    def factors(
        self, x: Tensor, tail: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """w: [B, H, T, D] of length 1, β: [B, H, T] in (0, 2), in at least float32, and the tail of the convolution."""
        w = self.w_proj(x)
        if self.w_conv is not None:
            w, tail = self.w_conv(w, tail, key_mask, cu_seqlens)
        wide = torch.promote_types(w.dtype, torch.float32)
        w = nn.functional.normalize(split_heads(w, self.head_dim).to(wide), dim=-1)
        beta = 2 * self.b_proj(x).to(wide).sigmoid().transpose(1, 2)
        if key_mask is not None:
            beta = beta.masked_fill(~key_mask[:, None], 0)
        return w, beta, tail

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: PathPast | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, PathPast]:
        S, T = 0 if past is None else past.length, x.shape[1]
        new_mask = None if key_mask is None else key_mask[:, S:]
        w, beta, tail = self.factors(x, None if past is None else past.tail, new_mask, cu_seqlens)
        inverse_norms = self.inverse_norms(k, past)
        if past is not None and T == 1 and not torch.is_grad_enabled() and self.impl != "reference":
            return self._decode(q, k, v, w, beta, past, inverse_norms, tail, key_mask)
        moved = None if past is None else (past.keys_at_end(), past.y)
        old_norms = None if inverse_norms is None else inverse_norms[:, :, :S]
        o, y = self.read(q, k, v, w, beta, moved, old_norms, key_mask, cu_seqlens)
        if moved is not None:
            k, y = torch.cat([moved[0], k], 2), torch.cat([moved[1], y], 2)
        return o, PathPast(k, y, inverse_norms, tail, w, beta)

    def inverse_norms(self, k: Tensor, past: PathPast | None) -> Tensor | None:
        """1/‖k‖ of all keys, [B, H, S + T], if the variant needs them; else None."""
        return None

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        beta: Tensor,
        past: tuple[Tensor, Tensor] | None,
        inverse_norms: Tensor | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The output [B, H·G, T, E] and the stored values [B, H, T, E].

        past: moved keys and their y. inverse_norms: of the keys of the past.
        """
        return path_attention(q, k, v, w, beta, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, impl=self.impl), v

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        w, beta, _ = self.factors(x, None, key_mask, None)
        return {"factors": (w, beta)}

    def step_options(self) -> dict[str, Any]:
        """Further arguments of `path_decode`."""
        return {}

    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        beta: Tensor,
        past: PathPast,
        inverse_norms: Tensor | None,
        tail: Tensor | None,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, PathPast]:
        keys, product, live, pending = past.k, past.product, past.live, past.pending
        if product is None or past.length - pending >= APPLY_EVERY:
            keys, live, pending = past.keys_at_end(), None, past.length
            product = identity_factors(keys)
        keys = torch.cat([keys, k], 2)
        step: PathDecoded = path_decode(
            q,
            keys,
            v,
            w,
            beta,
            past.y,
            product,
            pending,
            live=live,
            inverse_norms=inverse_norms,
            key_mask=key_mask,
            **self.step_options(),
        )
        y = torch.cat([past.y, step.y], 2)
        return step.o, PathPast(keys, y, inverse_norms, tail, product=step.product, live=step.live, pending=pending)
