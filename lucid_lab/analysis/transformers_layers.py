"""Layers of Transformers' architectures, watched where they look up their attention function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lucid_attention.models.attention import sees_whole_past
from lucid_attention.models.preconditioner import NAME, LucidSettings, uses_lucid

from .layer import Layer

# Arguments with which an architecture changes its scores in ways that analysis does not compute.
OTHER_SCORES = {"s_aux": "its softmax has sinks", "position_bias": "its scores have a bias"}


@contextmanager
def watch_interface(
    model: PreTrainedModel, key_mask: Tensor | None, show: Callable[[str, Callable[[int], Layer]], None]
) -> Iterator[None]:
    """Call `show` before every attention function that a module of this model calls.

    key_mask: [B, T] of the batch, or None. show: takes the name of the attention, and a function from the index of the
    layer to its `Layer`.
    """
    own = set(model.modules())
    original = AttentionInterface.get_interface

    @wraps(original)
    def get_interface(self: Any, *arguments: Any, **named: Any) -> Callable[..., Any]:
        attend = original(self, *arguments, **named)

        @wraps(attend)
        def watched(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Any:
            if module in own:
                name = _name_of(module, options)
                show(name, lambda index: _layer_of(index, name, module, q, k, v, key_mask, options))
            return attend(module, q, k, v, *others, **options)

        return watched

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = original


def _settings(module: nn.Module) -> LucidSettings:
    return LucidSettings.from_dict(getattr(module.config, NAME, None))


def _name_of(module: nn.Module, options: dict[str, Any]) -> str:
    settings = _settings(module)
    chosen = settings.layers is None or getattr(module, "layer_idx", None) in settings.layers
    if uses_lucid(module.config) and chosen and settings.strength > 0 and sees_whole_past(module, options):
        return "lucid"
    return "softmax" if options.get("sliding_window") is None else "sliding"


def _layer_of(
    index: int,
    name: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    options: dict[str, Any],
) -> Layer:
    """q: [B, H·G, T, D]; k, v: [B, H, T, *]; options: further arguments of the layer's attention function."""
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"layer {index} ({type(module).__name__}) is not causal: expected a decoder")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"layer {index} got a cache: analysis expects whole texts, one in each row")
    settings = _settings(module)
    return Layer(
        index=index,
        attention=name,
        q=q,
        k=k,
        v=v,
        key_mask=key_mask,
        scale=options.get("scaling"),
        preconditioned=name == "lucid",
        sharpness=settings.sharpness,
        strength=settings.strength if name == "lucid" else 1.0,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        unlike=next((why for key, why in OTHER_SCORES.items() if options.get(key) is not None), None),
    )
