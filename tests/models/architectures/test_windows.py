"""Layers with a sliding window, and layers that were not chosen, keep their attention."""

import pytest
import torch

from lucid_attention import enable_lucid
from tests.models.architectures.cases import (
    WINDOW,
    greedy,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)

WITH_WINDOWS = ["qwen2", "gemma2", "gemma3", "gpt_oss"]


def attention_outputs(model, ids, **inputs):
    """(module, args, kwargs, output) of every layer's attention, in order."""
    kept = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, out: kept.append((module, args, kwargs, out[0])), with_kwargs=True
        )
        for name, module in model.named_modules()
        if name.endswith("self_attn")
    ]
    model(ids, use_cache=False, **inputs)
    for hook in hooks:
        hook.remove()
    return kept


@pytest.mark.parametrize("name", WITH_WINDOWS)
@torch.no_grad()
def test_the_first_layer_has_a_window_and_is_not_changed(name):
    ids = tokens(2, 14)
    lucid, softmax = attention_outputs(lucid_model(name), ids), attention_outputs(softmax_model(name), ids)
    assert lucid[0][0].config.layer_types[0] == "sliding_attention"
    assert ids.shape[1] > 2 * WINDOW
    assert relative_error(lucid[0][3], softmax[0][3]) < 1e-6
    assert relative_error(lucid[1][3], softmax[1][3]) > 0.01


def test_no_layer_at_all_is_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        lucid_model("llama", layers=[])


@torch.no_grad()
def test_layers_are_chosen_one_by_one():
    ids = tokens(2)
    first, second, both = (lucid_model("llama", layers=layers)(ids).logits for layers in ([0], [1], [1, 0, 1]))
    assert torch.equal(both, lucid_model("llama")(ids).logits)
    for one, other in ((first, second), (first, both), (second, both), (first, softmax_model("llama")(ids).logits)):
        assert relative_error(one, other) > 0.01


def test_chosen_layers_are_kept_sorted_and_once():
    for layers in ((1, 0, 1), range(2), torch.tensor([1, 0])):
        assert lucid_model("llama", layers=layers).config.lucid["layers"] == [0, 1]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chosen_layers_decode_as_they_read(name):
    model, ids = lucid_model(name, layers=[1]), tokens(2)
    chosen = greedy(model, ids)
    assert torch.equal(chosen, greedy(model, ids, use_cache=False))
    assert torch.equal(chosen, greedy(model, ids, cache_implementation="static", disable_compile=True))


@torch.no_grad()
def test_settings_of_an_earlier_call_do_not_stay():
    model, ids = lucid_model("llama", layers=[1], strength=0.5), tokens(2)
    enable_lucid(model)
    assert torch.equal(model(ids).logits, lucid_model("llama")(ids).logits)
