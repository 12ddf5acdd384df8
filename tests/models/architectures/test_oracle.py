"""The drop-in against the equation written densely, in float64, inside the same models."""

import math
from types import MappingProxyType

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from tests.models.architectures.cases import (
    ARCHITECTURES,
    assert_same_gradients,
    gradients,
    left_padded,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
LOGITS, GRADIENTS = 2e-5, 2e-4


def per_head(x):
    return torch.as_tensor(x, dtype=torch.float64).view(-1, 1, 1)


def dense(layers, strength, sharpness, maps):
    """softmax(q kᵀ · scaling + mask) (I + s·L)⁻¹ v, with the softcaps and sinks of the architectures.

    maps: center [H, D] and matrix [H, D, D] by layer.
    """

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        q, k, v = (x.double() for x in (query, key, value))
        mask = attention_mask.double()
        kinds = getattr(module.config, "layer_types", None)
        full = kinds is None or kinds[module.layer_idx] == "full_attention"
        if full and (layers is None or module.layer_idx in layers):
            c = math.sqrt(k.shape[-1]) if sharpness is None else per_head(sharpness)
            center, matrix = maps.get(module.layer_idx, (torch.zeros(1), torch.eye(k.shape[-1])))
            unit = torch.nn.functional.normalize((k - center[:, None].double()) @ matrix.double(), dim=-1)
            below = (mask > -1).tril(-1)
            P = torch.eye(k.shape[2]).double() + per_head(strength) * below * torch.exp(c * (unit @ unit.mT) - c)
            v = torch.linalg.inv(P) @ v
        scores = q @ k.repeat_interleave(group, 1).mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask
        if hasattr(module, "sinks"):
            sinks = module.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return (weights @ v.repeat_interleave(group, 1)).to(query.dtype).transpose(1, 2), None

    return attend


def oracle_model(name, layers=None, strength=1.0, sharpness=None, maps=MappingProxyType({})):
    AttentionInterface.register("dense_oracle", dense(layers, strength, sharpness, maps))
    AttentionMaskInterface.register("dense_oracle", eager_mask)
    model = softmax_model(name)
    model.set_attn_implementation("dense_oracle")
    return model


def assert_equals_the_oracle(name, ids, weights, settings, **inputs):
    inputs = {"input_ids": ids, "use_cache": False, **inputs}
    expected, expected_gradients = gradients(oracle_model(name, **settings), weights, inputs)
    found, found_gradients = gradients(lucid_model(name, **settings), weights, inputs)
    seen = weights.bool()
    assert relative_error(found[seen], expected[seen]) < LOGITS
    assert_same_gradients(found_gradients, expected_gradients, GRADIENTS)
    return expected


@every_architecture
def test_logits_and_gradients_are_those_of_the_equation(name):
    ids = tokens(2, 13)
    expected = assert_equals_the_oracle(name, ids, torch.ones(2, 13), {})
    assert relative_error(softmax_model(name)(ids).logits.detach(), expected) > 0.05


@every_architecture
def test_logits_and_gradients_under_padding_are_those_of_the_equation(name):
    ids, left = left_padded(tokens(3, 13), [13, 9, 1])
    mask = torch.cat([left, torch.tensor([[1, 1], [1, 0], [0, 0]])], 1)
    ids = torch.cat([ids, tokens(3, 2, 5)], 1)
    assert_equals_the_oracle(name, ids, mask.float(), {}, attention_mask=mask)


# gpt-oss makes its masks without positions: documents see each other through its windows, with stock attention too.
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt_oss"])
def test_logits_and_gradients_of_packed_documents_are_those_of_the_equation(name):
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 0, 1], [*range(10), 0, 1, 2]])
    assert_equals_the_oracle(name, tokens(2, 13), torch.ones(2, 13), {}, position_ids=positions)


@pytest.mark.parametrize(
    "settings",
    [{"layers": [1]}, {"strength": 0.5}, {"sharpness": 1.0}, {"layers": [2], "strength": 0.25, "sharpness": 5.0}],
    ids=["one layer", "half strength", "blunt", "all three"],
)
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_settings_do_to_logits_and_gradients_what_the_equation_says(name, settings):
    ids, mask = left_padded(tokens(2, 13), [13, 8])
    expected = assert_equals_the_oracle(name, ids, mask.float(), settings, attention_mask=mask)
    plain = oracle_model(name)(ids, attention_mask=mask).logits.detach()
    assert relative_error(plain[mask.bool()], expected[mask.bool()]) > 0.01


def test_heads_may_differ_and_values_changed_in_place_act_in_the_next_pass():
    ids, settings = tokens(2, 13), {"sharpness": [1.0, 5.0], "strength": [0.5, 1.0]}
    model, inputs = lucid_model("llama"), {"input_ids": ids, "use_cache": False}
    model(**inputs)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.lucid.sharpness.copy_(torch.tensor(settings["sharpness"]))
            layer.self_attn.lucid.strength.copy_(torch.tensor(settings["strength"]))
    expected, expected_gradients = gradients(oracle_model("llama", **settings), torch.ones(2, 13), inputs)
    found, found_gradients = gradients(model, torch.ones(2, 13), inputs)
    assert relative_error(found, expected) < LOGITS
    assert_same_gradients(found_gradients, expected_gradients, GRADIENTS)
    with torch.no_grad():
        past = model(ids[:, :9]).past_key_values
        steps = [model(ids[:, i : i + 1], past_key_values=past).logits for i in range(9, 13)]
    assert relative_error(torch.cat(steps, 1), expected[:, 9:]) < LOGITS


@torch.no_grad()
def test_the_root_of_the_head_size_written_as_a_number_is_the_default():
    ids, default = tokens(2, 13), lucid_model("llama")
    root = math.sqrt(default.config.head_dim)
    assert torch.equal(lucid_model("llama", sharpness=root)(ids).logits, default(ids).logits)
