"""The parts of Transformers that continuous batching needs: each is named when it moves."""

import re
from typing import Any

import pytest
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import (
    cache_allocators,
    continuous_api,
    initialization,
    input_outputs,
    model_runner,
    scheduler,
)
from transformers.generation.continuous_batching import utils as engine_utils

from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.paged import engine
from tests.models.decoder.cases import decoder
from tests.models.dropin.cases import lucid_model, tokens
from tests.models.paged.cases import alone, bounds, in_batch, result_of, settings


def other(*args: Any, surprise: bool = True) -> bool:
    """Takes the place of a function, with other parameters."""
    return surprise


MOVES: dict[str, tuple[Any, str, Any]] = {
    "switch_to_cb_friendly_attn": (continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", other),
    "ContinuousBatchingManager.__init__": (continuous_api.ContinuousBatchingManager, "__init__", other),
    "cache.group_layers_by_attn_type": (paged_cache, "group_layers_by_attn_type", other),
    "initialization.group_layers_by_attn_type": (initialization, "group_layers_by_attn_type", None),
    "PagedAttentionMemoryHandler.__init__": (paged_cache.PagedAttentionMemoryHandler, "__init__", other),
    "PagedAttentionCache.update": (paged_cache.PagedAttentionCache, "update", other),
    "layer_to_allocator": (paged_cache.PagedAttentionCache, "__init__", other),
    "_kv_token_views": (cache_allocators.FullAttentionCacheAllocator, "update", other),
    "FullAttentionCacheAllocator.layer_type": (cache_allocators.FullAttentionCacheAllocator, "layer_type", "full"),
    "PagedAttentionArgs": (input_outputs, "PagedAttentionArgs", type("Args", (), {"__annotations__": {"cache": 0}})),
    "infer_max_single_request_tokens": (model_runner, "infer_max_single_request_tokens", other),
    "add_waiting_request": (scheduler.Scheduler, "add_waiting_request", None),
    "attn_mask_is_needed": (engine_utils, "attn_mask_is_needed", other),
}


BAD_REQUESTS = {
    "no tokens": ([], 4, "its prompt has no tokens"),
    "no new tokens": ([1, 2], 0, "at least 1 new token"),
    "a long prompt": ([1] * 300, 4, "at most 256 in all.* got a prompt of 300 tokens and 4 new ones"),
    "a long answer": ([1] * 10, 300, "at most 256 in all"),
}


@pytest.mark.parametrize("made", [lambda: lucid_model("llama"), decoder], ids=["drop-in", "decoder"])
def test_a_request_that_cannot_be_served_fails_alone(made: Any) -> None:
    model = made()
    with model.continuous_batching_context_manager(
        generation_config=settings(), continuous_batching_config=bounds()
    ) as manager:
        for prompt, new, words in BAD_REQUESTS.values():
            request = manager.add_request(prompt, max_new_tokens=new)
            assert re.search(words, result_of(manager, request).error)
        good = result_of(manager, manager.add_request([5, 6, 7]))
    assert [good.generated_tokens] == alone(model, [[5, 6, 7]])


def test_this_transformers_has_every_part() -> None:
    enable_lucid()
    assert engine.moved_parts() == []


@pytest.mark.parametrize("part", MOVES)
def test_a_part_that_moved_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enable_lucid()
    owner, name, value = MOVES[part]
    if name == "update" and owner is cache_allocators.FullAttentionCacheAllocator:
        # A class whose source says other things.
        monkeypatch.setattr(cache_allocators, "FullAttentionCacheAllocator", owner)
        monkeypatch.setattr(engine.inspect, "getsource", lambda function: "self.layer_to_allocator")
    elif name == "__init__" and owner is paged_cache.PagedAttentionCache:
        monkeypatch.setattr(engine.inspect, "getsource", lambda function: "(k_view, v_view)")
    else:
        monkeypatch.setattr(owner, name, value)
    moved = engine.moved_parts()
    assert any(part in line.partition(": expected")[0] for line in moved), moved


@pytest.mark.parametrize("made", [lambda: lucid_model("llama"), decoder], ids=["drop-in", "decoder"])
def test_a_moved_part_refuses_continuous_batching_and_nothing_else(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    monkeypatch.setattr(engine, "_checked", None)
    monkeypatch.setattr(engine_utils, "attn_mask_is_needed", other)
    with pytest.raises(RuntimeError, match=r"Transformers .*, which has moved .*attn_mask_is_needed.*use generate\(\)"):
        in_batch(model, [[1, 2, 3]])
    assert len(alone(model, [[1, 2, 3]])[0]) == 8


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_another_cache_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be the PagedAttentionCache of continuous batching, got object"):
        lucid_model(name)(tokens(), use_cache=False, cache=object())
