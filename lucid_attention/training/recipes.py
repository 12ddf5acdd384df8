"""Recipes: everything that a training run depends on, as one frozen value. A variation is `replace`.

The paper's runs (§4.1, §4.3, §4.4, A.5, A.6) and small ones that run on a laptop. `lucid recipes` lists them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .checked import check_recipe

Maker = Callable[[], "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """A training run.

    about: in a line.
    preset: a function in `lucid_attention.models.decoder.presets`; `model` overrides fields of what it returns.
    attention, attention_options: as in `LucidConfig`.
    data: a folder written by `lucid tokenize`; a .jsonl file of prompts and answers; "needles" or "memory_update"
        (synthetic); "stdlib" (the Python standard library, tokenized on first use). `data_options` go to its class.
    sequence_length, separate_documents: of the sequences; whether packed documents see each other.
    steps, batch_size: optimiser steps, and sequences in each, over all processes and accumulated micro-batches.
    micro_batch_size: sequences that one process computes at a time.
    learning_rate, beta1, beta2, weight_decay, clip: of AdamW; clip is the largest norm of the gradient, 0 for any.
    warmup, schedule: share of the steps in which the rate rises, and what it does then: "cosine" or "constant".
    precision: "float32" or "bfloat16" (autocast; the solve stays in float32).
    gradient_checkpointing: recompute activations in the backward pass, one layer's at a time.
    loss_rows: tokens whose logits exist at a time; 0 for all.
    start: a checkpoint to go on from (weights only); None for a new model.
    rope_theta: base of the rotary embedding, None for the model's own.
    strength_steps: raise LUCID's strength from 0 to 1 over so many steps (below 1: share of them); 0 for no ramp.
    log_every, evaluate_every, save_every: in steps; evaluate_every and save_every 0 for the end only.
    evaluation_sequences: of the validation split. keep: how many checkpoints.
    workers: processes that read data. seed: of weights and data.
    """

    about: str
    preset: str
    data: str
    sequence_length: int
    steps: int
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    attention: str | list[str] = "lucid"
    attention_options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data_options: dict[str, Any] = field(default_factory=dict)
    separate_documents: bool = True
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: float = 0.06
    schedule: str = "cosine"
    precision: str = "float32"
    gradient_checkpointing: bool = False
    loss_rows: int = 1024
    start: str | None = None
    rope_theta: float | None = None
    strength_steps: float = 0
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0
    evaluation_sequences: int = 64
    keep: int = 2
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_recipe(self)


def tiny_lm() -> Recipe:
    """A small language model on the Python standard library: minutes on two cores, no download."""
    return Recipe(
        about="language model on the Python standard library, 512 tokens; minutes on 2 cores, offline",
        preset="tiny",
        model={
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            # 1/√width: with the usual 0.02 softmax attention does not leave its plateau in so few steps.
            "initializer_range": 0.06,
        },
        data="stdlib",
        data_options={"vocab_size": 4096},
        sequence_length=512,
        steps=300,
        batch_size=8,
        micro_batch_size=8,
        learning_rate=2e-3,
        evaluate_every=100,
        save_every=100,
    )


def tiny_needle() -> Recipe:
    """Multi-needle recall of tokens: the task of the small-scale experiments."""
    return Recipe(
        about="recall of 2 to 16 needles among fillers, 64 tokens; a minute on 2 cores",
        preset="tiny",
        model={"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 16},
        data="needles",
        data_options={"n": [2, 4, 8, 16]},
        sequence_length=65,
        steps=1000,
        batch_size=16,
        micro_batch_size=16,
        learning_rate=3e-3,
        log_every=50,
        evaluate_every=250,
        save_every=250,
        evaluation_sequences=256,
    )


def pretrain_2k() -> Recipe:
    """§4.1: 11 000 steps of 256 sequences of 2048 tokens of Dolma, 5.8 billion tokens."""
    return Recipe(
        about="the paper's pretraining: 1B model, Dolma, 11 000 steps × 256 × 2048 tokens",
        preset="paper_1b",
        data="data/dolma",
        sequence_length=2048,
        steps=11_000,
        batch_size=256,
        micro_batch_size=8,
        learning_rate=5e-4,
        precision="bfloat16",
        gradient_checkpointing=True,
        evaluate_every=500,
        save_every=500,
        workers=4,
    )


def finetune_64k() -> Recipe:
    """§4.1: then 500 steps of 16 sequences of 65 536 tokens, with a RoPE base of 64 000."""
    return Recipe(
        about="the paper's long-context tuning: 500 steps × 16 × 65 536 tokens, RoPE base 64 000 (needs --from)",
        preset="paper_1b",
        data="data/dolma",
        sequence_length=65_536,
        steps=500,
        batch_size=16,
        micro_batch_size=1,
        learning_rate=5e-4,
        rope_theta=64_000.0,
        precision="bfloat16",
        gradient_checkpointing=True,
        evaluate_every=100,
        save_every=50,
        evaluation_sequences=16,
        workers=4,
    )


def context_4k() -> Recipe:
    """A.5: the 16-layer model, a million tokens a step for 80 000 steps of 4096-token sequences."""
    return Recipe(
        about="the paper's 16-layer model at 4096 tokens: 80 000 steps of 1M tokens",
        preset="paper_16_layer",
        data="data/dolma",
        sequence_length=4096,
        steps=80_000,
        batch_size=256,
        micro_batch_size=4,
        learning_rate=5e-4,
        beta2=0.95,
        precision="bfloat16",
        gradient_checkpointing=True,
        evaluate_every=1000,
        save_every=1000,
        workers=4,
    )


def context_32k() -> Recipe:
    """A.5: the same at 32 768 tokens, two million tokens a step for 25 000 steps."""
    return Recipe(
        **{
            **vars(context_4k()),
            "about": "the paper's 16-layer model at 32 768 tokens: 25 000 steps of 2M tokens",
            "sequence_length": 32_768,
            "steps": 25_000,
            "batch_size": 64,
            "micro_batch_size": 1,
        }
    )


def _answers(about: str, data: str, sequence_length: int) -> Recipe:
    """Fine-tuning on answers to prompts. The paper gives no settings; these are ours."""
    return Recipe(
        about=about,
        preset="paper_1b",
        data=data,
        sequence_length=sequence_length,
        steps=500,
        batch_size=16,
        micro_batch_size=1,
        learning_rate=1e-4,
        rope_theta=64_000.0,
        precision="bfloat16",
        gradient_checkpointing=True,
        evaluate_every=100,
        save_every=100,
        evaluation_sequences=32,
        workers=2,
    )


def babilong() -> Recipe:
    """§4.3: fine-tuning on BABILong's training set."""
    return _answers("fine-tuning on BABILong QA1–QA5 (needs --from)", "data/babilong_train.jsonl", 32_768)


def longbench() -> Recipe:
    """§4.4, A.6: half of 2WikiMQA and half of MultifieldQA."""
    return _answers("fine-tuning on halves of 2WikiMQA and MultifieldQA (needs --from)", "data/longbench.jsonl", 16_384)


def qasper() -> Recipe:
    """§4.4, A.6: the training split of Qasper."""
    return _answers("fine-tuning on Qasper's training split (needs --from)", "data/qasper_train.jsonl", 8192)


def qmsum() -> Recipe:
    """§4.4, A.6: the training split of QMSum."""
    return _answers("fine-tuning on QMSum's training split (needs --from)", "data/qmsum_train.jsonl", 32_768)


RECIPES: dict[str, Maker] = {
    "tiny_lm": tiny_lm,
    "tiny_needle": tiny_needle,
    "pretrain_2k": pretrain_2k,
    "finetune_64k": finetune_64k,
    "context_4k": context_4k,
    "context_32k": context_32k,
    "babilong": babilong,
    "longbench": longbench,
    "qasper": qasper,
    "qmsum": qmsum,
}
