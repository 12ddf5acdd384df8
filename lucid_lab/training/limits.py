"""Refuse what cannot fit in memory, before anything is allocated. Estimates are lower bounds."""

import math
from typing import Any

from lucid_attention.memory import gigabytes, machine_memory
from lucid_attention.models.decoder import presets

from ..processes import distributed_state
from .recipe import Recipe

# Fields of a model that decide about its size.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_ABOVE_ZERO = ("initializer_range", "rms_norm_eps")
# Weight, gradient and the two moments of AdamW, in float32.
BYTES_PER_PARAMETER = 16


def check_fits(recipe: Recipe, *, vocab_size: int | None = None, parallel: str = "ddp") -> None:
    """Refuse a new model with fields that make no model, or that cannot be trained in the memory of this machine.

    vocab_size: of the data, if it is known.
    """
    if recipe.start is not None:
        return
    defaults = vars(getattr(presets, recipe.preset)("softmax"))
    for name, value in recipe.model.items():
        if name in SIZES and (type(value) is not int or value < 1):
            raise ValueError(f"model.{name} must be an integer from 1 on, got {value!r}")
        if name in _ABOVE_ZERO and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ValueError(f"model.{name} must be a finite number above 0, got {value!r}")
    known = {} if vocab_size is None else {"vocab_size": vocabulary(recipe, vocab_size)}
    sizes = {name: {**defaults, **known, **recipe.model}[name] for name in SIZES}
    if "hidden_size" in recipe.model and "head_dim" not in recipe.model:
        sizes["head_dim"] = max(1, sizes["hidden_size"] // sizes["num_attention_heads"])
    processes = distributed_state().num_processes if parallel == "fsdp" else 1
    weights = parameters(sizes) * BYTES_PER_PARAMETER // processes
    # At least the input of every layer is kept for the backward pass.
    tokens = recipe.micro_batch_size * recipe.sequence_length
    activations = 4 * tokens * sizes["hidden_size"] * sizes["num_hidden_layers"]
    memory = machine_memory()
    if weights + activations <= memory:
        return
    cause = f"micro_batch_size={recipe.micro_batch_size} or sequence_length={recipe.sequence_length}"
    if weights > memory:
        # The field that is furthest above that of the preset.
        name = max(SIZES, key=lambda name: sizes[name] / defaults[name])
        cause = f"model.{name}={sizes[name]}" if sizes[name] > defaults[name] else f"preset={recipe.preset}"
    raise ValueError(
        f"the run must fit in the {gigabytes(memory)} of memory of this machine, but a model of "
        f"{parameters(sizes):,} parameters needs at least {gigabytes(weights)} and a batch {gigabytes(activations)}: "
        f"lower {cause}"
    )


def vocabulary(recipe: Recipe, of_data: int) -> int:
    """The vocabulary of a new model: that of the data, unless the recipe or a preset in `OWN_VOCABULARY` has another.

    A smaller one than that of the data is refused.
    """
    chosen = recipe.model.get("vocab_size")
    if chosen is None and recipe.preset in presets.OWN_VOCABULARY:
        chosen = getattr(presets, recipe.preset)("softmax").vocab_size
    if chosen is not None and chosen < of_data:
        raise ValueError(f"model.vocab_size must be at least {of_data}, the vocabulary of the data, got {chosen}")
    return of_data if chosen is None else int(chosen)


def parameters(sizes: dict[str, Any]) -> int:
    """The number of weights in embedding, projections and MLPs."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] + sizes["num_key_value_heads"]
    layer = 2 * hidden * heads * sizes["head_dim"] + 3 * hidden * sizes["intermediate_size"]
    return int(sizes["vocab_size"] * hidden + sizes["num_hidden_layers"] * layer)
