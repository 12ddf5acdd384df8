"""LucidConfig: a Llama-shaped decoder whose attention is a name in `ATTENTIONS`, for all layers or one per layer."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ...messages import did_you_mean
from ...nn.attention import ATTENTIONS
from ...nn.causal import CausalAttention, check_size, check_sizes
from .cache import layer_type
from .rotary import make_rotary

logger = logging.getLogger(__name__)

MODEL_TYPE = "lucid_attention"
# More would take minutes and all memory before anything is checked.
MOST_LAYERS = 10_000
# Keys that are no fields, but that Transformers passes to a configuration or writes into config.json.
KEYS_OF_TRANSFORMERS = {
    "model_type", "torch_dtype", "num_labels", "name_or_path", "output_attentions", "attn_implementation",
    "experts_implementation", "tie_last_hidden_states", "is_causal", "loss_type", "auto_map", "custom_pipelines",
    "tokenizer_class", "task_specific_params", "quantization_config", "distributed_config", "fusion_config",
    "transformers_weights", "rope_theta",
}  # fmt: skip
# Architectures with our blocks: RMS norm before attention and MLP, rotary halves, gated MLP, Llama's names.
LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")


@strict
class LucidConfig(PreTrainedConfig):
    """Configuration of `LucidModel` and `LucidForCausalLM`: Llama's fields, and the attention of every layer.

        LucidConfig(attention="lucid", attention_options={"sharpness": 4.0})
        LucidConfig(
            num_hidden_layers=12,
            attention=every(4, "lucid", otherwise="delta", layers=12),
            attention_options={"lucid": {"sharpness": 4.0}, "delta": {"conv_size": 3}},
        )

    Everything is checked when the configuration is made; an unknown key is an error.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, hidden_act,
            max_position_embeddings, initializer_range, rms_norm_eps, use_cache, pad_token_id, bos_token_id,
            eos_token_id, tie_word_embeddings: as in `LlamaConfig`.
        num_key_value_heads: a divisor of num_attention_heads; default num_attention_heads.
        head_dim: any size; default hidden_size / num_attention_heads.
        rope_parameters: rotary embedding of the attentions that use one, as in `LlamaConfig`: rope_theta, rope_type
            ("default", "linear", "yarn" or "llama3") with its numbers, partial_rotary_factor.
            None for no rotary embedding. `rope_theta` alone may be given instead, and is an attribute.
        attention_bias: True for biases of all projections, "qkv" for all but the output's, as in Qwen2.
        mlp_bias: whether the MLP has biases.
        qk_norm: learned RMS norm of queries and keys, as in Qwen3; for the attentions that have them.
        attention: a name in `ATTENTIONS`, or a list of one name per layer (see `every`).
        attention_options: further arguments of the attention's constructor, which override the fields above. For
            several attentions, one dictionary per attention, by its name. {"block": n}: blocks of n tokens that see
            each other (block diffusion). Pad them on the right, and pass whole blocks to a cache.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    # TRL reads this attribute of models that are not in Transformers itself. Read-only: all configurations share it.
    auto_map: ClassVar[Mapping[str, str]] = MappingProxyType({})

    vocab_size: int = 32_000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 22
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = field(default_factory=lambda: {"rope_type": "default"})
    attention_bias: bool | str = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention: str | list[str] = "lucid"
    attention_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            raise ValueError(_foreign_type(kwargs["model_type"]))
        # It names a file that a saved copy of the model does not have.
        kwargs.pop("auto_map", None)
        known = [option.name for option in fields(self)] + ["rope_theta"]
        for key in unknown_keys(kwargs):
            raise ValueError(f"LucidConfig has no {key!r}{did_you_mean(key, known)}; it takes {', '.join(known)}")
        sizes = (self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        self.num_key_value_heads, self.head_dim = check_sizes(*sizes)
        # Transformers runs validators too, but wraps their errors, and reads `layer_types` first.
        self._check_names()
        kwargs = self._read_rope(**kwargs)
        self.validate_attention()
        super().__post_init__(**kwargs)

    def _read_rope(self, **kwargs: Any) -> dict[str, Any]:
        """Take `rope_theta` out of kwargs into `rope_parameters`."""
        if "rope_theta" in kwargs:
            self.rope_theta = kwargs.pop("rope_theta")
        elif self.rope_parameters is not None:
            default = {"rope_type": "default", "rope_theta": self.default_theta}
            self.rope_parameters = default | self.rope_parameters
        return kwargs

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Leave `rope_parameters`, which `_read_rope` has made, alone: here None means no rotary embedding."""
        return kwargs

    @property
    def rope_theta(self) -> float | int | None:
        """The base of the rotary embedding; None for none."""
        return None if self.rope_parameters is None else self.rope_parameters["rope_theta"]

    @rope_theta.setter
    def rope_theta(self, base: float | int | None) -> None:
        old = {"rope_type": "default", **(self.rope_parameters or {})}
        self.rope_parameters = None if base is None else old | {"rope_theta": base}

    @property
    def layer_attentions(self) -> list[str]:
        """The name of the attention of every layer."""
        # Assisted decoding with an early exit lowers num_hidden_layers for a while: then names must be cut.
        names = [self.attention] * self.num_hidden_layers if isinstance(self.attention, str) else self.attention
        return list(names)[: self.num_hidden_layers]

    @property
    def layer_types(self) -> list[str]:
        """The types of the cache layers, from which Transformers makes a cache."""
        return [layer_type(ATTENTIONS[name].past_type) for name in self.layer_attentions]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: the classes are in this package, and are not copied into checkpoints."""

    def validate_layer_type(self) -> None:
        """Accept: `layer_types` follows from `attention`, and Transformers does not know our types."""

    def validate_attention(self) -> None:
        """Refuse names, options and sizes from which no attention can be made.

        Runs when a configuration is made, loaded or saved.
        """
        for name in ("vocab_size", "intermediate_size"):
            check_size(name, getattr(self, name))
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id must be below vocab_size = {self.vocab_size}, got {self.pad_token_id}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act must be an activation of Transformers, got {self.hidden_act!r}"
                f"{did_you_mean(self.hidden_act, ACT2FN)}"
            )
        if self.attention_bias not in (True, False, "qkv"):
            raise ValueError(f'attention_bias must be True, False or "qkv", got {self.attention_bias!r}')
        names = self._check_names()
        self._check_options(names)
        for name in names:
            # The constructor checks values. On the meta device it takes no memory.
            with torch.device("meta"):
                make_attention(self, self.layer_attentions.index(name))

    def _check_names(self) -> list[str]:
        """Refuse attentions that do not exist. Returns the different ones."""
        check_size("num_hidden_layers", self.num_hidden_layers)
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {self.num_hidden_layers}")
        if not isinstance(self.attention, str) and len(self.attention) != self.num_hidden_layers:
            raise ValueError(
                f"attention must be one name or one per layer: expected {self.num_hidden_layers} names, "
                f"got {len(self.attention)}"
            )
        names = list(dict.fromkeys(self.layer_attentions))
        for name in names:
            if name not in ATTENTIONS:
                known = ", ".join(ATTENTIONS)
                raise ValueError(f"attention must be one of {known}, got {name!r}{did_you_mean(name, ATTENTIONS)}")
        return names

    def _check_options(self, names: list[str]) -> None:
        if self._options_by_name():
            for name, options in self.attention_options.items():
                if name not in names:
                    raise ValueError(f"attention_options are given for {name!r}, but no layer has it: {names}")
                if not isinstance(options, dict):
                    raise ValueError(f"attention_options[{name!r}] must be a dictionary, got {options!r}")
        for name in names:
            known = [option for option in constructor_options(ATTENTIONS[name]) if option != "layer_index"]
            for option in self.options_of(name):
                if option not in known:
                    hint = "" if len(names) == 1 else ". Options of one attention among several go under its name"
                    raise ValueError(
                        f"attention {name!r} has no option {option!r}{did_you_mean(option, known)}; "
                        f"it takes {', '.join(known)}{hint}"
                    )

    def _options_by_name(self) -> bool:
        return bool(self.attention_options) and all(key in ATTENTIONS for key in self.attention_options)

    def options_of(self, name: str) -> dict[str, Any]:
        """`attention_options` for the attention of that name."""
        return dict(self.attention_options.get(name, {}) if self._options_by_name() else self.attention_options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers, but overrides are checked too, and unknown keys of a file give a warning."""
        if config_dict.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            raise ValueError(_foreign_type(config_dict["model_type"]))
        # Tools set attributes on a configuration, which are saved with it. The file must load, with these attributes.
        extra = {key: config_dict[key] for key in unknown_keys(config_dict)}
        if extra:
            logger.warning("LucidConfig does not know %s: without effect on the model", ", ".join(map(repr, extra)))
        result = super().from_dict({key: value for key, value in config_dict.items() if key not in extra}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for key, value in extra.items():
            setattr(config, key, value)
        config.validate_attention()
        return result

    @classmethod
    def from_llama(cls, config: PreTrainedConfig, attention: str | list[str] = "lucid", **overrides: Any) -> Any:
        """The configuration of the same decoder with another attention. The weights load by name.

            config = LucidConfig.from_llama(AutoConfig.from_pretrained(path))
            model = LucidForCausalLM.from_pretrained(path, config=config)

        Args:
            config: of a Llama, Mistral, Qwen2 or Qwen3. A setting that LucidConfig cannot express is refused.
            attention: as in `LucidConfig`; "softmax" gives the original model.
            overrides: further fields of `LucidConfig`.
        """
        _check_is_llama(config)
        names = [option.name for option in fields(cls) if option.name not in ("architectures", "transformers_version")]
        shared: dict[str, Any] = {name: getattr(config, name) for name in names if hasattr(config, name)}
        shared["rope_parameters"] = dict(config.rope_parameters)
        if "rope_theta" in overrides:
            shared["rope_parameters"].pop("rope_theta", None)
        if config.model_type == "qwen2":
            shared["attention_bias"] = "qkv"
        shared["qk_norm"] = config.model_type == "qwen3"
        return cls(**(shared | {"attention": attention} | overrides))


def every(n: int, name: str, *, otherwise: str, layers: int) -> list[str]:
    """The attentions of a hybrid: `name` on every n-th layer, the last of each n, and `otherwise` on the others."""
    check_size("n", n)
    check_size("layers", layers)
    return [name if index % n == n - 1 else otherwise for index in range(layers)]


def make_attention(config: LucidConfig, layer_index: int, hidden_size: int | None = None) -> CausalAttention:
    """The attention module of a layer. hidden_size: instead of the configuration's, for a cheap module."""
    name = config.layer_attentions[layer_index]
    known = constructor_options(ATTENTIONS[name])
    arguments: dict[str, Any] = {
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "bias": bool(config.attention_bias),
        "qk_norm": config.qk_norm,
        "layer_index": layer_index,
    }
    if ATTENTIONS[name].takes_rotary:
        arguments["rope_base"] = config.rope_theta
    arguments = {key: value for key, value in arguments.items() if key in known} | config.options_of(name)
    size = config.hidden_size if hidden_size is None else hidden_size
    module = ATTENTIONS[name](size, config.num_attention_heads, **arguments)
    if module.rotary is not None and "rope_base" not in config.options_of(name):
        module.rotary = make_rotary(module.head_dim, config)
    if config.attention_bias == "qkv":
        module.o_proj.register_parameter("bias", None)
    return module


def constructor_options(attention: type[CausalAttention]) -> dict[str, inspect.Parameter]:
    """The keyword arguments of a constructor, with those that it passes on to its base classes."""
    options: dict[str, inspect.Parameter] = {}
    for base in attention.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        for name, parameter in parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                options.setdefault(name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return options


def unknown_keys(keys: Iterable[str]) -> list[str]:
    """Keys that are neither fields nor keys of Transformers. Private keys belong to Transformers."""
    known = {option.name for option in fields(LucidConfig)} | KEYS_OF_TRANSFORMERS
    return [key for key in keys if key not in known and not key.startswith("_")]


def _foreign_type(model_type: str) -> str:
    return (
        f"LucidConfig is made from model_type {MODEL_TYPE!r}, got {model_type!r}: LucidConfig.from_llama makes one "
        f"from the configuration of a {', '.join(LLAMA_FAMILY)}"
    )


def _check_is_llama(config: PreTrainedConfig) -> None:
    if config.model_type not in LLAMA_FAMILY:
        raise ValueError(f"config must be of model_type {', '.join(LLAMA_FAMILY)}, got {config.model_type!r}")
    sliding = config.model_type != "qwen2" and getattr(config, "sliding_window", None) is not None
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    # Settings that LucidConfig has no field for: the value in `config`, and the only value that it can express.
    fixed = {
        "sliding_window": (config.sliding_window if sliding else None, None),
        "layer_types": (layer_types, {"full_attention"}),
        "attention_dropout": (getattr(config, "attention_dropout", 0.0) or 0.0, 0.0),
    }
    if config.model_type == "qwen3":
        # The query and key norms of our modules have a fixed eps.
        fixed["rms_norm_eps"] = (config.rms_norm_eps, 1e-6)
    for name, (value, expected) in fixed.items():
        if value != expected:
            raise ValueError(
                f"LucidConfig cannot express {name} of this {config.model_type}: {value!r}, expected {expected!r}"
            )
