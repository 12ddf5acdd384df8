"""generate() with attn_implementation="lucid": every cache and strategy gives the tokens of the plain pass."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from lucid_attention.models.cache import LucidDynamicLayer
from tests.models.architectures.cases import (
    A_FEW,
    ARCHITECTURES,
    greedy,
    left_padded,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
a_few_architectures = pytest.mark.parametrize("name", A_FEW)
LENGTHS = [12, 9, 5]


@every_architecture
@pytest.mark.shows("greedy search", model="drop-in")
@pytest.mark.shows("padded batches", model="drop-in")
@pytest.mark.shows("static cache", model="drop-in")
@pytest.mark.shows("prefill in chunks", model="drop-in")
def test_each_left_padded_row_generates_what_it_generates_alone_with_any_cache(name):
    model, ids = lucid_model(name), tokens(3)
    padded, mask = left_padded(ids, LENGTHS)
    alone = torch.cat([greedy(model, row[None, :n]) for row, n in zip(ids, LENGTHS, strict=True)])
    assert len(alone.unique()) > 2
    assert not torch.equal(alone[:1], greedy(softmax_model(name), ids[:1]))
    static = {"cache_implementation": "static", "disable_compile": True}
    for options in ({}, static, {"use_cache": False}, {"prefill_chunk_size": 5}):
        assert torch.equal(greedy(model, padded, attention_mask=mask, **options), alone), options


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "padded"), [(name, True) for name in ARCHITECTURES] + [(name, False) for name in A_FEW]
)
@torch.no_grad()
def test_a_cached_pass_in_pieces_has_the_logits_of_the_full_pass(name, padded, cache):
    model = lucid_model(name)
    ids, mask = (
        left_padded(tokens(3, 14), [14, 9, 5]) if padded else (tokens(3, 14), torch.ones(3, 14, dtype=torch.long))
    )
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=20)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    pieces, start = [], 0
    for size in (5, 1, 1, 4, 1, 2):
        stop = start + size
        inputs = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        pieces.append(model(ids[:, start:stop], past_key_values=past, **inputs).logits)
        start = stop
    full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    seen = mask.bool()
    assert relative_error(torch.cat(pieces, 1)[seen], full[seen]) < 1e-4 / 5
    assert int(past.get_seq_length()) == 14


@every_architecture
@pytest.mark.shows("beam search", model="drop-in")
def test_beam_search_is_the_same_with_and_without_cache(name):
    model, (ids, mask) = lucid_model(name), left_padded(tokens(2), [12, 8])
    options = {"num_beams": 3, "attention_mask": mask, "num_return_sequences": 2, "new": 6}
    beams = greedy(model, ids, **options)
    assert torch.equal(beams, greedy(model, ids, use_cache=False, **options))
    assert torch.equal(beams, greedy(model, ids, cache_implementation="static", disable_compile=True, **options))


@a_few_architectures
@pytest.mark.shows("sampling", model="drop-in")
def test_sampling_with_a_seed_is_the_same_with_and_without_cache(name):
    model, ids = lucid_model(name), tokens(2)
    drawn = []
    for options in ({}, {}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        torch.manual_seed(7)
        drawn.append(greedy(model, ids, do_sample=True, top_k=20, **options))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert not torch.equal(drawn[0], greedy(model, ids))


def test_a_static_cache_may_be_filled_to_the_last_place():
    model, ids = lucid_model("llama"), tokens(2)
    one = greedy(model, ids, 1, cache_implementation="static", disable_compile=True)
    assert torch.equal(one, greedy(model, ids, 1))


def test_a_static_cache_is_used_again_for_another_prompt():
    model = lucid_model("gemma3")
    cache = StaticCache(model.config, max_cache_len=20)
    for seed in (0, 1):
        ids = tokens(2, 9 + seed, seed)
        assert torch.equal(greedy(model, ids, past_key_values=cache, disable_compile=True), greedy(model, ids))
        cache.reset()


@a_few_architectures
@pytest.mark.parametrize("kind", ["lucid", "softmax"])
@pytest.mark.shows("speculative decoding with an assistant", model="drop-in")
def test_an_assistant_model_changes_no_token(name, kind):
    model, ids = lucid_model(name), tokens()
    assistant = {"lucid": lucid_model, "softmax": softmax_model}[kind](name)
    assistant.generation_config.num_assistant_tokens = 4
    assert torch.equal(greedy(model, ids, 10, assistant_model=assistant), greedy(model, ids, 10))


@every_architecture
@pytest.mark.shows("prompt lookup", model="drop-in")
def test_prompt_lookup_changes_no_token(name):
    model = lucid_model(name)
    first = tokens(1, 6)
    # The prompt holds a right and a wrong continuation of `first`: some candidates are accepted, some cropped.
    ids = torch.cat([first, greedy(model, first, 3), tokens(1, 3, 5), first, first], 1)
    assert torch.equal(greedy(model, ids, 10, prompt_lookup_num_tokens=3), greedy(model, ids, 10))


@every_architecture
@pytest.mark.shows("a cache kept over turns", model="drop-in")
def test_a_cache_is_taken_over_to_the_next_turn(name):
    model, text = lucid_model(name), tokens(1, 8)
    cache = DynamicCache(config=model.config)
    for turn in range(3):
        answer = greedy(model, text, 4, past_key_values=cache)
        assert torch.equal(answer, greedy(model, text, 4, use_cache=False))
        text = torch.cat([text, answer, tokens(1, 3, seed=turn)], 1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.shows("a plain `DynamicCache()`", model="drop-in")
def test_a_cache_without_a_configuration_becomes_one_of_the_model(name):
    model, (ids, mask) = lucid_model(name), left_padded(tokens(2), [12, 7])
    for step in ({}, {"num_beams": 2}):
        cache = DynamicCache()
        found = greedy(model, ids, attention_mask=mask, past_key_values=cache, **step)
        assert torch.equal(found, greedy(model, ids, attention_mask=mask, use_cache=False, **step))
    assert isinstance(cache.layers[-1], LucidDynamicLayer)


@torch.no_grad()
def test_the_inner_model_and_a_copy_take_a_cache_without_a_configuration():
    model, ids = copy.deepcopy(lucid_model("llama")), tokens()
    cache = DynamicCache()
    pieces = [model.model(piece, None, None, cache).last_hidden_state for piece in ids.split(5, 1)]
    assert relative_error(torch.cat(pieces, 1), model.model(ids, use_cache=False).last_hidden_state) < 1e-5
