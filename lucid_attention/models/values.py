"""Setting the strength s and the sharpness c of a model's LUCID layers: P = I + s · stril exp(c (cos θ_ij − 1)).

At s = 0, and at c → ∞, a softmax model is itself. At s = 1 and c = √D it is LUCID.
"""

from typing import Any

from transformers import PreTrainedModel

from ..nn.attention import LucidAttention
from ..ops.checks import check_positive, check_strength
from .decoder.configuration import LucidConfig
from .preconditioner import NAME, LucidSettings, Preconditioner


def set_strength(model: PreTrainedModel, strength: float) -> None:
    """Set s of every LUCID layer, in the model and in the configuration that is saved with it."""
    check_strength(strength)
    _set(model, "strength", strength)


def set_sharpness(model: PreTrainedModel, sharpness: float | None) -> None:
    """Set c of every LUCID layer, in the model and in the configuration that is saved with it. None: √D."""
    check_positive("sharpness", sharpness, optional=True)
    _set(model, "sharpness", sharpness)


def _set(model: PreTrainedModel, name: str, value: float | None) -> None:
    config, layers = model.config, _layers(model)
    if isinstance(config, LucidConfig):
        options = {attention: config.options_of(attention) for attention in dict.fromkeys(config.layer_attentions)}
        options["lucid"][name] = value
        learned = [name for layer in layers if name == "sharpness" and layer.log_sharpness is not None]
    else:
        learned = [one for one in layers[0].learned if one == name]
    if learned:
        raise ValueError(f"the {name} of this model is learned: it cannot be set")
    if isinstance(config, LucidConfig):
        config.attention_options = options
        for layer in layers:
            setattr(layer, "fixed_sharpness" if name == "sharpness" else name, value)
        return
    settings = LucidSettings.from_dict(getattr(config, NAME) | {name: value})
    setattr(config, NAME, settings.to_dict())
    for layer in layers:
        layer.set_values(settings)


def _layers(model: PreTrainedModel) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, (LucidAttention, Preconditioner))]
    if not layers:
        raise ValueError(f"model must have LUCID layers, got {type(model).__name__} without any")
    return layers
