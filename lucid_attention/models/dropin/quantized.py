"""Quantized caches: keys and y = P⁻¹v in the layers of Transformers' `QuantizedCache`, whatever its backend.

A stock layer quantizes what `update` gets, and the values of LUCID are known later. So a layer of ours asks the stock
layer for its past, and gives it the new keys and y when they are known.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...ops.lucid.decode import inverse_key_norms
from .cache import PendingValues, _CommittedLayer, _ConfigReference
from .settings import drop_settings, uses_lucid


class LucidQuantizedLayer(_CommittedLayer, CacheLayerMixin):
    """A stock layer with quantized keys and y. A token's own y is exact while it is computed, as v is elsewhere."""

    is_sliding = False
    is_croppable = False

    def __init__(self, stock: Any, config: Any) -> None:
        super().__init__()
        self.stock = stock
        self.owner, self.uncommitted, self.options = _ConfigReference(config), False, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the stock layer does so when it gets the first y."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin_update()
        keys, values, y_past = key_states, value_states, None
        if self.get_seq_length():
            # No new tokens: the stock layer returns its past.
            k_past, y_past = self.stock.update(key_states[:, :, :0], value_states[:, :, :0])
            keys, values = torch.cat([k_past, key_states], 2), torch.cat([y_past, value_states], 2)
        pending = PendingValues(self, keys, value_states, y_past, inverse_key_norms(keys))
        return keys, self.with_pending(values, pending)

    def commit(self, pending: PendingValues, y: Tensor) -> Tensor:
        self.uncommitted, self.is_initialized = False, True
        self.stock.update(pending.k[:, :, -y.shape[2] :], y)
        return y if pending.y_past is None else torch.cat([pending.y_past, y], 2)

    def get_seq_length(self) -> int:
        return self.stock.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.stock.reorder_cache(beam_idx)

    def reset(self) -> None:
        self.stock.reset()
        self.is_initialized, self.uncommitted, self.options = False, False, None

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a quantized cache cannot be cropped, which speculative decoding needs: use a dynamic or a static cache"
        )


def make_quantized(original: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of `QuantizedCache`, for configurations with LUCID as well."""

    def initialize(self: Any, backend: str, config: Any, *args: Any, **kwargs: Any) -> None:
        text = config.get_text_config(decoder=True)
        if not uses_lucid(text):
            original(self, backend, config, *args, **kwargs)
            return
        stock = copy.copy(text)
        drop_settings(stock)
        stock._attn_implementation_internal = None
        # Refuses models with sliding layers, as for softmax attention.
        original(self, backend, stock, *args, **kwargs)
        self.layers = [LucidQuantizedLayer(layer, text) for layer in self.layers]

    return initialize
