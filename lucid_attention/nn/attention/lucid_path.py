"""LUCID-PaTH as a module."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.checks import check_positive, check_shape
from ...ops.lucid.decode import inverse_key_norms
from ...ops.path.api import lucid_path_pass
from .path import PathAttention, PathPast


class LucidPathAttention(PathAttention):
    """PaTH attention over preconditioned values.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, qk_norm, w_rank, conv_size, bias, impl: as in
            `PathAttention`.
        sharpness: c in P_ij = exp(c (cos − 1)); default √head_dim.
        learn_sharpness: one learned c per key/value head, starting at `sharpness`.
    """

    title = "LUCID-PaTH"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        sharpness: float | None = None,
        learn_sharpness: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, **options)
        check_positive("sharpness", sharpness, optional=True)
        self.fixed_sharpness = sharpness
        self.log_sharpness = None
        if learn_sharpness:
            start = math.log(math.sqrt(self.head_dim) if sharpness is None else sharpness)
            self.log_sharpness = nn.Parameter(torch.full((self.num_kv_heads,), start))

    def sharpness(self) -> float | Tensor | None:
        """c: learned [H], a number, or None for √D."""
        return self.fixed_sharpness if self.log_sharpness is None else self.log_sharpness.exp()

    def check_past(self, past: PathPast, k: Tensor, v: Tensor) -> None:
        super().check_past(past, k, v)
        if past.inverse_norms is None:
            raise ValueError(
                "past.inverse_norms must be [B, H, S], 1/‖k‖ of the keys before they were moved, got None "
                "(is this a past of PathAttention?)"
            )
        check_shape("past.inverse_norms", past.inverse_norms, tuple(past.k.shape[:3]), "[B, H, S]")

    def inverse_norms(self, k: Tensor, past: PathPast | None) -> Tensor:
        norms = inverse_key_norms(k)
        return norms if past is None or past.inverse_norms is None else torch.cat([past.inverse_norms, norms], 2)

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
        return lucid_path_pass(
            q,
            k,
            v,
            w,
            beta,
            past=None if past is None or inverse_norms is None else (*past, inverse_norms),
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            sharpness=self.sharpness(),
            impl=self.impl,
        )

    def step_options(self) -> dict[str, Any]:
        return {"sharpness": self.sharpness()}

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        path = super().analysis_inputs(x, q, k, key_mask)
        return path | {"preconditioned": True, "sharpness": self.sharpness()}

    def extra_repr(self) -> str:
        return f"sharpness={'learned' if self.log_sharpness is not None else self.fixed_sharpness or '√D'}"
