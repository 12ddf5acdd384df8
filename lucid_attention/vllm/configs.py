"""The configuration of our own decoder as vLLM gets it: in the fields that its Llama reads.

LUCID in other architectures needs nothing here: `LucidLlamaConfig` is a `LlamaConfig`, and vLLM finds the model by the
name in `architectures`.
"""

from dataclasses import fields
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from ..models.decoder.configuration import MODEL_TYPE, LucidConfig
from ..models.preconditioner import NAME, LucidSettings

# What `LlamaAttention` of vLLM computes as our decoder does.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Options of the attentions of our decoder, with the only value that can be served; None for all values.
DECODER_OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "lucid": dict.fromkeys(["sharpness", "strength", "learn_sharpness", "center", "whiten"])
    | {"norm": "key", "learn_beta": False, "block": 1},
}


class LucidDecoderConfig(LlamaConfig):
    """`LucidConfig` with the attentions lucid and softmax.

    qk_norm, qkv_bias: further fields. no_rope: no rotary embedding.
    """


class DecoderReader(PreTrainedConfig):
    """Stands for `LucidConfig` in the processes of vLLM, and makes the configuration for vLLM from config.json."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration for vLLM."""
        # Names that Transformers passes along for itself, and a request to return what nobody read.
        kept = {key: value for key, value in kwargs.items() if not key.startswith("_")}
        wants_unused = kept.pop("return_unused_kwargs", False)
        # vLLM's Transformers cannot make our configuration with tied embeddings: the field is passed separately.
        own = LucidConfig.from_dict(config_dict | {"tie_word_embeddings": False})
        config = decoder_config(own, bool(config_dict.get("tie_word_embeddings", False)))
        if name := kept.get("name_or_path"):
            config.name_or_path = name
        return (config, kept) if wants_unused else config


def decoder_config(config: LucidConfig, tied: bool) -> LucidDecoderConfig:
    names = config.layer_attentions
    for name in dict.fromkeys(names):
        if name not in DECODER_OPTIONS:
            raise ValueError(
                f"vLLM serves LucidForCausalLM with the attentions {', '.join(DECODER_OPTIONS)}, got {name!r}, whose "
                "past is no paged cache of keys and values: use Transformers"
            )
        _check_options(name, config.options_of(name))
    parameters = config.rope_parameters
    if parameters is not None and parameters["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"vLLM serves LucidForCausalLM with rope_type {', '.join(ROPE_TYPES)}, got {parameters['rope_type']!r}"
        )
    lucid = [index for index, name in enumerate(names) if name == "lucid"]
    options = config.options_of("lucid")
    settings = LucidSettings(
        layers=tuple(lucid) or None,
        strength=options.get("strength", 1.0) if lucid else 0.0,
        sharpness=options.get("sharpness"),
        learned=("sharpness",) if options.get("learn_sharpness") else (),
        center=options.get("center", "none"),
        whiten=options.get("whiten", False),
    )
    llama = {field.name for field in fields(LlamaConfig)} - {field.name for field in fields(PreTrainedConfig)}
    shared = {name: getattr(config, name) for name in (llama | {"dtype"}) if hasattr(config, name)}
    changed = {
        "tie_word_embeddings": tied,
        "architectures": ["LucidForCausalLM"],
        "attention_bias": config.attention_bias is True,
        "qkv_bias": bool(config.attention_bias),
        "qk_norm": config.qk_norm,
        "no_rope": parameters is None,
        "rope_parameters": dict(parameters) if parameters else {"rope_type": "default", "rope_theta": 10_000.0},
        NAME: settings.to_dict(),
    }
    return LucidDecoderConfig(**shared | changed)


def _check_options(name: str, options: dict[str, Any]) -> None:
    known = DECODER_OPTIONS[name]
    for option, value in options.items():
        # All implementations compute the same.
        if option != "impl" and (option not in known or known[option] not in (None, value)):
            wanted = repr(known[option]) if option in known else "left out"
            raise ValueError(f"vLLM serves the attention {name!r} with {option} {wanted}, got {value!r}")
