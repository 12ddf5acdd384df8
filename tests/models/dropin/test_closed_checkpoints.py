"""A LUCID checkpoint in a process that does not know LUCID: nothing opens it, and the error names the package.

The same in a process that knows LUCID: everything opens it. Fresh processes are in test_fresh_processes.py.
"""

import copy
import inspect
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
)

from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.dropin.hooks import HOOKS
from lucid_attention.models.dropin.settings import uses_lucid
from lucid_attention.models.saved import KEY, OLD_MARK, SENTENCE, seal, unseal
from tests.models.decoder.cases import decoder
from tests.models.dropin.cases import A_FEW, ARCHITECTURES, lucid_model, softmax_model, tokens
from tests.models.dropin.test_saved_choice import composite, logits, written
from tests.models.tools_of_others import word_tokenizer

SETTINGS = {"layers": [1], "strength": 0.5, "sharpness": 2.0}


@pytest.fixture
def checkpoint(tmp_path):
    lucid_model("llama", **SETTINGS).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def stock(monkeypatch):
    """Transformers without the wrappers."""
    for hook in HOOKS:
        function = inspect.getattr_static(hook.owner, hook.name)
        if isinstance(function, classmethod):
            monkeypatch.setattr(hook.owner, hook.name, classmethod(function.__func__.__wrapped__))
        else:
            monkeypatch.setattr(hook.owner, hook.name, function.__wrapped__)


ATTENTION = [{}, {"attn_implementation": None}, {"attn_implementation": "sdpa"}]


@pytest.mark.parametrize("options", ATTENTION, ids=["absent", "None", "sdpa"])
@pytest.mark.parametrize("more", [{}, {"ignore_mismatched_sizes": True}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "LlamaForCausalLM", "AutoModel"])
def test_stock_transformers_does_not_open_it(checkpoint, stock, loader, options, more):
    with pytest.raises(Exception, match="pip install lucid-attention"):
        getattr(transformers, loader).from_pretrained(checkpoint, **options, **more)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_classes_of_every_architecture_do_not_open_it(tmp_path, name, request):
    model = lucid_model(name)
    model.save_pretrained(tmp_path)
    request.getfixturevalue("stock")
    for opener in (AutoConfig, type(model.config), type(model), AutoModelForCausalLM):
        with pytest.raises(Exception, match="pip install lucid-attention"):
            opener.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="lucid-attention"):
        AutoConfig.from_pretrained(tmp_path, model_type=model.config.model_type)


def test_stock_classes_do_not_open_a_model_of_several_parts(tmp_path, request):
    enable_lucid(composite()).save_pretrained(tmp_path)
    request.getfixturevalue("stock")
    auto = ("AutoConfig", "AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
    for opener in (*auto, "Gemma3Config", "Gemma3ForConditionalGeneration", "Gemma3TextConfig", "Gemma3ForCausalLM"):
        with pytest.raises(Exception, match="lucid-attention"):
            getattr(transformers, opener).from_pretrained(tmp_path)


@pytest.mark.parametrize("opener", ["AutoConfig", "AutoModelForCausalLM", "LlamaForCausalLM"])
def test_stock_transformers_names_the_package_for_the_own_decoder(tmp_path, stock, opener):
    decoder().save_pretrained(tmp_path)
    with pytest.raises(Exception, match="pip install lucid-attention"):
        getattr(transformers, opener).from_pretrained(tmp_path)


def test_the_own_decoder_opens_without_a_call(tmp_path, stock):
    model = decoder()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = torch.arange(2, 14)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert type(model.config).from_json_file(tmp_path / "config.json").attention == "lucid"


def test_converters_find_no_architecture_that_they_know(checkpoint, stock):
    """llama.cpp reads AutoConfig, then config.json, and vLLM get_config_dict; then they look up `architectures`."""
    found, _ = PreTrainedConfig.get_config_dict(checkpoint)
    for content in (written(checkpoint), found):
        assert content["architectures"] == [SENTENCE]
        assert content["model_type"] == SENTENCE
        # Parts in which converters look for the language model.
        assert not {"text_config", "llm_config", "thinker_config", "language_config", "decoder"} & set(content)
        # Transformers takes a dictionary with the model type that it looks for, wherever in the file.
        assert not any(isinstance(value, dict) for value in content.values())
        for size in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            assert content[size] == SENTENCE
        assert not {"vocab_size", "intermediate_size"} & set(content)
    assert SENTENCE not in transformers.CONFIG_MAPPING


def test_the_tokenizer_opens_without_the_package(checkpoint, stock):
    """Transformers reads config.json for it, too."""
    word_tokenizer().save_pretrained(checkpoint)
    assert AutoTokenizer.from_pretrained(checkpoint)("w1 w2").input_ids == [5, 6]


def test_a_converter_gets_no_plain_configuration_in_a_process_that_knows_lucid(checkpoint, tmp_path):
    """It would read the weights itself. Under `lucid run` Transformers knows LUCID in every program."""
    softmax_model("llama").save_pretrained(tmp_path / "plain")
    script = compile("found = AutoConfig.from_pretrained(folder)", "anywhere/convert_hf_to_gguf.py", "exec")
    with pytest.raises(ValueError, match="convert_hf_to_gguf cannot open a model with LUCID attention"):
        exec(script, {"AutoConfig": AutoConfig, "folder": checkpoint})
    for reader in ("sglang.srt.configs", "lucid_attention"):
        names = {"AutoConfig": AutoConfig, "folder": checkpoint, "__name__": reader}
        code = compile("found = AutoConfig.from_pretrained(folder)", "configs.py", "exec")
        if reader == "lucid_attention":
            exec(code, names)
        else:
            with pytest.raises(ValueError, match="sglang cannot open"):
                exec(code, names)
    exec(script, {"AutoConfig": AutoConfig, "folder": tmp_path / "plain"})


def test_weights_keep_their_names_and_files(checkpoint):
    assert set(load_file(checkpoint / "model.safetensors")) == set(lucid_model("llama").state_dict())


def test_weights_in_several_files_open(tmp_path):
    model = lucid_model("llama", **SETTINGS)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("name", A_FEW)
def test_the_configuration_inside_is_the_plain_one_with_the_settings(tmp_path, name):
    model = lucid_model(name)
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path / "again")
    assert written(tmp_path) == written(tmp_path / "again")
    (inside,) = written(tmp_path)[KEY]
    assert inside["lucid"] == model.config.lucid
    assert inside == json.loads(model.config.to_json_string())
    assert uses_lucid(PreTrainedConfig.from_json_file(tmp_path / "config.json"))
    assert AutoConfig.from_pretrained(tmp_path / "config.json").lucid == model.config.lucid


def test_generation_finds_token_ids_without_a_file_of_its_own(tmp_path):
    model = lucid_model("llama")
    model.config.eos_token_id = 5
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    found = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 5, 0)


def test_generation_config_is_left_alone(checkpoint):
    content = json.loads((checkpoint / "generation_config.json").read_text())
    assert SENTENCE not in str(content)
    assert content["bos_token_id"] == 1


def old_form(path):
    """Rewrite config.json as earlier releases wrote it."""
    content = unseal(written(path))
    parts = {name: OLD_MARK for name, part in content.items() if isinstance(part, dict) and "lucid" in part}
    content["attn_implementation"] = OLD_MARK if content.get("lucid") else parts
    (path / "config.json").write_text(json.dumps(content))
    return content


def test_checkpoints_of_earlier_releases_open(checkpoint, tmp_path):
    content = old_form(checkpoint)
    expected = logits(lucid_model("llama", **SETTINGS))
    for options in ATTENTION[:2]:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
        assert torch.equal(logits(model), expected)
    del content["lucid"]
    (checkpoint / "config.json").write_text(json.dumps(content))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.lucid == {"layers": None, "strength": 1.0, "sharpness": None}
    model.save_pretrained(tmp_path / "again")
    assert KEY in written(tmp_path / "again")


def test_checkpoints_of_earlier_releases_with_several_parts_open(tmp_path):
    model = enable_lucid(composite(), layers=[2])
    model.save_pretrained(tmp_path)
    assert old_form(tmp_path)["attn_implementation"] == {"text_config": OLD_MARK}
    again = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("inside", [None, {}, [], [1], [{}, {}]], ids=str)
def test_a_damaged_file_is_an_error(checkpoint, inside):
    (checkpoint / "config.json").write_text(json.dumps(written(checkpoint) | {KEY: inside}))
    with pytest.raises(ValueError, match=r"'lucid_attention' in config\.json must be a list of one configuration"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_the_place_of_code_stays_visible():
    """With `auto_map`, Transformers finds the classes of a model whose type it does not know."""
    config = {"model_type": "x", "auto_map": {"AutoConfig": "file.Config"}, "hidden_size": 4, "eos_token_id": 2}
    content = seal(copy.deepcopy(config))
    assert content["auto_map"] == config["auto_map"]
    assert content["eos_token_id"] == 2
    assert unseal(content) == config


def test_trainer_saves_and_resumes(tmp_path):
    rows = tokens(8)
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trainer(steps):
        model = lucid_model("llama", **SETTINGS)
        arguments = TrainingArguments(
            tmp_path / "run", max_steps=steps, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True
        )
        arguments.learning_rate, arguments.lr_scheduler_type = 1e-2, "constant"
        return Trainer(model, arguments, train_dataset=data)

    whole = trainer(2)
    whole.train()
    assert KEY in written(tmp_path / "run" / "checkpoint-1")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(logits(resumed.model), logits(whole.model))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2", attn_implementation=None)
    assert torch.equal(logits(loaded), logits(whole.model))
