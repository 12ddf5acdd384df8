"""What the plug-in for vLLM can show without vLLM: names, and the configuration of our own decoder."""

import pytest
from transformers import AutoModelForCausalLM

from lucid_attention import LucidConfig, enable_lucid
from lucid_attention.models.preconditioner import LucidSettings
from lucid_attention.models.subclasses import lucid_config_class
from lucid_attention.vllm.configs import DecoderReader, LucidDecoderConfig
from lucid_attention.vllm.plugin import SERVED
from tests.models.architectures.cases import CONFIGURATIONS


@pytest.mark.parametrize("kind", SERVED)
def test_architectures_have_the_names_that_checkpoints_have(kind):
    config = CONFIGURATIONS[kind.removesuffix("_text")]()
    assert config.model_type == kind
    assert type(enable_lucid(AutoModelForCausalLM.from_config(config))).__name__ == SERVED[kind]


def test_the_own_decoder_becomes_a_llama_with_settings():
    own = LucidConfig(
        num_hidden_layers=3, attention=["lucid", "softmax", "lucid"], attention_options={"lucid": {"strength": 0.8}}
    )
    config = DecoderReader.from_dict(own.to_dict() | {"tie_word_embeddings": True})
    assert isinstance(config, LucidDecoderConfig)
    assert config.lucid == LucidSettings(layers=(0, 2), strength=0.8).to_dict()
    assert config.tie_word_embeddings
    assert config.architectures == ["LucidForCausalLM"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention": "delta"}, "softmax, lucid, got 'delta'"),
        ({"attention_options": {"norm": "qk"}}, "with norm 'key', got 'qk'"),
        ({"attention_options": {"learn_beta": True}}, "with learn_beta False, got True"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "got 'dynamic'"),
    ],
)
def test_what_cannot_be_served_is_said(fields, words):
    with pytest.raises(ValueError, match=words):
        DecoderReader.from_dict(LucidConfig(**fields).to_dict())


def test_another_architecture_cannot_take_its_place():
    with pytest.raises(ValueError, match="others compute softmax attention"):
        lucid_config_class("llama")().update({"architectures": ["LlamaForCausalLM"]})
