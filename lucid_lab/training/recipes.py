"""The recipes: the paper's runs (§4.1, §4.3, §4.4, A.5, A.6), small ones for a laptop, and `lucid recipes`."""

import argparse
from collections.abc import Callable
from dataclasses import replace

from .recipe import Recipe


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
            # About 1/√width. With the usual 0.02, softmax attention does not leave its plateau in 300 steps.
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
    """Multi-needle recall of tokens: the task `data.synthetic.Needles`."""
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
        separate_documents=False,
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
    """§4.1, after `pretrain_2k`: 500 steps of 16 sequences of 65 536 tokens, with a RoPE base of 64 000."""
    return Recipe(
        about="the paper's long-context tuning: 500 steps × 16 × 65 536 tokens, RoPE base 64 000 (needs --from)",
        preset="paper_1b",
        data="data/dolma",
        sequence_length=65_536,
        separate_documents=False,
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
    """A.5: the 16-layer model at 4096 tokens, 80 000 steps of a million tokens."""
    return Recipe(
        about="the paper's 16-layer model at 4096 tokens: 80 000 steps of 1M tokens",
        preset="paper_16_layer",
        data="data/dolma-256k",
        sequence_length=4096,
        separate_documents=False,
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
    """A.5: the 16-layer model at 32 768 tokens, 25 000 steps of two million tokens."""
    return replace(
        context_4k(),
        about="the paper's 16-layer model at 32 768 tokens: 25 000 steps of 2M tokens",
        sequence_length=32_768,
        steps=25_000,
        batch_size=64,
        micro_batch_size=1,
    )


def _answers(about: str, data: str, sequence_length: int) -> Recipe:
    """Fine-tuning on prompts with answers. The paper gives no settings for it; these are ours."""
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
    """§4.4, A.6: fine-tuning on half of 2WikiMQA and half of MultifieldQA."""
    return _answers("fine-tuning on halves of 2WikiMQA and MultifieldQA (needs --from)", "data/longbench.jsonl", 16_384)


def qasper() -> Recipe:
    """§4.4, A.6: fine-tuning on the training split of Qasper."""
    return _answers("fine-tuning on Qasper's training split (needs --from)", "data/qasper_train.jsonl", 8192)


def qmsum() -> Recipe:
    """§4.4, A.6: fine-tuning on the training split of QMSum."""
    return _answers("fine-tuning on QMSum's training split (needs --from)", "data/qmsum_train.jsonl", 32_768)


RECIPES: dict[str, Callable[[], Recipe]] = {
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


def run(args: argparse.Namespace) -> int:
    """`lucid recipes`: print every recipe with its size and learning rate."""
    for name, make in RECIPES.items():
        recipe = make()
        tokens = recipe.steps * recipe.batch_size * recipe.sequence_length
        print(f"{name:<13} {recipe.about}")
        print(f"{'':13} {recipe.preset}, {tokens / 1e6:,.1f}M tokens, learning rate {recipe.learning_rate:g}")
    return 0
