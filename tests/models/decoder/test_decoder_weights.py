"""Weights of the own decoder: Llama's names, saving and loading, initial values."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import LucidForCausalLM, LucidModel

from .cases import SHAPE, decoder, padded, prompts

# head_dim of Qwen2 is always hidden_size / num_attention_heads.
FAMILY: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True)),
    "llama, tied, another base": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    ),
    "mistral, other norms and activation": (
        MistralForCausalLM,
        MistralConfig(**SHAPE, sliding_window=None, rms_norm_eps=0.1, hidden_act="gelu"),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**(SHAPE | {"head_dim": 8}))),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
}


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """The model with random biases and norms: with zeros and ones a wrong one would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.rand_like(parameter)
    return model.eval()


def logits(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        return model.to(dtype)(**padded(prompts(9, 6), "right"), use_cache=False).logits


@pytest.mark.parametrize("name", FAMILY)
def test_weights_of_the_llama_family_load_by_name(name: str, tmp_path: Path) -> None:
    kind, config = FAMILY[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path)
    ours, report = LucidForCausalLM.from_pretrained(
        tmp_path, config=LucidConfig.from_llama(config, attention="softmax"), output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert set(ours.state_dict()) == set(theirs.state_dict())
    real = padded(prompts(9, 6), "right")["attention_mask"].bool()
    torch.testing.assert_close(logits(ours)[real], logits(theirs)[real], rtol=1e-4, atol=1e-5)
    lucid = LucidForCausalLM.from_pretrained(tmp_path, config=LucidConfig.from_llama(config))
    assert (logits(lucid) - logits(theirs))[real].abs().max() > 1e-2


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.shows("`save_pretrained`, `from_pretrained`", model="decoder")
def test_a_saved_model_comes_back_the_same(name: str, tmp_path: Path) -> None:
    model = decoder(name)
    model.save_pretrained(tmp_path)
    assert (json.loads((tmp_path / "config.json").read_text()))["attention"] == name
    torch.testing.assert_close(logits(LucidForCausalLM.from_pretrained(tmp_path)), logits(model), rtol=0, atol=0)


def test_options_tied_embeddings_and_a_hybrid_are_saved(tmp_path: Path) -> None:
    lucid = {"sharpness": 1.25, "learn_beta": True, "norm": "qk", "center": "calibrated", "whiten": True}
    options = {"lucid": lucid, "gsa": {"num_slots": 3}}
    model = decoder(["gsa", "lucid"], attention_options=options, tie_word_embeddings=True, rope_theta=100.0)
    model.model.layers[1].self_attn.calibrate(torch.randn(2, 9, 32))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = LucidForCausalLM.from_pretrained(tmp_path)
    assert again.config.attention_options == options
    assert again.config == model.config.__class__.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    # Without the options it would be another model.
    plain = LucidForCausalLM.from_pretrained(
        tmp_path, attention_options={"lucid": lucid | {"norm": "key"}, "gsa": {"num_slots": 3}}
    )
    assert not torch.allclose(logits(plain), logits(model))


def test_untied_embeddings_are_two() -> None:
    model = decoder()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.get_output_embeddings() is model.lm_head
    model.resize_token_embeddings(60)
    assert model(torch.tensor([[55, 59]])).logits.shape == (1, 2, 60)


FRESH = """
import sys
import torch
import transformers
path = sys.argv[1]
try:
    transformers.AutoConfig.from_pretrained(path)
except ValueError as error:
    assert "lucid_attention" in str(error), error
else:
    raise AssertionError("known before it was registered")
from lucid_attention import enable_lucid
enable_lucid()
enable_lucid()
model = transformers.AutoModelForCausalLM.from_pretrained(path)
base = transformers.AutoModel.from_pretrained(path)
assert type(model).__name__ == "LucidForCausalLM" and type(base).__name__ == "LucidModel"
tokens = torch.arange(1, 10)[None]
assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
torch.save(model(tokens).logits, path + "/logits.pt")
"""


@pytest.mark.slow
@pytest.mark.shows("`enable_lucid()` in any cell of a notebook", model="decoder")
def test_a_fresh_process_loads_it_by_the_auto_classes(tmp_path: Path) -> None:
    model = decoder("lucid", attention_options={"sharpness": 1.5, "learn_sharpness": True})
    model.save_pretrained(tmp_path)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRESH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    expected = model(torch.arange(1, 10)[None]).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-5, atol=1e-5)


def test_weights_that_a_checkpoint_lacks_begin_as_their_module_makes_them(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    options = {"learn_sharpness": True, "sharpness": 2.5, "center": "calibrated", "whiten": True}
    config = LucidConfig.from_llama(LlamaConfig(**SHAPE), attention_options=options, qk_norm=True)
    attention = LucidForCausalLM.from_pretrained(tmp_path, config=config).model.layers[1].self_attn
    torch.testing.assert_close(attention.sharpness(), torch.full((2,), 2.5))
    torch.testing.assert_close(attention.q_norm.weight, torch.ones(6))
    assert not attention.key_center.any()
    assert torch.equal(attention.key_matrix, torch.eye(6).repeat(2, 1, 1))
    config = LucidConfig.from_llama(LlamaConfig(**SHAPE), attention=["diff", "delta"])
    first, second = LucidForCausalLM.from_pretrained(tmp_path, config=config).model.layers
    for weight in (first.self_attn.lambda_q1, second.self_attn.convolutions["k"].weight):
        assert weight.isfinite().all()
        assert 0.01 < weight.std() < 1
    assert second.self_attn.convolutions["k"].weight.abs().max() <= 0.5


def test_weights_begin_as_the_configuration_says() -> None:
    config = LucidConfig(**(SHAPE | {"attention": ["gated_delta", "lucid"], "initializer_range": 0.01}))
    model = LucidForCausalLM(config)
    for weight in (
        model.lm_head.weight,
        model.model.layers[0].self_attn.g_proj.weight,
        model.model.layers[1].mlp.up_proj.weight,
    ):
        assert weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert (model.model.embed_tokens.weight[0] == 0).all()
    decay = model.model.layers[0].self_attn
    assert (decay.A_log <= torch.tensor(16.0).log()).all()
    step = torch.nn.functional.softplus(decay.dt_bias)
    assert ((step > 0.0009) & (step < 0.11)).all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_bfloat16_is_finite_and_close(name: str) -> None:
    model = decoder(name)
    wide = logits(model)
    narrow = logits(model, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert narrow.isfinite().all()
    # The median token: where a recurrence returns almost 0, the norm after it enlarges the rounding error.
    assert ((narrow - wide).norm(dim=-1) / wide.norm(dim=-1)).median() < 0.1


@pytest.mark.parametrize("kind", [LucidModel, LucidForCausalLM])
def test_an_attention_of_transformers_is_refused(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    for name in ("sdpa", "flex_attention"):
        with pytest.raises(ValueError, match=r"attn_implementation=.* is not possible"):
            kind._from_config(LucidConfig(**SHAPE), attn_implementation=name)
    model = decoder()
    with pytest.raises(ValueError, match=r"attn_implementation=.* is not possible"):
        model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attn_implementation=.* is not possible"):
        kind.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_a_checkpoint_of_llama_needs_its_configuration_translated(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_llama"):
        LucidForCausalLM.from_pretrained(tmp_path)
    config = LucidConfig.from_llama(AutoConfig.from_pretrained(tmp_path), tie_word_embeddings=False)
    assert LucidForCausalLM.from_pretrained(tmp_path, config=config).config.attention == "lucid"
