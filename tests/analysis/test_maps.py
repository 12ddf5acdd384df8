"""Maps are the dense weights, averaged over squares for long texts."""

import pytest
import torch

from lucid_lab.analysis import layer as layer_module
from lucid_lab.analysis.hit_rate import attention_maps
from tests.models.decoder.cases import decoder
from tests.ops import oracles

from .subjects import Plain, layers_of, llama, tokens

T = 23


def dense(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """A and W: [B, heads, T, T] each."""
    q, k = layer.q.double(), layer.k.double()
    identity = torch.eye(T, dtype=torch.float64).expand(q.shape[0], k.shape[1], T, T)
    A = oracles.read_out(q, k, identity)
    W = oracles.lucid_attention(q, k, identity) if layer.preconditioned else A
    return A, W


@pytest.mark.parametrize("build", [decoder, lambda: llama("lucid"), lambda: llama("eager")])
@pytest.mark.parametrize(("bins", "rows_at_once"), [(5, 2), (5, 8), (23, 8), (100, 1000)])
def test_maps_are_means_over_squares(build, bins, rows_at_once, monkeypatch):
    monkeypatch.setattr(layer_module, "ELEMENTS", 2 * T * rows_at_once)
    model, ids = build(), tokens(2, T)
    layers = layers_of(model, ids)
    truths = [dense(layer) for layer in layers]
    records = attention_maps(model, ids, bins=bins)
    assert len(records) == len(layers) * 2 * 4
    for record in records:
        layer = layers[record["layer"]]
        assert record["attention"] == layer.attention
        borders = record["borders"]
        size = min(bins, T)
        assert len(borders) == size + 1
        assert (borders[0], borders[-1]) == (0, T)
        for name, maps_of_layer in zip(("softmax", "effective"), truths[record["layer"]], strict=True):
            mine, truth = record[name], maps_of_layer[record["row"], record["head"]]
            expected = torch.tensor(
                [
                    [truth[borders[i] : borders[i + 1], borders[j] : borders[j + 1]].mean().item() for j in range(size)]
                    for i in range(size)
                ]
            )
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        assert (record["softmax"] - record["effective"]).abs().max() > 1e-3 or not layer.preconditioned


def test_both_softmaxes_of_a_difference_are_averaged():
    model, ids = Plain("diff"), tokens(1, T)
    full, few = (attention_maps(model, ids, bins=bins) for bins in (T, 4))
    for fine, coarse in zip(full, few, strict=True):
        borders = coarse["borders"]
        part = fine["effective"][borders[2] : borders[3], borders[1] : borders[2]].mean()
        torch.testing.assert_close(coarse["effective"][2, 1], part, rtol=1e-4, atol=1e-6)
        assert (fine["effective"] - fine["softmax"]).abs().max() > 0.01
