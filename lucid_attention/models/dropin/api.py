"""`enable_lucid`: the one call that a user of the drop-in makes."""

from collections.abc import Iterable
from typing import Any, TypeVar

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..decoder.modeling import register_decoder
from .adapters import follow_peft
from .attention import lucid_attention_forward
from .hooks import check_architecture, install_hooks, layer_types
from .masks import lucid_mask
from .settings import NAME, CompositeName, LucidSettings, check_layers, parts_of, put_settings

Model = TypeVar("Model", bound=PreTrainedModel)


def enable_lucid(
    model: Model | None = None,
    *,
    layers: Iterable[int] | None = None,
    strength: float = 1.0,
    sharpness: float | None = None,
) -> Model | None:
    """Make attn_implementation="lucid" known to Transformers, and switch a model over to it.

        enable_lucid()                                                          # once per process
        AutoModelForCausalLM.from_config(config, attn_implementation="lucid")   # then by name
        enable_lucid(model, layers=[4, 5])                                      # or an existing model

    Layers with full attention become LUCID; layers with a sliding window keep their attention. Every call sets layers,
    strength and sharpness: an argument that is left out gets its default. The choice is saved with the model's
    configuration. `from_pretrained` restores it in every process that has called `enable_lucid()`; other processes
    cannot read the saved model.

    Args:
        model: a Transformers model, changed in place; None to register only.
        layers: indices of layers, counted from 0; None for all with full attention.
        strength: s in P = I + s·L: 0 is the original model, 1 is LUCID. See `StrengthRamp`.
        sharpness: c in P_ij = exp(c (cos θ_ij − 1)), default √D.

    Returns:
        The model.
    """
    AttentionInterface.register(NAME, lucid_attention_forward)
    AttentionMaskInterface.register(NAME, lucid_mask)
    install_hooks()
    follow_peft(enable_lucid)
    register_decoder()
    settings = LucidSettings(layers, strength, sharpness)  # type: ignore[arg-type]
    if model is None:
        if settings != LucidSettings():
            raise ValueError(f"enable_lucid needs a model for these settings, got none: {settings}")
        return None
    _check_model(model)
    config = model.config.get_text_config(decoder=True)
    if not getattr(config, "is_causal", True):
        raise ValueError("config.is_causal is False: LUCID is for causal attention")
    check_layers(settings, layer_types(config))
    if config is model.config:
        model.set_attn_implementation(NAME)
        put_settings(config, settings)
    else:
        names = _part_names(model.config, config)
        model.set_attn_implementation(dict.fromkeys(names, NAME))
        put_settings(config, settings)
        # Copies of the model are made with the name in the whole configuration.
        others = model.config._attn_implementation
        model.config._attn_implementation_internal = CompositeName(others, names[0], config)
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        hint = ": give its model.get_base_model()" if hasattr(model, "get_base_model") else ""
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}{hint}")
    check_architecture(model)
    if not any(getattr(module, "is_causal", False) and hasattr(module, "layer_idx") for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no causal attention: LUCID is for decoders")


def _part_names(config: Any, part: Any) -> list[str]:
    """The names under which a composite configuration has this part."""
    names = [name for name, found in parts_of(config).items() if found is part]
    if not names:
        raise ValueError(f"{type(config).__name__} has no part with a text decoder that could use LUCID")
    return names
