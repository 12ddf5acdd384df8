"""LoRA on the own decoder: the adapter reaches the output in every attention."""

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)

from lucid_attention import ATTENTIONS, LucidForCausalLM, enable_lucid
from tests.models.decoder.cases import decoder, prompts, relative


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.stack(prompts(12, 12))).logits


@pytest.fixture(autouse=True)
def enabled():
    enable_lucid()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_all_linear_layers_take_part(attention):
    """Merged and unmerged agree in float64: no attention reads the weight of a projection past its adapter."""
    plain = decoder(attention).double()
    before = logits(plain)
    model = get_peft_model(plain, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)).double()
    found = logits(model)
    assert relative(found, before) > 1e-3
    assert any("self_attn.q_proj.lora_A" in name for name, _ in model.named_parameters())
    assert not any("lm_head.lora_A" in name for name, _ in model.named_parameters())
    assert relative(logits(model.merge_and_unload()), found) < 1e-9


def test_gradients_of_every_adapter_are_there():
    model = get_peft_model(decoder(), LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    ids = torch.stack(prompts(12, 12))
    model(ids, labels=ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    assert all(float(p.grad.abs().max()) > 0 for p in trained.values())


@pytest.mark.shows("PEFT adapters", model="decoder")
def test_an_adapter_is_saved_reopened_and_merged(tmp_path):
    decoder().save_pretrained(tmp_path / "base")
    base = LucidForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(
        base, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", target_modules="all-linear")
    )
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    again = PeftModel.from_pretrained(LucidForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = LucidForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))
    assert relative(logits(loaded), expected) < 1e-4


@pytest.mark.parametrize("attention", ["lucid", "softmax", "delta"])
@pytest.mark.shows("prefix tuning (PEFT)", model="decoder", refused=True)
def test_prefix_tuning_is_refused_with_the_way_out(attention):
    shape = {"token_dim": 16, "num_attention_heads": 2, "num_layers": decoder().config.num_hidden_layers}
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **shape)
    model, ids = get_peft_model(decoder(attention), prefix), torch.stack(prompts(7, 7))
    for run in (lambda: model(ids), lambda: model.generate(input_ids=ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match="use PromptTuningConfig, PromptEncoderConfig or LoRA"):
            run()


@pytest.mark.parametrize("attention", ["lucid", "delta"])
def test_prompt_tuning_puts_virtual_tokens_before_the_text(attention):
    base, ids = decoder(attention).double(), torch.stack(prompts(7, 7))
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).double().eval()
    embeds = torch.cat([model.get_prompt(2).detach(), base.get_input_embeddings()(ids)], 1)
    torch.testing.assert_close(model(ids).logits, base(inputs_embeds=embeds).logits)
