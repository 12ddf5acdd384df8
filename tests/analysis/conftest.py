"""Checkpoints to analyse, made once."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lucid_attention import LucidForCausalLM, enable_lucid
from lucid_lab.data.tokenize import train
from lucid_lab.training.presets import tiny

TEXT = "The grass is green. The magic number is 4711. The sky is blue. Here we go, there and back again. "
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}


def write_checkpoint(folder: Path, kind: str, vocabulary: int) -> Path:
    """A model with random weights: "lucid", "path", "delta" (ours), "softmax" or "drop-in" (Llama)."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": vocabulary, "num_hidden_layers": 2, "initializer_range": 0.2}
    if kind in ("softmax", "drop-in"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1))
        if kind == "drop-in":
            enable_lucid(model, sharpness=2.0)
    else:
        model = LucidForCausalLM(tiny(kind, **sizes))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind, each with a small tokenizer, except "bare"."""
    root = tmp_path_factory.mktemp("checkpoints")
    train([TEXT] * 4, 300).save_pretrained(root / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")
    made = {"tokenizer": root / "tokenizer"}
    for kind in ("lucid", "path", "delta", "softmax", "drop-in"):
        made[kind] = write_checkpoint(root / kind, kind, len(tokenizer))
        tokenizer.save_pretrained(made[kind])
    made["bare"] = write_checkpoint(root / "bare" / "model", "lucid", 400)
    return made
