"""The parts of Transformers that continuous batching needs: each is named when it moves."""

import re
import sys
from typing import Any

import pytest
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.paged import engine
from tests.models.decoder.cases import decoder
from tests.models.dropin.cases import lucid_model, tokens
from tests.models.paged.cases import alone, bounds, in_batch, result_of, settings


def other(*args: Any, surprise: bool = True) -> bool:
    """Takes the place of a function, with other parameters."""
    return surprise


# Where a part stands in the engine, and what stands there in a release that has moved it.
MOVES: dict[str, Any] = {
    "continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn": other,
    "continuous_api.ContinuousBatchingManager.__init__": other,
    "scheduler.Scheduler.add_waiting_request": None,
    "cache.group_layers_by_attn_type": other,
    "initialization.group_layers_by_attn_type": None,
    "cache.PagedAttentionMemoryHandler.__init__": other,
    "cache.PagedAttentionCache.update": other,
    "cache.PagedAttentionCache": type("PagedAttentionCache", (), {"update": PagedAttentionCache.update}),
    "cache_allocators.FullAttentionCacheAllocator": type("Allocator", (), {"layer_type": "full_attention"}),
    "cache_allocators.FullAttentionCacheAllocator.layer_type": "full",
    "model_runner.infer_max_single_request_tokens": other,
    "input_outputs.PagedAttentionArgs": type("Arguments", (), {"__annotations__": {"cache": Any}}),
    "utils.attn_mask_is_needed": other,
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


def test_every_part_can_move() -> None:
    known = [part.path for part in engine.PARTS] + [f"{hook.owner}.{hook.name}" for hook in engine.HOOKS]
    assert sorted(MOVES) == sorted(known)


@pytest.mark.parametrize("part", MOVES)
def test_a_part_that_moved_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enable_lucid()
    owner, _, name = part.rpartition(".")
    monkeypatch.setattr(engine.locate(owner), name, MOVES[part])
    moved = engine.moved_parts()
    assert any(f"{engine.ENGINE}.{part}: expected" in line for line in moved), moved


@pytest.mark.parametrize("module", ["model_runner", "cache", "continuous_api"])
def test_a_module_that_is_gone_is_named_and_enable_lucid_works(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{engine.ENGINE}.{module}", None)
    enable_lucid()
    assert any(f"{engine.ENGINE}.{module}." in line and "got nothing" in line for line in engine.moved_parts())


@pytest.mark.parametrize("made", [lambda: lucid_model("llama"), decoder], ids=["drop-in", "decoder"])
def test_a_moved_part_refuses_continuous_batching_and_nothing_else(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    monkeypatch.setattr(engine, "_checked", None)
    monkeypatch.setattr(engine.locate("utils"), "attn_mask_is_needed", other)
    with pytest.raises(RuntimeError, match=r"Transformers .*, which has moved .*attn_mask_is_needed.*use generate\(\)"):
        in_batch(model, [[1, 2, 3]])
    assert len(alone(model, [[1, 2, 3]])[0]) == 8


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_another_cache_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be the PagedAttentionCache of continuous batching, got object"):
        lucid_model(name)(tokens(), use_cache=False, cache=object())
