"""Adapters of PEFT carry LUCID: every way to load one gives the logits with which it was trained, or an error."""

import copy
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftConfig,
    PeftMixedModel,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    set_peft_model_state_dict,
)
from peft.config import PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import hotswap
from peft.utils.save_and_load import load_peft_weights
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lucid_attention import StrengthRamp
from lucid_attention.models.dropin.adapters import KEY, SAVED_AS, adapter_hooks, install_adapter_hooks
from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.dropin.hooks import MARK
from tests.models.dropin.cases import lucid_model, softmax_model, tokens

ROOT = Path(__file__).parents[3]
SETTINGS = {"layers": [1], "strength": 0.75, "sharpness": 2.0}


def lora(**options):
    """Weights that are not 0, so that the adapter changes the logits."""
    return LoraConfig(init_lora_weights=False, r=4, task_type="CAUSAL_LM", **options)


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens(2)).logits


def written(folder):
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.fixture(autouse=True)
def enabled():
    enable_lucid()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plain base, an adapter that was trained on it with LUCID, one with softmax, and the logits of the first."""
    folder = tmp_path_factory.mktemp("saved")
    softmax_model("llama").save_pretrained(folder / "base")
    torch.manual_seed(0)
    model = get_peft_model(enable_lucid(plain(folder), **SETTINGS), lora())
    model.save_pretrained(folder / "adapter")
    get_peft_model(plain(folder), lora()).save_pretrained(folder / "softmax")
    torch.save(logits(model), folder / "logits")
    return folder


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base")


def by_transformers(folder):
    model = plain(folder)
    model.load_adapter(folder / "adapter")
    return model


def by_transformers_with_a_configuration(folder):
    model = plain(folder)
    model.load_adapter(peft_model_id=folder / "adapter", peft_config=lora())
    return model


def into_another_adapter(folder):
    model = get_peft_model(plain(folder), lora())
    model.load_adapter(folder / "adapter", "default")
    return model


def by_configuration(folder):
    config = PeftConfig.from_pretrained(folder / "adapter")
    model = get_peft_model(plain(folder), config)
    set_peft_model_state_dict(model, load_peft_weights(folder / "adapter"))
    return model


LOADERS = {
    "PeftModel": lambda folder: PeftModel.from_pretrained(plain(folder), folder / "adapter"),
    "PeftModel with a configuration": lambda f: PeftModel.from_pretrained(plain(f), f / "adapter", config=lora()),
    "AutoPeftModel": lambda folder: AutoPeftModelForCausalLM.from_pretrained(folder / "adapter"),
    "AutoModel": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "adapter"),
    "Transformers' load_adapter": by_transformers,
    "Transformers' load_adapter with a configuration": by_transformers_with_a_configuration,
    "into an adapter of the same name": into_another_adapter,
    "by the configuration": by_configuration,
    "mixed": lambda folder: PeftMixedModel.from_pretrained(plain(folder), folder / "adapter"),
    "base with LUCID": lambda f: PeftModel.from_pretrained(enable_lucid(plain(f), **SETTINGS), f / "adapter"),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.shows("PEFT adapters", model="drop-in")
def test_a_loaded_adapter_attends_as_it_was_trained(saved, loader):
    model = LOADERS[loader](saved)
    assert torch.equal(logits(model), torch.load(saved / "logits"))
    assert model.config.lucid == SETTINGS


def test_lucid_and_softmax_differ_with_this_adapter(saved):
    """Otherwise the test above would pass with softmax attention."""
    model = LOADERS["PeftModel"](saved)
    model.get_base_model().set_attn_implementation("sdpa")
    assert (logits(model) - torch.load(saved / "logits")).abs().max() > 0.1


def test_the_file_hides_its_fields_from_programs_that_do_not_know_lucid(saved):
    found = written(saved / "adapter")
    assert found.keys() == {"base_model_name_or_path", "peft_type", KEY}
    assert found["peft_type"] == SAVED_AS
    assert "pip install lucid-attention" in SAVED_AS
    assert found[KEY]["lucid"] == SETTINGS
    assert found[KEY]["r"] == 4


def test_an_adapter_without_lucid_is_saved_as_before(saved):
    found = written(saved / "softmax")
    assert (found["peft_type"], found["r"]) == ("LORA", 4)
    assert "lucid" not in json.dumps(found)


def test_merging_gives_a_lucid_checkpoint(saved, tmp_path):
    merged = LOADERS["PeftModel"](saved).merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.lucid == SETTINGS
    assert torch.equal(logits(again), logits(merged))
    torch.testing.assert_close(logits(again), torch.load(saved / "logits"), rtol=1e-4, atol=1e-4)


def test_an_adapter_that_transformers_added_and_saved(saved, tmp_path):
    model = enable_lucid(plain(saved), **SETTINGS)
    model.add_adapter(lora())
    model.save_pretrained(tmp_path)
    again = plain(saved)
    again.load_adapter(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_lucid_may_be_enabled_after_the_adapter_was_added(saved, tmp_path):
    model = get_peft_model(plain(saved), lora())
    enable_lucid(model.get_base_model(), **SETTINGS)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(plain(saved), tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_enable_lucid_asks_for_the_base(saved):
    with pytest.raises(TypeError, match=r"got PeftModelForCausalLM: give its model\.get_base_model\(\)"):
        enable_lucid(get_peft_model(plain(saved), lora()))


def test_an_adapter_from_before_the_hooks_carries_lucid(saved, tmp_path):
    """Of Transformers' own kind, in a model that was made before the first call of `enable_lucid`."""
    model = plain(saved)
    model.add_adapter(lora())
    del model.peft_config["default"]._lucid_base
    enable_lucid(model, **SETTINGS)
    model.save_pretrained(tmp_path)
    assert written(tmp_path)[KEY]["lucid"] == SETTINGS


def test_prompts_carry_lucid(saved, tmp_path):
    model = get_peft_model(
        enable_lucid(plain(saved), **SETTINGS), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(plain(saved), tmp_path)
    assert again.config.lucid == SETTINGS
    assert torch.equal(logits(again), logits(model))


def test_a_base_with_other_settings_is_refused(saved):
    with pytest.raises(ValueError, match=r"settings .*0\.75.*the model has .*0\.5"):
        PeftModel.from_pretrained(lucid_model("llama", strength=0.5), saved / "adapter")
    with pytest.raises(ValueError, match="the model has"):
        lucid_model("llama").load_adapter(saved / "adapter")


def test_all_layers_by_name_and_by_default_are_the_same_settings(tmp_path):
    get_peft_model(lucid_model("llama"), lora()).save_pretrained(tmp_path)
    PeftModel.from_pretrained(lucid_model("llama", layers=[0, 1]), tmp_path)


def test_softmax_adapters_are_not_switched_with_the_model(saved):
    model = PeftModel.from_pretrained(plain(saved), saved / "softmax")
    with pytest.raises(ValueError, match=r"softmax attention, \['default'\]"):
        model.load_adapter(saved / "adapter", "second")
    model = plain(saved)
    model.load_adapter(saved / "softmax", "first")
    with pytest.raises(ValueError, match=r"softmax attention, \['first'\]"):
        model.load_adapter(saved / "adapter", "second")


def test_a_softmax_adapter_on_a_lucid_model_is_told(saved):
    with pytest.warns(UserWarning, match="saved from a model without LUCID"):
        PeftModel.from_pretrained(enable_lucid(plain(saved)), saved / "softmax")


def test_weights_are_not_swapped_into_a_softmax_model(saved):
    model = PeftModel.from_pretrained(plain(saved), saved / "softmax")
    with pytest.raises(ValueError, match="before the swap"):
        hotswap.hotswap_adapter(model, saved / "adapter", adapter_name="default")


def test_transformers_swaps_weights_and_attention_together(saved):
    model = plain(saved)
    model.load_adapter(saved / "softmax")
    model.load_adapter(saved / "adapter", adapter_name="default", hotswap=True)
    assert torch.equal(logits(model), torch.load(saved / "logits"))


def test_weights_are_swapped_into_a_lucid_model(saved):
    model = get_peft_model(enable_lucid(plain(saved), **SETTINGS), lora())
    hotswap.hotswap_adapter(model, saved / "adapter", adapter_name="default")
    assert torch.equal(logits(model), torch.load(saved / "logits"))


def test_a_base_that_cannot_be_lucid_is_refused(saved):
    config = PeftConfig.from_pretrained(saved / "adapter")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)


def test_a_damaged_file_is_refused(saved, tmp_path):
    for change, message in (({"lucid": None}, "must be an object"), ({"lucid": {"strenght": 1}}, "unknown key")):
        found = written(saved / "adapter")
        found[KEY] |= change
        (tmp_path / "adapter_config.json").write_text(json.dumps(found))
        with pytest.raises(ValueError, match=message):
            PeftConfig.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_ramp_goes_on_where_the_adapter_was_saved(saved, tmp_path):
    """The Trainer resumes with the strength of its checkpoint, in a model that has another one."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]

    def trainer(steps, **settings):
        model = get_peft_model(enable_lucid(plain(saved), **settings), lora())
        arguments = TrainingArguments(
            tmp_path, max_steps=steps, save_steps=2, report_to=[], use_cpu=True, logging_steps=1
        )
        return Trainer(model, arguments, train_dataset=rows, callbacks=[StrengthRamp(4)])

    trainer(2, strength=0.0).train()
    assert written(tmp_path / "checkpoint-2")[KEY]["lucid"]["strength"] == 0.5
    # A softmax model, as after a forgotten enable_lucid(model), becomes LUCID as well.
    resumed = trainer(4, strength=0.0)
    resumed.model.get_base_model().set_attn_implementation("sdpa")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.config._attn_implementation == "lucid"
    assert written(tmp_path / "checkpoint-4")[KEY]["lucid"]["strength"] == 1.0


def test_a_reloaded_adapter_of_other_layers_is_refused(saved):
    model = get_peft_model(enable_lucid(plain(saved), layers=[0]), lora())
    with pytest.raises(ValueError, match="the model has"):
        model.load_adapter(saved / "adapter", "default")


def test_a_copy_of_a_model_saves_its_own_settings(saved, tmp_path):
    model = get_peft_model(enable_lucid(plain(saved), strength=0.5), lora())
    twin = copy.deepcopy(model)
    enable_lucid(twin.get_base_model(), strength=0.25)
    for name, one, strength in (("model", model, 0.5), ("twin", twin, 0.25)):
        one.save_pretrained(tmp_path / name)
        assert written(tmp_path / name)[KEY]["lucid"]["strength"] == strength


HOOKS = [(owner, name) for owner, name, _ in adapter_hooks(enable_lucid)]


@pytest.mark.parametrize(("owner", "name"), HOOKS, ids=[f"{owner.__name__}.{name}" for owner, name in HOOKS])
def test_a_release_of_peft_that_moves_a_function_is_named(owner, name, monkeypatch):
    assert hasattr(getattr(owner, name, None), MARK), f"{owner.__name__}.{name} has moved: see dropin/adapters.py"
    monkeypatch.delattr(owner, name)
    if not hasattr(owner, name):
        with pytest.raises(RuntimeError, match=f"{name}.* supports PEFT 0.21"):
            install_adapter_hooks(enable_lucid)


def test_no_class_of_peft_goes_around_the_hooks():
    """A tuner or a configuration with a method of its own must call the one that we wrap."""

    def below(cls):
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    for owner, names in (
        (PeftConfigMixin, ("save_pretrained", "from_json_file", "from_peft_type")),
        (BaseTuner, ("inject_adapter",)),
        (PeftModel, ("load_adapter", "save_pretrained")),
    ):
        for cls in below(owner):
            for name in names:
                own = vars(cls).get(name)
                assert own is None or f"super().{name}(" in inspect.getsource(own), f"{cls.__name__}.{name}"


def in_a_fresh_process(code, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
{before}
from peft import PeftModel
{after}
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder + "/base"), folder + "/adapter").eval()
from tests.models.dropin.cases import tokens
assert torch.equal(model(tokens(2)).logits, torch.load(folder + "/logits"))
"""
ENABLE = "from lucid_attention import enable_lucid; enable_lucid()"


NOT_YET = "assert 'peft' not in sys.modules"
REMOVED = "assert not any('AfterImport' in repr(finder) for finder in sys.meta_path)"
ASK = "import importlib.util; assert importlib.util.find_spec('peft')"
ORDERS = {
    "before the import": (f"{ENABLE}; {NOT_YET}", REMOVED),
    "after the import": (NOT_YET, ENABLE),
    # Transformers asks whether PEFT is there, which is no import.
    "asked for before": (f"{ENABLE}; {ASK}; {NOT_YET}", REMOVED),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_hooks_are_there_whenever_peft_is_imported(saved, order):
    before, after = ORDERS[order]
    done = in_a_fresh_process(LOAD.format(before=before, after=after), saved)
    assert done.returncode == 0, done.stderr


WITHOUT = """
import sys
from transformers import AutoModelForCausalLM
from peft import AutoPeftModelForCausalLM, PeftModel
folder = sys.argv[1]
def base():
    return AutoModelForCausalLM.from_pretrained(folder + "/base")
loaders = [
    lambda: PeftModel.from_pretrained(base(), folder + "/adapter"),
    lambda: AutoPeftModelForCausalLM.from_pretrained(folder + "/adapter"),
    lambda: AutoModelForCausalLM.from_pretrained(folder + "/adapter"),
    lambda: base().load_adapter(folder + "/adapter"),
    lambda: PeftModel.from_pretrained(base(), folder + "/softmax").load_adapter(folder + "/adapter", "second"),
]
for load in loaders:
    try:
        load()
    except KeyError as error:
        assert "pip install lucid-attention" in str(error), error
    else:
        raise SystemExit("loaded")
assert "lucid_attention" not in sys.modules
"""


@pytest.mark.slow
def test_peft_without_lucid_stops_and_names_the_package(saved):
    done = in_a_fresh_process(WITHOUT, saved)
    assert done.returncode == 0, done.stderr
