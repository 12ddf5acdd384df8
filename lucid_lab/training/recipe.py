"""A recipe: everything that a training run depends on, as one frozen value. A variation is `replace` or `changed`."""

import ast
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from lucid_attention.messages import did_you_mean
from lucid_attention.models.decoder import presets
from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.ops.checks import check_positive

SCHEDULES = ("cosine", "constant")
PRECISIONS = ("float32", "bfloat16")
_POSITIVE = ("steps", "batch_size", "micro_batch_size", "log_every", "evaluation_sequences", "keep")
_FROM_ZERO = ("evaluate_every", "save_every", "loss_rows", "workers", "seed")
_NUMBERS = ("learning_rate", "beta1", "beta2", "weight_decay", "clip", "warmup", "strength_steps", "sharpness_steps")
# Far above every batch in use, and below those whose first step does not end.
MOST_TOKENS = 1 << 30
_LARGEST = {"workers": 1024, "seed": 2**32 - 1}
_STRINGS = ("about", "preset", "data", "schedule", "precision")


@dataclass(frozen=True)
class Recipe:
    """A training run. Values with which no run is possible are refused.

    about: a line for the user.
    preset: a function in `lucid_attention.models.decoder.presets`. `model` overrides fields of its configuration.
    attention, attention_options: as in `LucidConfig`.
    data: a folder written by `lucid tokenize`; a .jsonl file of prompts with answers; "needles" or "memory_update"
        (synthetic); "stdlib" (the Python standard library, tokenized on first use). `data_options` go to its class.
    sequence_length: tokens in a sequence.
    separate_documents: whether documents packed into one sequence do not see each other.
    steps, batch_size: optimiser steps, and sequences per step, over all processes and accumulated micro-batches.
    micro_batch_size: sequences that one process computes at a time.
    learning_rate, beta1, beta2, weight_decay: of AdamW.
    clip: largest norm of the gradient; 0 for no limit.
    warmup, schedule: share of the steps in which the rate rises; then it follows "cosine" or stays "constant".
    precision: "float32" or "bfloat16" (autocast; the solve stays in float32).
    gradient_checkpointing: recompute activations in the backward pass, one layer at a time.
    loss_rows: tokens whose logits exist at a time; 0 for all.
    start: a checkpoint whose weights the run begins with; None for a new model.
    rope_theta: base of the rotary embedding; None for the model's own.
    strength_steps: steps (below 1: share of the steps) in which LUCID's strength rises from 0 to 1; 0 for no ramp.
    sharpness_steps: the same for LUCID's sharpness, which falls from sharpness_start to sharpness_end (None: √D).
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
    sharpness_steps: float = 0
    sharpness_start: float = 64.0
    sharpness_end: float | None = None
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0
    evaluation_sequences: int = 64
    keep: int = 2
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """A recipe that was saved as JSON. Unknown and missing fields are errors."""
        known = _names()
        for key in values:
            if key not in known:
                raise ValueError(f"a recipe has no {key!r}{did_you_mean(key, known)}")
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"a recipe needs {', '.join(missing)}")
        return cls(**values)

    def changed(self, changes: list[str], processes: int = 1) -> "Recipe":
        """The recipe with changes such as "learning_rate=3e-4" or "model.hidden_size=128".

        A new batch_size without a micro_batch_size gets the largest one up to the old that divides it between
        `processes`.
        """
        values: dict[str, Any] = {}
        for change in changes:
            key, equals, text = change.partition("=")
            if not equals or not key:
                raise ValueError(f"a change must be KEY=VALUE, got {change!r}")
            name, dot, inner = key.strip().partition(".")
            if name not in _names():
                raise ValueError(
                    f"a recipe has no {name!r}{did_you_mean(name, _names())}; it has {', '.join(_names())}"
                )
            old = values.get(name, getattr(self, name))
            if dot and not isinstance(old, dict):
                raise ValueError(f"{name} has no parts: expected {name}=VALUE, got {change!r}")
            if dot:
                values[name] = {**old, inner: _parse_as(self._inner_default(name, inner), text, inner)}
            else:
                values[name] = _parse_as(old, text, name)
        if "micro_batch_size" not in values and isinstance(batch_size := values.get("batch_size"), int):
            per_process = batch_size // processes
            divisors = (size for size in range(1, self.micro_batch_size + 1) if per_process % size == 0)
            values["micro_batch_size"] = max(divisors, default=1)
        # All at once: the check compares fields, such as batch_size with micro_batch_size.
        return replace(self, **values)

    def _inner_default(self, name: str, inner: str) -> Any:
        """The present value of a field such as model.hidden_size, None if it has none."""
        values = getattr(self, name)
        if name == "model" and inner not in values:
            return getattr(getattr(presets, self.preset)("softmax"), inner, None)
        return values.get(inner)

    def differences(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Fields in which two recipes differ: name to (own value, other's value)."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _names()}
        return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}


def _names() -> list[str]:
    return [f.name for f in fields(Recipe)]


def _parse(text: str) -> Any:
    """A number, list, dictionary, True, False or None; any other text is a string."""
    text = text.strip()
    try:
        return ast.literal_eval(text.replace("true", "True").replace("false", "False"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _parse_as(old: Any, text: str, name: str) -> Any:
    """The value in the type of the field: 1e3 is an integer for an integer field, 3 a string for a string field.

    For a field of floats, 1 is 1.0.
    """
    value = _parse(text)
    # `attention` is a name or a list of names.
    if isinstance(old, str) and name != "attention":
        return text.strip()
    if isinstance(old, int) and not isinstance(old, bool) and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(old, float) and type(value) is int:
        return float(value)
    return value


def preset_names() -> list[str]:
    """The configurations that a recipe can start from."""
    return [
        name
        for name, value in vars(presets).items()
        if callable(value) and value.__module__ == presets.__name__ and not name.startswith("_")
    ]


def _check(recipe: Recipe) -> None:
    for name in _STRINGS:
        _expect(name, getattr(recipe, name), isinstance(getattr(recipe, name), str), "a string")
    for name in (*_POSITIVE, *_FROM_ZERO, "sequence_length"):
        value, least = getattr(recipe, name), 0 if name in _FROM_ZERO else 2 if name == "sequence_length" else 1
        is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
        _expect(name, value, is_valid, f"an integer from {least} on")
        if name in _LARGEST:
            _expect(name, value, value <= _LARGEST[name], f"at most {_LARGEST[name]}")
    for name in _NUMBERS:
        value = getattr(recipe, name)
        is_valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
        _expect(name, value, is_valid, "a finite number from 0 on")
    _expect("start", recipe.start, recipe.start is None or isinstance(recipe.start, str), "a folder or None")
    for name in ("rope_theta", "sharpness_start", "sharpness_end"):
        check_positive(name, getattr(recipe, name))
    if recipe.strength_steps and recipe.sharpness_steps:
        raise ValueError(
            "strength_steps and sharpness_steps are two ways to move a model to LUCID: expected one of them, got "
            f"{recipe.strength_steps:g} and {recipe.sharpness_steps:g}"
        )
    for name in recipe.attention if isinstance(recipe.attention, list) else [recipe.attention]:
        _expect_one_of("attention", name, list(ATTENTIONS))
    for name in ("beta1", "beta2", "warmup"):
        _expect(name, getattr(recipe, name), getattr(recipe, name) < 1, "a number below 1")
    for name in ("separate_documents", "gradient_checkpointing"):
        _expect(name, getattr(recipe, name), isinstance(getattr(recipe, name), bool), "True or False")
    for name in ("attention_options", "model", "data_options"):
        _expect(name, getattr(recipe, name), isinstance(getattr(recipe, name), dict), "a dictionary")
    _expect_one_of("schedule", recipe.schedule, SCHEDULES)
    _expect_one_of("precision", recipe.precision, PRECISIONS)
    _expect_one_of("preset", recipe.preset, preset_names())
    for name in ("batch_size", "evaluation_sequences"):
        most = MOST_TOKENS // recipe.sequence_length
        expected = f"at most {most} sequences of {recipe.sequence_length} tokens, {MOST_TOKENS:,} tokens"
        _expect(name, getattr(recipe, name), getattr(recipe, name) <= most, expected)
    _expect("steps", recipe.steps, recipe.steps <= MOST_TOKENS, f"at most {MOST_TOKENS:,}")
    if recipe.batch_size % recipe.micro_batch_size:
        raise ValueError(
            f"batch_size must be a multiple of micro_batch_size: got {recipe.batch_size} and {recipe.micro_batch_size}"
        )


def _expect(name: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _expect_one_of(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")
