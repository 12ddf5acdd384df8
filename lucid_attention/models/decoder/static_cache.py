"""Static cache layers: keys, y and 1/‖k‖ in buffers of a fixed size, for torch.compile and torch.export.

`StaticCache(config=config, max_cache_len=...)` and generate(cache_implementation="static") find them in Transformers'
table of static layers.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, StaticLayer

from ...nn.causal import Past
from ...ops.lucid.decode import inverse_key_norms
from .cache import CROPPABLE, GROWING, NOT_CROPPABLE, PastLayer, StateLayer

# A state, or the keys of a window, have a bounded size anyway: their layer is the same in both kinds of cache.
STATIC_LAYER_TYPE_MAPPING[NOT_CROPPABLE] = StateLayer


class StaticPastLayer(StaticLayer):
    """A past of keys and y in buffers of `max_cache_len` places.

    A pass reads the part in use if its length is known. In a graph, whose shapes must not depend on the position, and
    for one token on an accelerator, where asking is a wait, it reads the whole buffers: the model hides the places that
    are not in use (`masks.read_places`).
    """

    _layer_type: ClassVar[str] = CROPPABLE
    is_croppable = False
    record_past = False
    inverse_norms: Tensor

    @property
    def past(self) -> Past | None:
        """The part in use."""
        return self.read(int(self.cumulative_length)) if self.is_initialized else None

    def read(self, length: int | None) -> Past | None:
        """The first `length` places, or all of them for None."""
        if not self.is_initialized or length == 0:
            return None
        return Past(*(x[:, :, :length] for x in (self.keys, self.values, self.inverse_norms)))

    def check_room(self, length: int, tokens: int) -> None:
        """Refuse more tokens than there are places after `length`."""
        if length + tokens > self.max_cache_len:
            raise ValueError(
                f"the static cache has {self.max_cache_len} places: expected at most "
                f"{self.max_cache_len - length} more tokens, got {tokens}"
            )

    def store(self, past: Past, tokens: int = 0) -> None:
        """Take over the new rows of the past that the module returned."""
        if not self.is_initialized or self.values.shape[1] != past.y.shape[1]:
            # Differential attention has half as many values as keys, which `early_initialization` does not know.
            self.lazy_initialization(past.k, past.y)
        k, y = past.k[:, :, past.length - tokens :], past.y[:, :, past.length - tokens :]
        places = torch.arange(tokens, device=k.device) + self.cumulative_length
        for buffer, new in ((self.keys, k), (self.values, y), (self.inverse_norms, inverse_key_norms(k))):
            # Buffers have no gradients: those of the new tokens go through `past`.
            buffer.index_copy_(2, places, new.detach().to(buffer.dtype))
        self.cumulative_length.add_(tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        B, H, _, E = value_states.shape
        wide = torch.promote_types(self.dtype, torch.float32)
        self.values = value_states.new_zeros(B, H, self.max_cache_len, E)
        self.inverse_norms = torch.zeros(self.keys.shape[:3], dtype=wide, device=self.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.values)
            torch._dynamo.mark_static_address(self.inverse_norms)

    update = PastLayer.update
    offload = PastLayer.offload
    prefetch = PastLayer.offload

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self.inverse_norms.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self.inverse_norms = self.inverse_norms.index_select(0, beam_idx.to(self.inverse_norms.device))


class NoStaticLayer(StaticLayer):
    """An entry in Transformers' table of static layers, which says why there is none."""

    _layer_type: ClassVar[str] = GROWING

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        raise ValueError(
            "PaTH and LUCID-PaTH have no static cache: every token moves all keys before it, and the moves that are "
            "not applied yet grow with the tokens. Leave cache_implementation out, or say 'dynamic'"
        )


def static_layer(cache: Cache | None) -> StaticPastLayer | None:
    """The first layer of a static cache that has places; None for another cache."""
    layers = () if cache is None else cache.layers
    return next((layer for layer in layers if isinstance(layer, StaticPastLayer)), None)
