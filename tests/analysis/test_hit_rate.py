"""Hit rates are sums of the dense maps on the spans, and only the rows of the queries are computed."""

import pytest
import torch

from lucid_lab.analysis import layer as layer_module
from lucid_lab.analysis.hit_rate import Query, average, hit_rates, synthetic_queries
from lucid_lab.data import IGNORED
from lucid_lab.data.synthetic import Needles
from tests.models.decoder.cases import decoder
from tests.ops import oracles
from tests.ops.cases import keys_of

from .subjects import Plain, layers_of, llama, tokens

T = 23
QUERIES = [Query(22, ((3, 6), (10, 11)), 0), Query(15, ((0, 1), (15, 20)), 1), Query(22, ((21, 22),), 1)]


def by_definition(a: list[float], w: list[float], query: Query) -> dict[str, float]:
    """Token by token."""
    on = [i for i in range(len(w)) if any(first <= i < stop for first, stop in query.spans)]
    total = sum(abs(x) for x in w)
    return {
        "softmax": sum(a[i] for i in on),
        "signed": sum(w[i] for i in on),
        "magnitude": sum(abs(w[i]) for i in on) / total,
        "negative": sum(-x for x in w if x < 0) / total,
    }


@pytest.mark.parametrize("build", [decoder, lambda: llama("lucid"), lambda: llama("sdpa"), lambda: Plain("lucid")])
def test_records_are_sums_of_the_dense_weights(build):
    model, ids = build(), tokens(2, T)
    records = hit_rates(model, ids, QUERIES)
    layers = layers_of(model, ids)
    assert len(records) == len(layers) * 4 * len(QUERIES)
    for layer in layers:
        q, k = layer.q.double(), layer.k.double()
        identity = torch.eye(T, dtype=torch.float64).expand(2, 2, T, T)
        A = oracles.read_out(q, k, identity)
        W = oracles.lucid_attention(q, k, identity) if layer.preconditioned else A
        for query in QUERIES:
            for head in range(4):
                place = {"layer": layer.index, "row": query.row, "head": head, "query": query.position}
                (record,) = [each for each in records if each.items() >= place.items()]
                rows = (X[query.row, head, query.position].tolist() for X in (A, W))
                expected = by_definition(*rows, query)
                assert record == place | {name: pytest.approx(x, abs=1e-10) for name, x in expected.items()}
    assert any(each["negative"] > 0.05 for each in records) == layers[0].preconditioned


def test_a_repeated_key_takes_the_weight_of_its_older_value():
    """Two equal keys, asked for: softmax gives both the same, LUCID all to the later one and nothing to the earlier."""
    k = keys_of("shifted", 1, 1, 6, 64)
    k = k - k.mean(2, keepdim=True)
    k[:, :, 4] = k[:, :, 1]
    layer = layer_module.Layer(0, "lucid", 60 * k, k, k, preconditioned=True)
    head = next(layer.heads())
    rows = torch.tensor([4])
    assert head.weights(rows)[0, 0, [1, 4]].tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert head.effective(rows)[0, 0, [1, 4]].tolist() == pytest.approx([0.0, 0.5], abs=1e-3)


def test_averages_are_means_of_records_that_agree():
    base = {"softmax": 1.0, "signed": 0.0, "magnitude": 0.5, "negative": 0.0}
    records = [
        {"layer": 0, "head": 0, "query": 5, **base},
        {"layer": 0, "head": 0, "query": 6, **base, "softmax": 0.0},
        {"layer": 0, "head": 1, "query": 5, **base, "softmax": 0.2},
    ]
    assert average(records) == [
        {"layer": 0, "head": 0, **base, "softmax": 0.5},
        {"layer": 0, "head": 1, **base, "softmax": 0.2},
    ]
    assert average(records, ()) == [base | {"softmax": pytest.approx(0.4)}]


def test_questions_of_synthetic_tasks_are_found_with_the_place_of_their_answer():
    task = Needles((2, 4), 40)
    items = [task[i] for i in range(5)]
    ids = torch.stack([item["input_ids"] for item in items])
    labels = torch.stack([item["labels"] for item in items])
    queries = synthetic_queries(task, ids)
    assert [[query.row, query.position + 1] for query in queries] == (labels != IGNORED).nonzero().tolist()
    for query in queries:
        ((first, stop),) = query.spans
        key, value = ids[query.row, first:stop].tolist()
        assert key == ids[query.row, query.position]
        assert value == labels[query.row, query.position + 1]
        # The latest write of the key before the question.
        writes = (ids[query.row, : query.position] == key).nonzero()[:, 0]
        assert first == writes[-1]


def test_bad_queries_are_refused():
    for spans in ((), ((4, 4),), ((9, 10),)):
        with pytest.raises(ValueError, match="before the query at 8"):
            Query(8, spans)
    with pytest.raises(ValueError, match="row of a query must be 0 to 1, the rows of the batch, got 2"):
        hit_rates(Plain("lucid"), tokens(2, T), [Query(8, ((0, 1),), 2)])
    with pytest.raises(ValueError, match="at least one Query"):
        hit_rates(Plain("lucid"), tokens(2, T), [])
