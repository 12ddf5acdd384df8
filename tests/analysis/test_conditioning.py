"""κ(P): exact for short prefixes, close for long ones, and there without an N × N matrix."""

import math

import pytest
import torch

from lucid_attention import preconditioner
from lucid_lab.analysis import layer as matrix
from lucid_lab.analysis.conditioning import (
    condition_numbers,
    key_condition_numbers,
)
from tests.models.decoder.cases import decoder
from tests.ops.cases import keys_of

from .subjects import Plain, layers_of, llama, tokens


def by_definition(P: torch.Tensor) -> tuple[float, float]:
    """‖P‖ and ‖P⁻¹‖, as norms of the matrices."""
    return torch.linalg.matrix_norm(P, 2).item(), torch.linalg.matrix_norm(torch.linalg.inv(P), 2).item()


def test_equal_keys_have_the_condition_number_of_the_lower_triangle_of_ones():
    """Its singular values are 1/(2 cos(jπ/(2n + 1))), j = 1..n."""
    n = 40
    (record,) = key_condition_numbers(keys_of("equal", 1, 1, n, 5)[0, 0], [n])
    largest, least = (0.5 / math.cos(j * math.pi / (2 * n + 1)) for j in (n, 1))
    assert record["largest"] == pytest.approx(largest, rel=1e-12)
    assert record["inverse_norm"] == pytest.approx(1 / least, rel=1e-12)
    assert record["kappa"] == pytest.approx(largest / least, rel=1e-12)
    assert record["exact"]


@pytest.mark.parametrize("build", [decoder, lambda: llama("lucid"), lambda: llama("sdpa"), lambda: Plain("softmax")])
def test_prefixes_of_every_layer_row_and_head_have_the_condition_number_of_their_own_matrix(build):
    model, ids, lengths = build(), tokens(2, 23), [5, 23]
    records = condition_numbers(model, ids, lengths)
    expected = []
    for layer in layers_of(model, ids):
        for row in range(2):
            for head in range(layer.k.shape[1]):
                for n in lengths:
                    # The matrix of the prefix, from its keys alone.
                    P = preconditioner(layer.k[row, head, :n].double()[None, None])[0, 0]
                    largest, inverse = by_definition(P)
                    place = {"layer": layer.index, "row": row, "head": head, "length": n, "exact": True}
                    found = {"kappa": largest * inverse, "largest": largest, "inverse_norm": inverse}
                    # A model of Transformers holds its sharpness in float32.
                    expected.append(place | {name: pytest.approx(value, rel=1e-6) for name, value in found.items()})
    assert sorted(records, key=str) == sorted(expected, key=lambda each: str({**each} | _plain(each)))
    assert max(each["kappa"] for each in records) > 2


def _plain(record):
    return {key: getattr(value, "expected", value) for key, value in record.items()}


@pytest.mark.parametrize("kind", ["shifted", "close", "equal", "runs", "repeated"])
@pytest.mark.parametrize("kept", [0, 8192], ids=["made anew", "kept"])
def test_long_prefixes_are_estimated_from_below(kind, kept, monkeypatch):
    monkeypatch.setattr(matrix, "BLOCK", 50)
    monkeypatch.setattr(matrix, "KEPT", kept)
    k, lengths = keys_of(kind, 1, 1, 230, 6)[0, 0], [60, 117, 230]
    for about, exact in zip(
        key_condition_numbers(k, lengths, exact_up_to=59), key_condition_numbers(k, lengths), strict=True
    ):
        assert (about["exact"], exact["exact"]) == (False, True)
        for name in ("kappa", "largest", "inverse_norm"):
            assert exact[name] * (1 - 1e-3) < about[name] <= exact[name] * (1 + 1e-12)


def test_a_layer_that_is_switched_off_tells_what_p_would_be():
    on, off = (condition_numbers(Plain("lucid", strength=strength), tokens(1, 12), [12]) for strength in (1.0, 0.0))
    assert off == on
    assert off[0]["kappa"] > 1.5


def test_heads_are_those_of_keys():
    records = condition_numbers(llama("lucid"), tokens(1, 12), [12], layers=[2])
    assert [(each["layer"], each["head"]) for each in records] == [(2, 0), (2, 1)]


def test_a_long_input_is_never_one_matrix(monkeypatch):
    """No tensor is as large as N × N, of one head; and the library's dense matrix is not asked for."""
    monkeypatch.setattr(matrix, "BLOCK", 16)
    monkeypatch.setattr(matrix, "KEPT", 0)
    N, largest = 256, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in torch.utils._pytree.tree_leaves(out):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    k = keys_of("close", 1, 1, N, 4)[0, 0]
    with Watch():
        key_condition_numbers(k, [N], exact_up_to=20)
    assert 0 < largest <= N * 32
    with Watch():
        key_condition_numbers(k, [N])
    assert largest >= N * N
