"""A model saved with LUCID loads with LUCID, or the error says what is missing. Other models are saved as before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.dropin.settings import uses_lucid
from lucid_attention.models.saved import KEY
from tests.models.dropin.cases import CONFIGURATIONS, lucid_model, sharpen, softmax_model, tokens

ROOT = Path(__file__).parents[3]


def written(path):
    return json.loads((path / "config.json").read_text())


def change_settings(path, change):
    """Write other settings into the config.json of a LUCID model."""
    content = written(path)
    content[KEY][0]["lucid"] = change(content[KEY][0]["lucid"])
    (path / "config.json").write_text(json.dumps(content))


def logits(model, **inputs):
    with torch.no_grad():
        return model.eval()(tokens(2), **inputs).logits


@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"layers": [1], "strength": 0.5, "sharpness": 2.0}, {"strength": 0.0}],
    ids=["plain", "with settings", "strength 0"],
)
@pytest.mark.shows("`save_pretrained`, `from_pretrained`", model="drop-in")
def test_the_choice_and_its_settings_survive(tmp_path, loader, settings):
    model = lucid_model("llama", **settings)
    expected = logits(model)
    for path in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(path)
        model = getattr(transformers, loader).from_pretrained(path)
        assert model.config._attn_implementation == "lucid"
        assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model, use_cache=False), expected)
        found = model.config.lucid
        assert (found["layers"], found["strength"]) == (settings.get("layers"), settings.get("strength", 1.0))


def test_a_model_that_was_switched_by_name_is_saved_with_its_choice(tmp_path):
    enable_lucid()
    model = softmax_model("qwen3")
    model.set_attn_implementation("lucid")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(lucid_model("qwen3")))


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "gpt_neox"])
def test_the_choice_survives_in_other_architectures(tmp_path, name):
    model = lucid_model(name, layers=[1])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_the_base_model_comes_back_with_lucid_too(tmp_path):
    model = lucid_model("llama")
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert base.config._attn_implementation == "lucid"
    with torch.no_grad():
        found, expected = (m(tokens(2)).last_hidden_state for m in (base, model.model))
    assert torch.equal(found, expected)


def test_the_choice_survives_in_a_configuration_alone(tmp_path):
    lucid_model("llama", strength=0.5).config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == "lucid"
    assert model.config.lucid["strength"] == 0.5
    again = type(config).from_dict(config.to_dict())
    assert uses_lucid(again)
    assert again.lucid == config.lucid


def test_loading_with_another_attention_overrides_lucid(tmp_path):
    lucid_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(logits(model), logits(softmax_model("llama")))
    model.save_pretrained(tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").config._attn_implementation == "sdpa"


def test_a_model_that_was_switched_back_is_saved_without_lucid(tmp_path):
    model = lucid_model("llama", strength=0.5)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    assert not {"attn_implementation", "lucid", KEY} & set(written(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(logits(again), logits(softmax_model("llama")))


def test_other_models_in_the_process_are_saved_as_before(tmp_path):
    lucid_model("llama")
    model = softmax_model("llama")
    assert "attn_implementation" not in model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert not {"attn_implementation", "lucid", KEY} & set(written(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert {type(layer).__name__ for layer in DynamicCache(config=again.config).layers} == {"DynamicLayer"}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("strenght", r"config\.lucid has an unknown key 'strenght' \(did you mean 'strength'\?\)"),
        ("zzz", r"config\.lucid has an unknown key 'zzz': expected some of \['layers', 'strength', 'sharpness'\]"),
    ],
)
def test_a_misspelt_key_is_an_error(tmp_path, key, message):
    lucid_model("llama").save_pretrained(tmp_path)
    change_settings(tmp_path, lambda settings: settings | {key: 0.5})
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"strength": 7}, "strength"),
        ({"layers": [9]}, "layers must be indices of the model's 2 layers"),
        ("yes", "dictionary"),
    ],
    ids=["too strong", "no such layer", "no dictionary"],
)
def test_wrong_settings_in_a_file_are_an_error(tmp_path, value, message):
    lucid_model("llama").save_pretrained(tmp_path)
    change_settings(tmp_path, lambda settings: value)
    with pytest.raises((ValueError, TypeError), match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)(tokens(2))


def composite():
    text = CONFIGURATIONS["gemma3"]()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=3,
        boi_token_index=4,
        eoi_token_index=5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    sharpen(model)
    return model


def test_of_a_model_with_several_parts_the_text_decoder_is_switched_and_saved(tmp_path):
    model = composite()
    softmax = logits(model)
    enable_lucid(model, layers=[2], strength=0.5)
    assert model.config.text_config._attn_implementation == "lucid"
    assert model.config.vision_config._attn_implementation == "sdpa"
    expected = logits(model)
    assert not torch.allclose(expected, softmax, atol=0.01)
    for path in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(path)
        model = transformers.Gemma3ForConditionalGeneration.from_pretrained(path)
        assert model.config.text_config._attn_implementation == "lucid"
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert model.config.text_config.lucid == {"layers": [2], "strength": 0.5, "sharpness": None}
        assert torch.equal(logits(model), expected)


def test_of_a_model_with_several_parts_only_what_was_switched_back_is_softmax(tmp_path):
    model = enable_lucid(composite())
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    assert KEY not in written(tmp_path)
    again = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.config.text_config._attn_implementation == "sdpa"


IN_A_FRESH_PROCESS = """
import json, sys, torch, transformers
import lucid_attention, lucid_attention.models.dropin.api
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, cache_utils

torch.set_num_threads(1)
wrapped = [hasattr(f, "__wrapped__") for f in (PreTrainedConfig.to_json_file, cache_utils.get_layer_types_and_kwargs)]
found = {"registered": "lucid" in AttentionInterface().valid_keys(), "wrapped": wrapped}
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except Exception as error:
    found["error"] = str(error)
lucid_attention.models.dropin.api.enable_lucid()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[1] + "/ids.pt")).logits, sys.argv[1] + "/logits.pt")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory):
    """The report of a process that loads a saved model, before and after `enable_lucid()`."""
    path = tmp_path_factory.mktemp("saved")
    model = lucid_model("gemma3", layers=[1], strength=0.5)
    model.save_pretrained(path)
    torch.save(tokens(2), path / "ids.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {
        "logits": torch.load(path / "logits.pt"),
        "expected": logits(model),
    }


@pytest.mark.shows("`enable_lucid()` in any cell of a notebook", model="drop-in")
def test_a_fresh_process_loads_what_was_saved(fresh_process):
    assert torch.equal(fresh_process["logits"], fresh_process["expected"])


def test_a_fresh_process_without_enable_lucid_says_what_is_missing(fresh_process):
    assert "pip install lucid-attention" in fresh_process["error"]
    assert "enable_lucid()" in fresh_process["error"]


def test_importing_the_package_registers_nothing(fresh_process):
    assert not fresh_process["registered"]
    assert not any(fresh_process["wrapped"])
