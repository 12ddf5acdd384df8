"""What the plug-in for vLLM can show without vLLM: names."""

import pytest
from transformers import AutoModelForCausalLM

from lucid_attention import enable_lucid
from lucid_attention.models.subclasses import lucid_config_class
from lucid_attention.vllm.plugin import SERVED
from tests.models.architectures.cases import CONFIGURATIONS


@pytest.mark.parametrize("kind", SERVED)
def test_architectures_have_the_names_that_checkpoints_have(kind):
    config = CONFIGURATIONS[kind.removesuffix("_text")]()
    assert config.model_type == kind
    assert type(enable_lucid(AutoModelForCausalLM.from_config(config))).__name__ == SERVED[kind]


def test_another_architecture_cannot_take_its_place():
    with pytest.raises(ValueError, match="others compute softmax attention"):
        lucid_config_class("llama")().update({"architectures": ["LlamaForCausalLM"]})
