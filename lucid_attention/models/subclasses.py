"""LUCID in the architectures of Transformers, by subclassing: `LucidLlamaForCausalLM` is a `LlamaForCausalLM`.

Classes are made once per architecture, from its own. A configuration has `model_type: lucid_llama`, so that a program
without this package refuses the checkpoint. Nothing of Transformers is wrapped or replaced.
"""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto

from .attention import Pass, lucid_attention_forward
from .cache import adopt_cache
from .decoder.configuration import LucidConfig
from .decoder.modeling import register_decoder
from .masks import given_documents, lucid_mask
from .preconditioner import (
    LEARNABLE,
    NAME,
    LucidSettings,
    Preconditioner,
    check_layers,
    head_size,
    kv_heads,
    layer_kinds,
    lucid_layers,
    structure,
)

PREFIX = "lucid_"
# Architectures that `enable_lucid()` makes known. Others are known from the first `enable_lucid(model)` on.
ARCHITECTURES = (
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_neox",
    "gpt_oss", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2",
    "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
# The same for encoders, whose attention sees both sides.
ENCODERS = ("bert", "modernbert", "roberta")
# The tables of Transformers in which the models of a configuration are found, by the Auto class.
HEADS = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}

# The model_type in checkpoints of release 0.1, whose configuration is inside. They are read for one release.
SENTENCE_0_1 = (
    "This model has LUCID attention: pip install lucid-attention, then call lucid_attention.enable_lucid() before "
    "loading, or start the program with `lucid run`. `lucid convert --to softmax` makes a plain checkpoint of it"
)

Model = TypeVar("Model", bound=PreTrainedModel)


def enable_lucid(
    model: Model | None = None,
    *,
    layers: Iterable[int] | None = None,
    strength: float = 1.0,
    sharpness: float | None = None,
    learned: Iterable[str] = (),
    center: str = "none",
    whiten: bool = False,
) -> Model | None:
    """Make LUCID's models known to the Auto classes of Transformers, and switch a model over to LUCID.

        enable_lucid()                                       # once per process: AutoModelForCausalLM opens checkpoints
        enable_lucid(model, layers=[4, 5])                   # an existing model becomes a LUCID model, in place

    Layers with full attention become LUCID; layers with a sliding window keep their attention. The layers of an
    encoder (BERT, RoBERTa, ModernBERT) solve for all tokens at once, as block=None of `lucid_attention`. Every call
    sets all settings: an argument that is left out gets its default. They are saved with the model, whose class and
    configuration are now LUCID's (`LucidLlamaForCausalLM`, `lucid_llama`).

    Args:
        model: a Transformers model, changed in place; None to register only.
        layers: indices of layers, counted from 0; None for all with full attention.
        strength: s in P = I + s·L: 0 is the original model, 1 is LUCID.
        sharpness: c in P_ij = exp(c (cos θ_ij − 1)), default √D.
        learned: "sharpness", "strength" or both, to be trained, one value per layer and key/value head. A strength that
            begins at 0 is a gate: exactly the original model, with a gradient.
        center: "none", or "calibrated" or "learned": P is made of (k − μ) with a μ per layer and key/value head, a
            buffer or a parameter, which is zero until it is trained or `model.calibrate` sets it.
        whiten: with a center, P is made of (k − μ) M, with a matrix M next to μ, at first the identity.

    Returns:
        The model.
    """
    register()
    settings = LucidSettings(layers, strength, sharpness, learned, center, whiten)  # type: ignore[arg-type]
    if model is None:
        if settings != LucidSettings():
            raise ValueError(f"enable_lucid needs a model for these settings, got none: {settings}")
        return None
    _check_model(model)
    if "strength" in settings.learned and is_encoder(model):
        raise ValueError("learned must not hold 'strength' for an encoder: one number for all heads is expected")
    check_layers(settings, model.config)
    if not isinstance(model, LucidModel):
        config_class: Any = lucid_config_class(type(model.config).model_type)
        register_models(config_class)
        # A copy: the caller may use the configuration for other models.
        stock, config = model.config, copy.deepcopy(model.config)
        for module in model.modules():
            if getattr(module, "config", None) is stock:
                module.config = config
        model.set_attn_implementation(NAME)
        # No public name tells whether an architecture took it: others would go on with softmax attention.
        if model.config._attn_implementation != NAME:
            raise ValueError(f"{type(model).__name__} computes its attention itself: LUCID needs AttentionInterface")
        model.config.__class__ = config_class
        # Who loads this name must not get the softmax model: Transformers refuses it, and prints it.
        source = model.config.name_or_path
        name = f"lucid:{source or 'unsaved'} (save this LUCID model and load it from there)"
        for module in _models_in(model):
            module.config.name_or_path = module.name_or_path = name
    setattr(model.config, NAME, settings.to_dict())
    model.config.architectures = None
    become_lucid(model)
    return model


def register() -> None:
    """Make LUCID's configurations known to Transformers. Their models follow with the first configuration of a type."""
    AttentionInterface.register(NAME, lucid_attention_forward)
    AttentionMaskInterface.register(NAME, lucid_mask)
    register_decoder()
    AutoConfig.register(SENTENCE_0_1, _Config01, exist_ok=True)
    for model_type in ARCHITECTURES + ENCODERS:
        if model_type in CONFIG_MAPPING:
            lucid_config_class(model_type)


class _Config01(PreTrainedConfig):
    model_type = SENTENCE_0_1

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        (content,) = config_dict["lucid_attention"]
        text = "this checkpoint was written by lucid-attention 0.1: load and save it, the next release will not read it"
        warnings.warn(text, FutureWarning, stacklevel=2)
        kind = content.pop("model_type")
        content.pop("architectures", None)
        own: Any = LucidConfig if kind == LucidConfig.model_type else lucid_config_class(kind)
        return own.from_dict(content, **kwargs)


class LucidConfiguration:
    """First base of LUCID's configurations. Its field `lucid` is the dictionary of `LucidSettings`."""

    # TRL reads this attribute of models that are not in Transformers itself. Read-only: all configurations share it.
    auto_map: Mapping[str, str] = MappingProxyType({})

    def __post_init__(self, **kwargs: Any) -> None:
        settings = LucidSettings.from_dict(kwargs.pop(NAME, None))
        # It names a file that a saved copy of the model does not have.
        kwargs.pop("auto_map", None)
        kwargs["attn_implementation"] = _checked_implementation(kwargs.get("attn_implementation"), type(self).__name__)
        super().__post_init__(**kwargs)  # type: ignore[misc]
        check_layers(settings, self)
        setattr(self, NAME, settings.to_dict())
        config_class: Any = type(self)
        register_models(config_class)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "architectures" and not all(one.startswith("Lucid") for one in value or ()):
            raise ValueError(
                f"architectures of a LUCID model must begin with 'Lucid', got {value}: others compute softmax attention"
            )
        super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """As in Transformers, and the attention: a stock class that is asked by name for this checkpoint refuses it."""
        return super().to_dict() | {"attn_implementation": NAME}  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: the classes are in this package, and are not copied into checkpoints."""


class LucidModel:
    """First base of LUCID's models. It makes the context of a pass, and chooses the layers of its cache."""

    sees_both_sides = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        become_lucid(self)
        # The configuration of a converted checkpoint has the values that are not learned. Authors of models set this
        # attribute, `_init_weights` and `_keep_in_fp32_modules_strict`: PreTrainedModel's interface for subclasses.
        fixed = [name for name in LEARNABLE if name not in getattr(config, NAME)["learned"]]
        ignored = getattr(self, "_keys_to_ignore_on_load_missing", None) or []
        self._keys_to_ignore_on_load_missing = [*ignored, *(rf"\.{NAME}\.{name}$" for name in fixed)]

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuse every other attention: `lucid convert --to softmax` makes a softmax model."""
        return _checked_implementation(requested_attention, type(self).__name__)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """As above."""
        _checked_implementation(attn_implementation, type(self).__name__)

    def adopt_cache(self, past_key_values: Any) -> Any:
        """Give a fresh cache the layers of this model, in place, and return it. `forward` does so too.

        Needed only for an initialised static cache whose first pass is compiled.
        """
        adopt_cache(past_key_values, self.config)  # type: ignore[attr-defined]
        return past_key_values

    @torch.no_grad()
    def calibrate(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Set center and matrix of the keys of every LUCID layer to those of the keys of sample texts.

        One pass, layer by layer: the keys of a layer are those of the model whose layers below are calibrated.

        input_ids: [B, T], of a few thousand tokens in all; attention_mask: [B, T], 0 at padding.
        """
        key_mask = None if attention_mask is None else attention_mask.bool()
        hooks = [
            module.register_forward_pre_hook(lambda layer, inputs: layer.calibrate(inputs[0], key_mask))
            for module in self.modules()  # type: ignore[attr-defined]
            if isinstance(module, Preconditioner)
        ]
        try:
            self.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)  # type: ignore[attr-defined]
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if not isinstance(module, Preconditioner):
            super()._init_weights(module)  # type: ignore[misc]
            return
        for name, value in module.initial(LucidSettings.from_dict(getattr(self.config, NAME))).items():  # type: ignore[attr-defined]
            init.constant_(getattr(module, name), value)
        if module.center is not None:
            init.zeros_(module.center)
        if module.matrix is not None:
            init.copy_(module.matrix, torch.eye(module.head_dim))


def _checked_implementation(requested: Any, name: str) -> str:
    if requested not in (None, NAME):
        raise ValueError(
            f"attn_implementation={requested!r} is not possible for {name}: leave it out. Softmax attention gives "
            "other outputs with these weights; `lucid convert --to softmax` makes a checkpoint for it"
        )
    return NAME


def become_lucid(model: Any) -> None:
    """Give a model, and the models in it, LUCID's classes, and its attentions the values of the configuration."""
    config = model.config
    encoder = is_encoder(model)
    for module in _models_in(model):
        module.sees_both_sides = encoder
        if not isinstance(module, LucidModel):
            stock: Any = type(module)
            module.__class__ = lucid_model_class(stock, config.__class__)
            # Transformers learns in its constructor what a class can record; this one has not been through it.
            PreTrainedModel.__init__(module.__class__.__new__(module.__class__), config)
    settings, chosen = LucidSettings.from_dict(getattr(config, NAME)), lucid_layers(config)
    for module in attention_modules(model):
        found = getattr(module, NAME, None)
        if module.layer_idx not in chosen:
            module._modules.pop(NAME, None)
        elif isinstance(found, Preconditioner) and found.structure == structure(settings):
            found.set_values(settings)
        else:
            place = next(module.parameters())
            wide = torch.promote_types(place.dtype, torch.float32)
            made = Preconditioner(kv_heads(config), head_size(config), settings).to(place.device, wide)
            made.set_values(settings)
            module.add_module(NAME, made)


def attention_modules(model: Any) -> list[Any]:
    """The attention modules with full attention, in the order of layers: the causal ones, or those of an encoder."""
    kinds = layer_kinds(model.config)
    causal = [module for module in model.modules() if getattr(module, "is_causal", False)]
    both = [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "layer_idx")]
    return [module for module in causal or both if kinds[getattr(module, "layer_idx", 0)] == "full_attention"]


def is_encoder(model: Any) -> bool:
    """Whether the attention of a model sees both sides."""
    return not any(module.is_causal for module in attention_modules(model))


def _models_in(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@cache
def lucid_config_class(model_type: str) -> type[PreTrainedConfig]:
    """LUCID's configuration of an architecture, registered with `AutoConfig`."""
    AttentionInterface.register(NAME, lucid_attention_forward)
    AttentionMaskInterface.register(NAME, lucid_mask)
    stock = CONFIG_MAPPING[model_type]
    body: dict[str, Any] = {"model_type": PREFIX + model_type}
    plan = stock.base_model_tp_plan or {}
    if plan.get("layers.*.self_attn.k_proj") == "colwise":
        # Every process has all values of LUCID, and the gradients of those of its heads.
        body["base_model_tp_plan"] = plan | {f"layers.*.self_attn.{NAME}": "replicated_with_grad_allreduce"}
    made: Any = _made(f"Lucid{stock.__name__}", (LucidConfiguration, stock), **body)
    AutoConfig.register(PREFIX + model_type, made, exist_ok=True)
    weights = get_checkpoint_conversion_mapping(model_type)
    if weights is not None:
        register_checkpoint_conversion_mapping(PREFIX + model_type, weights, overwrite=True)
    return made


@cache
def register_models(config_class: Any) -> None:
    """Register LUCID's models of a configuration with the Auto classes."""
    stock_config = config_class.__mro__[2]
    for auto, table in HEADS.items():
        mapping = getattr(modeling_auto, table)
        if stock_config in mapping:
            made = lucid_model_class(mapping[stock_config], config_class)
            getattr(transformers, auto).register(config_class, made, exist_ok=True)
            if auto == "AutoModelForCausalLM":
                # `transformers serve` looks the class up as an attribute of the package, and nowhere else. Transformers
                # executes its package twice, so that there are two modules of this name, of one type.
                setattr(type(transformers), made.__name__, made)
    tokenizers = transformers.TOKENIZER_MAPPING
    if stock_config in tokenizers:
        found = tokenizers[stock_config]
        found = found if isinstance(found, tuple) else (None, found)
        AutoTokenizer.register(config_class, *found, exist_ok=True)


@cache
def lucid_model_class(stock: Any, config_class: Any) -> Any:
    """LUCID's model of a model class."""
    if issubclass(stock, LucidModel):
        return stock
    body = {"config_class": config_class}
    keep = list(getattr(stock, "_keep_in_fp32_modules_strict", None) or [])
    body["_keep_in_fp32_modules_strict"] = [*keep, NAME]
    if stock is modeling_auto.MODEL_MAPPING.get(config_class.__mro__[2], None):
        body["forward"] = _forward(stock)
    return _made(f"Lucid{stock.__name__}", (LucidModel, stock), **body)


def _made(name: str, bases: tuple[Any, ...], **body: Any) -> Any:
    made = type(
        name, bases, {"__module__": __name__, "__doc__": f"`{bases[1].__name__}` with LUCID attention.", **body}
    )
    # Where pickle looks for it.
    setattr(sys.modules[__name__], name, made)
    return made


def __getattr__(name: str) -> Any:
    """The class of this name, for processes in which it was not made yet."""
    for model_type in ARCHITECTURES + ENCODERS if name.startswith("Lucid") else ():
        config_class: Any = lucid_config_class(model_type)
        if name == config_class.__name__:
            return config_class
        register_models(config_class)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _forward(stock: Any) -> Callable[..., Any]:
    """The forward pass of a base model: the stock one, with LUCID's cache layers and the argument `lucid_pass`."""
    parameters = inspect.signature(stock.forward).parameters
    names = list(parameters)[1:]
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ValueError(f"{stock.__name__} passes no arguments on to its attention, which LUCID needs")

    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))
        past = kwargs.get("past_key_values")
        if past is None and not self.sees_both_sides and _wants_cache(self, kwargs.get("use_cache")):
            past = DynamicCache(config=self.config)
        if past is not None:
            adopt_cache(past, self.config)
            kwargs["past_key_values"] = past
        tokens = kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        documents = None if tokens is None else given_documents(tokens.shape[0], tokens.shape[1], kwargs)
        kwargs["lucid_pass"] = Pass(past, documents)
        return stock.forward(self, **kwargs)

    return forward


def _wants_cache(model: Any, given: bool | None) -> bool:
    wanted = getattr(model.config, "use_cache", False) if given is None else given
    return bool(wanted) and not (model.is_gradient_checkpointing and model.training)


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = ": give its model.get_base_model()" if hasattr(model, "get_base_model") else ""
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {name}{hint}")
    config = model.config
    if isinstance(config, LucidConfig):
        raise ValueError(f"{name} chooses its attention in its configuration: LucidConfig(attention='lucid')")
    if isinstance(model, LucidModel):
        return
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder with a decoder; LUCID is for decoders alone and encoders alone")
    if config.get_text_config(decoder=True) is not config:
        raise ValueError(f"{name} has several parts; LUCID is for models of text: give its text model")
    if type(config).model_type not in CONFIG_MAPPING:
        raise ValueError(f"{name} has model_type {type(config).model_type!r}, which AutoConfig does not know")
    if not any(hasattr(module, "is_causal") and hasattr(module, "layer_idx") for module in model.modules()):
        raise ValueError(f"{name} has no attention with a layer_idx, or computes its attention itself")
