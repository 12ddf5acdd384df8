"""A recipe is everything that a training run depends on, as one frozen value; a variation is `replace`.

The recipes: the paper's runs (§4.1, §4.3, §4.4, A.5, A.6), and small ones for a laptop.
"""

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from types import UnionType
from typing import Any, get_origin

from lucid_attention.messages import did_you_mean
from lucid_attention.nn.attention import ATTENTIONS

from . import presets

PRESETS = [
    name
    for name, value in vars(presets).items()
    if callable(value) and value.__module__ == presets.__name__ and not name.startswith("_")
]
CHOICES = {"schedule": ["cosine", "constant"], "precision": ["float32", "bfloat16"], "preset": PRESETS}
AT_LEAST_1 = ("sequence_length", "steps", "batch_size", "micro_batch_size", "log_every", "evaluation_sequences", "keep")


@dataclass(frozen=True)
class Recipe:
    """A training run. Impossible values are refused.

    about: a line for the user.
    preset: a function in `lucid_lab.training.presets`. `model` overrides fields of its configuration.
    attention, attention_options: as in `LucidConfig`.
    data: a folder written by `lucid tokenize`; a .jsonl file of prompts with answers; "needles" or "latest_value"
        (synthetic); "stdlib" (the Python standard library, tokenized on first use). `data_options` go to its class.
    sequence_length: tokens in a sequence.
    separate_documents: whether documents packed into one sequence do not see each other.
    steps, batch_size: optimiser steps, and sequences per step, over all processes and accumulated micro-batches.
    micro_batch_size: sequences that one process computes at a time.
    learning_rate, beta1, beta2, adam_eps, weight_decay: of AdamW.
    clip: largest norm of the gradient; 0 for no limit.
    warmup, schedule: share of the steps in which the rate rises; then it follows "cosine" or stays "constant".
    precision: "float32" or "bfloat16" (autocast; the solve stays in float32).
    gradient_checkpointing: recompute activations in the backward pass, one layer at a time.
    loss_rows: tokens whose logits exist at a time; 0 for all.
    start: a checkpoint whose weights the run begins with; None for a new model.
    rope_theta: base of the rotary embedding; None for the model's own.
    log_every, evaluate_every, save_every: intervals in steps; evaluate_every and save_every: 0 for the end only.
    evaluation_sequences: number of sequences of the validation split.
    keep: number of checkpoints.
    workers: number of processes that read data.
    seed: of weights and data.
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
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: float = 0.06
    schedule: str = "cosine"
    precision: str = "float32"
    gradient_checkpointing: bool = False
    loss_rows: int = 1024
    start: str | None = None
    rope_theta: float | None = None
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0
    evaluation_sequences: int = 64
    keep: int = 2
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), f.type
            kinds = {get_origin(part) or part for part in (kind.__args__ if isinstance(kind, UnionType) else (kind,))}
            # float takes integers too; bool is no number.
            if type(value) not in kinds | ({int} if float in kinds else set()):
                raise ValueError(f"{f.name} must be of type {getattr(kind, '__name__', kind)}, got {value!r}")
            least = int(f.name in AT_LEAST_1)
            if isinstance(value, int | float) and not least <= value < (2**63 if isinstance(value, int) else math.inf):
                raise ValueError(f"{f.name} must be a finite number from {least}, got {value!r}")
        for name, known in CHOICES.items():
            _expect_one_of(name, getattr(self, name), known)
        for name in [self.attention] if isinstance(self.attention, str) else self.attention:
            _expect_one_of("attention", name, list(ATTENTIONS))
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size: got {self.batch_size} and {self.micro_batch_size}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch_size * self.sequence_length

    def changed(self, changes: Sequence[str], processes: int = 1) -> "Recipe":
        """The recipe with changes such as "learning_rate=3e-4" or "model.hidden_size=128".

        A new batch_size without a micro_batch_size gets the largest one up to the old that divides it between
        `processes`.
        """
        values: dict[str, Any] = {}
        for change in changes:
            key, equals, text = change.partition("=")
            name, dot, inner = key.strip().partition(".")
            if not equals:
                raise ValueError(f"a change must be KEY=VALUE, got {change!r}")
            _expect_one_of("KEY of --set", name, [f.name for f in fields(self)])
            old = values.get(name, getattr(self, name))
            if dot and not isinstance(old, dict):
                raise ValueError(f"{name} has no parts: expected {name}=VALUE, got {change!r}")
            if dot and name == "model":
                _expect_one_of("model", inner, list(getattr(presets, self.preset)("softmax").to_dict()))
            values[name] = {**old, inner: _parse(text, None)} if dot else _parse(text, old)
        if "micro_batch_size" not in values and isinstance(batch_size := values.get("batch_size"), int):
            divisors = (size for size in range(1, self.micro_batch_size + 1) if batch_size // processes % size == 0)
            values["micro_batch_size"] = max(divisors, default=1)
        # All at once: the check compares fields, such as batch_size with micro_batch_size.
        return replace(self, **values)


def _expect_one_of(name: str, value: Any, known: list[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")


def _parse(text: str, old: Any) -> Any:
    """A Python literal or JSON's true, false, null; any other text is text. 1e3 is an integer for an integer."""
    text = text.strip()
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None", "null": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
    if isinstance(old, str) and not isinstance(value, list):
        return text
    return int(value) if type(old) is int and isinstance(value, float) and value.is_integer() else value


# The paper's pretraining (§4.1): 11 000 steps of 256 sequences of 2048 tokens of Dolma, 5.8 billion tokens.
PRETRAIN_2K = Recipe(
    about="the paper's pretraining: 1B model, Dolma, 11 000 steps × 256 × 2048 tokens",
    preset="paper_1b",
    data="data/dolma",
    sequence_length=2048,
    separate_documents=False,
    steps=11_000,
    batch_size=256,
    micro_batch_size=8,
    learning_rate=5e-4,
    adam_eps=1e-12,
    precision="bfloat16",
    gradient_checkpointing=True,
    evaluate_every=500,
    save_every=500,
    workers=4,
)
# §4.1, after it. The learning rate is that of the authors' scripts; the text gives one rate, 5e-4, for both trainings.
FINETUNE_64K = replace(
    PRETRAIN_2K,
    about="the paper's long-context tuning: 500 steps × 16 × 65 536 tokens, RoPE base 64 000 (needs --from)",
    sequence_length=65_536,
    steps=500,
    batch_size=16,
    micro_batch_size=1,
    learning_rate=5e-6,
    rope_theta=64_000.0,
    evaluate_every=100,
    save_every=50,
    evaluation_sequences=16,
)
# A.5: the 16-layer model; steps of a million tokens.
CONTEXT_4K = replace(
    PRETRAIN_2K,
    about="the paper's 16-layer model at 4096 tokens: 80 000 steps of 1M tokens",
    preset="paper_16_layer",
    data="data/dolma-256k",
    sequence_length=4096,
    steps=80_000,
    micro_batch_size=4,
    beta2=0.95,
    evaluate_every=1000,
    save_every=1000,
)


def _answers(about: str, name: str, sequence_length: int, steps: int, **changes: Any) -> Recipe:
    """Fine-tuning on prompts with answers, from the model of PRETRAIN_2K, as in the authors' scripts.

    steps: epochs of the scripts × prompts / batch size.
    """
    settings: dict[str, Any] = {
        "batch_size": 32,
        "separate_documents": True,
        "save_every": 20,
        "evaluate_every": 20,
        "workers": 2,
    }
    settings |= {"sequence_length": sequence_length, "steps": steps} | changes
    return replace(FINETUNE_64K, about=f"fine-tuning on {about} (needs --from)", data=f"data/{name}.jsonl", **settings)


RECIPES = {
    "tiny_lm": Recipe(
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
        # All logits of a step take 70 MB: no need to compute them twice.
        loss_rows=0,
        learning_rate=2e-3,
        evaluate_every=100,
        save_every=100,
    ),
    # One layer learns the task `data.synthetic.LatestValue`.
    "latest_value": Recipe(
        about="48 writes in words, then questions for the latest value of a name; half a minute on 2 cores",
        preset="tiny",
        model={
            "num_hidden_layers": 1,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "initializer_range": 0.1,
        },
        data="latest_value",
        sequence_length=64,
        steps=600,
        batch_size=32,
        micro_batch_size=32,
        learning_rate=3e-3,
        log_every=50,
        evaluate_every=150,
        save_every=300,
        evaluation_sequences=256,
    ),
    "pretrain_2k": PRETRAIN_2K,
    "finetune_64k": FINETUNE_64K,
    "context_4k": CONTEXT_4K,
    "context_32k": replace(
        CONTEXT_4K,
        about="the paper's 16-layer model at 32 768 tokens: 25 000 steps of 2M tokens",
        sequence_length=32_768,
        steps=25_000,
        batch_size=64,
        micro_batch_size=1,
    ),
    # §4.3: 2 epochs of the 1000 prompts of QA1 to QA10 at 32K.
    "babilong": _answers("BABILong QA1–QA10", "babilong", 32_768, 62, learning_rate=5e-5),
    # §4.4, A.6: 3 epochs of 350 prompts, one epoch of 2567, 2 epochs of 1257.
    "longbench": _answers("2WikiMQA and MultifieldQA", "longbench", 32_768, 262, batch_size=4),
    "qasper": _answers("Qasper's training split", "qasper", 8192, 80, micro_batch_size=4),
    "qmsum": _answers("QMSum's training split", "qmsum", 32_768, 78),
}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise ValueError(
            f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}: expected one of {', '.join(RECIPES)}"
        )
    return RECIPES[name]
