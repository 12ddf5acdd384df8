"""Training with attn_implementation="lucid": caches, packing and checkpointing do not change gradients."""

from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.models.architectures.cases import (
    A_FEW,
    ARCHITECTURES,
    assert_same_gradients,
    gradients,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
a_few_architectures = pytest.mark.parametrize("name", A_FEW)


@every_architecture
def test_a_training_pass_that_fills_a_cache_has_the_gradients_of_one_that_does_not(name):
    model, ids, ones = lucid_model(name).train(), tokens(2), torch.ones(2, 12)
    plain = gradients(model, ones, {"input_ids": ids, "use_cache": False})
    cached = gradients(model, ones, {"input_ids": ids, "use_cache": True})
    assert relative_error(cached[0], plain[0]) < 1e-5
    assert_same_gradients(cached[1], plain[1], 1e-4)


@every_architecture
@pytest.mark.shows("gradient checkpointing", model="drop-in")
def test_gradient_checkpointing_changes_no_gradient(name):
    model, ids, ones = lucid_model(name).train(), tokens(2), torch.ones(2, 12)
    plain = gradients(model, ones, {"input_ids": ids})
    model.gradient_checkpointing_enable()
    again = gradients(model, ones, {"input_ids": ids})
    assert relative_error(again[0], plain[0]) < 1e-6
    assert_same_gradients(again[1], plain[1], 1e-5)


# gpt-oss makes its masks without positions: its documents see each other with any attention.
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt_oss"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.shows("packed documents", model="drop-in")
def test_packed_documents_are_trained_as_if_apart(name, batch):
    model, ids = lucid_model(name).train(), tokens(batch)
    borders = [0, 7, 10, 12]
    spans = list(pairwise(borders))
    positions = torch.cat([torch.arange(stop - start) for start, stop in spans]).expand(batch, -1)
    ones = torch.ones(batch, 12)
    apart = [{"input_ids": ids[:, start:stop], "use_cache": False} for start, stop in spans]
    expected = gradients(model, ones, *apart)
    found = gradients(model, ones, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    assert relative_error(found[0], expected[0]) < 1e-5
    assert_same_gradients(found[1], expected[1], 1e-4)


PACKED = {
    "positions, with the cache that is made by default": lambda positions: {"position_ids": positions},
    "positions and a mask of ones": lambda positions: {
        "position_ids": positions,
        "attention_mask": torch.ones_like(positions),
    },
    "borders for flash attention": lambda positions: {
        "cu_seq_lens_q": torch.tensor([0, 7, 10, 12], dtype=torch.int32),
        "position_ids": positions,
        "use_cache": False,
    },
}


@pytest.mark.parametrize("inputs", PACKED.values(), ids=PACKED)
@torch.no_grad()
def test_documents_are_found_in_every_form(inputs):
    model, ids = lucid_model("llama"), tokens()
    spans = list(pairwise([0, 7, 10, 12]))
    positions = torch.cat([torch.arange(stop - start) for start, stop in spans])[None]
    apart = torch.cat([model(ids[:, start:stop]).logits for start, stop in spans], 1)
    assert relative_error(model(ids, **inputs(positions)).logits, apart) < 1e-5
    assert relative_error(model(ids).logits, apart) > 1e-2


@pytest.mark.parametrize("frozen", ["", "k_proj"], ids=["all weights", "frozen keys"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_text_in_two_pieces_is_trained_as_in_one(name, frozen):
    model, ids, ones = lucid_model(name).train(), tokens(2), torch.ones(2, 12)
    for weight_name, weight in model.named_parameters():
        # Adapters on queries and values only: the keys of the first layer then need no gradient.
        weight.requires_grad_(not frozen or "q_proj" in weight_name or "v_proj" in weight_name)
    expected = gradients(model, ones, {"input_ids": ids, "use_cache": False})
    cache = DynamicCache(config=model.config)
    pieces = [{"input_ids": piece, "past_key_values": cache} for piece in (ids[:, :7], ids[:, 7:8], ids[:, 8:])]
    found = gradients(model, ones, *pieces)
    assert relative_error(found[0], expected[0]) < 1e-5
    assert_same_gradients(found[1], expected[1], 1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_text_behind_a_prompt_without_gradients_is_trained_as_behind_a_detached_one(name):
    model, ids, ones = lucid_model(name).train(), tokens(2), torch.ones(2, 6)
    found = []
    for recording in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.set_grad_enabled(recording):
            model(ids[:, :6], past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        pieces = [{"input_ids": piece, "past_key_values": cache} for piece in (ids[:, 6:9], ids[:, 9:])]
        found.append(gradients(model, ones, *pieces))
    assert relative_error(found[0][0], found[1][0]) < 1e-5
    assert_same_gradients(found[0][1], found[1][1], 1e-4)
    full = model(ids, use_cache=False).logits.detach()
    assert relative_error(found[0][0], full[:, 6:]) < 1e-5


def test_a_training_pass_that_fills_a_static_cache_has_the_same_gradients():
    model, ids, ones = lucid_model("llama").train(), tokens(2), torch.ones(2, 12)
    expected = gradients(model, ones, {"input_ids": ids, "use_cache": False})
    cache = StaticCache(model.config, max_cache_len=16)
    found = gradients(model, ones, {"input_ids": ids, "past_key_values": cache})
    assert relative_error(found[0], expected[0]) < 1e-5
    assert_same_gradients(found[1], expected[1], 1e-4)


@every_architecture
@torch.no_grad()
def test_bfloat16_stays_as_close_as_softmax_attention_does(name):
    ids = tokens(2)
    errors = {}
    for make in (lucid_model, softmax_model):
        exact = make(name)(ids).logits
        rounded = make(name).bfloat16()(ids).logits
        assert rounded.dtype == torch.bfloat16
        assert rounded.isfinite().all()
        errors[make] = float((rounded.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert errors[lucid_model] < 4 * errors[softmax_model]


@a_few_architectures
@torch.no_grad()
def test_bfloat16_decodes_to_the_logits_of_its_full_pass(name):
    model, ids = lucid_model(name).bfloat16(), tokens(2)
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache).logits for piece in (ids[:, :9], *ids[:, 9:].split(1, 1))]
    exact = lucid_model(name)(ids).logits
    size = exact.square().mean().sqrt()
    full = (model(ids).logits.float() - exact).square().mean().sqrt() / size
    cached = (torch.cat(pieces, 1).float() - exact).square().mean().sqrt() / size
    assert cached < 2 * full + 0.01


@every_architecture
def test_training_and_decoding_run_under_autocast(name):
    model, ids = lucid_model(name).train(), tokens(2)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert abs(float(loss.detach()) - float(expected.detach())) < 0.05
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, past_key_values=cache).logits for piece in (ids[:, :9], *ids[:, 9:].split(1, 1))]
        full = model(ids, use_cache=False).logits
    assert relative_error(torch.cat(pieces, 1).float(), full.float()) < 0.1


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_dropout_drops_in_training_and_only_there(name):
    model, ids = lucid_model(name), tokens(2)
    plain = model(ids).logits.detach()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert torch.equal(model(ids).logits, plain)
    model.train()
    torch.manual_seed(0)
    dropped = model(ids).logits
    torch.manual_seed(0)
    again = model(ids, use_cache=False).logits
    assert relative_error(dropped.detach(), plain) > 0.01
    assert relative_error(again.detach(), dropped.detach()) < 1e-5
    dropped.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox"])
@torch.no_grad()
def test_strength_zero_has_exactly_the_logits_of_sdpa(name):
    ids = tokens(2)
    for use_cache in (True, False):
        found = lucid_model(name, strength=0.0)(ids, use_cache=use_cache).logits
        assert torch.equal(found, softmax_model(name)(ids, use_cache=use_cache).logits)
