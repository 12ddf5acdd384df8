"""Watch a forward pass: a function gets the inputs of every layer of attention, one layer at a time.

Our modules are watched at `attend`, Transformers' models where they look up their attention function. Both are restored
when the pass ends, also by an error.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.nn.causal import CausalAttention

from .layer import Layer

Consumer = Callable[[Layer], None]
Inputs = Tensor | Mapping[str, Any]


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
    ours = [module for module in model.modules() if isinstance(module, CausalAttention)]
    shown_layers = _ShownLayers(consume, layers)
    with ExitStack() as contexts:
        contexts.enter_context(_evaluating(model))
        contexts.enter_context(torch.no_grad())
        if ours:
            contexts.enter_context(_watch_modules(ours, shown_layers))
        elif _is_transformers_model(model):
            from .transformers_layers import watch_interface

            contexts.enter_context(watch_interface(model, _key_mask(inputs), shown_layers.show))
        else:
            raise ValueError(
                f"{type(model).__name__} has no attention that could be analysed: expected a module that holds some of "
                f"{', '.join(ATTENTIONS)}, or a decoder of Transformers"
            )
        _run(model, inputs)
    shown_layers.check()
    return shown_layers.names


def _run(model: nn.Module, inputs: Inputs) -> None:
    if not _is_transformers_model(model):
        model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    # Without its head: the logits of a long text are larger than anything that analysis needs.
    body: Any = model.base_model
    body(**{"use_cache": False, **arguments})


def _is_transformers_model(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _key_mask(inputs: Inputs) -> Tensor | None:
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"attention_mask must be [B, T], got shape {list(mask.shape)}")
    return None if mask is None or bool(mask.bool().all()) else mask.bool()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _ShownLayers:
    """Counts the layers that attend, and shows the chosen ones to `consume`."""

    def __init__(self, consume: Consumer, layers: Sequence[int] | None) -> None:
        self.names: list[str] = []
        self._consume, self._layers = consume, layers

    def show(self, name: str, make: Callable[[int], Layer]) -> None:
        """Called when the next layer is about to attend. make: builds its `Layer` from its index."""
        index = len(self.names)
        self.names.append(name)
        if self._layers is None or index in self._layers:
            self._consume(make(index))

    def check(self) -> None:
        """Refuse indices of layers that the model does not have, and a model whose attention was never seen."""
        if not self.names:
            raise ValueError(
                "no attention was seen: expected a model that attends through modules of this library or through "
                "Transformers' AttentionInterface"
            )
        for layer in self._layers or ():
            if not 0 <= layer < len(self.names):
                raise ValueError(f"layers must be 0 to {len(self.names) - 1}, of this model, got {layer}")


@contextmanager
def _watch_modules(modules: list[CausalAttention], shown: _ShownLayers) -> Iterator[None]:
    def watch(module: CausalAttention) -> None:
        attend = module.attend

        def watched(*arguments: Any) -> Any:
            name = _name_of(module)
            shown.show(name, lambda index: _layer_of(module, name, index, *arguments))
            return attend(*arguments)

        # Set on the instance, past nn.Module.__setattr__: the class stays unchanged.
        vars(module)["attend"] = watched

    try:
        for module in modules:
            watch(module)
        yield
    finally:
        for module in modules:
            vars(module).pop("attend", None)


def _name_of(module: CausalAttention) -> str:
    names = [name for name, kind in ATTENTIONS.items() if type(module) is kind]
    return names[0] if names else type(module).__name__


def _layer_of(
    module: CausalAttention,
    name: str,
    index: int,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Any,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Layer:
    if past is not None or cu_seqlens is not None:
        got = "a cache" if past is not None else "packed documents"
        raise ValueError(f"layer {index} got {got}: analysis expects whole texts, one in each row")
    inputs = module.analysis_inputs(x, q, k, key_mask)
    if inputs is None:
        raise ValueError(
            f"layer {index} has attention {name!r}, which has no softmax that analysis knows (see `analysis_inputs` of "
            f"{type(module).__name__}), so no weights and no P. Leave the layer out with layers=..."
        )
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "key_mask": key_mask}
    return Layer(index=index, attention=name, **(given | inputs))
