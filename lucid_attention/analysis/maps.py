"""Attention maps: A, what the softmax gives to the prepared values, and W = A P⁻¹, what the values themselves get."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Head, Layer

# Rows and columns of the map of a longer text: means over squares of the whole map.
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
    """Borders of the bins, A and W: [G, bins, bins] each.

    P⁻¹ acts on columns: the mean of rows of W is made of the mean of rows of A, with one solve per bin.
    """
    N = len(head.positions)
    bins = min(bins, N)
    borders = [round(i * N / bins) for i in range(bins + 1)]
    device = head.q.device
    bin_of = torch.bucketize(torch.arange(N), torch.tensor(borders[1:]), right=True).to(device)
    sizes = torch.tensor(borders, dtype=torch.float64, device=device).diff()
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for some in head.row_blocks(torch.arange(bins)):
        first, stop = int(some[0]), int(some[-1]) + 1
        softmaxes = _mean_rows(head, torch.arange(borders[first], borders[stop]), bin_of, sizes, first, stop)
        for maps, rows in zip(found, (softmaxes[0], head.joined(softmaxes)), strict=True):
            sums = rows.new_zeros(*rows.shape[:2], bins).index_add_(2, bin_of, rows)
            maps.append((sums / sizes).float().cpu())
    a, w = (torch.cat(maps, 1) for maps in found)
    return borders, a, w


def _mean_rows(head: Head, rows: Tensor, bin_of: Tensor, sizes: Tensor, first: int, stop: int) -> list[Tensor]:
    """The softmaxes of these rows, which fill the bins first to stop, averaged in each bin: [G, stop − first, N]."""
    sums: list[Tensor] = []
    for some in head.row_blocks(rows):
        for i, weights in enumerate(head.softmaxes(some)):
            if i == len(sums):
                sums.append(weights.new_zeros(weights.shape[0], stop - first, weights.shape[2]))
            sums[i].index_add_(1, bin_of[some.to(bin_of.device)] - first, weights)
    return [each / sizes[first:stop, None] for each in sums]
