"""Quantized caches keep keys and y: the error is that of a softmax model whose values are quantized."""

from typing import Any

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import QuantizedCache

from lucid_attention.models.dropin.cache import pending_values
from tests.models.dropin.cases import greedy, lucid_model, relative_error, softmax_model, tokens

pytestmark = pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="needs the backend fp8, which needs no other package"
)
PROMPT, NEW = 32, 32


@torch.no_grad()
def errors(model: Any, **options: Any) -> float:
    """‖logits with the quantized cache − without a cache‖ / ‖logits‖, over new tokens, one by one after a prompt."""
    ids = tokens(2, PROMPT + NEW)
    cache = QuantizedCache(config=model.config, **options)
    model(ids[:, :PROMPT], past_key_values=cache)
    parts = [model(ids[:, [i]], past_key_values=cache).logits for i in range(PROMPT, PROMPT + NEW)]
    exact = model(ids).logits[:, PROMPT:]
    return float((torch.cat(parts, 1) - exact).norm() / exact.norm())


class Rounded:
    """What a stock layer is to ours, without an error: it keeps what it gets."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.kept or [k[:, :, :0], v[:, :, :0]]
        self.kept = [torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)]
        return self.kept[0], self.kept[1]

    def get_seq_length(self) -> int:
        return self.kept[0].shape[2] if self.kept else 0


@torch.no_grad()
@pytest.mark.parametrize("split", [1, 5])
def test_a_layer_that_rounds_nothing_gives_what_no_cache_gives(split: int) -> None:
    model, ids = lucid_model("llama").double(), tokens(2, 24)
    cache = QuantizedCache(backend="fp8", config=model.config)
    for layer in cache.layers:
        layer.stock = Rounded()
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :9], *ids[:, 9:].split(split, 1))]
    assert relative_error(torch.cat(parts, 1), model(ids).logits) < 1e-10


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
@pytest.mark.shows("quantized cache", model="drop-in")
def test_the_error_of_8_bits_is_of_the_size_that_softmax_has(name: str) -> None:
    lucid, softmax = errors(lucid_model(name), backend="fp8"), errors(softmax_model(name), backend="fp8")
    assert 0 < lucid < 3 * softmax


def test_a_model_generates_with_it() -> None:
    model = lucid_model("llama")
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    assert greedy(model, tokens(2), **options).shape == (2, 8)
    assert greedy(model, tokens(2), num_beams=3, **options).shape == (2, 8)


def test_layers_with_a_window_are_refused_as_without_lucid() -> None:
    with pytest.raises(ValueError, match="only supported for models with only full attention layers"):
        QuantizedCache(backend="fp8", config=lucid_model("gemma3").config)


@torch.no_grad()
def test_it_cannot_be_cropped_and_belongs_to_its_settings() -> None:
    model = lucid_model("llama")
    cache = QuantizedCache(backend="fp8", config=model.config)
    model(tokens(), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be cropped, which speculative decoding needs"):
        cache.layers[0].crop(-1)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="expected attn_implementation='lucid', with which it was made"):
        model(tokens(1, 1), past_key_values=cache)
    k = torch.randn(1, 2, 1, 8)
    fresh = QuantizedCache(backend="fp8", config=lucid_model("llama").config)
    assert pending_values(fresh.update(k, k, 0)[1]) is not None
    with pytest.raises(RuntimeError, match="never preconditioned"):
        fresh.update(k, k, 0)


def test_softmax_models_get_the_stock_cache() -> None:
    lucid_model("llama")
    cache = QuantizedCache(backend="fp8", config=softmax_model("llama").config)
    assert {type(layer).__name__ for layer in cache.layers} == {"Fp8QuantizedLayer"}
