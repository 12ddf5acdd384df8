"""Hit rates: how much weight the tokens get that hold the answer.

A LUCID layer reads W = A P⁻¹: its weights have signs and do not sum to one, so three numbers are told instead of one.
Only the rows that are asked for are computed, and P is never inverted: one transposed solve per group of heads.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Head, Layer

Record = dict[str, Any]
MEASURES = ("softmax", "signed", "magnitude", "negative")


@dataclass(frozen=True)
class Query:
    """Who asks, and which tokens hold the answer.

    position: of the query in the input. spans: (first, last + 1) of the tokens it should read. row: of the batch.
    """

    position: int
    spans: tuple[tuple[int, int], ...]
    row: int = 0

    def __post_init__(self) -> None:
        if not self.spans:
            raise ValueError("spans must hold at least one (first, last + 1), got none")
        for first, stop in self.spans:
            if not 0 <= first < stop:
                raise ValueError(f"a span must be (first, last + 1) of tokens in the input, got {(first, stop)}")
            if first > self.position:
                raise ValueError(f"spans must begin before the query at {self.position}, got {(first, stop)}")


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
        queries: which rows are looked at.
        heads: query heads, None for all.

    Returns:
        {"layer", "row", "head", "query", "softmax", "signed", "magnitude", "negative"}: the sum of A on the spans; the
        sum of W on them; the sum of |W| on them over that of all; and the share of all |W| that is negative.
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
    """The same for the queries of one head and row."""
    rows = head.rows_of([query.position for query in queries])
    inside = torch.stack([_inside(head.positions, query) for query in queries]).to(head.q.device)
    softmaxes = head.softmaxes(rows)
    a, w = softmaxes[0], head.joined(softmaxes)
    size = w.abs()
    total = size.sum(-1)
    measured = torch.stack(
        [
            (a * inside).sum(-1),
            (w * inside).sum(-1),
            (size * inside).sum(-1) / total,
            size.masked_fill(w > 0, 0).sum(-1) / total,
        ],
        -1,
    ).tolist()
    return [
        {"layer": head.layer, "row": head.row, "head": name, "query": query.position}
        | dict(zip(MEASURES, measured[g][i], strict=True))
        for g, name in enumerate(head.query_heads)
        for i, query in enumerate(queries)
    ]


def _inside(positions: Tensor, query: Query) -> Tensor:
    """[N]: which tokens are in the spans."""
    return torch.stack([(positions >= first) & (positions < stop) for first, stop in query.spans]).any(0)


def average(records: Sequence[Record], by: Sequence[str] = ("layer", "head")) -> list[Record]:
    """The means of records that agree in `by`, in the order in which they come; by=() for one mean of all."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in by)].append(record)
    return [
        dict(zip(by, key, strict=True)) | {name: sum(each[name] for each in group) / len(group) for name in MEASURES}
        for key, group in groups.items()
    ]


class Pairs(Protocol):
    """A task of `data.synthetic`: ids are an end token, then keys, then values, then fillers."""

    first_value: int
    first_filler: int


def synthetic_queries(task: Pairs, input_ids: Tensor, *, whole_pair: bool = True) -> list[Query]:
    """The questions in items of `Needles` or `MemoryUpdate`, with the place where their key was last written.

    task: the task, for its ids. input_ids: [T] or [B, T]. whole_pair: key and value, or the value alone.
    """
    if input_ids.ndim == 1:
        input_ids = input_ids[None]
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
                at = written[token]
                queries.append(Query(t, ((at if whole_pair else at + 1, at + 2),), row))
    return queries
