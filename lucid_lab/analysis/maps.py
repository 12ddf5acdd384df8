"""Attention maps: A, the weights of the stored values, and W = A P⁻¹, the weights of the values themselves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Head, Layer
from .progress import Progress, silent

# Largest number of rows and columns of a map. The map of a longer text is averaged over squares.
BINS = 256


def attention_maps(
    model: nn.Module,
    inputs: Inputs,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    most_heads: int | None = None,
    bins: int = BINS,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """A and W of every layer and head.

    Args:
        model, inputs, layers: as in `visit_layers`.
        heads: query heads, None for all.
        most_heads: without `heads`, only the first this many heads of every layer.
        progress: called with what is being done.
        bins: size of the largest map. A longer text is averaged to this many bins of tokens, in blocks of rows.

    Returns:
        {"layer", "row", "head", "attention", "borders", "softmax", "effective"}: borders of the bins in tokens without
        padding, [bins + 1]; both maps as tensors [bins, bins], float32, on the CPU.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    records: list[dict[str, Any]] = []

    def draw(layer: Layer) -> None:
        first = None if most_heads is None else range(min(most_heads, layer.query_heads))
        for head in layer.heads(first if heads is None else heads, progress):
            borders, a, w = head_maps(head, bins)
            for g, name in enumerate(head.query_heads):
                labels = {"layer": head.layer, "row": head.row, "head": name, "attention": layer.attention}
                records.append(labels | {"borders": borders, "softmax": a[g], "effective": w[g]})

    visit_layers(model, inputs, draw, layers=layers)
    return records


def head_maps(head: Head, bins: int = BINS) -> tuple[list[int], Tensor, Tensor]:
    """Borders of the bins, A and W: [G, bins, bins] each.

    P⁻¹ acts on columns, so the mean of rows of W follows from the mean of rows of A, with one solve per bin.
    """
    N = len(head.positions)
    bins = min(bins, N)
    borders = [round(i * N / bins) for i in range(bins + 1)]
    device = head.q.device
    bin_of = torch.bucketize(torch.arange(N), torch.tensor(borders[1:]), right=True).to(device)
    sizes = torch.tensor(borders, dtype=torch.float64, device=device).diff()
    blocks: tuple[list[Tensor], list[Tensor]] = [], []
    for block in head.row_blocks(torch.arange(bins)):
        first, stop = int(block[0]), int(block[-1]) + 1
        softmaxes = _mean_rows(head, torch.arange(borders[first], borders[stop]), bin_of, sizes, first, stop)
        for maps, rows in zip(blocks, (softmaxes[0], head.joined(softmaxes)), strict=True):
            sums = rows.new_zeros(*rows.shape[:2], bins).index_add_(2, bin_of, rows)
            maps.append((sums / sizes).float().cpu())
    a, w = (torch.cat(maps, 1) for maps in blocks)
    return borders, a, w


def _mean_rows(head: Head, rows: Tensor, bin_of: Tensor, sizes: Tensor, first: int, stop: int) -> list[Tensor]:
    """Means over each bin, first to stop, of the softmaxes of the rows in these bins: [G, stop − first, N] each."""
    sums: list[Tensor] = []
    for block in head.row_blocks(rows):
        for i, weights in enumerate(head.softmaxes(block)):
            if i == len(sums):
                sums.append(weights.new_zeros(weights.shape[0], stop - first, weights.shape[2]))
            sums[i].index_add_(1, bin_of[block.to(bin_of.device)] - first, weights)
    return [total / sizes[first:stop, None] for total in sums]
