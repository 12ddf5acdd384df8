"""Cache layers that keep y: chosen by Transformers, updated in two steps, independent of their copies."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, QuantizedCache, StaticSlidingWindowLayer

from lucid_attention import enable_lucid, inverse_key_norms, precondition
from lucid_attention.models.cache import LucidDynamicLayer, LucidStaticLayer
from tests.models.architectures.cases import lucid_model, relative_error, tokens

enable_lucid()
both_kinds = pytest.mark.parametrize(
    "make", [LucidDynamicLayer, lambda: LucidStaticLayer(max_cache_len=16)], ids=["dynamic", "static"]
)


@pytest.fixture(autouse=True)
def no_gradients():
    """With gradients the layers copy instead of writing in place."""
    with torch.no_grad():
        yield


def keys(batch=2, length=4, seed=0):
    """[batch, 2, length, 8], similar to each other."""
    return torch.randn(batch, 2, length, 8, generator=torch.Generator().manual_seed(seed)) + 0.7


def put(layer, k, v):
    """What `Cache` and the attention function call."""
    k_all, values = layer.update(k, v)
    layer.add_norms(None)
    assert values is v
    length = k.shape[2]
    start = k_all.shape[2] - length if isinstance(layer, LucidDynamicLayer) else layer.past_length(length)
    past = (k_all[:, :, :start], layer.values[:, :, :start]) if start else None
    layer.store(precondition(k, v, past=past))


def test_layers_are_chosen_by_the_kind_of_attention():
    model = lucid_model("gemma3")
    dynamic, static = DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=10)
    model(tokens(), past_key_values=dynamic)
    model.adopt_cache(static)
    assert [type(layer) for layer in dynamic.layers] == [DynamicSlidingWindowLayer] + 2 * [LucidDynamicLayer]
    assert [type(layer) for layer in static.layers] == [StaticSlidingWindowLayer] + 2 * [LucidStaticLayer]


@both_kinds
def test_a_layer_keeps_keys_lengths_and_y(make):
    layer, k, v = make(), keys(length=9), keys(length=9, seed=1)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        put(layer, k[:, :, start:stop], v[:, :, start:stop])
    assert torch.equal(layer.keys[:, :, :9], k)
    assert torch.equal(layer.inverse_norms[:, :, :9], inverse_key_norms(k))
    assert relative_error(layer.values[:, :, :9], precondition(k, v)) < 1e-6
    assert int(layer.get_seq_length()) == 9


@both_kinds
def test_a_layer_left_uncommitted_refuses_the_next_tokens(make):
    layer = make()
    layer.update(keys(), keys())
    with pytest.raises(RuntimeError, match=r"never preconditioned.*start with a new cache"):
        layer.update(keys(), keys())


@both_kinds
def test_a_layer_that_was_reset_begins_anew(make):
    layer = make()
    put(layer, keys(length=7, seed=4), keys(length=7, seed=5))
    layer.update(keys(length=1), keys(length=1))
    layer.reset()
    assert int(layer.get_seq_length()) == 0
    put(layer, keys(length=3), keys(length=3, seed=1))
    expected = precondition(keys(length=3), keys(length=3, seed=1))
    assert relative_error(layer.values[:, :, :3], expected) < 1e-6
    assert torch.equal(layer.inverse_norms[:, :, :3], inverse_key_norms(keys(length=3)))


@both_kinds
def test_a_layer_cannot_be_offloaded(make):
    layer = make()
    put(layer, keys(), keys())
    with pytest.raises(ValueError, match=r"cannot be offloaded.*cache_implementation=None"):
        layer.offload()


def test_a_layer_without_tokens_can_be_cropped_and_reordered():
    layer = LucidDynamicLayer()
    layer.crop(-2)
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    assert layer.get_seq_length() == 0


def content(layer):
    n = int(layer.get_seq_length())
    return [x[:, :, :n].clone() for x in (layer.keys, layer.values, layer.inverse_norms)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_keys_values_and_norms_of_a_row_of_a_static_layer_move_together():
    layer = LucidStaticLayer(max_cache_len=9)
    put(layer, keys(3, 5), keys(3, 5, 1))
    before = content(layer)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert_same(content(layer), [x[[2, 0, 0]] for x in before])


@given(st.lists(st.tuples(st.sampled_from(["append", "crop", "reorder", "copy"]), st.integers(0, 20)), max_size=12))
def test_any_history_gives_the_content_of_one_pass(history):
    layer, k, v = LucidDynamicLayer(), keys(), keys(seed=1)
    put(layer, k, v)
    for step, (action, number) in enumerate(history):
        if action == "append":
            new_k, new_v = keys(2, 1 + number % 3, 10 + step), keys(2, 1 + number % 3, 50 + step)
            put(layer, new_k, new_v)
            k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        elif action == "crop" and k.shape[2] > 1:
            remove = 1 + number % (k.shape[2] - 1)
            layer.crop(-remove)
            k, v = k[:, :, :-remove], v[:, :, :-remove]
        elif action == "reorder":
            order = torch.tensor([number % 2, number // 2 % 2])
            layer.reorder_cache(order)
            k, v = k[order], v[order]
        else:
            old, layer = layer, copy.copy(layer)
            put(old, keys(length=2, seed=99), keys(length=2, seed=98))
    assert torch.equal(layer.keys, k)
    assert relative_error(layer.values, precondition(k, v)) < 1e-5
    assert torch.equal(layer.inverse_norms, inverse_key_norms(k))


def test_two_answers_to_one_prompt_share_a_copied_cache():
    model, ids = lucid_model("gemma3"), tokens(1, 8)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for seed in (1, 2):
        answer, fork = tokens(1, 4, seed), copy.deepcopy(cache)
        found = torch.cat([model(token, past_key_values=fork).logits for token in answer.split(1, 1)], 1)
        full = model(torch.cat([ids, answer], 1), use_cache=False).logits[:, 8:]
        assert relative_error(found, full) < 2e-5


def test_a_cache_made_in_inference_mode_is_used_outside():
    model, ids = lucid_model("llama"), tokens(2)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :6], past_key_values=cache)
    found = [model(piece, past_key_values=cache).logits for piece in (ids[:, 6:7], ids[:, 7:])]
    full = model(ids, use_cache=False).logits[:, 6:]
    assert relative_error(torch.cat(found, 1), full) < 2e-5


def test_rows_of_a_cache_are_selected_and_repeated_between_passes():
    model, ids, more = lucid_model("qwen2"), tokens(3, 8), tokens(4, 3, 1)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    # Norms of keys are read for one token.
    found = torch.cat([model(piece, past_key_values=cache).logits for piece in more.split([1, 2], 1)], 1)
    full = model(torch.cat([ids[[2, 2, 0, 0]], more], 1), use_cache=False).logits[:, 8:]
    assert relative_error(found, full) < 2e-5


@pytest.mark.shows("quantized cache", model="drop-in", refused=True)
def test_a_quantized_cache_is_refused():
    model = lucid_model("llama")
    with pytest.raises(ValueError, match="must not be quantized"):
        model(tokens(), past_key_values=QuantizedCache(backend="fp8", config=model.config))
