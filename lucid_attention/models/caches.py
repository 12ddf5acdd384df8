"""Caches that a user made without the model's configuration."""

from typing import Any

from transformers import DynamicCache, EncoderDecoderCache


def adopt_cache(cache: Any, config: Any) -> None:
    """Give a fresh `DynamicCache()` the layers of `DynamicCache(config=config)`, in place.

    A cache that has layers already stays as it is: the model refuses layers that are not its own.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise TypeError(
            "past_key_values must be a cache of one decoder, got EncoderDecoderCache: LUCID is for models of causal "
            "attention alone. Use DynamicCache(config=model.config)"
        )
    if isinstance(cache, DynamicCache) and not cache.layers and not cache.offloading:
        cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None
