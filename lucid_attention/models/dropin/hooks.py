"""Wrappers around functions of Transformers, for needs of LUCID that Transformers has no interface for.

`enable_lucid` installs them once. They change nothing for configurations without LUCID.
"""

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils

from ..caches import adopt_cache
from ..decoder.configuration import LucidConfig
from ..saved import is_sealed, refuse_weight_readers, unseal, write_sealed
from .cache import LAYER_TYPE
from .masks import DOCUMENTS, given_documents
from .quantized import make_quantized
from .settings import (
    NAME,
    CompositeName,
    LucidName,
    LucidSettings,
    check_layers,
    drop_settings,
    parts_of,
    put_settings,
    uses_lucid,
)

logger = logging.getLogger(__name__)

MARK = "_wrapped_by_lucid_attention"
SUPPORTED = "5.20 and later of 5.x"


class Hook(NamedTuple):
    """A function of Transformers that is wrapped. parameters: those that it has in the supported releases."""

    owner: Any
    name: str
    parameters: tuple[str, ...]
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __str__(self) -> str:
        owner = self.owner.__name__ if inspect.ismodule(self.owner) else f"transformers.{self.owner.__name__}"
        return f"{owner}.{self.name}"


def install_hooks() -> None:
    """Wrap the functions. Further calls change nothing."""
    for hook in HOOKS:
        check_hook(hook)
    for hook in HOOKS:
        wrap(hook.owner, hook.name, hook.wrapper)


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a function, a method or a class method, once."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return
    is_classmethod = isinstance(inspect.getattr_static(owner, name), classmethod)
    function = original.__func__ if is_classmethod else original
    wrapped = wraps(function)(wrapper(function))
    setattr(wrapped, MARK, True)
    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)


def check_hook(hook: Hook) -> None:
    """Refuse a Transformers that does not have this function, or has it with other parameters."""
    function = getattr(hook.owner, hook.name, None)
    found = None if function is None else tuple(inspect.signature(function).parameters)
    if found != hook.parameters:
        problem = "does not have" if found is None else f"has with the parameters {', '.join(found)}"
        raise RuntimeError(
            f"LUCID needs the function {hook}({', '.join(hook.parameters)}), which Transformers "
            f"{transformers.__version__} {problem}. This release of lucid-attention supports Transformers {SUPPORTED}: "
            "install one of those, or a newer lucid-attention"
        )


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


def _choose_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers looks up attn_implementation for a model in this function, when the model is made and later."""

    def check(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        _copy_part(config, attn_implementation)
        saved = getattr(config, NAME, None)
        if attn_implementation == NAME or (attn_implementation is None and saved is not None):
            check_architecture(self)
            watch_calls(self)
            original(self, NAME, *args, **kwargs)
            settings = attn_implementation.settings if isinstance(attn_implementation, LucidName) else saved
            if settings is not saved or not isinstance(config._attn_implementation, LucidName):
                put_settings(config, LucidSettings.from_dict(settings))
            # Continuous batching must not switch this model to flash attention: it asks for this attribute first.
            self._supports_flash_attn = False
            return config._attn_implementation
        if saved is not None:
            _leave_lucid(self, attn_implementation)
        elif attn_implementation is None:
            _check_source(self)
        found = original(self, attn_implementation, *args, **kwargs)
        for name, part in parts_of(config).items():
            if uses_lucid(part):
                return CompositeName(found, name, part)
        return found

    return check


def _copy_part(config: Any, implementation: Any) -> None:
    """Settings of the part of another configuration, if that is where this implementation was taken from."""
    if not isinstance(implementation, CompositeName) or not uses_lucid(implementation.config):
        return
    part = parts_of(config).get(implementation.part)
    if part is not None and part is not implementation.config:
        put_settings(part, LucidSettings.from_dict(getattr(implementation.config, NAME, None)))


def _check_source(model: Any) -> None:
    """Refuse a configuration without LUCID for the weights of a LUCID model, if nobody asked for softmax attention.

    Transformers reads no config.json where the caller of `from_pretrained` gives a configuration.
    """
    config = model.config
    source = getattr(config, "name_or_path", None)
    if not source or isinstance(config, LucidConfig) or any(map(uses_lucid, parts_of(config).values())):
        return
    if is_sealed(source):
        raise ValueError(
            f"{source!r} holds a model with LUCID attention, and the given configuration has none: leave out config=, "
            f"or make it from AutoConfig.from_pretrained({source!r}). Softmax attention gives other outputs: pass "
            "attn_implementation='sdpa' for it"
        )


def _leave_lucid(model: Any, implementation: str) -> None:
    """The user asks for another attention by its name."""
    name = type(model).__name__
    if implementation.startswith("paged|"):
        raise ValueError(
            f"attn_implementation={implementation!r} is not possible for {name}, which has LUCID: it keeps values, "
            "LUCID needs P⁻¹v. Use generate(), or vLLM with the plug-in"
        )
    logger.warning(
        "%s has LUCID attention, and attn_implementation=%r replaces it: softmax attention gives other outputs. "
        "The model will be saved without LUCID",
        name,
        str(implementation),
    )
    drop_settings(model.config)
    model.__dict__.pop("_supports_flash_attn", None)


def watch_calls(model: Any) -> None:
    """Let a model, and the models in it, see the caches and the documents that they are called with."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _adopt_caches not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_adopt_caches, with_kwargs=True)
            if _takes_any_argument(module):
                module.register_forward_pre_hook(_tell_documents, with_kwargs=True)


def _adopt_caches(model: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
    config = model.config.get_text_config(decoder=True)
    if kwargs.get("cache") is not None and uses_lucid(config):
        raise ValueError("LUCID has no continuous batching in Transformers: use generate(), or vLLM with the plug-in")
    # By position only in calls by hand: generate() and every tool name the argument.
    for given in (*args, *kwargs.values()):
        if isinstance(given, cache_utils.Cache) and uses_lucid(config):
            adopt_cache(given, config)
    return None


def _tell_documents(model: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Read the documents of a pass once, for all layers. Without position_ids there are none, and nothing is read."""
    if torch.compiler.is_compiling() or not uses_lucid(model.config) or model.base_model is not model:
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    positions = kwargs.get("position_ids")
    # Positions of several axes belong to a model that makes others for its layers.
    readable = tokens is not None and len(args) <= 1 and (positions is None or positions.ndim == 2)
    if not readable or DOCUMENTS in kwargs:
        return None
    return args, {**kwargs, DOCUMENTS: given_documents(tokens.shape[0], tokens.shape[1], kwargs)}


def _takes_any_argument(model: Any) -> bool:
    """Whether the model hands arguments that it does not know to its layers."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


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


def _write(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers does not save attn_implementation: without a mark a checkpoint would load with softmax attention."""

    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        configs = [self, *parts_of(self).values()]
        for config in configs:
            # Transformers sets names of parts without a call that this package sees.
            if not uses_lucid(config):
                drop_settings(config)
            elif getattr(config, NAME, None) is None:
                put_settings(config, LucidSettings())
        write = write_sealed if any(map(uses_lucid, configs)) else original
        write(self, json_file_path, use_diff)

    return to_json_file


def _read(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_json_file(cls: Any, json_file: Any) -> Any:
        content = original(cls, json_file)
        if not isinstance(content, dict):
            return content
        sealed, content = content, unseal(content)
        if content is not sealed:
            refuse_weight_readers()
        parts = [value for key, value in content.items() if key.endswith("_config") and isinstance(value, dict)]
        for part in (content, *parts):
            LucidSettings.from_dict(part.get(NAME))
        return content

    return from_json_file


HOOKS = (
    Hook(cache_utils, "get_layer_types_and_kwargs", ("config",), _choose_cache_layers),
    Hook(
        PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        ("self", "attn_implementation", "is_init_check", "allow_all_kernels"),
        _choose_attention,
    ),
    Hook(
        cache_utils.QuantizedCache,
        "__init__",
        ("self", "backend", "config", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length"),
        make_quantized,
    ),
    Hook(PreTrainedConfig, "to_json_file", ("self", "json_file_path", "use_diff"), _write),
    # A class method, whose signature has no cls.
    Hook(PreTrainedConfig, "_dict_from_json_file", ("json_file",), _read),
)
