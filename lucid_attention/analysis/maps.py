"""Attention maps: A, what the softmax gives to the prepared values, and W = A P⁻¹, what the values themselves get."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Head, Layer

# Rows and columns of a map of a longer text: means over squares of it.
BINS = 256


def attention_maps(
    model: nn.Module,
    inputs: Inputs,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    bins: int = BINS,
) -> list[dict[str, Any]]:
    """A and W of every layer and head.

    Args:
        model, inputs, layers: as in `visit_layers`.
        heads: query heads, None for all.
        bins: largest map. A longer text is averaged to as many bins of tokens, made row block by row block.

    Returns:
        {"layer", "row", "head", "attention", "borders", "softmax", "effective"}: borders of the bins in tokens without
        padding, [bins + 1]; both maps as tensors [bins, bins], float32, on the CPU.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    records: list[dict[str, Any]] = []

    def draw(layer: Layer) -> None:
        for head in layer.heads(heads):
            borders, a, w = head_maps(head, bins)
            for g, name in enumerate(head.query_heads):
                place = {"layer": head.layer, "row": head.row, "head": name, "attention": layer.attention}
                records.append(place | {"borders": borders, "softmax": a[g], "effective": w[g]})

    visit_layers(model, inputs, draw, layers=layers)
    return records


def head_maps(head: Head, bins: int = BINS) -> tuple[list[int], Tensor, Tensor]:
    """Borders of the bins, A and W: [G, bins, bins] each."""
    N = len(head.positions)
    bins = min(bins, N)
    borders = [round(i * N / bins) for i in range(bins + 1)]
    column = torch.zeros(N, bins, dtype=torch.float64)
    for i in range(bins):
        column[borders[i] : borders[i + 1], i] = 1 / (borders[i + 1] - borders[i])
    column = column.to(head.q.device)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    # Whole bins, of about so many rows together.
    step = max(1, bins * BINS // N)
    for first in range(0, bins, step):
        stop = min(first + step, bins)
        rows = torch.arange(borders[first], borders[stop])
        within = column[rows.to(column.device), first:stop].mT
        a = head.weights(rows)
        for maps, weights in zip(found, (a, head.effective(rows, a)), strict=True):
            maps.append((within @ weights @ column).float().cpu())
    a, w = (torch.cat(maps, 1) for maps in found)
    return borders, a, w
