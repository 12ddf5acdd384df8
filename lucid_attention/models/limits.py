"""Refuse inputs that a model cannot take, before its weights are loaded. Estimates of memory are lower bounds."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..memory import gigabytes, machine_memory
from .checkpoint import load_config, load_skeleton, weight_files
from .decoder.cache import CROPPABLE

# Parts of the names that models give to tables of positions: wpe, embed_positions, position_embeddings.
TABLES = ("wpe", "pos")
# Layers whose cache grows with every token.
GROWING = ("full_attention", CROPPABLE)


def check_input_fits(
    folder: str | Path, length: int, option: str, *, batch_size: int = 1, dtype: str = "auto", is_cached: bool = False
) -> None:
    """Refuse inputs beyond a model's table of positions, and a model that does not fit in memory with its input.

    length: tokens of the longest input, answer included; 0 if it is not known. option: with which the length is chosen,
    for the error. dtype: one of `DTYPES`. is_cached: whether the model keeps a cache of all tokens.
    """
    model = load_skeleton(folder)
    positions = table_of_positions(model)
    if positions is not None and length > positions:
        raise ValueError(
            f"{str(folder)!r} has a table of {positions} positions: its inputs must have at most {positions} tokens, "
            f"got {length}: lower {option}"
        )
    config = load_config(folder).get_text_config(decoder=True)
    size = _bytes_of(config, dtype)
    weights = sum(parameter.numel() for parameter in model.parameters()) * size
    if getattr(config, "quantization_config", None):
        weights = sum(file.stat().st_size for file in weight_files(Path(folder)))
    # Without a cache, at least the input of one layer is in memory.
    per_token = _cache_per_token(config) if is_cached else getattr(config, "hidden_size", 0)
    inputs = batch_size * length * per_token * size
    memory = machine_memory()
    if weights > memory:
        raise ValueError(
            f"{str(folder)!r} must fit in the {gigabytes(memory)} of memory of this machine, but its weights need at "
            f"least {gigabytes(weights)}: choose a smaller --dtype, a smaller model or a larger machine"
        )
    if weights + inputs > memory:
        batch = f" or --batch-size {batch_size}" if batch_size > 1 else ""
        raise ValueError(
            f"{str(folder)!r} must fit in the {gigabytes(memory)} of memory of this machine, but its weights need at "
            f"least {gigabytes(weights)} and {batch_size * length:,} tokens {gigabytes(inputs)}: lower {option}{batch}"
        )


def table_of_positions(model: nn.Module) -> int | None:
    """The number of positions of a model that has a learned vector for each; None for a model without such a table."""
    sizes = [
        module.num_embeddings - int(getattr(module, "offset", 0))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and any(part in name.rpartition(".")[2] for part in TABLES)
    ]
    return min(sizes, default=None)


def _bytes_of(config: Any, dtype: str) -> int:
    """Bytes of a weight. A configuration without a dtype gets the smallest."""
    chosen = getattr(config, "dtype", None) if dtype == "auto" else dtype
    chosen = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    return chosen.itemsize if isinstance(chosen, torch.dtype) else torch.float16.itemsize


def _cache_per_token(config: Any) -> int:
    """Numbers in the cache for every token: keys and values of all layers that keep every token."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return 0
    types = getattr(config, "layer_types", None)
    if types is None:
        windowed = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        types = [] if windowed else ["full_attention"] * config.num_hidden_layers
    shared = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return sum(kind in GROWING for kind in types) * 2 * int(shared) * int(width)
