"""Hit rates: how much weight a query gives to the tokens that hold the answer.

A LUCID layer reads with W = A P⁻¹, whose entries have signs and do not sum to one, so there are several measures.
Only the rows of the queries are computed, and P is never inverted: one transposed solve per group of heads.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Head, Layer
from .progress import Progress, silent, within

Record = dict[str, Any]
MEASURES = ("softmax", "signed", "magnitude", "negative")


@dataclass(frozen=True)
class Query:
    """A query, and the tokens that hold its answer.

    position: of the query in the input. spans: (first, last + 1) of the tokens that it should read. row: of the batch.
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
    progress: Progress = silent,
) -> list[Record]:
    """The weight of the spans, for every query, layer and head.

    Args:
        model, inputs, layers: as in `visit_layers`.
        queries: positions that ask, with the spans of their answers.
        heads: query heads, None for all.
        progress: called with what is being done.

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
        for head in layer.heads(heads, progress):
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


def sample_hit_rates(
    model: nn.Module,
    tokenizer: Any,
    samples: Sequence[Mapping[str, Any]],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    progress: Progress = silent,
) -> list[Record]:
    """`hit_rates` of the last token of every sample, with the index of the "sample" in each record.

    samples: {"prompt": text, "spans": of the answer in tokens}, from `inputs.read_samples`.
    """
    records: list[Record] = []
    for index, sample in enumerate(samples):
        ids = tokenizer(sample["prompt"], return_attention_mask=False, verbose=False)["input_ids"]
        last = max(stop for _, stop in sample["spans"])
        if last > len(ids):
            raise ValueError(
                f"sample {index} has an answer at tokens up to {last}, its prompt {len(ids)} tokens: it was made for "
                "another tokenizer"
            )
        device = next(model.parameters()).device
        query = Query(len(ids) - 1, sample["spans"])
        where = f"sample {index + 1} of {len(samples)}"
        rates = hit_rates(
            model,
            torch.tensor([ids], device=device),
            [query],
            layers=layers,
            heads=heads,
            progress=within(where, progress),
        )
        records += [{"sample": index, **record} for record in rates]
    return records


class Pairs(Protocol):
    """A task of `data.synthetic`. Its ids in order: an end token, keys, values, fillers."""

    first_value: int
    first_filler: int


def synthetic_queries(task: Pairs, input_ids: Tensor, *, whole_pair: bool = True) -> list[Query]:
    """The questions in items of `Needles` or `MemoryUpdate`, each with the place where its key was last written.

    task: the task of the items. input_ids: [T] or [B, T]. whole_pair: spans hold key and value, or the value alone.
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
