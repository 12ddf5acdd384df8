"""vLLM's own models with LUCID in the layers that `config.lucid` names."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from ..models.preconditioner import NAME, LucidSettings, lucid_layers
from .backend import LucidBackend, LucidImpl
from .configs import LucidDecoderConfig

DECODER_VALUES = {"key_center": "center", "key_matrix": "matrix", "log_sharpness": "sharpness"}


def put_lucid(model: nn.Module, vllm_config: Any) -> dict[int, LucidImpl]:
    """Give the chosen layers of a model of vLLM the backend of LUCID, and return it by layer. Others keep vLLM's."""
    config = vllm_config.model_config.hf_config
    if getattr(config, NAME, None) is None:
        raise TypeError(f"{type(model).__name__} needs a configuration with LUCID, got {type(config).__name__}")
    width = config.hidden_size // config.num_attention_heads
    if isinstance(model, Qwen2ForCausalLM) and getattr(config, "head_dim", None) not in (None, width):
        # vLLM would take a part of the weights without a word.
        raise ValueError(
            f"vLLM's Qwen2 has heads of hidden_size / num_attention_heads = {width}, got {config.head_dim}"
        )
    if vllm_config.kv_transfer_config is not None:
        raise ValueError("LUCID attention keeps norms next to vLLM's cache: expected no kv_transfer_config, got one")
    settings, chosen = LucidSettings.from_dict(getattr(config, NAME)), lucid_layers(config)
    if not settings.strength and not settings.learned:
        return {}
    layers, made = vllm_config.compilation_config.static_forward_context, {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention) and (index := extract_layer_index(module.layer_name)) in chosen:
            # The place of the layer by its name, which it gives up to the new one.
            del layers[module.layer_name]
            parent, _, attribute = name.rpartition(".")
            layer = _lucid_layer(module, settings, vllm_config)
            setattr(model.get_submodule(parent), attribute, layer)
            made[index] = layer.impl
    return made


def _lucid_layer(layer: Any, settings: LucidSettings, vllm_config: Any) -> Attention:
    stock = layer.impl
    made = Attention(
        layer.num_heads,
        layer.head_size,
        stock.scale,
        num_kv_heads=layer.num_kv_heads,
        alibi_slopes=getattr(stock, "alibi_slopes", None),
        cache_config=vllm_config.cache_config,
        quant_config=layer.quant_config,
        logits_soft_cap=getattr(stock, "logits_soft_cap", None),
        per_layer_sliding_window=layer.sliding_window,
        prefix=layer.layer_name,
        attn_type=layer.attn_type,
        kv_sharing_target_layer_name=layer.kv_sharing_target_layer_name,
        attn_backend=LucidBackend,
        head_size_v=layer.head_size_v,
        sinks=getattr(stock, "sinks", None),
        settings=settings,
    )
    assert isinstance(made.impl, LucidImpl)
    return made


class WithLucid:
    """First base of a model of vLLM."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **others: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)  # type: ignore[call-arg]
        self.lucid_impls = put_lucid(self, vllm_config)  # type: ignore[arg-type]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM. LUCID's own values go to the attention of their layers."""

        def stock() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                path, _, kind = name.rpartition(".")
                if not path.endswith(f".{NAME}"):
                    yield name, weight
                elif (index := extract_layer_index(name)) in self.lucid_impls:
                    self.lucid_impls[index].set_value(kind, weight)

        loaded = super().load_weights(stock())  # type: ignore[misc]
        for index, impl in self.lucid_impls.items():
            if impl.missing:
                raise ValueError(f"the checkpoint must have {' and '.join(sorted(impl.missing))} of layer {index}")
        return loaded


class LucidLlamaForCausalLM(WithLucid, LlamaForCausalLM):
    """Llama with LUCID."""


class LucidMistralForCausalLM(WithLucid, MistralForCausalLM):
    """Mistral with LUCID."""


class LucidQwen2ForCausalLM(WithLucid, Qwen2ForCausalLM):
    """Qwen2 with LUCID."""


class LucidQwen3ForCausalLM(WithLucid, Qwen3ForCausalLM):
    """Qwen3 with LUCID."""


class LucidGemma3ForCausalLM(WithLucid, Gemma3ForCausalLM):
    """The text model of Gemma 3 with LUCID."""


class DecoderAttention(LlamaAttention):
    """The attention of our decoder: Llama's, optionally with norms of queries and keys or without rotary embedding."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        self.no_rope = config.no_rope
        super().__init__(config, *inputs, **options)
        # The eps of `CausalAttention`.
        self.q_norm = RMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else None

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: [T]; hidden_states: [T, hidden_size] -> [T, hidden_size]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normalized(q, self.q_norm), self._normalized(k, self.k_norm)
        if not self.no_rope:
            q, k = self.rotary_emb(positions, q, k)
        o, _ = self.o_proj(self.attn(q, k, v))
        return o

    def _normalized(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)


class DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with the attention of our decoder."""

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=DecoderAttention)


class LucidForCausalLM(WithLucid, LlamaForCausalLM):
    """Our decoder in vLLM."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if not isinstance(config, LucidDecoderConfig):
            raise TypeError(f"LucidForCausalLM in vLLM needs a LucidDecoderConfig, got {type(config).__name__}")
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=DecoderLayer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As above, with the names that LUCID's values have in our decoder."""

        def renamed() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                path, _, kind = name.rpartition(".")
                if kind in DECODER_VALUES:
                    weight = weight.float().exp() if kind == "log_sharpness" else weight
                    name = f"{path}.{NAME}.{DECODER_VALUES[kind]}"
                yield name, weight

        return super().load_weights(renamed())
