"""Cache layers that keep the `past` of an attention module: keys and y, or a recurrent state.

Transformers' own layers keep keys and values only. Ours are in its tables under two names, so that
`DynamicCache(config=config)` makes them from `LucidConfig.layer_types`, also inside generate().
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from ...nn.causal import Past
from ..cache import LucidDynamicLayer

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

    def read(self) -> Past | None:
        """The past for the next pass."""
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

    def __init__(self) -> None:
        super().__init__()
        self.past: Any = None

    def read(self) -> Any:
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


def _refuse_static(**places: Any) -> Any:
    raise ValueError(
        "LucidForCausalLM has no static cache: use a dynamic one, or make a Llama of it with `lucid convert` or "
        "`lucid_attention.models.convert.as_dropin`, whose decoding compiles"
    )


STATIC_LAYER_TYPE_MAPPING[CROPPABLE] = STATIC_LAYER_TYPE_MAPPING[NOT_CROPPABLE] = _refuse_static


def check_cache(cache: Any, layer_types: list[str]) -> None:
    """Refuse a cache whose layers are not those of the model."""
    if cache.offloading:
        raise ValueError("past_key_values must not be offloading: LucidModel does not move its cache between layers")
    kinds = [getattr(layer, "_layer_type", None) or type(layer).__name__ for layer in cache.layers]
    # While assisted decoding exits early, the model has fewer layers than the cache.
    if len(kinds) < len(layer_types) or kinds[: len(layer_types)] != layer_types:
        raise ValueError(
            "past_key_values must be DynamicCache(config=model.config): "
            f"expected layers {layer_types}, got {kinds or 'none'}. PEFT's prefix tuning fills caches itself: use "
            "PromptTuningConfig, PromptEncoderConfig or LoRA"
        )
