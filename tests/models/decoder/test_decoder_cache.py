"""The cache layers of the own decoder: operations on a batch of pasts, and refused caches of other models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, StaticCache

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.cache import CroppableLayer, StateLayer
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from .cases import CROPPABLE, SHAPE, decoder, greedy, padded, prompts

every_name = pytest.mark.parametrize("name", ATTENTIONS)


@pytest.fixture(scope="module")
def models() -> dict[str, LucidForCausalLM]:
    return {name: decoder(name).double() for name in ATTENTIONS}


@torch.no_grad()
def fed(model: LucidForCausalLM, tokens: Tensor, cache: DynamicCache | None = None, ones: int = 2) -> DynamicCache:
    """A cache of these tokens [B, T], the last `ones` of them fed one by one."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    for chunk in tokens.split([tokens.shape[1] - ones] + [1] * ones, 1):
        model(chunk, past_key_values=cache)
    return cache


@torch.no_grad()
def next_logits(model: LucidForCausalLM, cache: DynamicCache, tokens: Tensor) -> Tensor:
    return model(tokens, past_key_values=cache).logits


def batch(rows: int = 3, length: int = 8, seed: int = 1) -> Tensor:
    return torch.stack(prompts(*[length] * rows, seed=seed))


@every_name
def test_a_cache_counts_its_tokens(name: str, models: dict[str, LucidForCausalLM]) -> None:
    cache = DynamicCache(config=models[name].config)
    assert cache.get_seq_length() == 0
    fed(models[name], batch(), cache)
    assert [cache.get_seq_length(index) for index in range(2)] == [8, 8]
    assert cache.get_mask_sizes(3, 0) == (11, 0)
    assert cache.get_max_length() == -1
    assert cache.is_initialized
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized


@every_name
@pytest.mark.parametrize("ones", [0, 2], ids=["after a prompt", "after single tokens"])
def test_rows_change_places(ones: int, name: str, models: dict[str, LucidForCausalLM]) -> None:
    tokens, new, order = batch(), batch(length=2, seed=2), torch.tensor([2, 0, 0])
    cache = fed(models[name], tokens, ones=ones)
    # Beams, and rows that are done.
    cache.reorder_cache(torch.tensor([0, 2, 1]))
    cache.batch_select_indices(torch.tensor([1, 0, 0]))
    expected = next_logits(models[name], fed(models[name], tokens[order], ones=ones), new)
    torch.testing.assert_close(next_logits(models[name], cache, new), expected)


@every_name
def test_rows_are_repeated(name: str, models: dict[str, LucidForCausalLM]) -> None:
    tokens, new = batch(), batch(rows=6, length=1, seed=2)
    cache = fed(models[name], tokens)
    cache.batch_repeat_interleave(2)
    expected = next_logits(models[name], fed(models[name], tokens.repeat_interleave(2, 0)), new)
    torch.testing.assert_close(next_logits(models[name], cache, new), expected)


@every_name
def test_a_copy_of_a_cache_lives_on_its_own(name: str, models: dict[str, LucidForCausalLM]) -> None:
    new = batch(length=1, seed=2)
    cache = fed(models[name], batch())
    first = next_logits(models[name], copy.deepcopy(cache), new)
    torch.testing.assert_close(next_logits(models[name], cache, new), first, rtol=0, atol=0)


@pytest.mark.parametrize("name", CROPPABLE)
@pytest.mark.parametrize("ones", [0, 2], ids=["after a prompt", "after single tokens"])
def test_a_cropped_cache_is_that_of_fewer_tokens(name: str, ones: int, models: dict[str, LucidForCausalLM]) -> None:
    tokens, new = batch(), batch(length=1, seed=2)
    cache = fed(models[name], tokens, ones=ones)
    assert cache.is_croppable
    cache.crop(-3)
    assert cache.get_seq_length() == 5
    expected = next_logits(models[name], fed(models[name], tokens[:, :5]), new)
    torch.testing.assert_close(next_logits(models[name], cache, new), expected)
    cache.crop(0)
    assert cache.get_seq_length() == 6
    cache.crop(-6)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="positive value"):
        cache.crop(2)


NOT_CROPPABLE = pytest.mark.parametrize("name", [name for name in ATTENTIONS if name not in CROPPABLE])


@NOT_CROPPABLE
def test_a_past_that_changes_as_a_whole_is_not_cropped(name: str, models: dict[str, LucidForCausalLM]) -> None:
    cache = fed(models[name], batch())
    assert not cache.is_croppable
    cache.crop(0)
    for act in (lambda: cache.crop(-1), cache.activate_past_recording):
        with pytest.raises(ValueError, match="speculative decoding takes tokens back"):
            act()
    assert cache.get_seq_length() == 8


def test_a_hybrid_is_as_croppable_as_its_least_layer() -> None:
    cache = DynamicCache(config=decoder(["lucid", "gla"]).config)
    assert [type(layer) for layer in cache.layers] == [CroppableLayer, StateLayer]
    assert not cache.is_croppable


@pytest.mark.parametrize("name", ["lucid", "delta"])
@pytest.mark.shows("a plain `DynamicCache()`", model="decoder")
def test_a_cache_without_a_configuration_becomes_one_of_the_model(
    name: str, models: dict[str, LucidForCausalLM]
) -> None:
    model, cache, inputs = models[name], DynamicCache(), padded(prompts(8, 5))
    assert torch.equal(greedy(model, inputs, past_key_values=cache), greedy(model, inputs))
    assert [layer._layer_type for layer in cache.layers] == model.config.layer_types


def test_a_cache_of_an_encoder_with_a_decoder_is_refused(models: dict[str, LucidForCausalLM]) -> None:
    with pytest.raises(TypeError, match="got EncoderDecoderCache"):
        models["lucid"](batch(), past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))


def caches(config: Any) -> dict[str, Any]:
    """Caches that do not belong to a LucidModel with that configuration, and the message that refuses each."""
    two_layers = DynamicCache(config=config)
    llama = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4)
    other = decoder("delta").config
    offloading = DynamicCache(config=config)
    offloading.offloading = True
    two_layers.layers.pop()
    return {
        "another model's": (DynamicCache(config=llama), "DynamicCache\\(config=model.config\\)"),
        "another attention's": (DynamicCache(config=other), "expected layers"),
        "too few layers": (two_layers, "expected layers"),
        "another model's static": (StaticCache(config=llama, max_cache_len=20), "StaticLayer"),
        "offloading": (offloading, "offloading"),
    }


@pytest.mark.parametrize("kind", caches(decoder().config))
def test_a_foreign_cache_is_refused(kind: str, models: dict[str, LucidForCausalLM]) -> None:
    cache, complaint = caches(models["lucid"].config)[kind]
    with pytest.raises(ValueError, match=complaint):
        models["lucid"](batch(), past_key_values=cache)


def test_keys_and_values_as_tuples_are_refused(models: dict[str, LucidForCausalLM]) -> None:
    with pytest.raises(TypeError, match="must be a Cache"):
        models["lucid"](batch(), past_key_values=((torch.ones(1), torch.ones(1)),))


@every_name
def test_tools_find_keys_and_y_where_they_are(name: str, models: dict[str, LucidForCausalLM]) -> None:
    empty = DynamicCache(config=models[name].config).layers[0]
    assert (empty.keys, empty.values, empty.is_initialized, empty.get_seq_length()) == (None, None, False, 0)
    layer = fed(models[name], batch()).layers[0]
    assert (layer.is_initialized, layer.get_seq_length()) == (True, 8)
    if name not in CROPPABLE:
        assert (layer.keys, layer.values) == (None, None)
        return
    assert layer.read()[:2] == (layer.keys, layer.values)
    layer.keys, layer.values = 2 * layer.keys, 3 * layer.values
    layer.crop(-2)
    assert layer.keys.shape[2] == layer.values.shape[2] == 6


def test_another_model_does_not_take_our_cache(models: dict[str, LucidForCausalLM]) -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "eos_token_id"}
    llama = LlamaForCausalLM(LlamaConfig(**shape))
    with pytest.raises(TypeError, match="made for a LucidModel"):
        llama(batch(), past_key_values=DynamicCache(config=models["lucid"].config))


def test_packed_documents_are_not_cached(models: dict[str, LucidForCausalLM]) -> None:
    cache = DynamicCache(config=models["lucid"].config)
    with pytest.raises(ValueError, match="packed documents cannot be cached"):
        models["lucid"](batch(), past_key_values=cache, position_ids=torch.arange(8)[None] % 5)
