"""Cache layers that keep the `past` of an attention module: keys and y, or a recurrent state.

Transformers' own layers keep keys and values only. Ours are in its tables under three names, so that
`DynamicCache(config=config)` makes them from `LucidConfig.layer_types`, also inside generate(). Static layers are in
`static_cache.py`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache, CacheLayerMixin

from ...nn.attention.path import PathPast
from ...nn.causal import Past

CROPPABLE = "lucid_attention_past"
NOT_CROPPABLE = "lucid_attention_state"
GROWING = "lucid_attention_path"


def layer_type(past_type: type[Any]) -> str:
    """The name under which Transformers finds the cache layer for a module's past."""
    # y of a prefix does not depend on later tokens, so keys and y can be cropped. Every other past changes as a whole
    # with each token.
    return {Past: CROPPABLE, PathPast: GROWING}.get(past_type, NOT_CROPPABLE)


class PastLayer(CacheLayerMixin):
    """One module's past. Every tensor of a past has the batch in its first dimension."""

    is_sliding = False
    past: Any = None

    def store(self, past: Any) -> None:
        """Replace the past by the one that the module returned."""
        self.past = past
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        tensors = [leaf for leaf in tree_leaves(self.past) if isinstance(leaf, Tensor)]
        if not tensors:
            # Cache.batch_size skips layers that raise AttributeError.
            raise AttributeError("an empty layer has no batch size")
        return tensors[0].shape[0]

    def get_seq_length(self) -> int:
        """Positions so far, padding included. A recurrent state counts them too."""
        return 0 if self.past is None else self.past.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        self.past = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_tensors(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_tensors(lambda x: x.repeat_interleave(repeats, 0))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        self.past = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, self.past)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the module makes the first past."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("this cache was made for a LucidModel: its layers keep no keys and values of other models")

    def offload(self) -> None:
        raise ValueError("LucidModel does not move its cache to the CPU between layers: use a dynamic cache")

    prefetch = offload


class CroppableLayer(PastLayer):
    """A past of keys and y, from which the last tokens can be removed."""

    _layer_type: ClassVar[str] = CROPPABLE
    is_croppable = True

    @property
    def keys(self) -> Tensor | None:
        """[B, H, S, D]. Tools look at keys and values of a cache."""
        return None if self.past is None else self.past.k

    @keys.setter
    def keys(self, k: Tensor | None) -> None:
        self._replace(k=k)

    @property
    def values(self) -> Tensor | None:
        """y: [B, H, S, E]."""
        return None if self.past is None else self.past.y

    @values.setter
    def values(self, y: Tensor | None) -> None:
        self._replace(y=y)

    def _replace(self, **changes: Tensor | None) -> None:
        # Transformers sets None where it makes a layer.
        if self.past is not None:
            self.past = self.past._replace(**changes)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. tokens_to_remove: their number, negative."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        if tokens_to_remove < 0 and self.past is not None:
            length = self.past.length + tokens_to_remove
            if length < 1:
                self.reset()
            else:
                self._map_tensors(lambda x: x[:, :, :length])


class StateLayer(PastLayer):
    """A past from which no token can be removed: a recurrent state, a window, or the keys of PaTH."""

    _layer_type: ClassVar[str] = NOT_CROPPABLE
    is_croppable = False

    def activate_past_recording(self) -> None:
        """Refuse. Transformers calls this before it generates with a method that crops."""
        self._refuse()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            self._refuse()

    def _refuse(self) -> None:
        raise ValueError(
            "this model's cache cannot take tokens back, which assisted decoding and prompt lookup need: a recurrent "
            "state has no way back, and PaTH moves all keys with every token. Generate without an assistant"
        )


class GrowingLayer(StateLayer):
    """The past of PaTH: it grows with the tokens, and changes as a whole."""

    _layer_type: ClassVar[str] = GROWING


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
            f"expected layers {layer_types}, got {kinds or 'none'}"
        )
