"""Look into a forward pass: what every layer attends with is shown to a function, layer by layer, and kept nowhere.

Modules of ours are watched at `attend`, Transformers' models where they ask for their attention function. Both are put
back when the pass ends, however it ends.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.attention import ATTENTIONS
from ..nn.attention.diff import DiffAttention
from ..nn.attention.lucid import LucidAttention
from ..nn.attention.lucid_path import LucidPathAttention
from ..nn.attention.path import PathAttention
from ..nn.attention.sliding import SlidingAttention
from ..nn.attention.softmax import SoftmaxAttention
from ..nn.causal import CausalAttention
from ..ops.lucid.api import normalize_for_readout
from .layer import Layer

Consumer = Callable[[Layer], None]
Inputs = Tensor | Mapping[str, Any]


def visit_layers(
    model: nn.Module, inputs: Inputs, consume: Consumer, *, layers: Sequence[int] | None = None
) -> list[str]:
    """Run a model once and show its layers of attention to `consume`, one at a time, without gradients.

    Args:
        model: a module that holds modules of `ATTENTIONS`, or a decoder of Transformers. It runs as in evaluation.
        inputs: ids [B, T], or keyword arguments of the model (input_ids, attention_mask).
        consume: gets a `Layer` during the pass. What it does not keep is gone.
        layers: which, counted from 0 in the order in which they attend; None for all.

    Returns:
        The names of the attentions of all layers.
    """
    ours = [module for module in model.modules() if isinstance(module, CausalAttention)]
    seen = _Seen(consume, layers)
    with ExitStack() as watched:
        watched.enter_context(_evaluating(model))
        watched.enter_context(torch.no_grad())
        if ours:
            watched.enter_context(_watch_modules(ours, seen))
        elif _is_transformers_model(model):
            from .transformers_layers import watch_interface

            watched.enter_context(watch_interface(model, _key_mask(inputs), seen.show))
        else:
            raise ValueError(
                f"{type(model).__name__} has no attention that could be analysed: expected a module with some of "
                f"{', '.join(ATTENTIONS)} in it, or a decoder of Transformers"
            )
        _run(model, inputs)
    seen.check()
    return seen.names


def _run(model: nn.Module, inputs: Inputs) -> None:
    if not _is_transformers_model(model):
        model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    # Without its head: logits of a long text are larger than anything that is looked at.
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


class _Seen:
    """Counts layers, and shows those that were asked for."""

    def __init__(self, consume: Consumer, layers: Sequence[int] | None) -> None:
        self.names: list[str] = []
        self._consume, self._layers = consume, layers

    def show(self, name: str, make: Callable[[int], Layer]) -> None:
        """The next layer is about to attend."""
        index = len(self.names)
        self.names.append(name)
        if self._layers is None or index in self._layers:
            self._consume(make(index))

    def check(self) -> None:
        """Refuse layers that are not there, and a model whose attention was never seen."""
        if not self.names:
            raise ValueError(
                "no attention was seen: the model computes it by itself, and not through modules of this library or "
                "Transformers' AttentionInterface"
            )
        for layer in self._layers or ():
            if not 0 <= layer < len(self.names):
                raise ValueError(f"layers must be 0 to {len(self.names) - 1}, of this model, got {layer}")


@contextmanager
def _watch_modules(modules: list[CausalAttention], seen: _Seen) -> Iterator[None]:
    def watch(module: CausalAttention) -> None:
        attend = module.attend

        def watched(*arguments: Any) -> Any:
            name = _name_of(module)
            seen.show(name, lambda index: _layer_of(module, name, index, *arguments))
            return attend(*arguments)

        # In the instance, where nn.Module keeps what is neither weight nor module: the class stays as it is.
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
        came = "a cache" if past is not None else "packed documents"
        raise ValueError(f"layer {index} got {came}: an analysis wants whole texts, one in each row")
    parts: dict[str, Any] = {"index": index, "attention": name, "key_mask": key_mask, "v": v}
    if isinstance(module, LucidAttention):
        if module.norm == "qk":
            q, k = normalize_for_readout(q, k, key_mask)
        parts |= {"norm": module.norm, "sharpness": module.sharpness(), "beta": module.beta(x)}
        if module.strength > 0:
            parts |= {"preconditioned": True, "strength": module.strength}
    elif isinstance(module, PathAttention):
        w, beta, _ = module.factors(x, None, key_mask, cu_seqlens)
        parts |= {"factors": (w, beta)}
        if isinstance(module, LucidPathAttention):
            parts |= {"preconditioned": True, "sharpness": module.sharpness()}
    elif isinstance(module, DiffAttention):
        parts |= {"lam": float(module.lam())}
    elif isinstance(module, SlidingAttention):
        parts |= {"window": module.window}
    elif type(module) not in (SoftmaxAttention, CausalAttention):
        raise ValueError(
            f"layer {index} has attention {name!r}, which has no softmax, so no weights and no P: expected one of "
            "softmax, sliding, lucid, path, lucid_path, diff. Leave the layer out with layers=..."
        )
    return Layer(q=q, k=k, **parts)
