"""Cache layers that keep the `past` of an attention module: keys and y, or a recurrent state.

Transformers' own layers keep keys and values only. Ours are in its tables under two names, so that
`DynamicCache(config=config)` makes them from `LucidConfig.layer_types`, also inside generate(). `StaticCache` finds the
static layers, buffers of a fixed size for torch.compile and torch.export, in the same way.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin

from ...nn.causal import Past
from ...ops.lucid.decode import inverse_key_norms
from ..cache import LucidDynamicLayer, LucidStaticLayer

CROPPABLE = "lucid_attention_past"
NOT_CROPPABLE = "lucid_attention_state"


def layer_type(past_type: type[Any]) -> str:
    """The name under which Transformers finds the cache layer for a module's past."""
    # y of a prefix does not depend on later tokens, so keys and y can be cropped. Every other past changes as a whole
    # with each token.
    return CROPPABLE if past_type is Past else NOT_CROPPABLE


class PastLayer:
    """What all layers share: the model reads the past of a module, and keeps the new one."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("this cache was made for a LucidModel: its layers keep no keys and values of other models")

    def offload(self) -> None:
        raise ValueError("LucidModel does not move its cache to the CPU between layers: use a dynamic cache")

    prefetch = offload


class CroppableLayer(PastLayer, LucidDynamicLayer):
    """A past of keys and y, from which the last tokens can be removed."""

    _layer_type: ClassVar[str] = CROPPABLE

    def read(self, length: int | None) -> Past | None:
        """The past for the next pass. length: tokens so far, which only buffers of a fixed size ask for."""
        return Past(self.keys, self.values, self.inverse_norms) if self.get_seq_length() else None

    def keep(self, past: Past, tokens: int) -> None:
        """Keep the past that the module returned, of which these last tokens are new."""
        if not self.is_initialized:
            self.lazy_initialization(past.k, past.y)
        self._append("keys", past.k[:, :, -tokens:])
        self._append("values", past.y[:, :, -tokens:])
        if past.inverse_norms is None or self.inverse_norms is None:
            self.inverse_norms = past.inverse_norms
        else:
            self._append("inverse_norms", past.inverse_norms[:, :, -tokens:])


class StateLayer(PastLayer, CacheLayerMixin):
    """A past that changes as a whole with every token: a recurrent state, a window, or the keys of PaTH.

    Every tensor of it has the batch in its first dimension.
    """

    _layer_type: ClassVar[str] = NOT_CROPPABLE
    is_sliding = False

    def __init__(self, **places: Any) -> None:
        """places: max_cache_len, where a static cache makes this layer, which is the same in both kinds of cache."""
        super().__init__()
        self.past: Any = None

    def read(self, length: int | None) -> Any:
        """The past for the next pass."""
        return self.past

    def keep(self, past: Any, tokens: int) -> None:
        """Replace the past by the one that the module returned."""
        self.past = past
        self.is_initialized = past is not None

    def get_seq_length(self) -> int:
        """Positions so far, padding included. A recurrent state counts them too."""
        return 0 if self.past is None else self.past.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the module makes the first past."""

    def reset(self) -> None:
        self.keep(None, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_tensors(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_tensors(lambda x: x.repeat_interleave(repeats, 0))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        self.past = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, self.past)

    def activate_past_recording(self) -> None:
        raise ValueError(
            "speculative decoding takes tokens back, which this past cannot: a recurrent state and a window forget, "
            "and PaTH moves all keys with every token. Generate without it"
        )

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self.activate_past_recording()


# In a static cache, too: a state, or the keys of a window, have a bounded size anyway. PaTH moves all its keys with
# every token, so they have no fixed places.
STATIC_LAYER_TYPE_MAPPING[NOT_CROPPABLE] = StateLayer


class StaticPastLayer(PastLayer, LucidStaticLayer):
    """A past of keys and y in buffers of `max_cache_len` places.

    A pass reads the part in use if its length is known. In a graph, whose shapes must not depend on the position, and
    for one token on an accelerator, where asking is a wait, it reads the whole buffers: the model hides the places that
    are not in use (`masks.read_places`).
    """

    _layer_type: ClassVar[str] = CROPPABLE

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

    def keep(self, past: Past, tokens: int) -> None:
        """Take over the new rows of the past that the module returned."""
        if not self.is_initialized or self.values.shape[1] != past.y.shape[1]:
            # Differential attention has half as many values as keys, which `early_initialization` does not know.
            self.lazy_initialization(past.k, past.y)
        # A module that maps its keys gives their norms.
        norms = inverse_key_norms(past.k[:, :, -tokens:]) if past.inverse_norms is None else past.inverse_norms
        self.cumulative_length.add_(tokens)
        for buffer, x in ((self.keys, past.k), (self.values, past.y), (self.inverse_norms, norms)):
            self.write(buffer, x[:, :, -tokens:].detach().to(buffer.dtype))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        B, H, _, E = value_states.shape
        if self.values.shape[1] != H:
            self.values = value_states.new_zeros(B, H, self.max_cache_len, E)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)


def static_layer(cache: Cache | None) -> StaticPastLayer | None:
    """The first layer of a static cache that has places; None for another cache."""
    layers = () if cache is None else cache.layers
    return next((layer for layer in layers if isinstance(layer, StaticPastLayer)), None)


def check_cache(cache: Any, layer_types: list[str]) -> None:
    """Refuse a cache whose layers are not those of the model."""
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a Cache of Transformers, got {type(cache).__name__}")
    if cache.offloading:
        raise ValueError("past_key_values must not be offloading: LucidModel does not move its cache between layers")
    kinds = [getattr(layer, "_layer_type", None) or type(layer).__name__ for layer in cache.layers]
    # While assisted decoding exits early, the model has fewer layers than the cache.
    if len(kinds) < len(layer_types) or kinds[: len(layer_types)] != layer_types:
        raise ValueError(
            "past_key_values must be made with the configuration of the model, DynamicCache(config=model.config) or "
            "StaticCache(config=model.config, max_cache_len=...): "
            f"expected layers {layer_types}, got {kinds or 'none'}. PEFT's prefix tuning fills caches itself: use "
            "PromptTuningConfig, PromptEncoderConfig or LoRA"
        )
