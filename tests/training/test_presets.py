"""Presets have the published shapes and numbers of parameters."""

from collections.abc import Callable

import pytest
import torch

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_lab.training import presets


def count(config: LucidConfig) -> int:
    with torch.device("meta"):
        return LucidForCausalLM(config).num_parameters()


def by_hand(
    layers: int,
    hidden: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head: int,
    vocabulary: int,
    *,
    embeddings: int = 2,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> int:
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    attention += 2 * head * qk_norm + head * (heads + 2 * kv_heads) * qkv_bias
    return layers * (attention + 3 * hidden * mlp + 2 * hidden) + hidden + embeddings * vocabulary * hidden


GEMMA_1B = by_hand(26, 1152, 6912, 4, 1, 256, 262_144, embeddings=1, qk_norm=True)
GEMMA_4B = by_hand(34, 2560, 10_240, 8, 4, 256, 262_208, embeddings=1, qk_norm=True)
QWEN = by_hand(28, 1536, 8960, 12, 2, 128, 151_936, embeddings=1, qkv_bias=True)
COUNTS: dict[str, tuple[Callable[..., LucidConfig], int]] = {
    "tiny": (presets.tiny, by_hand(2, 64, 176, 4, 2, 16, 512)),
    "small": (presets.small, by_hand(12, 768, 2048, 12, 4, 64, 32_000, embeddings=1)),
    "paper_1b": (presets.paper_1b, by_hand(22, 2048, 5632, 32, 4, 68, 32_000)),
    "paper_16_layer": (presets.paper_16_layer, by_hand(16, 2048, 4096, 32, 32, 64, 256_000)),
    "qwen2_5_1_5b": (presets.qwen2_5_1_5b, QWEN),
}
WITH_WINDOWS = {"gemma3_1b": (presets.gemma3_1b, GEMMA_1B), "gemma3_4b": (presets.gemma3_4b, GEMMA_4B)}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [pytest.param(*case, id=name) for name, case in (COUNTS | WITH_WINDOWS).items()],
)
def test_a_preset_has_as_many_parameters_as_its_shape(preset: Callable[..., LucidConfig], expected: int) -> None:
    # LUCID adds none.
    assert count(preset()) == count(preset(attention="softmax")) == expected


def test_the_counts_agree_with_the_published_ones() -> None:
    # Parameters of the published checkpoints. Gemma's language models have two norms more per layer than ours.
    assert QWEN == 1_543_714_304
    assert GEMMA_1B + 26 * 2 * 1152 == 999_885_952
    assert GEMMA_4B + 34 * 2 * 2560 == 3_880_263_168
    assert round(COUNTS["paper_1b"][1] / 1e9, 2) == 1.11


def test_the_papers_model_is_as_described() -> None:
    config = presets.paper_1b()
    assert (config.attention, config.rope_theta, config.head_dim) == ("lucid", 10_000.0, 68)
    assert presets.paper_1b(rope_theta=64_000.0).rope_theta == 64_000.0
    assert presets.paper_1b("lucid_path").head_dim == presets.paper_1b("path").head_dim == 68
    narrow = presets.paper_16_layer(num_attention_heads=128, num_key_value_heads=128, head_dim=16)
    assert count(narrow) == COUNTS["paper_16_layer"][1]


def test_overrides_win_and_are_checked() -> None:
    config = presets.tiny("delta", num_hidden_layers=3, attention_options={"conv_size": 2})
    assert (config.attention, config.num_hidden_layers, config.attention_options) == ("delta", 3, {"conv_size": 2})
    with pytest.raises(ValueError, match="num_layers"):
        presets.tiny(num_layers=3)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_fits_the_papers_model(name: str) -> None:
    # Within 5 % of softmax attention, so that models can be compared.
    assert count(presets.paper_1b(name)) == pytest.approx(COUNTS["paper_1b"][1], rel=0.05)


def test_one_layer_of_six_has_no_window() -> None:
    config = presets.gemma3_1b(num_hidden_layers=12, attention_options={"lucid": {"sharpness": 4.0}})
    assert config.layer_attentions == (["sliding"] * 5 + ["lucid"]) * 2
    assert config.options_of("lucid") == {"sharpness": 4.0}
    assert config.options_of("sliding") == {"window": 512, "rope_base": 10_000.0}
    assert presets.gemma3_4b().options_of("sliding")["window"] == 1024
    assert presets.gemma3_1b("softmax").layer_attentions.count("softmax") == 4
