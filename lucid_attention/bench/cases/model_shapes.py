"""Whole models for cost measurements: architectures of Transformers in the true widths, made of few layers.

Transformers is imported when a model is made: the other benchmarks do without it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class ModelShape:
    """A published model. Without sliding layers the window is 0."""

    name: str
    family: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    sliding_layers: int
    full_layers: int
    vocab: int
    paper: float | None
    """What training costs more with LUCID, as the paper has it."""

    def small(self) -> "ModelShape":
        """The same heads and mix of layers in a model that computes in milliseconds."""
        return replace(self, hidden=64, intermediate=96, window=min(self.window, 16), vocab=128)

    @property
    def layers(self) -> int:
        return self.sliding_layers + self.full_layers

    @property
    def mix(self) -> list[str]:
        """A few layers in the proportion of the model: Gemma's five with a window and one without, or four."""
        return [*[SLIDING] * 5, FULL] if self.window else [FULL] * 4

    @property
    def weights(self) -> int:
        """Of the matrices of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def layer_operations(self, kind: str, T: int) -> float:
        """Floating point operations of one layer over T tokens, forward and backward, reading no key in vain."""
        attention = _attention(pairs(T, self.window if kind == SLIDING else T), self.head_dim)
        return 6.0 * T * self.weights + attention * self.heads

    def solve_operations(self, T: int) -> float:
        """What LUCID adds to a layer: one more attention per key/value head, as in the benchmark `solve`."""
        return _attention(pairs(T, T), self.head_dim) * self.kv_heads

    def head_operations(self, T: int) -> float:
        return 6.0 * T * self.hidden * self.vocab

    def predicted(self, T: int, head: bool) -> float:
        """LUCID over softmax attention by the count of operations: all layers, with or without the vocabulary."""
        whole = self.sliding_layers * self.layer_operations(SLIDING, T) + self.full_layers * self.layer_operations(
            FULL, T
        )
        whole += self.head_operations(T) if head else 0.0
        return 1 + self.full_layers * self.solve_operations(T) / whole

    def predicted_decoding(self, context: int) -> float:
        """The same for one token, by what is read from memory; LUCID also reads one number per key."""
        cached = self.full_layers * context + self.sliding_layers * min(context, self.window)
        read = self.layers * self.weights + 2 * cached * self.kv_heads * self.head_dim
        return 1 + self.full_layers * self.kv_heads * context / read


def pairs(T: int, window: int) -> float:
    """Queries and keys that meet: each query sees up to `window` keys, itself included."""
    full = min(T, window)
    return full * (full + 1) / 2 + (T - full) * full


def _attention(pairs: float, D: int) -> float:
    """Seven products of D features for every pair: two forward, five backward. The solve has as many."""
    return 7 * 2.0 * pairs * D


# config.json of google/gemma-3-1b-pt, of the text model in google/gemma-3-4b-pt, of Qwen/Qwen2.5-1.5B. Their parameters
# come out right, see tests/benchmarks: 999 885 952, 3 880 263 168 (with 262 208 tokens), 1 543 714 304.
GEMMA_1B = ModelShape("Gemma-3-1B", "gemma3", 1152, 6912, 4, 1, 256, 512, 22, 4, 262_144, 0.0)
GEMMA_4B = ModelShape("Gemma-3-4B", "gemma3", 2560, 10_240, 8, 4, 256, 1024, 29, 5, 262_208, 0.035)
QWEN = ModelShape("Qwen-2.5-1.5B", "qwen2", 1536, 8960, 12, 2, 128, 0, 0, 28, 151_936, 0.055)
# The paper's own model (section 4.1), whose cost it does not report.
PAPER_1B = ModelShape("paper's 1B", "llama", 2048, 5632, 32, 4, 68, 0, 0, 22, 32_000, None)


def config(shape: ModelShape, kinds: Sequence[str], vocab: int = 8) -> Any:
    """A Transformers configuration with these layers; a small vocabulary, as hidden states go in and come out."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

    common = {
        "vocab_size": vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 131_072,
        # Larger than usual: what attention adds must not drown in the residual stream, or the gate sees nothing of it.
        "initializer_range": 2 * shape.hidden**-0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.family == "gemma3":
        return Gemma3TextConfig(**common, sliding_window=shape.window, layer_types=list(kinds))
    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[shape.family](**common, tie_word_embeddings=True)


def with_softmax(shape: ModelShape, kinds: Sequence[str]) -> Any:
    """The model as Transformers has it, without the vocabulary's matrix, random weights."""
    from transformers import AutoModel

    torch.manual_seed(0)
    return AutoModel.from_config(config(shape, kinds), attn_implementation="sdpa")


def twin(model: Any) -> Any:
    """A second model with the same weights, not copies of them."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def with_lucid(model: Any, strength: float = 1.0) -> Any:
    """A twin that attends with LUCID."""
    from lucid_attention import enable_lucid

    return enable_lucid(twin(model), strength=strength)


def hidden_states(shape: ModelShape, T: int) -> Tensor:
    """What goes into the first layer: [1, T, hidden], with a common direction, so that keys are correlated."""
    random = torch.Generator().manual_seed(T)
    return torch.randn(1, T, shape.hidden, generator=random) + 5 * torch.randn(1, 1, shape.hidden, generator=random)


def training_step(model: Any, x: Tensor, dx: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output, and the gradients of x and of every weight of the layers."""
    x = x.detach().requires_grad_()
    o = model(inputs_embeds=x, use_cache=False).last_hidden_state
    weights = [*model.layers.parameters(), *model.norm.parameters()]
    return (o.detach(), *torch.autograd.grad(o, (x, *weights), dx))
