"""Copies of a LUCID model are LUCID models with its settings, whichever way a tool makes them."""

import copy
import json
import logging
import pickle

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from lucid_attention import set_strength
from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.dropin.settings import uses_lucid
from tests.models.dropin.cases import CONFIGURATIONS, lucid_model, softmax_model, tokens
from tests.models.dropin.test_saved_choice import composite

SETTINGS = {"layers": [1], "strength": 0.5, "sharpness": 2.0}


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens(2)).logits


@pytest.fixture
def checkpoint(tmp_path):
    lucid_model("llama", **SETTINGS).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def plain(tmp_path):
    softmax_model("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_a_copy_from_the_path_and_the_implementation_has_the_settings_of_the_model(plain):
    """What TRL does for the reference of DPO. The path holds the model as it was before LUCID was switched on."""
    model = enable_lucid(LlamaForCausalLM.from_pretrained(plain), **SETTINGS)
    reference = AutoModelForCausalLM.from_pretrained(plain, attn_implementation=model.config._attn_implementation)
    assert reference.config.lucid == SETTINGS
    assert torch.equal(logits(reference), logits(model))
    assert not torch.allclose(logits(reference), logits(LlamaForCausalLM.from_pretrained(plain)), atol=0.01)


def test_a_copy_has_the_current_strength_and_is_independent(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    set_strength(model, 0.8)
    reference = LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation=model.config._attn_implementation)
    assert reference.config.lucid == SETTINGS | {"strength": 0.8}
    assert torch.equal(logits(reference), logits(model))
    set_strength(model, 0.9)
    assert reference.config.lucid["strength"] == 0.8
    assert model.config._attn_implementation.settings["strength"] == 0.9


def test_a_copy_of_a_model_with_several_parts_has_its_settings(tmp_path):
    model = composite()
    model.save_pretrained(tmp_path)
    load = transformers.Gemma3ForConditionalGeneration.from_pretrained
    enable_lucid(model, layers=[2], strength=0.5)
    reference = load(tmp_path, attn_implementation=model.config._attn_implementation)
    assert reference.config.text_config.lucid == {"layers": [2], "strength": 0.5, "sharpness": None}
    assert reference.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(logits(reference), logits(model))
    again = load(tmp_path, attn_implementation=reference.config._attn_implementation)
    assert torch.equal(logits(again), logits(model))
    model.set_attn_implementation("sdpa")
    back = load(tmp_path, attn_implementation=model.config._attn_implementation)
    assert back.config.text_config._attn_implementation == "sdpa"


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "from_dict": lambda config: type(config).from_dict(config.to_dict()),
    "for_model": lambda config: AutoConfig.for_model(**config.to_dict()),
    "json string": lambda config: type(config)(**json.loads(config.to_json_string())),
    "diff": lambda config: type(config)(**config.to_diff_dict()),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_the_configuration_is_lucid(way):
    model = lucid_model("llama", **SETTINGS)
    config = COPIES[way](model.config)
    assert uses_lucid(config)
    again = AutoModelForCausalLM.from_config(config)
    assert again.config._attn_implementation == "lucid"
    assert again.config.lucid == SETTINGS
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))
    set_strength(again, 0.1)
    assert model.config.lucid["strength"] == 0.5
    assert again.config._attn_implementation.settings is again.config.lucid


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_the_model_is_lucid(way):
    model = lucid_model("llama", **SETTINGS)
    again = COPIES[way](model)
    assert torch.equal(logits(again), logits(model))
    set_strength(again, 0.1)
    assert model.config.lucid["strength"] == 0.5
    assert again.config._attn_implementation.settings is again.config.lucid


def test_a_model_from_the_configuration_of_another_is_lucid(checkpoint, plain):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    again = AutoModelForCausalLM.from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(plain, config=model.config)), logits(model))
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(plain, config=str(checkpoint))), logits(model))


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_configuration_without_lucid_is_refused_unless_it_names_its_attention(checkpoint, plain, loader):
    for config in (AutoConfig.from_pretrained(plain), CONFIGURATIONS["llama"]()):
        with pytest.raises(ValueError, match="a model with LUCID attention, and the given configuration has none"):
            loader.from_pretrained(checkpoint, config=config)
    model = loader.from_pretrained(checkpoint, config=config, attn_implementation="sdpa")
    assert not uses_lucid(model.config)
    assert torch.equal(logits(model), logits(softmax_model("llama")))
    assert not uses_lucid(AutoModelForCausalLM.from_config(model.config).config)


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, LlamaForCausalLM])
def test_no_implementation_is_lucid_for_a_lucid_checkpoint(checkpoint, tmp_path, loader, caplog):
    expected = logits(lucid_model("llama", **SETTINGS))
    model = loader.from_pretrained(checkpoint, attn_implementation=None)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loader.from_pretrained(tmp_path / "again", attn_implementation=None)), expected)
    assert not caplog.records


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_another_attention_by_name_gives_one_warning(checkpoint, name, caplog):
    with caplog.at_level(logging.WARNING, logger="lucid_attention"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=name)
    (record,) = (record for record in caplog.records if record.name.startswith("lucid_attention"))
    assert f"LlamaForCausalLM has LUCID attention, and attn_implementation={name!r} replaces it" in record.message
    assert not hasattr(model.config, "lucid")
    assert model._supports_flash_attn
    caplog.clear()
    AutoModelForCausalLM.from_config(model.config)
    model.set_attn_implementation("eager")
    assert not caplog.records


def test_the_text_part_by_another_name_gives_one_warning(tmp_path, caplog):
    model = enable_lucid(composite())
    model.save_pretrained(tmp_path)
    again = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    assert [record.name for record in caplog.records].count("lucid_attention.models.dropin.hooks") == 1
    assert not hasattr(again.config.text_config, "lucid")
