"""Run a model once; a function gets the inputs of every layer of attention, one layer at a time."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.nn.causal import CausalAttention

from .layer import Layer

Consumer = Callable[[Layer], None]
Inputs = Tensor | Mapping[str, Any]
# Called before a layer attends, with the name of its attention and a function from its index to its `Layer`.
Show = Callable[[str, Callable[[int], Layer]], None]
# Arguments with which an architecture changes its scores in ways that analysis does not compute.
OTHER_SCORES = {"s_aux": "its softmax has sinks", "position_bias": "its scores have a bias"}


def visit_layers(
    model: nn.Module, inputs: Inputs, consume: Consumer, *, layers: Sequence[int] | None = None
) -> list[str]:
    """Run a model once and show its layers of attention to `consume`, one at a time, without gradients.

    Args:
        model: a module that holds modules of `ATTENTIONS`, or a decoder of Transformers. It runs in evaluation mode.
        inputs: ids [B, T], or keyword arguments of the model (input_ids, attention_mask).
        consume: called with a `Layer` during the pass. A layer that it does not keep is freed.
        layers: indices of the layers to show, counted from 0 in the order in which they attend; None for all.

    Returns:
        The names of the attentions of all layers.
    """
    names: list[str] = []

    def show(name: str, make: Callable[[int], Layer]) -> None:
        index = len(names)
        names.append(name)
        if layers is None or index in layers:
            consume(make(index))

    ours = [module for module in model.modules() if isinstance(module, CausalAttention)]
    transformers = sys.modules.get("transformers")
    of_transformers = transformers is not None and isinstance(model, transformers.PreTrainedModel)
    if not ours and not of_transformers:
        raise ValueError(
            f"{type(model).__name__} has no attention that could be analysed: expected a module that holds some of "
            f"{', '.join(ATTENTIONS)}, or a decoder of Transformers"
        )
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    watched = _watch_modules(ours, show) if ours else _watch_transformers(model, _key_mask(arguments), show)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), watched:
            if of_transformers:
                # Without its head: the logits of a long text are larger than anything that analysis needs.
                body: Any = model.base_model
                body(**{"use_cache": False, **arguments})
            else:
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    finally:
        for module in training:
            module.training = True
    if not names:
        raise ValueError(
            "no attention was seen: expected a model that attends through modules of this library or through "
            "Transformers' AttentionInterface"
        )
    for layer in layers or ():
        if not 0 <= layer < len(names):
            raise ValueError(f"layers must be 0 to {len(names) - 1}, of this model, got {layer}")
    return names


def _key_mask(arguments: Mapping[str, Any]) -> Tensor | None:
    mask = arguments.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"attention_mask must be [B, T], got shape {list(mask.shape)}")
    return None if mask is None or bool(mask.bool().all()) else mask.bool()


@contextmanager
def _watch_modules(modules: list[CausalAttention], show: Show) -> Iterator[None]:
    """Watch modules of this library at `attend`."""

    def watch(module: CausalAttention) -> None:
        attend = module.attend
        name = next((name for name, kind in ATTENTIONS.items() if type(module) is kind), type(module).__name__)

        def watched(x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Any, key_mask: Any, cu_seqlens: Any) -> Any:
            def make(index: int) -> Layer:
                if past is not None or cu_seqlens is not None:
                    raise ValueError(_not_whole(index, "a cache" if past is not None else "packed documents"))
                inputs = module.analysis_inputs(x, q, k, key_mask)
                if inputs is None:
                    raise ValueError(
                        f"layer {index} has attention {name!r}, which has no softmax that analysis knows (see "
                        f"`analysis_inputs` of {type(module).__name__}), so no weights and no P. Leave the layer out "
                        "with layers=..."
                    )
                given: dict[str, Any] = {"q": q, "k": k, "v": v, "key_mask": key_mask}
                return Layer(index=index, attention=name, **(given | inputs))

            show(name, make)
            return attend(x, q, k, v, past, key_mask, cu_seqlens)

        # Set on the instance, past nn.Module.__setattr__: the class stays unchanged.
        vars(module)["attend"] = watched

    try:
        for module in modules:
            watch(module)
        yield
    finally:
        for module in modules:
            vars(module).pop("attend", None)


def _not_whole(index: int, got: str) -> str:
    return f"layer {index} got {got}: analysis expects whole texts, one in each row"


@contextmanager
def _watch_transformers(model: Any, key_mask: Tensor | None, show: Show) -> Iterator[None]:
    """Watch a model of Transformers at its attention functions, by local entries in the table of these functions.

    key_mask: [B, T] of the batch, or None.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    own = set(model.modules())
    configs = [module.config for module in own if getattr(module, "config", None) is not None]
    names = {str(config._attn_implementation) for config in configs if config._attn_implementation is not None}
    stock = {name: FUNCTIONS.get(name) for name in names}

    def watching(name: str) -> Callable[..., Any]:
        def watched(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Any:
            if module in own:
                given = {"q": q, "k": k, "v": v, "key_mask": key_mask, **_lucid_settings(module, k)}
                sliding = options.get("sliding_window") is not None
                attention = "lucid" if given["preconditioned"] else "sliding" if sliding else "softmax"
                given["attention"] = attention
                show(attention, lambda index: _layer_of(index, module, options, given))
            # "eager" is not in the table: every architecture has its own.
            attend = stock[name] or sys.modules[type(module).__module__].eager_attention_forward
            return attend(module, q, k, v, *others, **options)

        return watched

    for name in names:
        FUNCTIONS[name] = watching(name)
    try:
        yield
    finally:
        for name in names:
            del FUNCTIONS[name]


def _lucid_settings(module: Any, k: Tensor) -> dict[str, Any]:
    """The fields of `Layer` about P: all that analysis knows of LUCID in attention modules of Transformers."""
    own = getattr(module, "lucid", None)
    found = own(k) if isinstance(own, nn.Module) else {}
    on = bool(found) and bool(torch.as_tensor(found["strength"]).any())
    return {"sharpness": None, **found, "preconditioned": on, "strength": found["strength"] if on else 1.0}


def _layer_of(index: int, module: nn.Module, options: Mapping[str, Any], given: dict[str, Any]) -> Layer:
    """options: further arguments of the layer's attention function. given: fields of `Layer`."""
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"layer {index} ({type(module).__name__}) is not causal: expected a decoder")
    if given["k"].shape[2] != given["q"].shape[2]:
        raise ValueError(_not_whole(index, "a cache"))
    unlike = next((why for key, why in OTHER_SCORES.items() if options.get(key) is not None), None)
    given |= {"scale": options.get("scaling"), "window": options.get("sliding_window"), "unlike": unlike}
    return Layer(index=index, softcap=options.get("softcap"), **given)
