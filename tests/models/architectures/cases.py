"""Tiny random models of many architectures, with keys so similar that LUCID and softmax choose different tokens."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lucid_attention import enable_lucid

VOCABULARY = 97
WINDOW = 5

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Gemma's scores have a scale of their own, which P does not use.
_GEMMA = {"tie_word_embeddings": False, "query_pre_attn_scalar": 3, "sliding_window": WINDOW}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}


def _config(name: str, **options: Any) -> Callable[[], transformers.PreTrainedConfig]:
    return lambda: getattr(transformers, name)(**{**_SHAPE, **options})


CONFIGURATIONS = {
    "llama": _config("LlamaConfig"),
    "qwen2": _config("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, **_MIXED),
    "qwen3": _config("Qwen3Config"),
    "mistral": _config("MistralConfig", sliding_window=None),
    "gemma2": _config("Gemma2Config", attn_logit_softcapping=4.0, **_GEMMA, **_MIXED),
    "gemma3": _config("Gemma3TextConfig", **_GEMMA, **_MIXED),
    "phi3": _config("Phi3Config", pad_token_id=0, sliding_window=None),
    "olmo2": _config("Olmo2Config"),
    "smollm3": _config("SmolLM3Config", tie_word_embeddings=False),
    "granite": _config("GraniteConfig", attention_multiplier=0.5, logits_scaling=2.0),
    "starcoder2": _config("Starcoder2Config", sliding_window=None),
    "gemma": _config("GemmaConfig", tie_word_embeddings=False),
    "cohere": _config("CohereConfig", tie_word_embeddings=False),
    "glm": _config("GlmConfig"),
    "helium": _config("HeliumConfig"),
    "arcee": _config("ArceeConfig"),
    "phi": _config("PhiConfig", num_key_value_heads=4),
    "mixtral": _config("MixtralConfig", num_local_experts=2, num_experts_per_tok=1, sliding_window=None),
    "gpt_neox": _config("GPTNeoXConfig", num_key_value_heads=4, rotary_pct=0.5),
    "gpt_oss": _config(
        "GptOssConfig",
        sliding_window=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
# Attention of these models without LUCID: SDPA has no soft caps and no sinks.
STOCK = {"gemma2": "eager", "gpt_oss": "eager"}
ARCHITECTURES = list(CONFIGURATIONS)
# For slow tests: sliding windows and sinks, plain scores, and normalised keys.
A_FEW = ["llama", "qwen3", "gemma3", "gpt_oss"]


def sharpen(model: PreTrainedModel, scale: float = 6.0, shift: float = 0.05) -> None:
    """Make keys similar (a constant in the embeddings) and logits far apart (large weights)."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.mul_(scale)
            elif name.endswith("sinks"):
                weight.normal_()
        model.get_input_embeddings().weight.add_(shift)


@cache
def _weights(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name](), attn_implementation=STOCK.get(name, "sdpa"))
    sharpen(model)
    return model.eval()


def softmax_model(name: str) -> PreTrainedModel:
    """A fresh copy with softmax attention."""
    return copy.deepcopy(_weights(name))


def lucid_model(name: str, **settings: Any) -> PreTrainedModel:
    """A fresh copy with LUCID."""
    return enable_lucid(softmax_model(name), **settings)


def tokens(batch: int = 1, length: int = 12, seed: int = 0) -> Tensor:
    """Random tokens, none of them padding."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: PreTrainedModel, ids: Tensor, new: int = 8, **options: Any) -> Tensor:
    """The tokens that are generated behind `ids`."""
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, **options}
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


def left_padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The first lengths[i] tokens of row i with padding before them, and the mask."""
    longest = max(lengths)
    rows = [
        torch.cat([torch.zeros(longest - n, dtype=ids.dtype), row[:n]]) for row, n in zip(ids, lengths, strict=True)
    ]
    padded = torch.stack(rows)
    return padded, (padded != 0).long()


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Largest difference over largest value."""
    return float((x - truth).abs().max() / truth.abs().max())


def gradients(model: PreTrainedModel, weights: Tensor, *passes: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of one or more forward passes, side by side, and the gradients of their weighted sum."""
    model.zero_grad()
    logits = torch.cat([model(**inputs).logits for inputs in passes], 1)
    (logits * weights[..., None] * _directions()).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), found


@cache
def _directions() -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(11))


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every weight has a gradient in both, and it is the same."""
    assert found.keys() == expected.keys()
    # The gradient of a bias of keys cancels to 0, with rounding errors as large as those of other weights.
    floor = 1e-3 * max(float(g.abs().max()) for g in expected.values())
    for name, g in found.items():
        error = float((g - expected[name]).abs().max()) / max(float(expected[name].abs().max()), floor)
        assert error < tolerance, (name, error)
