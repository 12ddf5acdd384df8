"""Cache layers that keep what an attention module returns as `past`, whatever that is: keys and y, or a state.

Transformers' own layers keep keys and values and nothing else. Ours stand in its tables below two names, so that
`DynamicCache(config=config)` makes them from `LucidConfig.layer_types`, inside of generate() too.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from ...nn.causal import Past

CROPPABLE = "lucid_attention_past"
NOT_CROPPABLE = "lucid_attention_state"


def layer_type(past_type: type[Any]) -> str:
    """Below which name Transformers finds the cache layer for a module's past."""
    # y of a prefix does not depend on what follows, so keys and y can be cut. Everything else has moved on.
    return CROPPABLE if past_type is Past else NOT_CROPPABLE


class PastLayer(CacheLayerMixin):
    """One module's past. Every tensor of a past has the batch in its first dimension."""

    is_sliding = False
    past: Any = None

    def store(self, past: Any) -> None:
        """Keep what the module returned, instead of what it was given."""
        self.past = past
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        tensors = [each for each in torch.utils._pytree.tree_leaves(self.past) if isinstance(each, Tensor)]
        if not tensors:
            # Cache.batch_size passes over layers without this attribute.
            raise AttributeError("an empty layer has no batch size")
        return tensors[0].shape[0]

    def get_seq_length(self) -> int:
        """Positions seen, padding included. A recurrent state counts them as well."""
        return 0 if self.past is None else self.past.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        self.past = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each_tensor(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each_tensor(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each_tensor(lambda x: x.repeat_interleave(repeats, 0))

    def _each_tensor(self, change: Callable[[Tensor], Tensor]) -> None:
        self.past = tree_map(lambda each: change(each) if isinstance(each, Tensor) else each, self.past)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("this cache was made for a LucidModel: its layers keep no keys and values of other models")

    def offload(self) -> None:
        raise ValueError("LucidModel does not move its cache to the CPU between layers: use a dynamic cache")

    prefetch = offload


class CroppableLayer(PastLayer):
    """A past of keys and y, of which the last tokens can be taken back."""

    _layer_type: ClassVar[str] = CROPPABLE
    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number comes negative."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        if tokens_to_remove < 0 and self.past is not None:
            length = self.past.length + tokens_to_remove
            if length < 1:
                self.reset()
            else:
                self._each_tensor(lambda x: x[:, :, :length])


class StateLayer(PastLayer):
    """A past that cannot go back: a recurrent state, a window, or keys that PaTH has moved on."""

    _layer_type: ClassVar[str] = NOT_CROPPABLE
    is_croppable = False

    def activate_past_recording(self) -> None:
        """Called where cropping is going to be needed, before the first token is spent."""
        self._refuse()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            self._refuse()

    def _refuse(self) -> None:
        raise ValueError(
            "this model's cache cannot take tokens back, which assisted decoding and prompt lookup need: a recurrent "
            "state has no way back, and PaTH moves all keys with every token. Generate without an assistant"
        )


class _NoStaticLayer(StaticLayer):
    """Stands in Transformers' table of static layers to say why there is none."""

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        raise ValueError(
            "LucidModel has no static cache: its past grows with the tokens, or is a state of fixed size anyway. "
            "Leave cache_implementation out, or say 'dynamic'"
        )


class _NoStaticPast(_NoStaticLayer):
    _layer_type: ClassVar[str] = CROPPABLE


class _NoStaticState(_NoStaticLayer):
    _layer_type: ClassVar[str] = NOT_CROPPABLE


def check_cache(cache: Any, layer_types: list[str]) -> None:
    """Refuse a cache whose layers are not those of the model."""
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a Cache of Transformers, got {type(cache).__name__}")
    if cache.offloading:
        raise ValueError("past_key_values must not be offloading: LucidModel does not move its cache between layers")
    kinds = [getattr(layer, "_layer_type", None) or type(layer).__name__ for layer in cache.layers]
    # Layers beyond those of the model are there while assisted decoding exits early.
    if len(kinds) < len(layer_types) or kinds[: len(layer_types)] != layer_types:
        raise ValueError(
            "past_key_values must be made with the configuration of the model, DynamicCache(config=model.config): "
            f"expected layers {layer_types}, got {kinds or 'none'}"
        )
