"""LucidConfig: all fields are checked when it is made, and it loads as it was saved."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.configuration import LucidConfig, constructor_options, every, make_attention
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from .cases import SHAPE

HYBRID = {"attention": ["delta", "lucid"]}


def made(**overrides: Any) -> LucidConfig:
    return LucidConfig(**(SHAPE | overrides))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt attention": ({"attention": "lucd"}, "attention must be one of .*got 'lucd' .*did you mean 'lucid'"),
    "an unknown attention in a list": ({"attention": ["lucid", "magic"]}, "got 'magic'"),
    "too few attentions": ({"attention": ["lucid"]}, "expected 2 names, got 1"),
    "a misspelt option": (
        {"attention_options": {"sharpnes": 4.0}},
        "attention 'lucid' has no option 'sharpnes' .*did you mean 'sharpness'.*it takes norm, learn_beta",
    ),
    "an option of another attention": (
        {"attention": "delta", "attention_options": {"sharpness": 4.0}},
        "'delta' has no",
    ),
    "an option of one of two": (HYBRID | {"attention_options": {"sharpness": 4.0}}, "go under its name"),
    "options of an attention that is not there": ({"attention_options": {"delta": {}}}, "but no layer has it"),
    "options that are none": (HYBRID | {"attention_options": {"delta": 3}}, "must be a dictionary, got 3"),
    "the index of a layer": ({"attention": "diff", "attention_options": {"layer_index": 1}}, "no option 'layer_index'"),
    "the width of a layer": ({"attention_options": {"hidden_size": 8}}, "no option 'hidden_size'"),
    "a value that the module refuses": ({"attention_options": {"sharpness": -1.0}}, "sharpness must be a positive"),
    "a rotary base where there is none": ({"attention": "path", "attention_options": {"rope_base": 9.0}}, "rope_base"),
    "heads that are no groups": ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    "heads that cannot be paired": ({"attention": "diff", "num_key_value_heads": 1}, "num_kv_heads must be even"),
    "odd heads with rotations": ({"head_dim": 7}, "head_dim must be even"),
    "heads of no size": ({"head_dim": None, "hidden_size": 33}, "give head_dim"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
    "an unknown activation": ({"hidden_act": "silue"}, "hidden_act must be .*did you mean 'silu'"),
    "an unknown bias": ({"attention_bias": "qk"}, 'attention_bias must be True, False or "qkv"'),
    "a misspelt key": ({"atention": "lucid"}, "LucidConfig has no 'atention' .*did you mean 'attention'"),
    "a key of Llama": ({"pretraining_tp": 2}, "LucidConfig has no 'pretraining_tp'"),
    "a key that is derived": ({"layer_types": ["full_attention"] * 2}, "LucidConfig has no 'layer_types'"),
    "a key for generating": ({"temperature": 0.5}, "LucidConfig has no 'temperature'"),
    "another model's type": ({"model_type": "llama"}, "from_llama"),
}


@pytest.mark.parametrize(("overrides", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_field_is_refused_when_the_configuration_is_made(overrides: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        made(**overrides)


def test_types_are_checked_too() -> None:
    for wrong in ({"hidden_size": "32"}, {"attention": 3}, {"attention_options": ["sharpness"]}):
        with pytest.raises(Exception, match=next(iter(wrong))):
            made(**wrong)


def test_a_changed_configuration_is_checked_before_a_model_is_made_or_saved(tmp_path: Path) -> None:
    config = made()
    config.attention_options = {"sharpnes": 4.0}
    with pytest.raises(ValueError, match="sharpnes"):
        LucidForCausalLM(config)
    with pytest.raises(Exception, match="sharpnes"):
        config.save_pretrained(tmp_path)


def test_keys_of_transformers_pass() -> None:
    config = made(
        dtype="bfloat16", architectures=["LucidForCausalLM"], num_labels=3, name_or_path="here", loss_type=None
    )
    assert config.dtype == torch.bfloat16
    assert config.num_labels == 3
    assert LucidConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_a_saved_configuration_loads_as_it_was(tmp_path: Path) -> None:
    options = {"lucid": {"sharpness": 1.5, "rope_base": None}, "delta": {"conv_size": None}}
    config = made(**HYBRID, attention_options=options, rope_theta=64_000, qk_norm=True, attention_bias="qkv")
    config.save_pretrained(tmp_path)
    again = LucidConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.attention_options == options
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "lucid_attention"
    assert "layer_types" not in written
    assert LucidConfig.from_pretrained(tmp_path, rope_theta=5.0).rope_theta == 5.0
    with pytest.raises(ValueError, match="got 'lucd'"):
        LucidConfig.from_pretrained(tmp_path, attention="lucd")


def test_attributes_set_by_tools_are_kept_and_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = made()
    config.note_of_a_tool = "run 7"
    config.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        again = LucidConfig.from_pretrained(tmp_path)
    assert "does not know 'note_of_a_tool'" in caplog.text
    assert again.note_of_a_tool == "run 7"


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'lucid_attention', got 'llama'"):
        LucidConfig.from_pretrained(tmp_path)


def test_every_nth_layer_of_a_hybrid() -> None:
    assert every(3, "lucid", otherwise="delta", layers=7) == ["delta", "delta", "lucid"] * 2 + ["delta"]
    assert every(1, "lucid", otherwise="delta", layers=2) == ["lucid", "lucid"]
    with pytest.raises(ValueError, match="n must be a positive integer"):
        every(0, "lucid", otherwise="delta", layers=2)


def test_a_hybrid_gives_each_layer_its_attention_and_options() -> None:
    config = made(**HYBRID, attention_options={"lucid": {"sharpness": 1.5}, "delta": {"conv_size": 2}})
    first, second = (layer.self_attn for layer in LucidForCausalLM(config).model.layers)
    assert type(first) is ATTENTIONS["delta"]
    assert first.convolutions["q"].size == 2
    assert type(second) is ATTENTIONS["lucid"]
    assert second.sharpness() == 1.5
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    assert kinds == ["StateLayer", "CroppableLayer"]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_fields_reach_the_attentions_that_have_them(name: str) -> None:
    config = made(attention=name, rope_theta=123.0, qk_norm=True, attention_bias=True)
    attention = make_attention(config, 1)
    known = constructor_options(ATTENTIONS[name])
    has_rotary = known["rope_base"].default is not None
    assert (attention.rotary.base if has_rotary else attention.rotary) == (123.0 if has_rotary else None)
    assert (attention.q_norm is not None) == ("qk_norm" in known)
    assert attention.o_proj.bias is not None
    attention = make_attention(made(attention=name, rope_theta=None, attention_bias="qkv"), 0)
    assert attention.rotary is None
    assert (attention.q_proj.bias is None, attention.o_proj.bias is None) == (False, True)
    assert attention.num_kv_heads == 2


def test_the_known_attentions_have_what_they_are_known_for() -> None:
    rotary = {name for name in ATTENTIONS if make_attention(made(attention=name), 0).rotary is not None}
    assert rotary >= {"softmax", "lucid", "diff"}
    assert rotary.isdisjoint({"path", "lucid_path", "delta", "gated_delta", "gla", "gsa"})
    assert make_attention(made(attention="diff"), 1).lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    assert make_attention(made(attention_options={"rope_base": 7.0}), 0).rotary.base == 7.0


def test_defaults_are_filled_in() -> None:
    config = LucidConfig(hidden_size=32, num_attention_heads=4)
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    first, second = LucidConfig(), LucidConfig()
    first.attention_options["sharpness"] = 4.0
    assert second.attention_options == {}


NOT_LLAMA: dict[str, tuple[PreTrainedConfig, str]] = {
    "stretched positions of another kind": (
        LlamaConfig(rope_parameters={"rope_type": "proportional", "rope_theta": 10_000.0}),
        "rope_type must be one of .*got 'proportional'",
    ),
    "a sliding window": (MistralConfig(sliding_window=128), "sliding_window of this mistral: 128"),
    "some sliding windows": (
        Qwen2Config(use_sliding_window=True, sliding_window=128, max_window_layers=4),
        "layer_types of this qwen2",
    ),
    "dropout": (LlamaConfig(attention_dropout=0.1), "attention_dropout of this llama: 0.1"),
    "another eps of the query norm": (Qwen3Config(rms_norm_eps=1e-5), "rms_norm_eps of this qwen3"),
    "another architecture": (GemmaConfig(), "model_type llama, mistral, qwen2, qwen3, got 'gemma'"),
}


@pytest.mark.parametrize(("config", "complaint"), NOT_LLAMA.values(), ids=NOT_LLAMA)
def test_a_setting_that_lucid_config_cannot_express_is_refused(config: PreTrainedConfig, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LucidConfig.from_llama(config)


def test_from_llama_takes_shape_and_overrides() -> None:
    llama = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 77.0}, dtype="bfloat16")
    config = LucidConfig.from_llama(llama, attention=["lucid", "softmax"], qk_norm=True)
    assert {name: getattr(config, name) for name in SHAPE} == SHAPE
    assert (config.rope_theta, config.dtype, config.qk_norm) == (77.0, torch.bfloat16, True)
    assert config.attention == ["lucid", "softmax"]
    assert LucidConfig.from_llama(Qwen2Config(use_sliding_window=False)).attention_bias == "qkv"
