"""Saved LUCID models: they come back as they were, and a program that does not know LUCID cannot open them."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from lucid_attention import enable_lucid, set_sharpness
from lucid_attention.models.subclasses import ARCHITECTURES as KNOWN
from lucid_attention.models.subclasses import SENTENCE_0_1
from tests.models.architectures.cases import (
    ARCHITECTURES,
    gradients,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)
from tests.models.decoder.cases import decoder
from tests.models.tools_of_others import environment

SETTINGS = {"layers": [1], "strength": 0.75, "sharpness": 2.0}


@torch.no_grad()
def logits(model):
    return model.eval()(tokens(2)).logits


def content(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_of_every_architecture_comes_back(name, tmp_path):
    model = lucid_model(name, **SETTINGS)
    kind = type(softmax_model(name).config).model_type
    assert kind in KNOWN
    model.save_pretrained(tmp_path)
    saved = content(tmp_path)
    assert saved["model_type"] == f"lucid_{kind}"
    assert saved["architectures"] == [type(model).__name__] == [f"Lucid{type(softmax_model(name)).__name__}"]
    assert saved["lucid"] == SETTINGS | {"learned": [], "center": "none", "whiten": False}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert isinstance(again, type(softmax_model(name)))
    assert torch.equal(logits(again), logits(model))
    assert relative_error(logits(again), logits(softmax_model(name))) > 0.001


def test_values_are_per_layer_and_head_in_the_state_dict(tmp_path):
    model = lucid_model("llama", sharpness=3.0)
    with torch.no_grad():
        model.model.layers[0].self_attn.lucid.sharpness.copy_(torch.tensor([1.0, 5.0]))
    model.save_pretrained(tmp_path)
    saved = {name: x for name, x in load_file(tmp_path / "model.safetensors").items() if ".lucid." in name}
    assert saved["model.layers.0.self_attn.lucid.sharpness"].tolist() == [1.0, 5.0]
    assert saved["model.layers.1.self_attn.lucid.sharpness"].tolist() == [3.0, 3.0]
    assert len(saved) == 4
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_values_keep_their_precision_in_a_narrow_model(tmp_path):
    lucid_model("llama", sharpness=2.7182817).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert float(model.model.layers[0].self_attn.lucid.sharpness[0]) == pytest.approx(2.7182817)


@pytest.mark.parametrize("learned", [["sharpness"], ["sharpness", "strength"]], ids="+".join)
def test_learned_values_have_the_gradient_of_the_equation_and_are_saved(learned, tmp_path):
    model = lucid_model("llama", learned=learned, strength=0.5, sharpness=2.0).double()
    ids, weights = tokens(2), torch.ones(2, 12, dtype=torch.float64)
    _, found = gradients(model, weights, {"input_ids": ids, "use_cache": False})
    for name in learned:
        weight = model.model.layers[0].self_attn.lucid.get_parameter(name)
        key, step, sums = f"model.layers.0.self_attn.lucid.{name}", 1e-2, []
        for sign in (1, -1):
            with torch.no_grad():
                weight[1] += sign * step
            moved, _ = gradients(model, weights, {"input_ids": ids, "use_cache": False})
            sums.append(float((moved * _directions(moved)).sum()))
            with torch.no_grad():
                weight[1] -= sign * step
        assert float(found[key][1]) == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-2)
    with torch.no_grad():
        model.model.layers[1].self_attn.lucid.sharpness.copy_(torch.tensor([1.5, 4.0]))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert {name for name, p in again.named_parameters() if ".lucid." in name} == {
        f"model.layers.{i}.self_attn.lucid.{name}" for i in (0, 1) for name in learned
    }
    assert relative_error(logits(again), logits(model)) < 1e-6
    with pytest.raises(ValueError, match="is learned: it cannot be set"):
        set_sharpness(again, 3.0)


def _directions(x):
    from tests.models.architectures.cases import _directions as directions

    return directions().to(x.dtype)


def test_heads_of_other_tasks_are_lucid_too(tmp_path):
    model = lucid_model("llama", **SETTINGS)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == "LucidLlamaModel"
    with torch.no_grad():
        assert torch.equal(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
    labels = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert type(labels).__name__ == "LucidLlamaForSequenceClassification"
    with torch.no_grad():
        assert torch.equal(labels.model(tokens()).last_hidden_state, base(tokens()).last_hidden_state)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_is_lucid_and_independent(way):
    model = lucid_model("llama", **SETTINGS)
    other = way(model)
    assert type(other) is type(model)
    assert torch.equal(logits(other), logits(model))
    set_sharpness(other, 5.0)
    assert model.config.lucid["sharpness"] == 2.0
    assert not torch.equal(logits(other), logits(model))


def test_hidden_states_are_recorded():
    model = lucid_model("llama")
    assert len(model(tokens(), output_hidden_states=True).hidden_states) == 3


def test_a_model_from_the_configuration_of_another_is_lucid():
    config = lucid_model("qwen3", **SETTINGS).config
    model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "LucidQwen3ForCausalLM"
    assert model.model.layers[1].self_attn.lucid.sharpness.tolist() == [2.0, 2.0]
    assert not hasattr(model.model.layers[0].self_attn, "lucid")


def test_the_name_of_a_model_that_was_switched_over_loads_nothing(tmp_path):
    softmax_model("llama").save_pretrained(tmp_path)
    model = enable_lucid(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert model.name_or_path == model.config.name_or_path
    with pytest.raises(OSError, match="save this LUCID model and load it from there"):
        AutoModelForCausalLM.from_pretrained(model.name_or_path)
    model.save_pretrained(tmp_path / "lucid")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lucid").name_or_path == str(tmp_path / "lucid")


def test_a_setting_that_is_not_known_is_an_error(tmp_path):
    lucid_model("llama").save_pretrained(tmp_path)
    changed = content(tmp_path)
    changed["lucid"]["stregth"] = 1
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(TypeError, match="unexpected keyword argument 'stregth'"):
        AutoConfig.from_pretrained(tmp_path)


STOCK = """
import json, sys, torch
sys.modules["lucid_attention"] = None
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, pipeline
found = {}
for folder in sys.argv[1:]:
    for loader in (AutoConfig, AutoModelForCausalLM, LlamaForCausalLM):
        try:
            loader.from_pretrained(folder)
            found[f"{folder} {loader.__name__}"] = "opened"
        except Exception as error:
            found[f"{folder} {loader.__name__}"] = str(error)
    try:
        pipeline("text-generation", model=folder)
        found[f"{folder} pipeline"] = "opened"
    except Exception as error:
        found[f"{folder} pipeline"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_program_without_the_package_refuses_by_itself(tmp_path):
    lucid_model("llama").save_pretrained(tmp_path / "llama")
    decoder().save_pretrained(tmp_path / "own")
    command = [sys.executable, "-c", STOCK, "llama", "own"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for attempt, outcome in found.items():
        if attempt == "own LlamaForCausalLM":
            # Another architecture altogether: Transformers warns of the model type.
            continue
        assert "opened" not in outcome, attempt
    assert "lucid_llama" in found["llama AutoModelForCausalLM"]
    assert '`attn_implementation="lucid"` is not supported' in found["llama LlamaForCausalLM"]


@pytest.mark.parametrize("kind", ["llama", "own"])
def test_a_checkpoint_of_release_0_1_opens_with_a_warning(kind, tmp_path):
    model = decoder() if kind == "own" else lucid_model("llama", **SETTINGS)
    model.save_pretrained(tmp_path)
    inside = content(tmp_path)
    inside.pop("attn_implementation", None)
    if kind == "llama":
        inside |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "lucid": SETTINGS}
    sentences = dict.fromkeys(["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"], SENTENCE_0_1)
    (tmp_path / "config.json").write_text(
        json.dumps(sentences | {"architectures": [SENTENCE_0_1], "lucid_attention": [inside]})
    )
    with pytest.warns(FutureWarning, match="written by lucid-attention 0.1"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(2) % 40
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    again.save_pretrained(tmp_path / "again")
    assert content(tmp_path / "again")["model_type"] == model.config.model_type


def test_weights_in_several_files_open(tmp_path):
    model = lucid_model("llama", **SETTINGS)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_trainer_saves_and_resumes(tmp_path):
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]

    def train(folder, resume=None):
        model = lucid_model("llama", learned=["sharpness"])
        arguments = TrainingArguments(
            folder, max_steps=4, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return model

    whole = train(tmp_path)
    parts = train(tmp_path, str(tmp_path / "checkpoint-2"))
    assert torch.equal(logits(parts), logits(whole))
    moved = whole.model.layers[0].self_attn.lucid.sharpness
    assert not torch.equal(moved.detach(), torch.full_like(moved, 8**0.5))


def test_the_configuration_of_the_caller_stays_as_it_was():
    model = softmax_model("llama")
    config = model.config
    enable_lucid(model)
    assert type(config).__name__ == "LlamaConfig"
    assert config._attn_implementation == "sdpa"
    assert all(getattr(module, "config", model.config) is model.config for module in model.modules())
