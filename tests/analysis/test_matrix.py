"""P, computed in blocks of rows, equals the dense P."""

import pytest
import torch

from lucid_attention import preconditioner
from lucid_attention.ops.path.api import path_precondition
from lucid_lab.analysis import layer
from lucid_lab.analysis.layer import KeyMatrix, LikeKeys, LikePathKeys
from tests.ops.cases import keys_of

SETTINGS = {
    "paper": {},
    "sharp": {"sharpness": 0.7},
    "row max": {"norm": "row_max"},
    "strength": {"strength": 0.3},
    "beta": {"beta": True},
}


@pytest.fixture(params=[4, 512], ids=["many blocks", "one block"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "BLOCK", request.param)


@pytest.fixture(params=[0, 8192], ids=["made anew", "kept"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "KEPT", request.param)


def both(settings: dict, N: int = 19) -> tuple[KeyMatrix, torch.Tensor]:
    """P of ours, and the library's dense one."""
    options = dict(settings)
    k = keys_of("close", 1, 1, N, 5)
    beta = torch.rand(1, 1, N, dtype=torch.float64) if options.pop("beta", False) else None
    dense = preconditioner(k, beta=beta, **options)[0, 0]
    strength = options.pop("strength", 1.0)
    return KeyMatrix(LikeKeys(k[0, 0], **options), N, strength, None if beta is None else beta[0, 0]), dense


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("n", [1, 7, 19])
def test_products_and_solves_are_those_of_the_dense_matrix_and_its_leading_blocks(settings, n):
    P, dense = both(settings)
    truth = dense[:n, :n]
    x = torch.randn(n, 3, dtype=torch.float64)
    given = x.clone()
    for _ in range(2):  # the second time from rows in memory
        torch.testing.assert_close(P.dense(n), truth, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(P.gram(x), truth.T @ truth @ x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(P.solve(x), torch.linalg.solve(truth, x), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(P.solve_transposed(x), torch.linalg.solve(truth.T, x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(x, given, rtol=0, atol=0)
    # Rows that were kept for a prefix serve the whole matrix.
    torch.testing.assert_close(P.dense(), dense, rtol=1e-13, atol=1e-13)


def test_path_keys_make_the_matrix_that_path_precondition_solves_with():
    N, D = 19, 5
    k, w = keys_of("close", 1, 1, N, D), torch.nn.functional.normalize(torch.randn(1, 1, N, D).double(), dim=-1)
    beta, v = 2 * torch.rand(1, 1, N).double(), torch.randn(1, 1, N, 3).double()
    P = KeyMatrix(LikePathKeys(k[0, 0], w[0, 0], beta[0, 0], 1.3), N)
    y = path_precondition(k, v, w, beta, sharpness=1.3, impl="reference")[0, 0]
    torch.testing.assert_close(P.solve(v[0, 0]), y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(P.dense() @ y, v[0, 0], rtol=1e-11, atol=1e-11)
