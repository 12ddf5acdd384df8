"""The decoder in continuous batching: keys and y of all requests in Transformers' paged cache."""

from typing import Any, NamedTuple

from torch import Tensor

from ...nn.attention import ATTENTIONS
from ...nn.attention.lucid import LucidAttention
from ...nn.causal import CausalAttention, Past
from ...ops.lucid.decode import inverse_key_norms
from ..paged.engine import paged_layer
from ..paged.ragged import attend_ragged
from .configuration import LucidConfig


class PagedModule(NamedTuple):
    """A layer of `attention`, whose past is keys and y. x: [1, T, hidden_size], all requests one behind the other."""

    attention: CausalAttention
    x: Tensor

    def step(
        self, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As in `Attend`."""
        x, attention, y_past = self.x[0, tokens, None], self.attention, y[:, :, :-1]
        if isinstance(attention, LucidAttention) and attention.impl != "reference":
            return attention.step(x, q, k, v, y_past, inverse_key_norms(k), mask)
        o, present = attention.attend(x, q, k[:, :, -1:], v, Past(k[:, :, :-1], y_past), mask, None)
        return o, present.y[:, :, -1:]

    def extend(
        self, tokens: slice, q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """As in `Attend`."""
        before = None if past is None else Past(*past)
        o, present = self.attention.attend(self.x[:, tokens], q, k, v, before, None, None)
        return o, present.y[:, :, -v.shape[2] :]


def attend_paged(
    attention: CausalAttention, x: Tensor, index: int, positions: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """The output of a layer, [1, T, hidden_size]. positions: [1, T]; arguments: of Transformers' engine."""
    q, k, v = attention.project(x, positions)
    options = {"strength": getattr(attention, "strength", None)}
    o = attend_ragged(paged_layer(arguments["cache"], index, arguments, options), q, k, v, PagedModule(attention, x))
    return attention.o_proj(o.transpose(1, 2).flatten(2))


def attentions_with_a_state(config: LucidConfig) -> list[str]:
    """The names of attentions whose past is no keys and values, or changes with every token."""
    return sorted({name for name in config.layer_attentions if ATTENTIONS[name].past_type is not Past})


def check_pageable(config: LucidConfig, attentions: list[CausalAttention]) -> None:
    """Refuse attentions that a paged cache cannot hold. attentions: of the layers."""
    if states := attentions_with_a_state(config):
        raise ValueError(
            "continuous batching (generate_batch, `transformers serve --continuous-batching`) keeps keys and values in "
            f"pages, and the past of {', '.join(states)} is a state or changes with every token: expected attentions "
            "that keep keys and y (lucid, softmax, diff). Use generate()"
        )
    heads, head_dim = config.num_key_value_heads, config.head_dim
    # LucidConfig fills both in.
    assert heads is not None
    assert head_dim is not None
    for name, attention in zip(config.layer_attentions, attentions, strict=True):
        keys, values = attention.k_proj.out_features, attention.v_proj.out_features
        if attention.head_dim != head_dim or not keys == values == heads * head_dim:
            raise ValueError(
                f"continuous batching gives every token of a layer {heads} keys and values of size {head_dim}: {name} "
                f"has {keys // attention.head_dim} keys of size {attention.head_dim} and values of {values} numbers in "
                "all. Use generate()"
            )
