"""vLLM's own models with LUCID in the layers that `config.lucid` names."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from ..models.preconditioner import NAME, LucidSettings, lucid_layers
from .backend import LucidBackend, LucidImpl


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
