"""Where attention looks: weights on the tokens that hold the answer (hit rates), and maps of all weights.

A LUCID layer reads with W = A P⁻¹, whose entries have signs and do not sum to one, so there are several measures.
Only the rows of the queries are computed, and P is never inverted: one transposed solve per group of heads.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Head, Layer

Record = dict[str, Any]
MEASURES = ("softmax", "signed", "magnitude", "negative")
# Largest number of rows and columns of a map. The map of a longer text is averaged over squares.
BINS = 256


@dataclass(frozen=True)
class Query:
    """A query, and the tokens that hold its answer.

    position: of the query in the input. spans: (first, last + 1) of the tokens that it should read. row: of the batch.
    """

    position: int
    spans: tuple[tuple[int, int], ...]
    row: int = 0

    def __post_init__(self) -> None:
        if not self.spans or any(not 0 <= first < min(stop, self.position + 1) for first, stop in self.spans):
            raise ValueError(
                f"spans must be (first, last + 1) of tokens before the query at {self.position}, got {self.spans}"
            )


def hit_rates(
    model: nn.Module,
    inputs: Inputs,
    queries: Sequence[Query],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[Record]:
    """The weight of the spans, for every query, layer and head.

    Args:
        model, inputs, layers: as in `visit_layers`.
        queries: positions that ask, with the spans of their answers.
        heads: query heads, None for all.

    Returns:
        {"layer", "row", "head", "query", "softmax", "signed", "magnitude", "negative"}: ΣA on the spans; ΣW on the
        spans; Σ|W| on the spans divided by Σ|W| of the row; and the negative part of Σ|W| divided by Σ|W|.
    """
    if not queries:
        raise ValueError("queries must hold at least one Query, got none")
    rows = (inputs if isinstance(inputs, Tensor) else inputs["input_ids"]).shape[0]
    for query in queries:
        if not 0 <= query.row < rows:
            raise ValueError(f"row of a query must be 0 to {rows - 1}, the rows of the batch, got {query.row}")
    records: list[Record] = []

    def measure(layer: Layer) -> None:
        for head in layer.heads(heads):
            asked = [query for query in queries if query.row == head.row]
            if asked:
                records.extend(head_hit_rates(head, asked))

    visit_layers(model, inputs, measure, layers=layers)
    return records


def head_hit_rates(head: Head, queries: Sequence[Query]) -> list[Record]:
    """`hit_rates` of one head, for queries of its row, in blocks of queries."""
    rows = head.rows_of([query.position for query in queries])
    blocks: list[Tensor] = []
    done = 0
    for block in head.row_blocks(rows):
        inside = torch.stack([_inside(head.positions, query) for query in queries[done : done + len(block)]])
        blocks.append(_measured(head, block, inside.to(head.q.device)))
        done += len(block)
    measured = torch.cat(blocks, 1).tolist()
    return [
        {"layer": head.layer, "row": head.row, "head": name, "query": query.position}
        | dict(zip(MEASURES, measured[g][i], strict=True))
        for g, name in enumerate(head.query_heads)
        for i, query in enumerate(queries)
    ]


def _measured(head: Head, rows: Tensor, inside: Tensor) -> Tensor:
    """MEASURES of some rows: [G, n, 4]. inside: [n, N]."""
    softmaxes = head.softmaxes(rows)
    a, w = softmaxes[0], head.joined(softmaxes)
    size = w.abs()
    total = size.sum(-1)
    measures = [
        (a * inside).sum(-1),
        (w * inside).sum(-1),
        (size * inside).sum(-1) / total,
        size.masked_fill(w > 0, 0).sum(-1) / total,
    ]
    return torch.stack(measures, -1)


def _inside(positions: Tensor, query: Query) -> Tensor:
    """[N]: which tokens are in the spans."""
    return torch.stack([(positions >= first) & (positions < stop) for first, stop in query.spans]).any(0)


def average(records: Sequence[Record], by: Sequence[str] = ("layer", "head")) -> list[Record]:
    """Means of the records that agree in `by`, in order of first appearance; by=() for one mean of all records."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in by)].append(record)
    return [
        dict(zip(by, key, strict=True)) | {name: _mean(group, name) for name in MEASURES}
        for key, group in groups.items()
    ]


def _mean(records: Sequence[Record], name: str) -> float:
    return sum(record[name] for record in records) / len(records)


def synthetic_queries(task: Any, input_ids: Tensor) -> list[Query]:
    """The questions in items of `Needles`, each with the place of its key and value where they were last written.

    task: the task of the items; its ids in order: an end token, keys, values, fillers. input_ids: [B, T].
    """
    queries = []
    for row, ids in enumerate(input_ids.tolist()):
        written: dict[int, int] = {}
        for t, token in enumerate(ids):
            if not 0 < token < task.first_value:
                continue
            following = ids[t + 1] if t + 1 < len(ids) else 0
            if task.first_value <= following < task.first_filler:
                written[token] = t
            elif token in written:
                queries.append(Query(t, ((written[token], written[token] + 2),), row))
    return queries


def attention_maps(
    model: nn.Module,
    inputs: Inputs,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    most_heads: int | None = None,
    bins: int = BINS,
) -> list[dict[str, Any]]:
    """A and W of every layer and head.

    Args:
        model, inputs, layers: as in `visit_layers`.
        heads: query heads, None for all.
        most_heads: without `heads`, only the first this many heads of every layer.
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
        for head in layer.heads(first if heads is None else heads):
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
    sums: dict[int, Tensor] = {}
    for block in head.row_blocks(torch.arange(N)):
        for i, weights in enumerate(head.softmaxes(block)):
            total = sums.setdefault(i, weights.new_zeros(weights.shape[0], bins, N))
            total.index_add_(1, bin_of[block.to(device)], weights)
    means = [total / sizes[:, None] for total in sums.values()]
    a, w = (
        (rows.new_zeros(*rows.shape[:2], bins).index_add_(2, bin_of, rows) / sizes).float().cpu()
        for rows in (means[0], head.joined(means))
    )
    return borders, a, w
