"""Cache layers that keep y = P⁻¹v where others keep v.

Transformers calls `Cache.update` before the attention function, and without the mask, which padded batches need to be
preconditioned. So new values enter a layer in two steps. `update` appends the keys, and returns all keys and the new
values. The attention function, which gets the mask, computes y and calls `store`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    QuantizedCache,
    StaticLayer,
)

from ..ops.keys import KeyMap
from ..ops.lucid.decode import inverse_key_norms
from .preconditioner import full_layers, layer_kinds


class GrowingTensor:
    """Appends to [B, H, S, *] in place, in a buffer that has room behind the rows in use.

    Only the newest view is extended in place. A caller with another view (of a cropped, reordered or shallowly copied
    cache) gets a new buffer, so that rows of other views are never overwritten.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.newest: Tensor | None = None

    def append(self, x: Tensor | None, new: Tensor) -> Tensor:
        """x: [B, H, S, *] or None; new: [B, H, T, *] -> [B, H, S + T, *]."""
        if torch.is_grad_enabled():
            # A backward pass may need views of the buffer, even if x and new need no gradients themselves.
            return new if x is None else torch.cat([x, new], 2)
        S, T = 0 if x is None else x.shape[2], new.shape[2]
        if not self._has_room(x, S + T):
            # With a quarter of room a copy is made every S/4 tokens, and at most a quarter of the memory is unused.
            capacity = S + T + max(64, (S + T) // 4)
            self.buffer = new.new_empty(*new.shape[:2], capacity, *new.shape[3:])
            if x is not None:
                self.buffer[:, :, :S] = x
        assert self.buffer is not None
        self.buffer[:, :, S : S + T] = new
        self.newest = self.buffer[:, :, : S + T]
        return self.newest

    def _has_room(self, x: Tensor | None, rows: int) -> bool:
        return (
            x is not None
            and x is self.newest
            and self.buffer is not None
            and rows <= self.buffer.shape[2]
            # A tensor made in inference mode cannot be written outside of it.
            and (torch.is_inference_mode_enabled() or not self.buffer.is_inference())
        )


class LucidLayer:
    """Base of the cache layers: every `update` must be followed by a `store`.

    keys: [B, H, S, D], values: y [B, H, S, E], inverse_norms: 1/‖k‖ [B, H, S] of the keys that P is made of; whole
    buffers of M places in a static layer. pending: keys that came and whose y is not stored yet, or None.
    """

    keys: Any
    values: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # On the instance: torch.compile would notice an attribute that comes with the first pass.
        self.pending: Any = None
        self.inverse_norms: Any = None

    def begin_update(self, keys: Tensor) -> None:
        if self.pending is not None:
            raise RuntimeError(
                "This cache holds tokens that LUCID attention never preconditioned: was an earlier forward pass "
                "interrupted? Then start with a new cache. Or does this architecture change cached values before it "
                "attends (as DeepSeek's latent attention does)? Then it cannot use LUCID with a cache"
            )
        self.pending = keys

    def add_norms(self, key_map: KeyMap | None) -> None:
        """Keep the norms of the new keys, which only a layer of LUCID's reads. Between `update` and `store`."""
        with torch.no_grad():
            self.keep_norms(inverse_key_norms(self.pending, key_map))

    def keep_norms(self, norms: Tensor) -> None:
        """norms: [B, H, T] of the new keys."""
        raise NotImplementedError

    def offload(self) -> None:
        raise ValueError(
            "LUCID's cache cannot be offloaded: its values are written after `update`, when Transformers has already "
            "moved the layer away. Use cache_implementation=None ('dynamic') or 'static'"
        )


class LucidDynamicLayer(LucidLayer, DynamicLayer):
    """Keys, y and 1/‖k‖ that grow with the sequence, in place; see `GrowingTensor`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._growing = {name: GrowingTensor() for name in ("keys", "values", "inverse_norms")}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self.values = self.inverse_norms = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin_update(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append("keys", key_states), value_states

    def keep_norms(self, norms: Tensor) -> None:
        self._append("inverse_norms", norms)

    def store(self, y: Tensor) -> Tensor:
        """Keep y: [B, H, T, E] of the new tokens, and return that of all: [B, H, S + T, E]."""
        self.pending = None
        return self._append("values", y)

    def _append(self, name: str, new: Tensor) -> Tensor:
        grown = self._growing[name].append(getattr(self, name), new)
        setattr(self, name, grown)
        return grown

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        if self.keys is None:
            return
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms[:, :, : -abs(tokens_to_remove)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms.index_select(0, beam_idx.to(self.inverse_norms.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms[indices, ...]


class LucidStaticLayer(LucidLayer, StaticLayer):
    """Preallocated keys, y and 1/‖k‖ for torch.compile: no buffer changes its shape or address."""

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len=max_cache_len, **kwargs)
        # Whether no token came yet: known on the host, without waiting for `cumulative_length`.
        self.empty = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.inverse_norms = torch.zeros(self.keys.shape[:3], dtype=wide, device=self.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.inverse_norms)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin_update(key_states)
        # Zeros until `store` writes y: the decoding step reads the whole buffer before it knows the new y.
        super().update(key_states, torch.zeros_like(value_states))
        return self.keys, value_states

    def keep_norms(self, norms: Tensor) -> None:
        self.write(self.inverse_norms, norms)

    def position(self, T: int) -> Tensor:
        """[] int64: the place of the first of T new tokens, after `update`."""
        return self.cumulative_length - T

    def past_length(self, T: int) -> int:
        """The same as a number, on the host."""
        return 0 if self.empty else int(self.position(T))

    def store(self, y: Tensor) -> Tensor:
        """Keep y: [B, H, T, E] of the new tokens, and return the whole buffer: [B, H, M, E]."""
        self.pending, self.empty = None, False
        y = y.to(self.values.dtype)
        self.write(self.values, y)
        if torch.is_grad_enabled() and y.requires_grad:
            # The buffer keeps y without gradients; the returned copy has them.
            return self.values.index_copy(2, self._places(y), y)
        return self.values

    def write(self, buffer: Tensor, new: Tensor) -> None:
        buffer.index_copy_(2, self._places(new), new.detach())

    def _places(self, new: Tensor) -> Tensor:
        return torch.arange(new.shape[2], device=new.device) + self.position(new.shape[2])

    def reset(self) -> None:
        super().reset()
        self.pending, self.empty = None, True
        if self.is_initialized:
            self.inverse_norms.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.get_seq_length() > 0:
            self.inverse_norms = self.inverse_norms.index_select(0, beam_idx.to(self.inverse_norms.device))


def adopt_cache(cache: Any, config: Any) -> None:
    """Give a fresh cache of Transformers the layers of LUCID, in place, where the model has full attention.

    config: of the model. A layer that holds values of softmax attention is refused.
    """
    fill_layers(cache, config)
    if cache.offloading or isinstance(cache, QuantizedCache):
        kind = "quantized" if isinstance(cache, QuantizedCache) else "offloading"
        raise ValueError(
            f"past_key_values must not be {kind}: LUCID's values are known after `update`, in the attention"
        )
    for index in full_layers(layer_kinds(config)):
        # While assisted decoding exits early, the model has fewer layers than the cache.
        if index < len(cache.layers) and not isinstance(cache.layers[index], LucidLayer):
            cache.layers[index] = _lucid_layer(cache.layers[index])


def fill_layers(cache: Any, config: Any) -> None:
    """Give a fresh `DynamicCache()` the layers of `DynamicCache(config=config)`. Other kinds of caches are refused."""
    if isinstance(cache, EncoderDecoderCache):
        raise TypeError(
            "past_key_values must be a cache of one decoder, got EncoderDecoderCache: LUCID is for models of causal "
            "attention alone. Use DynamicCache(config=model.config)"
        )
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a Cache of Transformers, got {type(cache).__name__}")
    if isinstance(cache, DynamicCache) and not cache.layers and not cache.offloading:
        cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None


def _lucid_layer(layer: Any) -> LucidLayer:
    if type(layer) is StaticLayer and not layer.is_initialized:
        return LucidStaticLayer(max_cache_len=layer.max_cache_len)
    if type(layer) is StaticLayer and torch.compiler.is_compiling():
        raise ValueError(
            "this static cache was initialised before LUCID saw it, which a graph cannot change: call "
            "model.adopt_cache(cache) after its early_initialization"
        )
    if type(layer) is StaticLayer and not int(layer.cumulative_length):
        made = LucidStaticLayer(max_cache_len=layer.max_cache_len)
        made.lazy_initialization(layer.keys, layer.values)
        return made
    if type(layer) is DynamicLayer and not layer.get_seq_length():
        return LucidDynamicLayer()
    raise ValueError(
        "past_key_values must be a fresh cache, or one that this LUCID model filled: got a cache with values of "
        f"another attention, in a {type(layer).__name__}. What softmax attention filled cannot be continued: run its "
        "tokens again. PEFT's prefix tuning fills caches itself: use PromptTuningConfig, PromptEncoderConfig or LoRA"
    )
