"""The decoder of `LucidConfig`: Llama's blocks and weight names around an attention module of this library."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...nn.causal import CausalAttention
from ...nn.norm import HeadNorm
from ...nn.short_convolution import ShortConvolution
from ..documents import document_borders
from .cache import check_cache
from .configuration import MODEL_TYPE, LucidConfig, make_attention


class LucidMLP(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: LucidConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LucidDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, config: LucidConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.self_attn = make_attention(config, layer_index)
        self.mlp = LucidMLP(config)
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
        past = None if cache_layer is None else cache_layer.past
        o, past = self.self_attn(x, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, positions=positions)
        if cache_layer is not None:
            cache_layer.store(past)
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
        if requested_attention not in (None, "eager"):
            raise ValueError(
                f"attn_implementation must be left out for {type(self).__name__}, got {requested_attention!r}: its "
                "attention is LucidConfig(attention=...), its implementation attention_options={'impl': ...}"
            )
        return "eager"

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
        """Initialize weights of the attention module itself (decay rates, λ, sharpness), as its constructor does."""
        own = dict(module.named_parameters(recurse=False))
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
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds: exactly one of them")
        self._refuse_unsupported(kwargs)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = hidden_states.shape
        if past_key_values is not None:
            check_cache(past_key_values, self.config.layer_types)
        S = 0 if past_key_values is None else past_key_values.get_seq_length()
        key_mask = padding_mask(attention_mask, B, S + T)
        positions = None if position_ids is None else check_positions(position_ids, B, T)
        cu_seqlens = None
        if positions is not None and T > 1:
            cu_seqlens = None if key_mask is not None else document_borders(positions)
        if cu_seqlens is not None and past_key_values is not None:
            raise ValueError("position_ids must go up where a cache is in use: packed documents cannot be cached")
        if cu_seqlens is not None:
            key_mask, positions = (None if x is None else x.reshape(1, -1) for x in (key_mask, positions))
        elif use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                past_key_values=past_key_values,
                key_mask=key_mask,
                cu_seqlens=cu_seqlens,
                positions=positions,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _refuse_unsupported(self, kwargs: dict[str, Any]) -> None:
        """Refuse arguments that other models take and that this one would ignore."""
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError("output_attentions must be False: no attention weights are computed, so none are returned")
        borders = [name for name in ("cu_seq_lens_q", "seq_idx") if kwargs.get(name) is not None]
        if borders:
            raise ValueError(
                f"packed documents must be given by position_ids, got {borders[0]}: leave return_flash_attn_kwargs and "
                "return_seq_idx of DataCollatorWithFlattening out"
            )


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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens, and the loss if there are labels.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: as in `LucidModel`.
            labels: [B, T], the tokens themselves, which are shifted inside; −100 is ignored.
            logits_to_keep: a number of last tokens, or indices of tokens, to return logits of; 0 for all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(_kept(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )


def padding_mask(attention_mask: Any, B: int, total: int) -> Tensor | None:
    """attention_mask in the form of the modules: [B, S + T] bool, None if nothing is padding."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != (B, total):
        form = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must be [B, S + T] = {[B, total]}, 0 at padding, got {form}. Attention here is causal; "
            "packed documents are given by position_ids"
        )
    key_mask = attention_mask.bool()
    # All operators are faster without a mask. A compiled graph cannot read values.
    return None if not torch.compiler.is_compiling() and bool(key_mask.all()) else key_mask


def check_positions(position_ids: Tensor, B: int, T: int) -> Tensor:
    """position_ids as [B, T]. One row holds for all."""
    if tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
        raise ValueError(f"position_ids must be [B, T] = {[B, T]}, got shape {list(position_ids.shape)}")
    return position_ids.expand(B, T)


def register_decoder() -> None:
    """Register the model type with the Auto classes of Transformers. Further calls change nothing."""
    AutoConfig.register(MODEL_TYPE, LucidConfig, exist_ok=True)
    AutoModel.register(LucidConfig, LucidModel, exist_ok=True)
    AutoModelForCausalLM.register(LucidConfig, LucidForCausalLM, exist_ok=True)
    # `transformers serve` looks up the class that a configuration names as an attribute of the package. Transformers
    # executes its package twice, so that there are two modules of this name, of one type.
    type(transformers).LucidForCausalLM = LucidForCausalLM


def _kept(hidden: Tensor, keep: int | Tensor) -> Tensor:
    """hidden: [B, T, *], at its last `keep` positions (0 for all), or at the indices keep: [n]."""
    if isinstance(keep, int):
        return hidden[:, -keep:] if keep else hidden
    return hidden[:, keep]
