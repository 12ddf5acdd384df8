"""The base of the linear-time variants: a state instead of keys and values, short convolutions, published sizes."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.dispatch import RECURRENT, choose
from .causal import CausalAttention, check_size, check_sizes, split_heads
from .short_convolution import ShortConvolution


class RecurrentPast(NamedTuple):
    """The state of the recurrence, and the tails of the convolutions of q, k and v.

    length: positions so far, padding included. The sizes of state and tails do not depend on it.
    """

    state: Any
    tails: tuple[Tensor, ...]
    length: int


class RecurrentAttention(CausalAttention, ABC):
    """Attention by a recurrence. A variant overrides `recur` (the recurrence) and `finish` (norm and gate after it).

    Args:
        hidden_size, num_heads, num_kv_heads, bias: as in `CausalAttention`.
        head_dim: head size of the softmax attention that this variant is compared with; default
            hidden_size / num_heads.
        key_dim: D. The default gives the projections the number of weights of softmax attention with `head_dim`.
        value_dim: E. Default: the published multiple of key_dim.
        conv_size: tokens that the short convolutions of q, k and v see; None for no convolutions.
        rope_base: must be None. The recurrence knows the order of its tokens.
        impl: "auto", "reference", "chunkwise" or "fla".
    """

    takes_rotary = False
    past_type = RecurrentPast
    # Weights per query head and per key/value head in units of hidden_size · D, and E/D. Softmax attention: 2, 2, 1.
    query_weights: ClassVar[int] = 2
    kv_weights: ClassVar[int] = 2
    value_ratio: ClassVar[int] = 1

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int | None = None,
        rope_base: None = None,
        bias: bool = False,
        impl: str = "auto",
    ) -> None:
        if rope_base is not None:
            raise ValueError(
                f"rope_base must be None: {type(self).__name__} has no rotary embedding, got {rope_base!r}"
            )
        num_kv_heads, head_dim = check_sizes(hidden_size, num_heads, num_kv_heads, head_dim)
        if key_dim is None:
            G = num_heads // num_kv_heads
            key_dim = max(1, round(head_dim * (2 * G + 2) / (self.query_weights * G + self.kv_weights)))
        check_size("key_dim", key_dim)
        value_dim = self.value_ratio * key_dim if value_dim is None else value_dim
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=key_dim,
            value_dim=value_dim,
            rope_base=None,
            bias=bias,
        )
        choose(impl, RECURRENT)
        self.impl = impl
        self.convolutions = None
        if conv_size is not None:
            check_size("conv_size", conv_size)
            self.convolutions = nn.ModuleDict(
                {
                    name: ShortConvolution(projection.out_features, conv_size)
                    for name, projection in (("q", self.q_proj), ("k", self.k_proj), ("v", self.v_proj))
                }
            )

    def check_past(self, past: RecurrentPast, k: Tensor, v: Tensor) -> None:
        expected = 0 if self.convolutions is None else len(self.convolutions)
        if not isinstance(past.tails, tuple) or len(past.tails) != expected:
            got = len(past.tails) if hasattr(past.tails, "__len__") else type(past.tails).__name__
            raise ValueError(f"past.tails must be a tuple of {expected} convolution tails, got {got}")

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: RecurrentPast | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, RecurrentPast]:
        T = x.shape[1]
        state, tails, S = (None, (), 0) if past is None else past
        new_mask = None if key_mask is None else key_mask[:, S:]
        if self.convolutions is not None:
            old_tails = tails or (None,) * len(self.convolutions)
            convolved = [
                convolution(projected.transpose(1, 2).flatten(2), tail, new_mask, cu_seqlens)
                for convolution, projected, tail in zip(self.convolutions.values(), (q, k, v), old_tails, strict=True)
            ]
            q, k, v = (
                split_heads(y, size)
                for (y, _), size in zip(convolved, (self.head_dim, self.head_dim, self.value_dim), strict=True)
            )
            tails = tuple(tail for _, tail in convolved)
        o, state = self.recur(x, q, k, v, state, new_mask, cu_seqlens)
        return o, RecurrentPast(state, tails, S + T)

    @abstractmethod
    def recur(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        """From q: [B, H·G, T, D], k: [B, H, T, D], v: [B, H, T, E] to o: [B, H·G, T, E] and the new state."""


def log_sigmoid_gate(x: Tensor, temperature: float) -> Tensor:
    """log σ(x)^(1/τ) in at least float32, τ the temperature: the log of a decay that starts near 1."""
    return F.logsigmoid(x.to(torch.promote_types(x.dtype, torch.float32))) / temperature
