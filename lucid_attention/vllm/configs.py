"""Configurations of LUCID models as vLLM gets them: those of its own architectures, under names of ours.

config.json of a LUCID model is closed to programs that do not know LUCID (`models/saved.py`). Here it is opened for
vLLM, which knows a model by `architectures`: the names below lead to `models.py` and to nothing else.
"""

import json
from typing import Any, ClassVar

from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ..models.decoder.configuration import MODEL_TYPE as DECODER
from ..models.decoder.configuration import LucidConfig
from ..models.dropin.settings import NAME, LucidSettings, check_config
from ..models.saved import SENTENCE, unseal

# What `LlamaAttention` of vLLM computes as our decoder does.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Options of the attentions of our decoder, with the only value that can be served; None for all values.
DECODER_OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "lucid": {"sharpness": None, "strength": None, "norm": ["key"], "learn_beta": [False], "learn_sharpness": [False]},
}


class Served:
    """A configuration with LUCID. Its architecture cannot be changed into one that would compute softmax attention."""

    architecture: ClassVar[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "architectures" and value not in (None, [self.architecture]):
            raise ValueError(
                f"architectures of this checkpoint with LUCID must be {[self.architecture]}, got {value}: another one "
                "would compute softmax attention. `lucid convert --to softmax` makes a plain checkpoint"
            )
        super().__setattr__(name, value)


class LucidLlamaConfig(Served, LlamaConfig):
    """Llama with LUCID."""

    architecture = "LucidLlamaForCausalLM"


class LucidMistralConfig(Served, MistralConfig):
    """Mistral with LUCID."""

    architecture = "LucidMistralForCausalLM"


class LucidQwen2Config(Served, Qwen2Config):
    """Qwen2 with LUCID."""

    architecture = "LucidQwen2ForCausalLM"


class LucidQwen3Config(Served, Qwen3Config):
    """Qwen3 with LUCID."""

    architecture = "LucidQwen3ForCausalLM"


class LucidGemma3Config(Served, Gemma3TextConfig):
    """The text model of Gemma 3 with LUCID."""

    architecture = "LucidGemma3ForCausalLM"


class LucidDecoderConfig(Served, LlamaConfig):
    """`LucidConfig` with the attentions lucid and softmax, in the fields that vLLM's Llama reads.

    qk_norm, qkv_bias: further fields. no_rope: no rotary embedding.
    """

    architecture = "LucidForCausalLM"


CLASSES: dict[str, type[Any]] = {
    "llama": LucidLlamaConfig,
    "mistral": LucidMistralConfig,
    "qwen2": LucidQwen2Config,
    "qwen3": LucidQwen3Config,
    "gemma3_text": LucidGemma3Config,
}


class SealedConfig(PreTrainedConfig):
    """Stands for config.json of a LUCID model, and makes the configuration in it."""

    model_type = SENTENCE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration for vLLM, from the content of config.json."""
        # Names that Transformers passes along for itself, and a request to return what nobody read.
        kept = {key: value for key, value in kwargs.items() if not key.startswith("_")}
        wants_unused = kept.pop("return_unused_kwargs", False)
        config = served_config(unseal(config_dict))
        if name := kept.get("name_or_path"):
            config.name_or_path = name
        return (config, kept) if wants_unused else config


def served_config(content: dict[str, Any]) -> Any:
    """The configuration for vLLM. content: the configuration of a LUCID model, or of our decoder."""
    kind = content.get("model_type")
    if kind == DECODER:
        # vLLM's Transformers cannot make our configuration with tied embeddings: the field is passed beside it.
        own = LucidConfig.from_dict(content | {"tie_word_embeddings": False})
        return _decoder_config(own, bool(content.get("tie_word_embeddings", False)))
    if kind not in CLASSES:
        raise ValueError(
            f"vLLM serves LUCID in models of type {', '.join(CLASSES)} and {DECODER}, got {kind!r}: use Transformers"
        )
    if content.get(NAME) is None:
        raise ValueError(f"the configuration of a LUCID model must have the field {NAME!r}, got none")
    name = CLASSES[kind].architecture
    config = CLASSES[kind](**content | {"architectures": [name]})
    check_config(config)
    width = config.hidden_size // config.num_attention_heads
    if kind == "qwen2" and getattr(config, "head_dim", None) not in (None, width):
        # vLLM would take a part of the weights without a word.
        raise ValueError(
            f"vLLM's Qwen2 has heads of hidden_size / num_attention_heads = {width}, got {config.head_dim}"
        )
    return config


def served(config: Any) -> Any:
    """A configuration that vLLM has read: as it is without LUCID, otherwise the one for vLLM.

    A process that has called `enable_lucid` reads config.json of a LUCID model as that of a plain one.
    """
    if isinstance(config, Served):
        return config
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    if any(getattr(part, NAME, None) is not None for part in [config, *parts]) or isinstance(config, LucidConfig):
        return served_config(json.loads(config.to_json_string(use_diff=False)))
    if getattr(config, "attn_implementation", None) is not None:
        unsealed = unseal({"attn_implementation": config.attn_implementation})
        if NAME in unsealed:
            raise ValueError("this checkpoint has LUCID in an old form: load and save it with lucid-attention")
    return config


def _decoder_config(config: LucidConfig, tied: bool) -> LucidDecoderConfig:
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
    )
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "dtype",
    )
    return LucidDecoderConfig(
        **{name: getattr(config, name) for name in same},
        tie_word_embeddings=tied,
        architectures=[LucidDecoderConfig.architecture],
        attention_bias=config.attention_bias is True,
        qkv_bias=bool(config.attention_bias),
        qk_norm=config.qk_norm,
        no_rope=parameters is None,
        rope_parameters=dict(parameters) if parameters else {"rope_type": "default", "rope_theta": 10_000.0},
        **{NAME: settings.to_dict()},
    )


def _check_options(name: str, options: dict[str, Any]) -> None:
    known = DECODER_OPTIONS[name]
    for option, value in options.items():
        if option == "impl":
            # All implementations compute the same.
            continue
        if option not in known or (known[option] is not None and value not in known[option]):
            wanted = f"{known[option][0]!r}" if known.get(option) else "left out"
            raise ValueError(f"vLLM serves the attention {name!r} with {option} {wanted}, got {value!r}")
