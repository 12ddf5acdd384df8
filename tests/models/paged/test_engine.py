"""The parts of Transformers that continuous batching needs: each is named when it moves."""

from typing import Any

import pytest
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import cache_allocators, continuous_api, initialization, input_outputs
from transformers.generation.continuous_batching import utils as engine_utils

from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.paged import engine
from tests.models.decoder.cases import decoder
from tests.models.dropin.cases import lucid_model, tokens
from tests.models.paged.cases import alone, in_batch


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
    "attn_mask_is_needed": (engine_utils, "attn_mask_is_needed", other),
}


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


def test_another_cache_is_refused() -> None:
    arguments = {"cache": object(), "cu_seq_lens_q": None}
    with pytest.raises(ValueError, match="must be the PagedAttentionCache of continuous batching, got object"):
        lucid_model("llama")(tokens(), use_cache=False, **arguments)
