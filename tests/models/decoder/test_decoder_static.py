"""The static cache of the own decoder: the same tokens as with a growing one, also in a compiled graph."""

from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.integrations.executorch import convert_and_export_with_cache

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from .cases import decoder, greedy, padded, prompts

OPTIONS = {"learn_beta": True, "learn_sharpness": True, "norm": "qk"}
CASES: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    **{name: (name, {}) for name in ATTENTIONS},
    "lucid, options": ("lucid", {"attention_options": OPTIONS, "qk_norm": True}),
    "hybrid": (["delta", "lucid"], {}),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def models() -> dict[str, LucidForCausalLM]:
    return {case: decoder(attention, **overrides).double() for case, (attention, overrides) in CASES.items()}


@every_case
@pytest.mark.shows("static cache", model="decoder")
def test_static_and_growing_caches_give_the_same(case: str, models: dict[str, LucidForCausalLM]) -> None:
    model, inputs = models[case], padded(prompts(11, 6, 9))
    for options in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        found = greedy(model, inputs, cache_implementation="static", **options)
        assert torch.equal(found, greedy(model, inputs, **options))


@every_case
@torch.no_grad()
def test_logits_do_not_depend_on_the_kind_of_cache(case: str, models: dict[str, LucidForCausalLM]) -> None:
    model, inputs = models[case], padded(prompts(12, 7))
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    full = model(**inputs, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=12)
    seen = 0
    for size in (5, 4, 1, 1, 1):
        chunk = slice(seen, seen := seen + size)
        found = model(tokens[:, chunk], attention_mask=mask[:, :seen], past_key_values=cache).logits
        real = mask[:, chunk].bool()
        torch.testing.assert_close(found[real], full[:, chunk][real])
    assert int(cache.get_seq_length()) == 12


def test_memory_does_not_grow_and_the_cache_ends() -> None:
    model, tokens = decoder(), prompts(9)[0][None]
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(tokens[:, :6], past_key_values=cache)
        keys = cache.layers[0].keys
        model(tokens[:, 6:8], past_key_values=cache)
        assert cache.layers[0].keys is keys
        assert keys.shape[2] == cache.get_max_length() == 8
        with pytest.raises(ValueError, match="has 8 places: expected at most 0 more tokens, got 1"):
            model(tokens[:, 8:], past_key_values=cache)
        cache.reset()
        again = model(tokens[:, :6], past_key_values=cache).logits
        torch.testing.assert_close(again, model(tokens[:, :6], use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lucid", "lucid, options", "softmax", "diff"])
@pytest.mark.shows("compiled generation", model="decoder")
def test_generation_compiles_to_one_graph(case: str, models: dict[str, LucidForCausalLM]) -> None:
    torch._dynamo.reset()
    config = CompileConfig(backend="aot_eager", fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    model, inputs = models[case], padded(prompts(11, 6, 9))
    counter = torch._dynamo.utils.counters
    counter.clear()
    found = greedy(model, inputs, cache_implementation="static", compile_config=config)
    assert torch.equal(found, greedy(model, inputs))
    assert counter["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_one_step_in_a_graph_is_the_same_step(models: dict[str, LucidForCausalLM]) -> None:
    """With the mask of every place, and without one; shapes of the graph do not depend on the position."""
    torch._dynamo.reset()
    model, tokens = models["lucid, options"], torch.stack(prompts(9, 9))
    step = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    static, growing = StaticCache(config=model.config, max_cache_len=12), DynamicCache(config=model.config)
    for cache in (static, growing):
        model(tokens[:, :6], past_key_values=cache)
    counter = torch._dynamo.utils.counters
    counter.clear()
    for place in (6, 7, 8):
        new = tokens[:, place : place + 1]
        found, expected = step(new, past_key_values=static).logits, model(new, past_key_values=growing).logits
        torch.testing.assert_close(found, expected)
    assert counter["stats"]["unique_graphs"] == 1
    with pytest.raises(Exception, match="one bit per place of the static cache"):
        step(new, past_key_values=static, attention_mask=torch.ones(2, 10))


@torch.no_grad()
def test_a_graph_refuses_layers_whose_past_is_not_static(models: dict[str, LucidForCausalLM]) -> None:
    model, tokens = models["hybrid"], prompts(6)[0][None]
    cache = StaticCache(config=model.config, max_cache_len=9)
    model(tokens, past_key_values=cache)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="compiles where every attention keeps keys and y"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens[:, :1], past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lucid", "lucid, options"])
@torch.no_grad()
@pytest.mark.shows("`torch.export` of a decoding step", model="decoder")
def test_transformers_exports_a_step_with_a_static_cache(case: str, models: dict[str, LucidForCausalLM]) -> None:
    model, rows = models[case], prompts(9, 9, seed=3)
    options = {"batch_size": 1, "max_cache_len": 12, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=options)
    # Exported at another place than 0, at which nothing of the cache is seen.
    exported = convert_and_export_with_cache(model, prompts(1)[0][None], torch.tensor([3]))
    for row in rows:
        expected = model(row[None], use_cache=False).logits
        for place in range(9):
            step = {"input_ids": row[None, place : place + 1], "cache_position": torch.tensor([place])}
            torch.testing.assert_close(exported.module()(**step), expected[:, place : place + 1])
