"""Recipes are checked when they are made; changes to them by name are read and checked too."""

import ast
import math
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ..models.decoder import presets
from ..nn.attention import ATTENTIONS
from ..ops.checks import check_positive

if TYPE_CHECKING:
    from .recipes import Recipe

SCHEDULES = ("cosine", "constant")
PRECISIONS = ("float32", "bfloat16")
_POSITIVE = ("steps", "batch_size", "micro_batch_size", "log_every", "evaluation_sequences", "keep")
_FROM_ZERO = ("evaluate_every", "save_every", "loss_rows", "workers", "seed")
_NUMBERS = ("learning_rate", "beta1", "beta2", "weight_decay", "clip", "warmup", "strength_steps")
_WORDS = ("about", "preset", "data", "schedule", "precision")


def check_recipe(recipe: "Recipe") -> None:
    """Refuse values with which no run is possible: what, expected, got."""
    for name in _WORDS:
        _expect(name, getattr(recipe, name), isinstance(getattr(recipe, name), str), "a string")
    for name in (*_POSITIVE, *_FROM_ZERO, "sequence_length"):
        value, least = getattr(recipe, name), 0 if name in _FROM_ZERO else 2 if name == "sequence_length" else 1
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        _expect(name, value, whole, f"an integer from {least} on")
    for name in _NUMBERS:
        value = getattr(recipe, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
        _expect(name, value, number, "a finite number from 0 on")
    _expect("start", recipe.start, recipe.start is None or isinstance(recipe.start, str), "a folder or None")
    check_positive("rope_theta", recipe.rope_theta)
    names = recipe.attention if isinstance(recipe.attention, list) else [recipe.attention]
    for name in names:
        if name not in ATTENTIONS:
            known = list(ATTENTIONS)
            raise ValueError(f"attention must be one of {', '.join(known)}, got {name!r}{nearest(str(name), known)}")
    for name in ("beta1", "beta2", "warmup"):
        _expect(name, getattr(recipe, name), getattr(recipe, name) < 1, "a number below 1")
    for name in ("separate_documents", "gradient_checkpointing"):
        _expect(name, getattr(recipe, name), isinstance(getattr(recipe, name), bool), "True or False")
    for name in ("attention_options", "model", "data_options"):
        _expect(name, getattr(recipe, name), isinstance(getattr(recipe, name), dict), "a dictionary")
    _expect("schedule", recipe.schedule, recipe.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
    _expect("precision", recipe.precision, recipe.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
    known = preset_names()
    if recipe.preset not in known:
        raise ValueError(
            f"preset must be one of {', '.join(known)}, got {recipe.preset!r}{nearest(recipe.preset, known)}"
        )
    if recipe.batch_size % recipe.micro_batch_size:
        raise ValueError(
            f"batch_size must be a multiple of micro_batch_size: got {recipe.batch_size} and {recipe.micro_batch_size}"
        )


def preset_names() -> list[str]:
    """The configurations that a recipe can start from."""
    return [
        name
        for name, value in vars(presets).items()
        if callable(value) and value.__module__ == presets.__name__ and not name.startswith("_")
    ]


def nearest(word: str, known: list[str]) -> str:
    """ " (did you mean …?)", if something is near."""
    near = get_close_matches(word, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _expect(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def changed(recipe: "Recipe", changes: list[str]) -> "Recipe":
    """The recipe with changes such as "learning_rate=3e-4" or "model.hidden_size=128"."""
    new: dict[str, Any] = {}
    known = [each.name for each in fields(recipe)]
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise ValueError(f"a change must be KEY=VALUE, got {change!r}")
        name, dot, inner = key.strip().partition(".")
        if name not in known:
            raise ValueError(f"a recipe has no {name!r}{nearest(name, known)}; it has {', '.join(known)}")
        old = new.get(name, getattr(recipe, name))
        if dot and not isinstance(old, dict):
            raise ValueError(f"{name} has no parts: expected {name}=VALUE, got {change!r}")
        new[name] = {**old, inner: _read(text)} if dot else _as(old, text, name)
    # Together: fields may depend on each other.
    return replace(recipe, **new)


def _read(text: str) -> Any:
    """A number, list, dictionary, True, False or None; anything else is a word."""
    text = text.strip()
    try:
        return ast.literal_eval(text.replace("true", "True").replace("false", "False"))
    except (ValueError, SyntaxError):
        return text


def _as(old: Any, text: str, name: str) -> Any:
    """The value in the type of the field: 1e3 is an integer where an integer belongs, 3 a word where a word does."""
    new = _read(text)
    if isinstance(old, str) and name != "attention":
        return text.strip()
    if isinstance(old, int) and not isinstance(old, bool) and isinstance(new, float) and new.is_integer():
        return int(new)
    return new


def difference(recipe: "Recipe", other: "Recipe") -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes differ."""
    pairs = {each.name: (getattr(recipe, each.name), getattr(other, each.name)) for each in fields(recipe)}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def from_dict(cls: type["Recipe"], written: dict[str, Any]) -> "Recipe":
    """A recipe as it was saved with a run. Unknown and missing fields are errors."""
    known = [each.name for each in fields(cls)]
    for key in written:
        if key not in known:
            raise ValueError(f"a recipe has no {key!r}{nearest(key, known)}")
    needed = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in needed if name not in written]
    if missing:
        raise ValueError(f"a recipe needs {', '.join(missing)}")
    return cls(**written)
