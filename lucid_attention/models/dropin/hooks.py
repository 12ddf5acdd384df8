"""Wrappers around functions of Transformers, for needs of LUCID that Transformers has no interface for.

`enable_lucid` installs them once. They change nothing for configurations without LUCID.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ..caches import adopt_cache
from ..decoder.configuration import LucidConfig
from .cache import LAYER_TYPE
from .settings import NAME, LucidSettings, check_layers, uses_lucid

# The attn_implementation in a saved configuration. A process without this package stops and prints it.
SAVED_AS = "lucid (pip install lucid-attention, and call lucid_attention.enable_lucid() before loading)"
MARK = "_wrapped_by_lucid_attention"


def install_hooks() -> None:
    """Wrap the functions. Further calls change nothing."""
    _wrap(cache_utils, "get_layer_types_and_kwargs", _choose_cache_layers)
    _wrap(PreTrainedModel, "_check_and_adjust_attn_implementation", _refuse_architectures)
    _wrap(PreTrainedConfig, "to_dict", _save_implementation)
    _wrap(PreTrainedConfig, "__post_init__", _restore_implementation)
    _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _refuse_continuous_batching)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, MARK):
        wrapped = wraps(original)(wrapper(original))
        setattr(wrapped, MARK, True)
        setattr(owner, name, wrapped)


def layer_types(config: Any) -> list[str]:
    """The kind of attention of every layer, from which Transformers makes caches."""
    read = cache_utils.get_layer_types_and_kwargs
    return list(getattr(read, "__wrapped__", read)(config)[0])


def _choose_cache_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """generate() and every model choose the classes of cache layers through this function."""

    def choose(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
        kinds, options = original(config)
        if not uses_lucid(config):
            return kinds, options
        if getattr(config, "num_kv_shared_layers", None):
            raise ValueError(
                "LUCID needs keys and values of its own in every layer: expected num_kv_shared_layers = 0, got "
                f"{config.num_kv_shared_layers}"
            )
        check_layers(LucidSettings.from_dict(getattr(config, NAME, None)), kinds)
        full = [kind == "full_attention" for kind in kinds]
        kinds = [LAYER_TYPE if is_full else kind for is_full, kind in zip(full, kinds, strict=True)]
        return kinds, [{"config": config} if is_full else one for is_full, one in zip(full, options, strict=True)]

    return choose


def _refuse_architectures(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers looks up attn_implementation for a model in this function."""

    def check(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation == NAME:
            check_architecture(self)
            watch_caches(self)
        return original(self, attn_implementation, *args, **kwargs)

    return check


def watch_caches(model: Any) -> None:
    """Let a model, and the models in it, see the caches that they are called with."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _adopt_caches not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_adopt_caches, with_kwargs=True)


def _adopt_caches(model: Any, args: Any, kwargs: Any) -> None:
    # By position only in calls by hand: generate() and every tool name the argument.
    config = model.config.get_text_config(decoder=True)
    for cache in (*args, *kwargs.values()):
        if isinstance(cache, cache_utils.Cache) and uses_lucid(config):
            adopt_cache(cache, config)


def check_architecture(model: Any) -> None:
    """Refuse our own decoder, models that compute their attention themselves, and encoders with decoders."""
    name = type(model).__name__
    if isinstance(model.config, LucidConfig):
        raise ValueError(f"{name} chooses its attention in its configuration: LucidConfig(attention='lucid')")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{name} computes its attention itself and cannot use LUCID: expected a model that goes through "
            "Transformers' AttentionInterface"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder with a decoder; LUCID is for models of causal attention alone")


def _save_implementation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers does not save attn_implementation: without it a checkpoint would load with softmax attention."""

    def to_dict(self: Any) -> dict[str, Any]:
        written = original(self)
        parts = {name: SAVED_AS for name in self.sub_configs if uses_lucid(getattr(self, name, None))}
        if uses_lucid(self):
            written["attn_implementation"] = SAVED_AS
        elif parts:
            # By the names of parts: a single value of a composite configuration would override all of its parts.
            written["attn_implementation"] = parts
        return written

    return to_dict


def _restore_implementation(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: Any, **kwargs: Any) -> None:
        saved = kwargs.get("attn_implementation")
        if saved == SAVED_AS:
            kwargs["attn_implementation"] = NAME
        elif isinstance(saved, dict):
            kwargs["attn_implementation"] = {
                part: NAME if value == SAVED_AS else value for part, value in saved.items()
            }
        original(self, **kwargs)
        if uses_lucid(self):
            LucidSettings.from_dict(getattr(self, NAME, None))

    return post_init


def _refuse_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if uses_lucid(model.config.get_text_config(decoder=True)):
            raise ValueError(
                "Continuous batching is not possible with LUCID: its paged cache keeps values, LUCID needs P⁻¹v, and "
                "Transformers would switch to softmax attention. Use generate(), or "
                "model.set_attn_implementation('sdpa') if softmax attention is what you want"
            )
        return original(self, model, *args, **kwargs)

    return switch
