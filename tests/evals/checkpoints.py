"""Small checkpoints and tokenizers, and `lucid` commands in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lucid_attention import LucidForCausalLM
from lucid_lab import cli
from lucid_lab.evals.haystacks import NOISE, read_prose
from lucid_lab.evals.needles import NEEDLE, PROMPT
from lucid_lab.evals.tokens import load_tokenizer
from lucid_lab.training.presets import tiny

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 48}


def write_tokenizer(folder: Path, texts: Sequence[str], size: int = 600) -> Path:
    """A byte-level tokenizer, trained on RULER's noise and on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([*NOISE, *texts] * 3, trainer)
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return folder


def write_needle_tokenizer(folder: Path, size: int = 900) -> Path:
    """A tokenizer for needles and prose."""
    return write_tokenizer(folder, [NEEDLE, PROMPT, *read_prose("prose").sentences[:300]], size)


def write_checkpoint(folder: Path, tokenizer: Path, kind: str = "lucid", seed: int = 0) -> Path:
    """A model with random weights. kind: "lucid" or "llama"."""
    loaded = load_tokenizer(str(tokenizer))
    # The configuration names no end token: answers in a batch must still be those of prompts asked alone.
    ends = {"pad_token_id": loaded.pad_token_id, "bos_token_id": loaded.bos_token_id, "eos_token_id": None}
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {**SMALL, **ends, "vocab_size": len(loaded), "initializer_range": 0.2}
    model = LucidForCausalLM(tiny("lucid", **sizes)) if kind == "lucid" else LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    loaded.save_pretrained(folder)
    return folder


def lucid(name: str, *words: object) -> int:
    """A `lucid` command in this process."""
    return cli.main([name, *map(str, words)])
