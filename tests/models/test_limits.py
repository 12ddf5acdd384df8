"""Inputs that a model cannot take are refused before its weights are loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from lucid_attention import LucidForCausalLM
from lucid_attention.models import checkpoint, limits
from lucid_attention.models.checkpoint import load_skeleton
from lucid_attention.models.decoder.presets import tiny
from lucid_attention.models.limits import _cache_per_token, check_input_fits, table_of_positions

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
GPT2 = GPT2Config(n_positions=48, n_embd=32, n_head=4, n_layer=2, vocab_size=200)
TABLES: dict[str, tuple[PreTrainedConfig, int | None]] = {
    "gpt2": (GPT2, 48),
    "opt": (OPTConfig(**HEADS, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=48), 48),
    "gpt_neo": (
        GPTNeoConfig(
            hidden_size=32, num_heads=4, num_layers=2, vocab_size=50, attention_types=[[["global"], 2]],
            max_position_embeddings=48,
        ),
        48,
    ),
    "llama": (LlamaConfig(**HEADS, intermediate_size=32, max_position_embeddings=48), None),
}  # fmt: skip


def save(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_positions_is_found(name: str, tmp_path: Path) -> None:
    config, positions = TABLES[name]
    folder = save(config, tmp_path)
    assert table_of_positions(load_skeleton(folder)) == positions
    # The limit is the model's own.
    if positions is not None:
        model = checkpoint.load_model(folder)
        model(torch.zeros(1, positions, dtype=torch.long))
        with pytest.raises(IndexError):
            model(torch.zeros(1, positions + 1, dtype=torch.long))
        check_input_fits(folder, positions, "--lengths")
        message = "has a table of 48 positions: its inputs must have at most 48 tokens, got 49: lower --lengths"
        with pytest.raises(ValueError, match=message):
            check_input_fits(folder, positions + 1, "--lengths")
    else:
        check_input_fits(folder, 10_000, "--lengths")


def test_a_model_of_ours_has_no_table_and_a_cache_of_its_growing_layers(tmp_path: Path) -> None:
    for attention, growing in (("lucid", 2), ("gla", 0), ("sliding", 0)):
        config = tiny(attention, **HEADS, num_key_value_heads=2, head_dim=8, intermediate_size=32)
        LucidForCausalLM(config).save_pretrained(tmp_path / attention)
        assert table_of_positions(load_skeleton(tmp_path / attention)) is None
        assert _cache_per_token(config) == growing * 2 * 2 * 8


def test_a_cache_counts_shared_heads_and_no_windows() -> None:
    sizes = {**HEADS, "intermediate_size": 32, "num_key_value_heads": 2}
    assert _cache_per_token(LlamaConfig(**sizes)) == 2 * 2 * 2 * 8
    assert _cache_per_token(GPT2) == 2 * 2 * 4 * 8
    assert _cache_per_token(MistralConfig(**sizes, sliding_window=16)) == 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setattr(limits, "machine_memory", lambda: size)


def test_weights_and_caches_beyond_memory_are_refused(tmp_path: Path, memory: Callable[[int], None]) -> None:
    folder = save(TABLES["llama"][0], tmp_path)
    weights = 4 * sum(parameter.numel() for parameter in load_skeleton(folder).parameters())
    memory(weights)
    check_input_fits(folder, 0, "--lengths")
    with pytest.raises(ValueError, match=r"and 10 tokens 0\.0 GB: lower --lengths$"):
        check_input_fits(folder, 10, "--lengths")
    memory(weights - 1)
    with pytest.raises(ValueError, match=r"its weights need at least .* choose a smaller --dtype"):
        check_input_fits(folder, 0, "--lengths")
    check_input_fits(folder, 0, "--lengths", dtype="bfloat16")
    memory(weights + 4 * 10 * 3 * 128)
    check_input_fits(folder, 10, "--lengths", batch_size=3, is_cached=True)
    with pytest.raises(ValueError, match=r"lower --lengths or --batch-size 4$"):
        check_input_fits(folder, 10, "--lengths", batch_size=4, is_cached=True)
