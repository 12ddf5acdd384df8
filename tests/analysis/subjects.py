"""Models to analyse, with correlated keys."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lucid_attention import ATTENTIONS, enable_lucid
from lucid_lab.analysis.capture import visit_layers
from lucid_lab.analysis.layer import Layer

VOCABULARY = 48
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # A model holds c = √D in float32: 2 is exact there.
    "head_dim": 4,
    "initializer_range": 0.3,
}


class Plain(nn.Module):
    """Layers of attention with residuals, without configuration and without Transformers."""

    def __init__(self, *attentions: str, width: int = 24, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(ATTENTIONS[name](width, 4, num_kv_heads=2, **options) for name in attentions)
        with torch.no_grad():
            # Tokens and their keys share a direction, so that P is far from the identity.
            self.embedding.weight += 1

    def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, key_mask=key_mask)[0]
        return x


def llama(implementation: str, **overrides: Any) -> PreTrainedModel:
    """A small Llama whose keys are correlated."""
    torch.manual_seed(0)
    config = LlamaConfig(**(LLAMA | overrides))
    stock = "sdpa" if implementation == "lucid" else implementation
    model = LlamaForCausalLM._from_config(config, attn_implementation=stock).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight += 0.5
    return enable_lucid(model) if implementation == "lucid" else model


def tokens(*shape: int) -> Tensor:
    """Ids, the same for the same shape."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def layers_of(model: nn.Module, inputs: Any, **options: Any) -> list[Layer]:
    """All layers at once: for tests, where they are small."""
    seen: list[Layer] = []
    visit_layers(model, inputs, seen.append, **options)
    return seen
