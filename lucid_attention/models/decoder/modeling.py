"""The decoder of `LucidConfig`: Llama's blocks and weight names around an attention module of this library."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...nn.causal import CausalAttention, HeadNorm
from ...nn.short_convolution import ShortConvolution
from ..cache import fill_layers
from .cache import check_cache
from .configuration import MODEL_TYPE, LucidConfig, make_attention
from .masks import read_inputs


class LucidDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, config: LucidConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.self_attn = make_attention(config, layer_index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        past_key_values: Cache | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """hidden_states: [B, T, hidden_size]. With cu_seqlens, key_mask and positions are [1, B·T], all rows as one."""
        x = self.input_layernorm(hidden_states)
        if cu_seqlens is not None:
            x = x.flatten(0, 1)[None]
        cache_layer = None if past_key_values is None else past_key_values.layers[self.layer_index]
        past = None if cache_layer is None else cache_layer.read()
        o, past = self.self_attn(x, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, positions=positions)
        if cache_layer is not None:
            cache_layer.keep(past, x.shape[1])
        hidden_states = hidden_states + o.view_as(hidden_states)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LucidPreTrainedModel(PreTrainedModel):
    """Base of both models: initial weights, and the attributes that Transformers reads."""

    config_class = LucidConfig
    config: LucidConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["LucidDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _can_record_outputs: ClassVar[dict[str, type[nn.Module]]] = {"hidden_states": LucidDecoderLayer}

    def __init__(self, config: LucidConfig, *inputs: Any, **kwargs: Any) -> None:
        # The configuration may have been changed since it was checked.
        config.validate_attention()
        super().__init__(config, *inputs, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuse every choice: the configuration names the attention."""
        if requested_attention in (None, "eager"):
            return "eager"
        name = type(self).__name__
        raise ValueError(
            f"attn_implementation={requested_attention!r} is not possible for {name}: leave it out. Its attention is "
            f"LucidConfig(attention=...), here {self.config.attention!r}; attention='softmax' gives softmax attention"
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ShortConvolution):
            init.copy_(module.weight, ShortConvolution(module.channels, module.size).weight.to(module.weight))
        elif isinstance(module, CausalAttention):
            self._init_own_weights(module)
        else:
            super()._init_weights(module)

    def _init_own_weights(self, module: CausalAttention) -> None:
        """Initialize values of the attention module itself (decay rates, λ, sharpness, a map of keys), as it does."""
        own = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
        if own:
            index = next(layer.layer_index for layer in self.layers if layer.self_attn is module)
            # These weights belong to heads, so a module of width 1 has them too, and is made quickly.
            fresh = make_attention(self.config, index, hidden_size=1)
            for name, weight in own.items():
                init.copy_(weight, getattr(fresh, name).to(weight))


class LucidModel(LucidPreTrainedModel):
    """Embedding, decoder layers and a last norm. Returns the hidden states of every token."""

    def __init__(self, config: LucidConfig) -> None:
        super().__init__(config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([LucidDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = HeadNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of T new tokens after S in the cache.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S + T], 0 at padding, on either side.
            position_ids: [B, T], for the rotary embedding; by default counted without padding. Without a cache, a token
                whose position is not above that of the token before it begins another document (packing).
            past_key_values: `DynamicCache(config=model.config)`.
            inputs_embeds: [B, T, hidden_size] instead of input_ids.
            use_cache: whether to return a cache; packed documents have none.
            kwargs: cu_seq_lens_q and seq_idx of flattening collators, borders of packed documents.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds: exactly one of them")
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError("output_attentions must be False: no attention weights are computed, so none are returned")
        if kwargs.get("cache") is not None:
            raise ValueError("LucidForCausalLM has no continuous batching in Transformers: use generate()")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = hidden_states.shape
        if past_key_values is not None:
            fill_layers(past_key_values, self.config)
            check_cache(past_key_values, self.config.layer_types)
        S = 0 if past_key_values is None else past_key_values.get_seq_length()
        cached = bool(use_cache) or past_key_values is not None
        seen = read_inputs(attention_mask, position_ids, kwargs, B, T, S, cached=cached)
        if seen.cu_seqlens is not None and past_key_values is not None:
            raise ValueError("position_ids must go up where a cache is in use: packed documents cannot be cached")
        if seen.cu_seqlens is None and use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(hidden_states, past_key_values=past_key_values, **seen._asdict())
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class LucidForCausalLM(LucidPreTrainedModel, GenerationMixin):
    """A causal language model whose attention comes from `ATTENTIONS` by name.

        model = LucidForCausalLM(LucidConfig(attention="lucid", attention_options={"sharpness": 4.0}))

    Args:
        config: the sizes, and the attention of every layer.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LucidConfig) -> None:
        super().__init__(config)
        self.model = LucidModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    # Logits and loss of the hidden states, as in Llama.
    forward = LlamaForCausalLM.forward


class LucidForSequenceClassification(GenericForSequenceClassification, LucidPreTrainedModel):
    """One label or score per sequence, read at its last token: also a reward model (num_labels=1).

    A batch of several sequences needs config.pad_token_id, with padding on either side.
    """

    def __init__(self, config: LucidConfig) -> None:
        # Transformers makes the decoder of a head with `AutoModel`, which must know ours.
        register_decoder()
        super().__init__(config)


def register_decoder() -> None:
    """Register the model type with the Auto classes of Transformers. Further calls change nothing."""
    AutoConfig.register(MODEL_TYPE, LucidConfig, exist_ok=True)
    for auto, model in (
        (AutoModel, LucidModel),
        (AutoModelForCausalLM, LucidForCausalLM),
        (AutoModelForSequenceClassification, LucidForSequenceClassification),
    ):
        auto.register(LucidConfig, model, exist_ok=True)
