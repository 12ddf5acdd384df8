"""The exponential of tiles: compiled code where Numba is installed, torch elsewhere."""

import math

import pytest
import torch

from lucid_attention import precondition
from lucid_attention.ops import exponential, numba_runtime
from lucid_attention.ops.exponential import LEAST_COMPILED, LEAST_SHARED, exponential_


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of every call of compiled code."""
    counts: list[int] = []
    run = numba_runtime.run

    def counted(function: object, job: object, threads: int) -> None:
        counts.append(threads)
        run(function, job, threads)

    monkeypatch.setattr(numba_runtime, "run", counted)
    return counts


@pytest.mark.parametrize("size", [LEAST_COMPILED, LEAST_SHARED + 13, 3 * LEAST_SHARED + 1])
def test_it_is_the_exponential(size: int, calls: list[int]) -> None:
    pytest.importorskip("numba")
    x = torch.linspace(-86.5, 88, size)
    truth = x.double().exp()
    exponential_(x)
    assert len(calls) == 1
    assert ((x.double() - truth) / truth).abs().max() <= 2e-7


def test_the_edges_are_those_of_torch(calls: list[int]) -> None:
    pytest.importorskip("numba")
    edges = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1000.0, -1000.0, 89.0, -104.0])
    x = edges.repeat(LEAST_COMPILED)
    torch.testing.assert_close(exponential_(x)[:9], edges.exp(), equal_nan=True, rtol=2e-7, atol=0)
    assert len(calls) == 1


def test_what_compiled_code_cannot_take_goes_to_torch(calls: list[int]) -> None:
    for x in (
        torch.zeros(LEAST_COMPILED - 1),
        torch.zeros(LEAST_COMPILED, dtype=torch.float64),
        torch.zeros(LEAST_COMPILED, 2)[:, 0],
        torch.nn.Parameter(torch.zeros(LEAST_COMPILED), requires_grad=False),
    ):
        assert torch.equal(exponential_(x), torch.ones_like(x))
    assert not calls


def test_without_the_extra_the_solve_is_torchs(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (torch.randn(1, 1, 300, 8, generator=torch.Generator().manual_seed(seed)) + 1 for seed in range(2))
    compiled = precondition(k, v)
    monkeypatch.setattr(exponential.numba_runtime, "compiled", lambda *_: "numba is not installed")
    before = len(calls)
    plain = precondition(k, v)
    assert len(calls) == before
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
