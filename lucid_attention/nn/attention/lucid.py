"""LUCID attention as a module."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.checks import check_center, check_norm, check_positive, check_size, check_strength
from ...ops.dispatch import choose
from ...ops.keys import KeyMap, calibrated_key_map
from ...ops.lucid import reference
from ...ops.lucid.api import normalize_for_readout, precondition
from ...ops.lucid.decode import inverse_key_norms, lucid_decode
from ...ops.precision import readout_dtype
from ...ops.softmax.attention import softmax_attention
from ...ops.softmax.one_token import Decoded
from ..causal import CausalAttention, Past, count_positions


class LucidAttention(CausalAttention):
    """Softmax attention over preconditioned values.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, rope_base, bias: as in `CausalAttention`.
        norm: "key", "qk" or "row_max" (see `lucid_attention`).
        learn_beta: step sizes β = σ(W x) of the writes, per token and key/value head.
        double_beta: with learn_beta, β = 2σ(W x), so that a write can reverse a stored value.
        sharpness: c in P_ij = exp(c (cos θ_ij − 1)); default √head_dim. About 4 makes LUCID act on large heads.
        learn_sharpness: one learned c per key/value head, starting at `sharpness`.
        strength: s in P = I + s · stril exp(…), from 0 (softmax attention) to 1. A schedule may set this attribute
            between calls; values already in a past keep the strength they were made with.
        center: "none": P is made of the keys. "learned" or "calibrated": of (k − μ) with a μ for each key/value head, a
            parameter or a buffer, which is zero until it is trained or `calibrate` sets it.
        whiten: P is made of (k − μ) M, with a matrix M next to μ, the identity until it is trained or calibrated.
        block: 1 for causal attention, n for blocks of n tokens that see each other, None for one block (see
            `lucid_attention`). A past ends at a border: a block is final when all its tokens are there, and a running
            block is given whole. A schedule may set this attribute between calls, too.
        impl: "auto", "blockwise" or "reference".
    """

    key_center: Tensor | None
    key_matrix: Tensor | None
    title = "LUCID"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        norm: str = "key",
        learn_beta: bool = False,
        double_beta: bool = False,
        sharpness: float | None = None,
        learn_sharpness: bool = False,
        strength: float = 1.0,
        center: str = "none",
        whiten: bool = False,
        block: int | None = 1,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, **options)
        check_norm(norm)
        choose(impl)
        check_positive("sharpness", sharpness, optional=True)
        check_strength(strength)
        if block is not None:
            check_size("block", block)
        if block != 1 and (learn_beta or norm == "row_max"):
            name = "learn_beta=True" if learn_beta else "norm='row_max'"
            raise ValueError(f"{name} needs block=1 (see `lucid_attention`), got block = {block}")
        self.block = block
        if double_beta and not learn_beta:
            raise ValueError("double_beta needs learn_beta=True, got learn_beta=False")
        self.double_beta = double_beta
        self.norm, self.impl, self.fixed_sharpness, self.strength = norm, impl, sharpness, strength
        self.b_proj = nn.Linear(hidden_size, self.num_kv_heads, bias=False) if learn_beta else None
        self.log_sharpness = None
        if learn_sharpness:
            start = math.log(math.sqrt(self.head_dim) if sharpness is None else sharpness)
            self.log_sharpness = nn.Parameter(torch.full((self.num_kv_heads,), start))
        check_center(center, whiten)
        H, D = self.num_kv_heads, self.head_dim
        start_map = KeyMap(
            None if center == "none" else torch.zeros(H, D), torch.eye(D).repeat(H, 1, 1) if whiten else None
        )
        for name, x in zip(("key_center", "key_matrix"), start_map, strict=True):
            if center == "learned":
                self.register_parameter(name, None if x is None else nn.Parameter(x))
            else:
                self.register_buffer(name, x)

    def key_map(self) -> KeyMap | None:
        """The map of the keys of P; None without a center."""
        return None if self.key_center is None else KeyMap(self.key_center, self.key_matrix)

    @torch.no_grad()
    def calibrate(self, x: Tensor, *, key_mask: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Set center and matrix to those of the keys of x: [B, T, hidden_size], see `calibrated_key_map`.

        key_mask: [B, T]; positions: as in the forward pass. Keys of a past keep their y: calibrate before decoding.
        """
        if self.key_center is None:
            raise ValueError("calibrate() needs center='learned' or center='calibrated', got center='none'")
        self._check(x, None, key_mask, None, positions)
        _, k, _ = self.project(x, count_positions(x, 0, key_mask) if positions is None else positions)
        found = calibrated_key_map(k, key_mask, whiten=self.key_matrix is not None)
        for own, value in zip((self.key_center, self.key_matrix), found, strict=True):
            if own is not None and value is not None:
                own.copy_(value)

    def beta(self, x: Tensor) -> Tensor | None:
        """β of every token: [B, H, T] in (0, 1), in (0, 2) with `double_beta`, or None without `learn_beta`."""
        if self.b_proj is None:
            return None
        beta: Tensor = self.b_proj(x).sigmoid().transpose(1, 2)
        return 2 * beta if self.double_beta else beta

    def sharpness(self) -> float | Tensor | None:
        """c: learned [H], a number, or None for √D."""
        return self.fixed_sharpness if self.log_sharpness is None else self.log_sharpness.exp()

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Past | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Past]:
        if past is None or k.shape[2] != 1 or self.block != 1 or torch.is_grad_enabled() or self.impl == "reference":
            o, present = super().attend(x, q, k, v, past, key_mask, cu_seqlens)
            if self.key_center is not None:
                # A cache knows k, and not its map.
                present = present._replace(inverse_norms=inverse_key_norms(present.k.detach(), self.key_map()).detach())
            return o, present
        past_norms = inverse_key_norms(past.k, self.key_map()) if past.inverse_norms is None else past.inverse_norms
        inverse_norms = torch.cat([past_norms, inverse_key_norms(k, self.key_map())], 2)
        k = torch.cat([past.k, k], 2)
        step = self.step(x, q, k, v, past.y, inverse_norms, key_mask)
        return step.o, Past(k, torch.cat([past.y, step.y], 2), inverse_norms)

    def step(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, y_past: Tensor, inverse_norms: Tensor, key_mask: Tensor | None
    ) -> Decoded:
        """One new token, x: [B, 1, hidden_size], with the other arguments of `lucid_decode`. No gradients."""
        if self.block != 1:
            raise ValueError(
                f"a step of one token needs block=1, got block = {self.block}: a block is solved as a whole"
            )
        settings: dict[str, Any] = {"norm": self.norm, "sharpness": self.sharpness(), "strength": self.strength}
        settings["key_map"] = self.key_map()
        return lucid_decode(q, k, v, y_past, inverse_norms, key_mask=key_mask, beta=self.beta(x), **settings)

    def values(
        self, x: Tensor, k: Tensor, v: Tensor, past: Past | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        return precondition(
            k,
            v,
            past=None if past is None else (past.k, past.y),
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            beta=self.beta(x),
            norm=self.norm,
            sharpness=self.sharpness(),
            strength=self.strength,
            key_map=self.key_map(),
            block=self.block,
            impl=self.impl,
        )

    def readout(self, q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if self.norm == "qk":
            q, k = normalize_for_readout(q, k, key_mask)
        if self.impl == "reference":
            return reference.readout(q, k, y, key_mask, cu_seqlens, None, self.block).to(readout_dtype(q))
        return softmax_attention(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens, block=self.block)

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any] | None:
        if self.block != 1:
            return None
        if self.norm == "qk":
            q, k = normalize_for_readout(q, k, key_mask)
        inputs = {"q": q, "k": k, "norm": self.norm, "sharpness": self.sharpness(), "beta": self.beta(x)}
        inputs["key_map"] = self.key_map()
        # At strength 0 analysis shows the P of strength 1, as for softmax attention.
        return inputs | ({"preconditioned": True, "strength": self.strength} if self.strength > 0 else {})

    def extra_repr(self) -> str:
        sharpness = "learned" if self.log_sharpness is not None else self.fixed_sharpness or "√D"
        text = f"norm={self.norm!r}, beta={'learned' if self.b_proj is not None else 1}, sharpness={sharpness}"
        if self.key_center is not None:
            learned = isinstance(self.key_center, nn.Parameter)
            text += f", center={'learned' if learned else 'calibrated'!r}, whiten={self.key_matrix is not None}"
        text = text if self.block == 1 else f"{text}, block={self.block}"
        return text if self.strength == 1 else f"{text}, strength={self.strength}"
