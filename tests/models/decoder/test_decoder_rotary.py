"""Rotary embeddings of the own decoder: Transformers' rope_parameters, checked against Transformers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from lucid_attention.models.decoder.configuration import LucidConfig, make_attention
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from .cases import SHAPE, decoder, greedy, prompts

# Positions before and behind the length of pretraining.
ORIGINAL, LENGTH = 16, 40
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
every_type = pytest.mark.parametrize("kind", TYPES)


def parameters(kind: str) -> dict[str, Any]:
    return {"rope_theta": 50.0, **TYPES[kind]}


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


@every_type
@pytest.mark.shows("RoPE scaling", model="decoder")
def test_softmax_attention_with_rope_parameters_is_llama(kind: str) -> None:
    torch.manual_seed(0)
    length = ORIGINAL if kind == "default" else 4 * ORIGINAL
    config = LlamaConfig(**SHAPE, max_position_embeddings=length, rope_parameters=parameters(kind))
    llama = LlamaForCausalLM(config)
    ours = LucidForCausalLM(LucidConfig.from_llama(config, attention="softmax"))
    ours.load_state_dict(llama.state_dict())
    for T in (ORIGINAL // 2, LENGTH):
        tokens = prompts(T)[0][None]
        torch.testing.assert_close(logits(ours, tokens), logits(llama, tokens), rtol=1e-4, atol=1e-5)
    if kind != "default":
        plain = LucidForCausalLM(
            LucidConfig.from_llama(config, attention="softmax", rope_parameters=parameters("default"))
        )
        plain.load_state_dict(llama.state_dict())
        assert (logits(plain, tokens) - logits(llama, tokens)).abs().max() > 1e-3


@every_type
def test_generation_goes_beyond_the_original_length_as_llama_does(kind: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=ORIGINAL, rope_parameters=parameters(kind))
    llama = LlamaForCausalLM(config).eval()
    ours = LucidForCausalLM(LucidConfig.from_llama(config, attention="softmax")).eval()
    ours.load_state_dict(llama.state_dict())
    inputs = {"input_ids": prompts(ORIGINAL - 3)[0][None]}
    assert torch.equal(greedy(ours, inputs), greedy(llama, inputs))


@every_type
def test_part_of_a_head_is_rotated_as_in_phi(kind: str) -> None:
    """Llama rotates whole heads; Phi 3 has the same rotation of a part."""
    options = parameters(kind) | {"partial_rotary_factor": 0.5}
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 4 * ORIGINAL}
    # Phi's own configuration allows fewer types.
    theirs = Phi3RotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(options)))
    ours = make_attention(LucidConfig(**shape, num_hidden_layers=1, vocab_size=8, rope_parameters=options), 0).rotary
    q, k = torch.randn(2, 1, 4, LENGTH, 8).unbind()
    positions = torch.arange(LENGTH)[None]
    expected = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    for x, truth in zip((q, k), expected, strict=True):
        torch.testing.assert_close(ours(x, positions), truth, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours(x, positions)[..., 4:], x[..., 4:])


@every_type
def test_a_saved_configuration_has_the_same_rotations(kind: str, tmp_path: Path) -> None:
    model = decoder(rope_parameters=parameters(kind), max_position_embeddings=ORIGINAL)
    tokens = prompts(LENGTH)[0][None]
    expected = logits(model, tokens)
    model.save_pretrained(tmp_path)
    again = LucidForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_parameters == model.config.rope_parameters
    torch.testing.assert_close(logits(again, tokens), expected, rtol=0, atol=0)
    # Frequencies stay float32 where weights do not.
    rotary = again.bfloat16().model.layers[0].self_attn.rotary
    assert rotary.frequencies(torch.arange(LENGTH))[0].dtype == torch.float32


def test_the_base_alone_may_be_given_as_in_older_files() -> None:
    config = LucidConfig(**SHAPE, rope_theta=77.0)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 77.0}
    assert LucidConfig(**SHAPE).rope_theta == 10_000.0
    none = LucidConfig(**SHAPE, rope_theta=None)
    assert none.rope_parameters is None
    assert none.rope_theta is None
    assert LucidConfig(**none.to_dict()).rope_parameters is None
    assert make_attention(none, 0).rotary is None
    old = {key: value for key, value in config.to_dict().items() if key != "rope_parameters"} | {"rope_theta": 5.0}
    assert LucidConfig.from_dict(old).rope_theta == 5.0
    none.rope_theta = 9.0
    assert make_attention(none, 0).rotary.base == 9.0
    llama = LlamaConfig(**SHAPE, rope_parameters=parameters("linear"))
    assert LucidConfig.from_llama(llama, rope_theta=3.0).rope_parameters == parameters("linear") | {"rope_theta": 3.0}


def test_a_layer_with_its_own_base_is_not_scaled() -> None:
    config = LucidConfig(
        **SHAPE,
        attention=["sliding", "lucid"],
        rope_parameters=parameters("linear"),
        attention_options={"sliding": {"rope_base": 9.0}},
    )
    first, second = (make_attention(config, index).rotary for index in range(2))
    assert (first.base, second.base, second.rope_type) == (9.0, 50.0, "linear")
    positions = torch.arange(3)
    torch.testing.assert_close(4 * second.frequencies(positions)[0], 50.0 ** -(torch.arange(0, 6, 2) / 6))
    torch.testing.assert_close(first.frequencies(positions)[0], 9.0 ** -(torch.arange(0, 6, 2) / 6))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"rope_parameters": {"rope_type": "yarm"}}, "rope_type must be one of .*did you mean 'yarn'"),
    "frequencies that depend on the length": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type must be",
    ),
    "a missing number": ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "a negative base": ({"rope_theta": -1.0}, "rope_base must be a positive"),
    "a part that is odd": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary_dim must be even"),
}


@pytest.mark.parametrize(("overrides", "complaint"), REFUSED.values(), ids=REFUSED)
def test_rope_parameters_without_meaning_are_refused(overrides: dict[str, Any], complaint: str) -> None:
    with pytest.raises((ValueError, KeyError), match=complaint):
        LucidConfig(**SHAPE, **overrides)
