"""Models, caches and settings that cannot work with LUCID are refused, with the reason."""

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    T5Config,
)

from lucid_attention import LucidForCausalLM, enable_lucid
from lucid_lab.training.presets import tiny
from tests.models.architectures.cases import CONFIGURATIONS, lucid_model, softmax_model, tokens

CACHES = {
    "plain": lambda config: DynamicCache(),
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, 20),
}


@pytest.mark.shows("continuous batching of Transformers (`generate_batch`)", model="drop-in", refused=True)
def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="lucid is not supported for continuous batching"):
        lucid_model("llama").generate_batch([[1, 2, 3]])


def test_a_cache_of_an_encoder_with_a_decoder_is_refused():
    with pytest.raises(TypeError, match="got EncoderDecoderCache"):
        lucid_model("llama")(tokens(), past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.shows("prefix tuning (PEFT)", model="drop-in", refused=True)
def test_prefix_tuning_is_refused_with_the_way_out(name):
    shape = {"token_dim": 16, "num_attention_heads": 2, "num_layers": CONFIGURATIONS[name]().num_hidden_layers}
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **shape)
    model = get_peft_model(lucid_model(name), prefix)
    with pytest.raises((ValueError, RuntimeError), match="se PromptTuningConfig, PromptEncoderConfig or LoRA"):
        model(tokens())


def test_prompt_tuning_puts_virtual_tokens_before_the_text():
    """The way out: virtual tokens are embeddings, which go through every layer like others."""
    base, ids = lucid_model("llama").double(), tokens(2)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).double().eval()
    virtual = model.get_prompt(2).detach()
    embeds = torch.cat([virtual, base.get_input_embeddings()(ids)], 1)
    torch.testing.assert_close(model(ids).logits, base(inputs_embeds=embeds).logits)


@pytest.mark.parametrize("made", CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_a_cache_from_before_lucid_was_switched_on_is_refused(made):
    model, ids = softmax_model("llama"), tokens()
    cache = made(model.config)
    model(ids, past_key_values=cache)
    enable_lucid(model)
    with pytest.raises(ValueError, match=r"must be a fresh cache, .*values of another attention"):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_cache_of_an_interrupted_pass_is_refused():
    model, ids = lucid_model("llama"), tokens()
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(ids, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool), past_key_values=cache)
    with pytest.raises(RuntimeError, match="never preconditioned"):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("gemma3", [0, 1], r"layer 0 has 'sliding_attention'.*needs full attention, which layers \[1, 2\] have"),
        ("gpt_oss", [0], r"layer 0 has 'sliding_attention'"),
        ("llama", [2], r"layers must be indices of the model's 2 layers, 0 to 1, got 2"),
        ("llama", [-1], r"layers must be indices of the model's 2 layers, 0 to 1, got -1"),
    ],
    ids=["sliding of three", "sliding of two", "behind the last", "negative"],
)
def test_layers_that_cannot_be_lucid_are_refused(name, layers, message):
    model = softmax_model(name)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        enable_lucid(model, layers=layers)
    assert model.config._attn_implementation == before
    assert not hasattr(model.config, "lucid")


@pytest.mark.parametrize("layers", ["1", [0.5], ["1"], 1], ids=["string", "fraction", "strings", "number"])
def test_layers_that_are_no_integers_are_refused(layers):
    with pytest.raises(TypeError, match=r"layers|iterable"):
        enable_lucid(softmax_model("llama"), layers=layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"strength": 1.5}, "strength"), ({"strength": -0.1}, "strength"), ({"sharpness": 0.0}, "sharpness")],
    ids=["too strong", "too weak", "blunt"],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        enable_lucid(softmax_model("llama"), **settings)


def test_layers_that_share_their_keys_and_values_are_refused():
    model = softmax_model("llama")
    model.config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="expected num_kv_shared_layers = 0, got 1"):
        enable_lucid(model)


def only_windows():
    config = CONFIGURATIONS["mistral"]()
    config.sliding_window = 4
    return config


def test_a_model_with_sliding_windows_only_is_refused():
    with pytest.raises(ValueError, match=r"at least one layer with full attention, got only \['sliding_attention'\]"):
        enable_lucid(AutoModelForCausalLM.from_config(only_windows()))


def test_layers_that_slide_although_their_configuration_says_otherwise_are_refused():
    config = CONFIGURATIONS["mistral"]()
    config.sliding_window, config.layer_types = 4, ["full_attention", "sliding_attention"]
    model = enable_lucid(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match=r"layer 0 has full attention according to config\.layer_types, but"):
        model(tokens())


@pytest.mark.parametrize(
    "model", [torch.nn.Linear(2, 2), "llama", transformers.LlamaConfig()], ids=lambda m: type(m).__name__
)
def test_only_a_model_of_transformers_is_switched_over(model):
    with pytest.raises(TypeError, match=r"model must be a transformers\.PreTrainedModel, got"):
        enable_lucid(model)


def test_settings_without_a_model_are_refused():
    with pytest.raises(ValueError, match="enable_lucid needs a model for these settings"):
        enable_lucid(strength=0.5)


@torch.no_grad()
def test_a_static_cache_takes_flat_masks_only():
    model, ids = lucid_model("llama"), tokens()
    cache = StaticCache(model.config, max_cache_len=16)
    mask = torch.ones(12, 16, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match=r"static cache must be \[B, 16\].*got shape \[1, 1, 12, 16\]"):
        model(ids, attention_mask=mask, past_key_values=cache)


NO_DECODERS = {
    "bloom": (lambda: BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=20), "computes its attention itself"),
    "t5": (lambda: T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=20), "encoder"),
}


@pytest.mark.parametrize("kind", NO_DECODERS)
def test_architectures_that_cannot_are_refused(kind):
    make, reason = NO_DECODERS[kind]
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    with pytest.raises(ValueError, match=reason):
        enable_lucid(auto.from_config(make()))


def test_a_stock_model_does_not_attend_with_lucid_by_its_name_alone():
    model = softmax_model("llama")
    model.set_attn_implementation("lucid")
    with pytest.raises(ValueError, match=r"not switched over by enable_lucid\(model\)"):
        model(tokens())


def test_an_architecture_that_does_not_hand_arguments_to_its_attention_is_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = enable_lucid(transformers.StableLmForCausalLM(transformers.StableLmConfig(vocab_size=97, **sizes)))
    with pytest.raises(ValueError, match="this architecture does not pass it on"):
        model(tokens())


@pytest.mark.parametrize("name", ["sdpa", "eager", "paged|eager"])
def test_another_attention_is_refused_where_a_model_is_lucid(name, tmp_path):
    model = lucid_model("llama")
    model.save_pretrained(tmp_path)
    for ask in (
        lambda: model.set_attn_implementation(name),
        lambda: AutoModelForCausalLM.from_config(model.config, attn_implementation=name),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name),
        lambda: type(model.config)(attn_implementation=name),
    ):
        with pytest.raises(ValueError, match=r"is not possible for Lucid.*lucid convert --to softmax"):
            ask()
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=None).config._attn_implementation == "lucid"
    )


def test_the_own_decoder_is_not_switched_over():
    with pytest.raises(ValueError, match=r"LucidConfig\(attention='lucid'\)"):
        enable_lucid(LucidForCausalLM(tiny("softmax", vocab_size=20)))
