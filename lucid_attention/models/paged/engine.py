"""Every part of Transformers' continuous batching that this package touches, most of them private, and nothing else.

`install` wraps six functions, and `paged_layer` reads a layer of the paged cache. `moved_parts` compares what they
need with the Transformers at hand: where a release has moved a part, continuous batching is refused by its name, and
everything else works.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import transformers
from torch import Tensor

from ..decoder.configuration import LucidConfig
from ..dropin.hooks import SUPPORTED, wrap
from ..dropin.settings import NAME, uses_lucid
from .requests import Plan, Request

ENGINE = "transformers.generation.continuous_batching"
FULL_ATTENTION = "full_attention"
# Keyword arguments that the engine passes to the attention function, besides those of the architecture.
ARGUMENTS = (
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "write_index",
    "read_index",
    "block_table",
    "logits_indices",
    "logits_processor_args",
)
# The beginning of what is said about a request that cannot be served.
REFUSED = "the request cannot be served: "
# Attributes of a manager and of a cache: the choice of attention that they were made for, the options
# of every layer, the tokens for which an empty cache has room, the plan of the pass.
MADE_FOR, OPTIONS, ROOM, PLAN = "_lucid_made_for", "_lucid_options", "_lucid_room", "_lucid_plan"


def locate(path: str) -> Any:
    """A part of the engine: its module there, and the name in it. Raises ImportError or AttributeError."""
    module, _, name = path.partition(".")
    found = import_module(f"{ENGINE}.{module}")
    return attrgetter(name)(found) if name else found


def is_paged(cache: Any) -> bool:
    """Whether this is the cache of continuous batching."""
    return cache is not None and isinstance(cache, locate("cache.PagedAttentionCache"))


class PagedLayer(NamedTuple):
    """One layer of the paged cache, and the requests of this pass.

    keys, values: [rows, H, D], views of the cache, written in place; write: [T] int64, rows of the new tokens.
    """

    keys: Tensor
    values: Tensor
    write: Tensor
    plan: Plan


def paged_layer(cache: Any, index: int, arguments: dict[str, Any], options: dict[str, Any]) -> PagedLayer:
    """A layer with full attention. arguments: `ARGUMENTS` of this pass. options: of LUCID, the same for a whole cache.

    Raises:
        ValueError: for a cache that this layer filled with other options.
    """
    _check_cache(cache)
    before = vars(cache).setdefault(OPTIONS, {}).setdefault(index, options)
    if before != options:
        raise ValueError(
            f"This cache was begun with {before} and cannot continue with {options}: LUCID's settings changed while "
            "requests were running. Stop the manager and make a new one"
        )
    allocator = cache.layer_to_allocator[index]
    if arguments.get("block_table") is not None or allocator.layer_type != FULL_ATTENTION:
        raise ValueError(f"layer {index} needs full attention without a block table, got {allocator.layer_type!r}")
    keys, values = allocator._kv_token_views[index]
    return PagedLayer(keys, values, arguments["write_index"][allocator.index], _plan(cache, allocator, arguments))


def _plan(cache: Any, allocator: Any, arguments: dict[str, Any]) -> Plan:
    """The plan of this pass, made by its first layer. All layers of a pass get the same dictionary of borders."""
    borders = arguments["cu_seq_lens_k"]
    made = getattr(cache, PLAN, None)
    if made is None or made[0] is not borders:
        requests = read_requests(arguments["cu_seq_lens_q"], borders[allocator.layer_type])
        made = borders, Plan(requests, cache.device, arguments["read_index"][allocator.index])
        setattr(cache, PLAN, made)
    return made[1]


def _check_cache(cache: Any) -> None:
    check_parts()
    if not is_paged(cache):
        raise ValueError(f"cache must be the PagedAttentionCache of continuous batching, got {type(cache).__name__}")


def read_requests(new: Tensor, all_tokens: Tensor) -> list[Request]:
    """The requests of a step. new, all_tokens: [n + 1] borders of their new tokens, and of those with their past."""
    starts, ends = new.tolist(), all_tokens.tolist()
    return [Request(*borders) for borders in zip(starts[:-1], starts[1:], ends[:-1], ends[1:], strict=True)]


def update_window(
    cache: Any, index: int, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor, Plan]:
    """Write to a layer with a sliding window, which keeps values.

    key, value: [1, H, T, *] -> what the requests see, [1, H, N, *], one behind the other, and their places in it.
    """
    _check_cache(cache)
    arguments = dict(arguments)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=arguments)
    requests = read_requests(arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"])
    return key, value, Plan(requests, key.device)


class Part(NamedTuple):
    """A part of the engine. read: what is looked at; expected: what that is in the supported releases."""

    path: str
    read: Callable[[Any], Any]
    expected: Any


class Hook(NamedTuple):
    """A function of the engine that is wrapped. parameters: those that it has in the supported releases."""

    owner: str
    name: str
    parameters: tuple[str, ...]
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _says(*lines: str) -> Callable[[Any], bool]:
    """Whether the source has these lines: for attributes that exist in instances only."""
    return lambda owner: all(line in inspect.getsource(owner) for line in lines)


def _makes_masks(is_needed: Any) -> list[bool]:
    return [is_needed(SimpleNamespace(_attn_implementation=name)) for name in (NAME, "eager")]


PARTS = (
    Part(
        "cache.PagedAttentionCache.update",
        _parameters,
        ("self", "key_states", "value_states", "layer_idx", "kwargs"),
    ),
    Part(
        "cache.PagedAttentionCache",
        _says("self.layer_to_allocator: dict", "self.config = config", "self.device = device"),
        True,
    ),
    Part(
        "cache_allocators.FullAttentionCacheAllocator",
        _says(
            "self._kv_token_views[layer_idx] = (k_view, v_view)", "v_cache.index_copy_(0, write_index, value_states)"
        ),
        True,
    ),
    Part("cache_allocators.FullAttentionCacheAllocator.layer_type", str, FULL_ATTENTION),
    Part("model_runner.infer_max_single_request_tokens", _parameters, ("cache",)),
    Part("input_outputs.PagedAttentionArgs", lambda found: set(ARGUMENTS) <= set(found.__annotations__), True),
    Part("utils.attn_mask_is_needed", _makes_masks, [False, False]),
)


def moved_parts() -> list[str]:
    """The parts that this Transformers does not have in the expected form, each with what it has instead."""
    moved = []
    for part in (*PARTS, *(Part(f"{hook.owner}.{hook.name}", _parameters, hook.parameters) for hook in HOOKS)):
        try:
            found = part.read(locate(part.path))
        except (ImportError, AttributeError, TypeError, OSError) as error:
            found = f"nothing ({error})"
        if found != part.expected:
            moved.append(f"{ENGINE}.{part.path}: expected {part.expected}, got {found}")
    return moved


_checked: list[str] | None = None


def check_parts() -> None:
    """Refuse continuous batching if a part has moved."""
    global _checked
    if _checked is None:
        _checked = moved_parts()
    if _checked:
        raise RuntimeError(
            f"LUCID cannot use the continuous batching of Transformers {transformers.__version__}, which has moved "
            f"{'; '.join(_checked)}. This release of lucid-attention supports it with Transformers {SUPPORTED}: "
            "install one of those, or use generate()"
        )


def install() -> None:
    """Wrap the functions of Transformers. Further calls change nothing; a function that is not there stays so."""
    for hook in HOOKS:
        try:
            owner = locate(hook.owner)
        except (ImportError, AttributeError):
            continue
        if hasattr(owner, hook.name):
            wrap(owner, hook.name, hook.wrapper)


def _choice(model: Any) -> Any:
    """The attention of a model with LUCID, by which managers are told apart; None for other models."""
    config = model.config.get_text_config(decoder=True)
    if isinstance(config, LucidConfig):
        return "LucidConfig"
    return NAME if uses_lucid(config) else None


def _keep_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """A manager switches its model to an attention with a paged cache in this function; LUCID has one already."""

    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        choice = _choice(model)
        if vars(self).setdefault(MADE_FOR, choice) != choice:
            raise ValueError(
                f"This manager of continuous batching was made for attention {getattr(self, MADE_FOR) or 'softmax'!r}, "
                f"and the model has {choice or 'softmax'!r} now: its cache holds other values. Call "
                "model.destroy_cached_continuous_batching_manager() first"
            )
        if choice is None:
            return original(self, model, *args, **kwargs)
        check_parts()
        if hasattr(model, "check_paged"):
            model.check_paged()
        return None

    return switch


def _check_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        config = self.continuous_batching_config
        if _choice(model) is None:
            return
        compiled = config.varlen_compile_config is not None or config.decode_compile_config is not None
        if any(config.cuda_graph_booleans) or compiled:
            raise ValueError(
                "LUCID's paged attention asks which requests are in a batch, and cannot be part of a CUDA graph or of "
                "a compiled one: leave use_cuda_graph, default_compile_level and the compile configurations out of "
                "the ContinuousBatchingConfig"
            )

    return initialize


def _count_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine asks in this function which layers keep everything and which a window."""

    def group(config: Any) -> dict[str, list[int]]:
        if isinstance(config, LucidConfig):
            return {FULL_ATTENTION: list(range(config.num_hidden_layers))}
        return original(config)

    return group


def _plan_no_masks(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine plans memory for T × S masks, which LUCID does not use."""

    def initialize(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if isinstance(config, LucidConfig) or uses_lucid(config):
            self.num_attention_masks = 0

    return initialize


def _check_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine takes a request in here, and fails it alone if this raises. Later it would fail all of them."""

    def add(self: Any, state: Any) -> None:
        config = self.cache.config
        if isinstance(config, LucidConfig) or uses_lucid(config):
            if not hasattr(self.cache, ROOM):
                # The first request comes to an empty cache.
                setattr(self.cache, ROOM, locate("model_runner.infer_max_single_request_tokens")(self.cache))
            room = getattr(self.cache, ROOM)
            prompt, new = len(state.initial_tokens), state.max_new_tokens
            if not prompt:
                raise ValueError(f"{REFUSED}its prompt has no tokens")
            if new is not None and (new < 1 or prompt + new > room):
                raise ValueError(
                    f"{REFUSED}expected at least 1 new token, and at most {room} in all, which is the size of the "
                    f"cache, got a prompt of {prompt} tokens and {new} new ones"
                )
        original(self, state)

    return add


_GROUPS = "group_layers_by_attn_type"
_MANAGER = "continuous_api.ContinuousBatchingManager"
HOOKS = (
    Hook(_MANAGER, "switch_to_cb_friendly_attn", ("self", "model", "auto_switch_to_flash"), _keep_attention),
    Hook(
        _MANAGER,
        "__init__",
        ("self", "model", "generation_config", "continuous_batching_config", "workload_hints"),
        _check_manager,
    ),
    Hook("scheduler.Scheduler", "add_waiting_request", ("self", "state"), _check_request),
    Hook("cache", _GROUPS, ("config",), _count_layers),
    Hook("initialization", _GROUPS, ("config",), _count_layers),
    Hook(
        "cache.PagedAttentionMemoryHandler",
        "__init__",
        (
            "self",
            "config",
            "cb_config",
            "dtype",
            "bytes_per_sector",
            "tokens_per_sector",
            "bytes_per_block",
            "attn_types",
            "model_supports_logits_to_keep",
        ),
        _plan_no_masks,
    ),
)
