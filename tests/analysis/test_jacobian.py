"""The softmax Jacobian and the theorem, against dense matrices and against autograd."""

import math

import pytest
import torch

from lucid_attention import lucid_attention
from lucid_attention.ops.softmax.attention import softmax_attention
from lucid_lab.analysis import layer as layer_module
from lucid_lab.analysis.jacobian import head_off_diagonal, jacobians, query_jacobian_norms
from lucid_lab.analysis.layer import Layer
from tests.models.decoder.cases import decoder
from tests.ops.cases import keys_of

from .subjects import Plain, layers_of, llama, tokens

T = 23


def off_diagonal(A: torch.Tensor) -> float:
    """From the Jacobians of all rows, written out: A [T, T] is causal."""
    entries = []
    for i, a in enumerate(A):
        J = torch.diag(a) - torch.outer(a, a)
        entries += [J[j, k].abs().item() for j in range(i + 1) for k in range(i + 1) if j != k]
    return sum(entries) / len(entries)


def jacobian_norm(q: torch.Tensor, k: torch.Tensor, row: int, lucid: bool, **options) -> float:
    """By autograd through the operator: with V = I its output is the weights of the values."""
    n = row + 1
    values = torch.eye(n, dtype=k.dtype)[None, None]
    attend = lucid_attention if lucid else softmax_attention

    def weights(x):
        return attend(x.expand(1, 1, n, -1), k[None, None, :n], values, **options)[0, 0, -1]

    return torch.autograd.functional.jacobian(weights, q[row]).norm().item()


SMALL = {"num_hidden_layers": 1}
BUILDS = {
    "decoder": decoder,
    "drop-in": lambda: llama("lucid", **SMALL),
    "stock": lambda: llama("sdpa", **SMALL),
    "plain": lambda: Plain("softmax"),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_both_measures_of_a_model(build, monkeypatch):
    # More than one block of rows, for both.
    monkeypatch.setattr(layer_module, "ELEMENTS", 2 * 5 * T)
    model, ids, rows = build(), tokens(2, T), [0, 7, 22]
    layers = layers_of(model, ids)
    records = jacobians(model, ids, rows=rows)
    assert len(records) == len(layers) * 2 * 4
    for record in records:
        layer = layers[record["layer"]]
        q, k = layer.q[record["row"], record["head"]].double(), layer.k[record["row"], record["head"] // 2].double()
        scores = (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
        assert record["off_diagonal"] == pytest.approx(off_diagonal(scores.softmax(-1)), rel=1e-9)
        norms = [jacobian_norm(q, k, row, layer.preconditioned) for row in rows]
        assert norms[0] < 1e-12 < norms[1]
        assert record["query_jacobian"] == pytest.approx(sum(norms) / 3, rel=1e-9)


@pytest.mark.parametrize(
    "options", [{"sharpness": 0.9}, {"strength": 0.4}, {"norm": "row_max"}, {"beta": True}, {"scale": 0.7}], ids=str
)
def test_settings_of_the_layer_count(options):
    k, q = keys_of("close", 1, 1, T, 5), torch.randn(1, 2, T, 5, dtype=torch.float64)
    settings = {"beta": torch.rand(1, 1, T, dtype=torch.float64)} if "beta" in options else options
    head = next(Layer(0, "lucid", q, k, k, preconditioned=True, **settings).heads())
    rows = torch.tensor([4, 22])
    found = query_jacobian_norms(head, rows)
    for g in range(2):
        for i, row in enumerate(rows.tolist()):
            cut = {"beta": settings["beta"][:, :, : row + 1]} if "beta" in settings else settings
            assert found[g, i].item() == pytest.approx(jacobian_norm(q[0, g], k[0, 0], row, True, **cut), rel=1e-9)


def test_capped_scores_have_the_slope_of_their_cap():
    k, q = keys_of("close", 1, 1, T, 5), 3 * torch.randn(1, 1, T, 5, dtype=torch.float64)
    head = next(Layer(0, "softmax", q, k, k, softcap=1.5).heads())

    def weights(x):
        scores = x @ k[0, 0].T / math.sqrt(5)
        return (1.5 * torch.tanh(scores / 1.5)).softmax(-1)

    truth = torch.autograd.functional.jacobian(weights, q[0, 0, -1]).norm().item()
    assert query_jacobian_norms(head, torch.tensor([T - 1])).item() == pytest.approx(truth, rel=1e-9)


def test_windows_count_the_pairs_that_are_seen():
    k, q = keys_of("shifted", 1, 1, 9, 5), torch.randn(1, 1, 9, 5, dtype=torch.float64)
    head = next(Layer(0, "sliding", q, k, k, window=2).heads())
    A = head.weights(torch.arange(9))[0]
    pairs = [2 * A[i, i] * A[i, i - 1] for i in range(1, 9)]
    assert head_off_diagonal(head).item() == pytest.approx(sum(pairs).item() / 16, rel=1e-12)


def test_the_jacobian_of_the_query_is_that_of_softmax_and_lucid_only():
    for name in ("path", "lucid_path", "diff"):
        records = jacobians(Plain(name), tokens(1, T))
        assert all(each["query_jacobian"] is None and each["off_diagonal"] > 0 for each in records)
    with pytest.raises(ValueError, match="softmax and LUCID attention only"):
        query_jacobian_norms(next(layers_of(Plain("path"), tokens(1, T))[0].heads()), torch.tensor([3]))
