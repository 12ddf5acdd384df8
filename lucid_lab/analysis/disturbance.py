"""How much the loss of a model changes, without training, when LUCID is switched on in it.

Measured for one layer at a time, for all layers at several strengths and for all layers at several sharpnesses. The
layers with a small change are the ones to convert, and the sharpness with a small change is where a ramp may start.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lucid_attention import enable_lucid
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.preconditioner import full_layers, layer_kinds
from lucid_attention.nn.attention import LucidAttention

from .progress import Progress, silent

Record = dict[str, Any]
STRENGTHS = (0.1, 0.25, 0.5)
# In units of √D.
SHARPNESSES = (8.0, 4.0, 2.0, 1.0)


def disturbances(
    model: Any,
    ids: Tensor,
    *,
    layers: Sequence[int] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    sharpnesses: Sequence[float] | None = None,
    progress: Progress = silent,
) -> list[Record]:
    """Records {"layers", "strength", "sharpness", "loss", "change"}: the softmax model first, with a change of 0.

    model: any architecture that `enable_lucid` takes, or a `LucidForCausalLM` with layers of "lucid". Its settings are
    left as in the last record. ids: [1, T]. layers: those tried one by one, None for all that can be
    LUCID. strengths: of all layers, at c = √D. sharpnesses: of all layers, at strength 1; None: multiples of √D.
    """
    switch: _Decoder | _DropIn = _Decoder(model) if isinstance(model.config, LucidConfig) else _DropIn(model)
    root = math.sqrt(switch.head_size)
    able = switch.layers
    tried = able if layers is None else list(layers)
    unable = [layer for layer in tried if layer not in able]
    if unable:
        raise ValueError(f"layers must be ones that can be LUCID, {able}, got {unable[0]}")
    sharpnesses = [factor * root for factor in SHARPNESSES] if sharpnesses is None else sharpnesses
    cases: list[tuple[tuple[int, ...], float, float]] = [((layer,), 1.0, root) for layer in tried]
    cases += [(tuple(able), strength, root) for strength in strengths]
    cases += [(tuple(able), 1.0, sharpness) for sharpness in sharpnesses]
    progress("softmax")
    switch.set(tuple(able), 0.0, root)
    base = mean_loss(model, ids)
    records: list[Record] = [_record((), 0.0, root, base, base)]
    for number, (chosen, strength, sharpness) in enumerate(cases, 1):
        where = f"layer {chosen[0]}" if len(chosen) == 1 else f"all layers, s = {strength:g}, c = {sharpness:g}"
        progress(f"{where} ({number} of {len(cases)})")
        switch.set(chosen, strength, sharpness)
        records.append(_record(chosen, strength, sharpness, mean_loss(model, ids), base))
    return records


def _record(layers: tuple[int, ...], strength: float, sharpness: float, loss: float, base: float) -> Record:
    values = {"strength": strength, "sharpness": sharpness, "loss": loss, "change": loss - base}
    return {"layers": list(layers), **values}


def mean_loss(model: Any, ids: Tensor) -> float:
    """The mean loss of the next token, in nats. ids: [1, T]."""
    with torch.no_grad():
        return float(model(ids, labels=ids, use_cache=False).loss)


class _DropIn:
    """LUCID on and off in a model of Transformers."""

    def __init__(self, model: Any) -> None:
        self.model, config = model, model.config.get_text_config(decoder=True)
        self.layers = full_layers(layer_kinds(config))
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def set(self, layers: tuple[int, ...], strength: float, sharpness: float) -> None:
        enable_lucid(self.model, layers=layers, strength=strength, sharpness=sharpness)


class _Decoder:
    """LUCID on and off in a `LucidForCausalLM`, whose other attentions cannot become LUCID."""

    def __init__(self, model: Any) -> None:
        names = model.config.layer_attentions
        self.layers = [layer for layer, name in enumerate(names) if name == "lucid"]
        if not self.layers:
            raise ValueError(
                f"--what disturbance needs layers that can be LUCID, got a LucidForCausalLM with {sorted(set(names))}"
            )
        modules = [module for module in model.modules() if isinstance(module, LucidAttention)]
        self.modules = dict(zip(self.layers, modules, strict=True))
        self.head_size = modules[0].head_dim
        if any(module.log_sharpness is not None for module in modules):
            raise ValueError("--what disturbance needs a sharpness that can be set, and this model learned its own")

    def set(self, layers: tuple[int, ...], strength: float, sharpness: float) -> None:
        for layer, module in self.modules.items():
            module.strength, module.fixed_sharpness = (strength if layer in layers else 0.0), sharpness
