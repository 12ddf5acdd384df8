"""Whole models: architectures of Transformers in their true widths, made of few layers; and their correctness gate.

Transformers is imported when a model is made: the other benchmarks do not need it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import gate
from .peers import SDPA

SLIDING, FULL = "sliding_attention", "full_attention"
LUCID, STRENGTH_0 = "LUCID", "LUCID of strength 0"
LENGTH, PREFILL, STEPS = 150, 120, 20
PARTS = ("its output", "the gradient of its input", "the gradient of its weights")
TRUTHS = {False: "benchmark_softmax", True: "benchmark_lucid"}


@dataclass(frozen=True)
class ModelShape:
    """A published model. The window is 0 if no layer has one."""

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
    """The share that LUCID adds to the cost of training, according to the paper."""

    def small(self) -> "ModelShape":
        """A model with the same heads and mix of layers, small enough to run in milliseconds."""
        return replace(self, hidden=64, intermediate=96, window=min(self.window, 16), vocab=128)

    @property
    def layers(self) -> int:
        return self.sliding_layers + self.full_layers

    @property
    def mix(self) -> list[str]:
        """A few layers in the model's proportion: five with a window and one without (Gemma), or four without."""
        return [*[SLIDING] * 5, FULL] if self.window else [FULL] * 4

    @property
    def weights(self) -> int:
        """The weights in the matrices of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def layer_operations(self, kind: str, T: int) -> float:
        """Operations of one layer over T tokens, forward and backward; keys outside of the window cost nothing."""
        attention = _attention(pairs(T, self.window if kind == SLIDING else T), self.head_dim)
        return 6.0 * T * self.weights + attention * self.heads

    def solve_operations(self, T: int) -> float:
        """Operations that LUCID adds to a layer: one more attention per key/value head."""
        return _attention(pairs(T, T), self.head_dim) * self.kv_heads

    def head_operations(self, T: int) -> float:
        return 6.0 * T * self.hidden * self.vocab

    def predicted(self, T: int, head: bool) -> float:
        """LUCID over softmax attention by the count of operations, for all layers and, if `head`, the vocabulary."""
        whole = self.sliding_layers * self.layer_operations(SLIDING, T)
        whole += self.full_layers * self.layer_operations(FULL, T)
        whole += self.head_operations(T) if head else 0.0
        return 1 + self.full_layers * self.solve_operations(T) / whole

    def predicted_decoding(self, context: int) -> float:
        """LUCID over softmax attention for one token, by the numbers read: LUCID reads one more for each key."""
        cached = self.full_layers * context + self.sliding_layers * min(context, self.window)
        numbers_read = self.layers * self.weights + 2 * cached * self.kv_heads * self.head_dim
        return 1 + self.full_layers * self.kv_heads * context / numbers_read


def pairs(T: int, window: int) -> float:
    """Pairs of a query and a key that it sees: each query sees up to `window` keys, its own included."""
    full = min(T, window)
    return full * (full + 1) / 2 + (T - full) * full


def _attention(pairs: float, D: int) -> float:
    """Operations of attention or of a solve: seven products of D features per pair, two forward and five backward."""
    return 7 * 2.0 * pairs * D


# From config.json of google/gemma-3-1b-pt, the text model in google/gemma-3-4b-pt, and Qwen/Qwen2.5-1.5B. tests/bench
# counts their parameters: 999 885 952, 3 880 263 168 (with 262 208 tokens), 1 543 714 304.
GEMMA_1B = ModelShape("Gemma-3-1B", "gemma3", 1152, 6912, 4, 1, 256, 512, 22, 4, 262_144, 0.0)
GEMMA_4B = ModelShape("Gemma-3-4B", "gemma3", 2560, 10_240, 8, 4, 256, 1024, 29, 5, 262_208, 0.035)
QWEN = ModelShape("Qwen-2.5-1.5B", "qwen2", 1536, 8960, 12, 2, 128, 0, 0, 28, 151_936, 0.055)
# The paper's own model (section 4.1), whose cost it does not report.
PAPER_1B = ModelShape("paper's 1B", "llama", 2048, 5632, 32, 4, 68, 0, 0, 22, 32_000, None)


def config(shape: ModelShape, kinds: Sequence[str], vocab: int = 8) -> Any:
    """A Transformers configuration with these layers. The vocabulary is small: models get and give hidden states."""
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
        # Larger than usual: otherwise the residual stream hides errors of attention from the gate.
        "initializer_range": 2 * shape.hidden**-0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.family == "gemma3":
        return Gemma3TextConfig(**common, sliding_window=shape.window, layer_types=list(kinds))
    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[shape.family](**common, tie_word_embeddings=True)


def with_softmax(shape: ModelShape, kinds: Sequence[str]) -> Any:
    """The model of Transformers with random weights, without the matrix of the vocabulary."""
    from transformers import AutoModel

    torch.manual_seed(0)
    return AutoModel.from_config(config(shape, kinds), attn_implementation="sdpa")


def twin(model: Any) -> Any:
    """A second model that shares the weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def with_lucid(model: Any, strength: float = 1.0) -> Any:
    """A twin with LUCID."""
    from lucid_attention import enable_lucid

    return enable_lucid(twin(model), strength=strength)


def hidden_states(shape: ModelShape, T: int) -> Tensor:
    """The input of the first layer: [1, T, hidden], with a common direction, so that keys are correlated."""
    random = torch.Generator().manual_seed(T)
    return torch.randn(1, T, shape.hidden, generator=random) + 5 * torch.randn(1, 1, shape.hidden, generator=random)


def training_step(model: Any, x: Tensor, dx: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output, and the gradients of x and of every weight of the layers."""
    x = x.detach().requires_grad_()
    o = model(inputs_embeds=x, use_cache=False).last_hidden_state
    weights = [*model.layers.parameters(), *model.norm.parameters()]
    return (o.detach(), *torch.autograd.grad(o, (x, *weights), dx))


def _true_forward(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, solves: bool, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """Attention by its definition, dense, in float64, as a function that Transformers can call."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert q.dtype == torch.float64
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] == SLIDING:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **others)
    assert abs(scaling * k.shape[-1] ** 0.5 - 1) < 1e-6
    return gate.true_attention(q, k, v, solves).transpose(1, 2).contiguous(), None


def _true_twin(model: Any, solves: bool) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(TRUTHS[solves], partial(_true_forward, solves=solves))
    AttentionMaskInterface.register(TRUTHS[solves], sdpa_mask)
    wide = with_softmax(*model.made_from).double()
    wide.load_state_dict(model.state_dict())
    wide.set_attn_implementation(TRUTHS[solves])
    return wide


def _small_model(shape: ModelShape) -> Any:
    made_from = shape.small(), [SLIDING, FULL] if shape.window else [FULL, FULL]
    model = with_softmax(*made_from)
    model.made_from = made_from
    return model


def _step(model: Any, x: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A training step, with the gradients of all weights in one tensor."""
    o, gradient, *weights = training_step(model, x, dx)
    return o, gradient, torch.cat([weight.flatten() for weight in weights])


@cache
def check_training(shape: ModelShape) -> None:
    """Compare outputs and all gradients with the definition, and LUCID of strength 0 with softmax attention."""
    model, where = _small_model(shape), f"model_training, {shape.name}, small, T={LENGTH}"
    x, dx = (hidden_states(shape.small(), T)[:, :LENGTH] for T in (LENGTH, LENGTH + 1))
    truths = [_step(_true_twin(model, solves), x.double(), dx.double()) for solves in (False, True)]
    gate.check_sharp(where, truths[1][0], truths[0][0], torch.float32)
    softmax = _step(model, x, dx)
    gate.check(where, SDPA, softmax, "the float64 truth", truths[0], PARTS)
    gate.check(where, LUCID, _step(with_lucid(model), x, dx), "the float64 truth", truths[1], PARTS)
    gate.check(where, STRENGTH_0, _step(with_lucid(model, 0.0), x, dx), repr(SDPA), softmax, PARTS)


@cache
def check_decoding(shape: ModelShape) -> None:
    """Compare a prefill and single tokens after it, with either cache, with the full pass in float64."""
    from transformers import DynamicCache, StaticCache

    model, where = _small_model(shape), f"model_decode, {shape.name}, small, context {PREFILL}"
    x, end = hidden_states(shape.small(), PREFILL + STEPS), PREFILL + STEPS
    with torch.no_grad():
        truths = [
            _true_twin(model, solves)(inputs_embeds=x.double(), use_cache=False).last_hidden_state
            for solves in (False, True)
        ]
        gate.check_sharp(where, truths[1], truths[0], torch.float32)
        for name, tested, truth in ((SDPA, model, truths[0]), (LUCID, with_lucid(model), truths[1])):
            caches = {"dynamic": DynamicCache(config=tested.config), "static": StaticCache(tested.config, end)}
            for kind, past in caches.items():
                parts = x.split([PREFILL, *[1] * STEPS], 1)
                outputs = [tested(inputs_embeds=part, past_key_values=past).last_hidden_state for part in parts]
                part_names = (f"its output from a {kind} cache",)
                gate.check(where, name, (torch.cat(outputs, 1),), "the float64 truth", (truth,), part_names)
