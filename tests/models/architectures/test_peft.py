"""Adapters of PEFT on LUCID models: trained, saved, opened again and merged, with learned values of LUCID."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lucid_attention import enable_lucid
from tests.models.architectures.cases import lucid_model, relative_error, softmax_model, tokens

SETTINGS = {"layers": [1], "strength": 0.75, "sharpness": 2.0}


def lora(**options):
    """Weights that are not 0, so that the adapter changes the logits."""
    return LoraConfig(init_lora_weights=False, r=4, task_type="CAUSAL_LM", target_modules="all-linear", **options)


@torch.no_grad()
def logits(model):
    return model.eval()(tokens(2)).logits


@pytest.fixture
def base(tmp_path):
    lucid_model("llama", **SETTINGS).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.shows("PEFT adapters", model="drop-in")
def test_an_adapter_is_saved_opened_and_merged(base, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert torch.equal(logits(opened), expected)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)
    merged = opened.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(again).__name__ == "LucidLlamaForCausalLM"
    assert torch.equal(logits(again), logits(merged))
    assert relative_error(logits(again), expected) < 1e-4
    # Were LUCID lost on the way, the logits would be those of softmax attention.
    softmax = PeftModel.from_pretrained(softmax_model("llama"), tmp_path / "adapter")
    assert relative_error(logits(softmax), expected) > 0.01


def test_an_adapter_of_a_model_that_was_never_saved_finds_no_softmax_base(tmp_path):
    softmax_model("llama").save_pretrained(tmp_path / "plain")
    model = get_peft_model(enable_lucid(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), lora())
    model.save_pretrained(tmp_path / "adapter")
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        with pytest.raises(OSError, match="save this LUCID model and load it from there"):
            auto.from_pretrained(tmp_path / "adapter")


def trained(folder, resume=None):
    """LoRA, with c of every head learned next to it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder / "learned")
    model = get_peft_model(base, lora(modules_to_save=["lucid"]))
    arguments = TrainingArguments(
        folder / "run", max_steps=4, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_lora_with_a_learned_sharpness_is_resumed_and_opened_with_what_was_learned(tmp_path):
    lucid_model("llama", **SETTINGS, learned=["sharpness"]).save_pretrained(tmp_path / "learned")

    def opened(adapter):
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "learned"), adapter)

    whole = trained(tmp_path)
    middle = str(tmp_path / "run" / "checkpoint-2")
    at_middle, at_end = (
        model.base_model.model.model.layers[1].self_attn.lucid.sharpness for model in (opened(middle), whole.model)
    )
    assert (at_middle - 2.0).abs().min() > 1e-3
    assert (at_middle - at_end).abs().min() > 1e-3
    assert torch.equal(logits(trained(tmp_path, middle).model), logits(whole.model))
    whole.save_model(tmp_path / "adapter")
    assert torch.equal(logits(opened(tmp_path / "adapter")), logits(whole.model))
    auto = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(auto), logits(whole.model))
    merged = auto.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert relative_error(logits(merged), logits(whole.model)) < 1e-4
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))
