"""Causal attention as a module: projections, rotary embedding, grouped heads, padding, packing, cache.

A variant overrides `values` (the stored values), `readout` (how queries read them) and `finish` (norm and gate of what
they read), or `attend` (the first two, and the contents of the past). `CausalAttention` itself is plain softmax
attention.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import checks
from ..ops.checks import check_size
from ..ops.softmax.attention import softmax_attention
from .rotary import Rotary


class Past(NamedTuple):
    """The S positions so far. k: [B, H, S, D]; y: [B, H, S, E], stored values; inverse_norms: [B, H, S], 1/‖k‖."""

    k: Tensor
    y: Tensor
    inverse_norms: Tensor | None = None

    @property
    def length(self) -> int:
        """S, padding included."""
        return self.k.shape[2]


class CausalAttention(nn.Module):
    """Softmax attention over the stored values.

    Args:
        hidden_size: size of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads; default num_heads.
        head_dim: D, default hidden_size / num_heads. May be odd without rotary embedding.
        value_dim: E, default head_dim.
        rope_base: base of the rotary embedding, None for none.
        qk_norm: learned RMS norm of every query and key, before the rotary embedding.
        bias: whether the projections have biases.
    """

    # The name that reports show.
    title: ClassVar[str]
    # Whether `rope_base` gives queries and keys a rotary embedding. Other variants know positions by other means.
    takes_rotary: ClassVar[bool] = True
    # The type of `past` in forward: a NamedTuple with a `length`.
    past_type: ClassVar[type[Any]] = Past

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rope_base: float | None = 10_000.0,
        qk_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads, head_dim = check_sizes(hidden_size, num_heads, num_kv_heads, head_dim)
        value_dim = head_dim if value_dim is None else value_dim
        check_size("value_dim", value_dim)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * value_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * value_dim, hidden_size, bias=bias)
        self.q_norm = HeadNorm(head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = HeadNorm(head_dim, eps=1e-6) if qk_norm else None
        self.rotary = None if rope_base is None else Rotary(head_dim, rope_base)

    def forward(
        self,
        x: Tensor,
        *,
        past: Any = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the output, and the `past` for the next call.

        Args:
            x: [B, T, hidden_size].
            past: returned by the call for the S positions before.
            key_mask: [B, S + T] bool, False at padding.
            cu_seqlens: int32 [n + 1], borders of packed documents (B = 1).
            positions: [T] or [B, T], for the rotary embedding. Default: counted from 0, padding not counted.

        Returns:
            [B, T, hidden_size] and the past of S + T positions.
        """
        self._check(x, past, key_mask, cu_seqlens, positions)
        S = 0 if past is None else past.length
        if key_mask is not None:
            # A NaN at padding would reach the gradients of the projections: 0 · NaN is NaN.
            x = x.masked_fill(~key_mask[:, S:, None], 0)
        if positions is None and self.rotary is not None:
            positions = count_positions(x, S, key_mask)
        q, k, v = self.project(x, positions)
        if past is not None:
            self.check_past(past, k, v)
        o, present = self.attend(x, q, k, v, past, key_mask, cu_seqlens)
        return self.o_proj(self.finish(x, o, v).transpose(1, 2).flatten(2)), present

    def project(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q: [B, H·G, T, D], k: [B, H, T, D] and v: [B, H, T, E] of x, as `attend` takes them.

        positions: [T] or [B, T]; not read without a rotary embedding.
        """
        q, k = split_heads(self.q_proj(x), self.head_dim), split_heads(self.k_proj(x), self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        return q, k, split_heads(self.v_proj(x), self.value_dim)

    def _check(
        self, x: Any, past: Any, key_mask: Tensor | None, cu_seqlens: Tensor | None, positions: Tensor | None
    ) -> None:
        checks.check_tensor("x", x)
        expected = f"[B, T, {self.q_proj.in_features}]"
        if x.ndim != 3 or x.shape[2] != self.q_proj.in_features:
            raise ValueError(f"x must be {expected}, got shape {list(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"x must be {expected} with no empty dimension, got shape {list(x.shape)}")
        if past is not None and not isinstance(past, self.past_type):
            raise TypeError(
                f"past must be a {self.past_type.__name__} as returned by the module, got {type(past).__name__}"
            )
        B, T, _ = x.shape
        one_head = x[:, None]
        checks.check_key_mask(key_mask, one_head, 0 if past is None else past.length)
        checks.check_cu_seqlens(cu_seqlens, one_head, past)
        if positions is not None:
            checks.check_tensor("positions", positions)
            if tuple(positions.shape) not in ((T,), (B, T)):
                raise ValueError(
                    f"positions must be [T] = [{T}] or [B, T] = {[B, T]}, got shape {list(positions.shape)}"
                )

    def check_past(self, past: Any, k: Tensor, v: Tensor) -> None:
        """Refuse a past that does not fit the new k: [B, H, T, D] and v: [B, H, T, E]."""
        checks.check_past((past.k, past.y), k, v)

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Any, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        """From projected q: [B, H·G, T, D], k: [B, H, T, D], v: [B, H, T, E] to o: [B, H·G, T, E] and the new past."""
        y = self.values(x, k, v, past, key_mask, cu_seqlens)
        if past is not None:
            k, y = torch.cat([past.k, k], 2), torch.cat([past.y, y], 2)
        return self.readout(q, k, y, key_mask, cu_seqlens), Past(k, y)

    def values(
        self, x: Tensor, k: Tensor, v: Tensor, past: Past | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The values that are stored for the new positions: [B, H, T, E]."""
        return v

    def readout(self, q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """The output that q reads from the keys k and the stored values y: [B, H·G, T, E]."""
        return softmax_attention(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens)

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        """Norm and gate of the output o: [B, H·G, T, E] before o_proj. v: [B, H, T, E], values of the same tokens."""
        return o

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any] | None:
        """How analysis computes the weights of this layer; None if they are not those of a softmax.

        A dictionary of fields of `analysis.layer.Layer` that differ from plain softmax attention: `q` and `k` if the
        scores take others, `preconditioned`, `norm`, `sharpness`, `strength`, `beta`, `window`, `factors`, `lam`.

        A variant that overrides another hook than `project` overrides this method as well, or analysis refuses it.
        """
        own, plain = type(self), CausalAttention
        hooks = ("values", "readout", "finish", "attend")
        return None if any(getattr(own, hook) != getattr(plain, hook) for hook in hooks) else {}


class SoftmaxAttention(CausalAttention):
    """Causal softmax attention: `CausalAttention` without changes."""

    title = "softmax"


class HeadNorm(nn.RMSNorm):
    """Learned RMS norm over the last dimension, computed in at least float32, returned in the dtype of x."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """norm(x), or norm(x) · silu(gate) with a gate of the shape of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps)
        if gate is not None:
            y = y * F.silu(gate.to(wide))
        return y.to(x.dtype)


def split_heads(x: Tensor, size: int) -> Tensor:
    """[B, T, H · size] -> [B, H, T, size]."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def check_sizes(hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Return num_kv_heads and head_dim, with defaults for None."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, value in (("hidden_size", hidden_size), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        check_size(name, value)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads: got {num_heads} and {num_kv_heads}")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}: give head_dim")
        head_dim = hidden_size // num_heads
    check_size("head_dim", head_dim)
    return num_kv_heads, head_dim


def count_positions(x: Tensor, S: int, key_mask: Tensor | None) -> Tensor:
    """Positions of x: [B, T, hidden_size] after S others, padding not counted: [T] or [B, T]."""
    if key_mask is None:
        return torch.arange(S, S + x.shape[1], device=x.device)
    return (key_mask.cumsum(-1) - 1).clamp(min=0)[:, S:]
