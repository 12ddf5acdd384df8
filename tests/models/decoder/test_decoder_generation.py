"""generate() with the own decoder: every attention, with padding and beams, with and without its cache."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from .cases import CROPPABLE, NEW_TOKENS, decoder, greedy, padded, prompts, relative

HYBRID = ["delta", "lucid"]
CASES: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    **{name: (name, {}) for name in ATTENTIONS},
    "lucid, all learned": ("lucid", {"attention_options": {"learn_beta": True, "learn_sharpness": True}}),
    "lucid, qk_norm, biases": ("lucid", {"qk_norm": True, "attention_bias": "qkv"}),
    "hybrid": (HYBRID, {"attention_options": {"delta": {"conv_size": 2}, "lucid": {"sharpness": 1.5}}}),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def models() -> dict[str, LucidForCausalLM]:
    return {case: decoder(attention, **overrides) for case, (attention, overrides) in CASES.items()}


def logits_by_token(model: LucidForCausalLM, tokens: Tensor, mask: Tensor, first: int) -> Tensor:
    """Logits with a cache: `first` tokens at once, then one by one."""
    cache = DynamicCache(config=model.config)
    found, seen = [], 0
    for size in [first] + [1] * (tokens.shape[1] - first):
        seen += size
        inputs = {"input_ids": tokens[:, seen - size : seen], "attention_mask": mask[:, :seen]}
        found.append(model(**inputs, past_key_values=cache).logits)
    return torch.cat(found, 1)


@every_case
@torch.no_grad()
@pytest.mark.shows("greedy search", model="decoder")
@pytest.mark.shows("padded batches", model="decoder")
@pytest.mark.shows("prefill in chunks", model="decoder")
def test_the_cache_changes_neither_tokens_nor_logits(case: str, models: dict[str, LucidForCausalLM]) -> None:
    model, rows = models[case], prompts(11, 6, 1)
    inputs = padded(rows)
    tokens = torch.cat([greedy(model, {"input_ids": row[None]}) for row in rows])
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 4}):
        assert torch.equal(greedy(model, inputs, **options), tokens), options
    everything = torch.cat([inputs["input_ids"], tokens], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens)], 1)
    full = model(input_ids=everything, attention_mask=mask, use_cache=False).logits
    assert relative(logits_by_token(model, everything, mask, 11)[mask.bool()], full[mask.bool()]) < 1e-4


@every_case
@pytest.mark.shows("beam search", model="decoder")
def test_beam_search_needs_no_cache_to_find_the_same(
    case: str, models: dict[str, LucidForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_beams": 3, "num_return_sequences": 3}
    inputs, orders = padded(prompts(9, 5)), []
    reorder = DynamicCache.reorder_cache
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, order: (orders.append(order), reorder(self, order)))
    found = greedy(models[case], inputs, **options)
    assert torch.equal(found, greedy(models[case], inputs, use_cache=False, **options))
    # If no beam changed its place, the test would pass without reordering.
    assert any(not torch.equal(order, torch.arange(len(order))) for order in orders)


@every_case
@pytest.mark.shows("sampling", model="decoder")
def test_sampling_repeats_with_its_seed(case: str, models: dict[str, LucidForCausalLM]) -> None:
    def sample(seed: int, **options: Any) -> Tensor:
        torch.manual_seed(seed)
        return greedy(models[case], padded(prompts(9, 5)), do_sample=True, top_k=0, **options)

    assert torch.equal(sample(3), sample(3))
    assert torch.equal(sample(3), sample(3, use_cache=False))
    assert not torch.equal(sample(3), sample(4))


@every_case
@pytest.mark.shows("a cache kept over turns", model="decoder")
def test_a_conversation_goes_on_from_its_cache(case: str, models: dict[str, LucidForCausalLM]) -> None:
    model, (first, second) = models[case], prompts(7, 4)
    cache = DynamicCache(config=model.config)
    turn = torch.cat([first[None], greedy(model, {"input_ids": first[None]}, past_key_values=cache), second[None]], 1)
    # The last token of an answer is not in the cache yet.
    assert cache.get_seq_length() == 7 + NEW_TOKENS - 1
    # The mask is needed: without it generate() takes token 0 of an answer for padding.
    inputs = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    assert torch.equal(greedy(model, inputs, past_key_values=cache), greedy(model, inputs, use_cache=False))


def test_lucid_and_softmax_continue_differently_with_the_same_weights(models: dict[str, LucidForCausalLM]) -> None:
    softmax = decoder("softmax")
    softmax.load_state_dict(models["lucid"].state_dict())
    inputs = padded(prompts(11, 6, 9))
    # Otherwise all tests of this file would pass without LUCID.
    assert not torch.equal(greedy(softmax, inputs), greedy(models["lucid"], inputs))


def repetitive() -> dict[str, Tensor]:
    """A prompt in which prompt lookup finds candidates, right ones and wrong ones."""
    return {"input_ids": torch.cat([prompts(6)[0]] * 3)[None]}


@pytest.mark.parametrize("case", CROPPABLE)
@pytest.mark.shows("speculative decoding with an assistant", model="decoder")
@pytest.mark.shows("prompt lookup", model="decoder")
def test_assisted_decoding_finds_the_same_tokens(case: str, models: dict[str, LucidForCausalLM]) -> None:
    inputs, model = repetitive(), models[case]
    expected = greedy(model, inputs, max_new_tokens=12)
    assert torch.equal(greedy(model, inputs, max_new_tokens=12, prompt_lookup_num_tokens=3), expected)
    assistant = decoder(case, num_hidden_layers=1)
    assert torch.equal(greedy(model, inputs, max_new_tokens=12, assistant_model=assistant), expected)
    assert torch.equal(greedy(model, inputs, max_new_tokens=12, assistant_early_exit=1), expected)


@pytest.mark.parametrize("name", ["lucid", "delta"])
@pytest.mark.parametrize(
    ("kind", "reason"), [("static", "no static cache: use a dynamic one"), ("quantized", "only full attention")]
)
@pytest.mark.shows("quantized cache", model="decoder", refused=True)
@pytest.mark.shows("static cache", model="decoder", refused=True)
def test_other_caches_are_refused(name: str, kind: str, reason: str, models: dict[str, LucidForCausalLM]) -> None:
    with pytest.raises(ValueError, match=reason):
        greedy(models[name], padded(prompts(5, 3)), cache_implementation=kind)
