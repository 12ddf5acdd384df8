"""P of centred and whitened keys, and gates: values per layer and head, in every cache and in the state dict."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from lucid_attention import calibrated_key_map, enable_lucid
from tests.models.architectures.cases import (
    assert_same_gradients,
    gradients,
    greedy,
    left_padded,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)
from tests.models.architectures.test_oracle import GRADIENTS, LOGITS, oracle_model


def preconditioners(model):
    """By index of the layer."""
    return {module.layer_idx: module.lucid for module in model.modules() if hasattr(module, "lucid")}


def mapped_model(name, **settings):
    """A model with keys mapped at random, another way in every layer and head, and the maps by layer."""
    model = lucid_model(name, **{"center": "calibrated", "whiten": True, **settings})
    generator, maps = torch.Generator().manual_seed(5), {}
    for index, one in preconditioners(model).items():
        with torch.no_grad():
            for x in filter(torch.is_tensor, one.key_map):
                x.add_(0.5 * torch.randn(x.shape, generator=generator))
        matrix = torch.eye(one.head_dim) if one.matrix is None else one.matrix.detach().clone()
        maps[index] = (one.center.detach().clone(), matrix)
    return model, maps


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("settings", [{}, {"whiten": False}], ids=["whitened", "centred"])
def test_the_equation_holds_with_padding_and_in_every_cache(name, settings, tmp_path):
    ids, mask = left_padded(tokens(2, 14), [14, 9])
    model, maps = mapped_model(name, **settings)
    weights = mask.float()
    expected, expected_gradients = gradients(
        oracle_model(name, maps=maps), weights, {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    )
    found, found_gradients = gradients(model, weights, {"input_ids": ids, "attention_mask": mask, "use_cache": False})
    assert relative_error(found[mask.bool()], expected[mask.bool()]) < LOGITS
    assert_same_gradients(found_gradients, expected_gradients, GRADIENTS)
    plain = lucid_model(name)(ids, attention_mask=mask).logits.detach()
    assert relative_error(plain[mask.bool()], expected[mask.bool()]) > 0.01
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)):
            parts = [(0, 8), (8, 9), (9, 12), (12, 13), (13, 14)]
            logits = [
                model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
                for start, stop in parts
            ]
            assert relative_error(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()]) < LOGITS


def test_generation_reads_mapped_keys_with_any_cache():
    ids, mask = left_padded(tokens(2, 14), [14, 9])
    model, maps = mapped_model("llama")
    oracle = oracle_model("llama", maps=maps)
    expected = greedy(oracle, ids, attention_mask=mask, use_cache=False)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}):
        assert torch.equal(greedy(model, ids, attention_mask=mask, **options), expected), options
    beams = {"num_beams": 3, "attention_mask": mask}
    assert torch.equal(greedy(model, ids, **beams), greedy(oracle, ids, use_cache=False, **beams))


def test_a_learned_map_has_the_gradient_of_the_equation():
    ids, mask = left_padded(tokens(2, 12), [12, 9])
    model, maps = mapped_model("llama", center="learned")
    assert {name for name, _ in model.named_parameters() if ".lucid." in name} == {
        f"model.layers.{i}.self_attn.lucid.{name}" for i in (0, 1) for name in ("center", "matrix")
    }
    for pair in maps.values():
        for x in pair:
            x.requires_grad_()
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    _, found = gradients(model, mask.float(), inputs)
    oracle = oracle_model("llama", maps=maps)
    gradients(oracle, mask.float(), inputs)
    for index, (center, matrix) in maps.items():
        for name, x in (("center", center), ("matrix", matrix)):
            assert relative_error(found[f"model.layers.{index}.self_attn.lucid.{name}"], x.grad) < GRADIENTS


@torch.no_grad()
def test_calibration_uses_the_keys_of_the_calibrated_model_and_no_padding():
    ids, mask = left_padded(tokens(6, 20), [20, 20, 11, 20, 7, 20])
    model = lucid_model("llama", center="calibrated", whiten=True)
    model.calibrate(ids, mask)
    seen = {}
    hooks = [
        one.register_forward_pre_hook(lambda one, inputs, index=index: seen.update({index: inputs[0]}))
        for index, one in preconditioners(model).items()
    ]
    model(ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    for index, one in preconditioners(model).items():
        expected = calibrated_key_map(seen[index], mask.bool())
        assert relative_error(one.center, expected.center) < 1e-5
        assert relative_error(one.matrix, expected.matrix) < 1e-4
    before = model(ids, attention_mask=mask).logits
    kept = [one.center.clone() for one in preconditioners(model).values()]
    enable_lucid(model, center="calibrated", whiten=True, sharpness=3.0)
    assert all(torch.equal(one.center, x) for one, x in zip(preconditioners(model).values(), kept, strict=True))
    assert relative_error(model(ids, attention_mask=mask).logits, before) > 1e-3
    with pytest.raises(ValueError, match="calibration needs center='learned' or center='calibrated'"):
        lucid_model("llama").calibrate(ids)


def test_a_map_that_a_checkpoint_lacks_is_the_identity_until_it_is_calibrated(tmp_path):
    softmax_model("llama").save_pretrained(tmp_path)
    config = lucid_model("llama", center="calibrated", whiten=True).config
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(model(tokens()).logits, lucid_model("llama")(tokens()).logits)


def test_a_gate_begins_at_exactly_the_original_model_with_a_gradient_and_comes_back_from_below():
    ids, ones = tokens(2, 12), torch.ones(2, 12)
    model, softmax = lucid_model("llama", strength=0.0, learned=["strength"]), softmax_model("llama")
    inputs = {"input_ids": ids, "use_cache": False}
    logits, found = gradients(model, ones, inputs)
    assert torch.equal(logits, softmax(**inputs).logits)
    assert torch.equal(greedy(model, ids), greedy(softmax, ids))
    for layer in (0, 1):
        strength = torch.zeros(2, requires_grad=True)
        gradients(oracle_model("llama", layers=[layer], strength=strength), ones, inputs)
        assert relative_error(found[f"model.layers.{layer}.self_attn.lucid.strength"], strength.grad) < 5e-3
    gates = [one.strength for one in preconditioners(model).values()]
    with torch.no_grad():
        for gate in gates:
            gate.fill_(-0.5)
    logits, below = gradients(model, ones, inputs)
    assert torch.equal(logits, softmax(**inputs).logits)
    for name, gradient in below.items():
        assert torch.equal(gradient, found[name])
