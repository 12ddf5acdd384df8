"""The paper's theorem: ∂o/∂q of o = softmax(q Kᵀ/√d) P⁻¹ vanishes only where Kᵀ(diag(a) − a aᵀ) does."""

import math

import pytest
import torch

from lucid_attention import lucid_attention

from .cases import shifted_keys
from .oracles import preconditioner


def jacobian(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """∂o/∂q, [n, D], of the weights o [n] that the last query puts on the values: V = I makes the output these."""
    n, D = k.shape
    values = torch.eye(n, dtype=k.dtype)[None, None]

    def weights(q: torch.Tensor) -> torch.Tensor:
        return lucid_attention(q.expand(1, 1, n, D), k[None, None], values)[0, 0, -1]

    return torch.autograd.functional.jacobian(weights, q)


def by_formula(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1/√d) P⁻ᵀ (diag(a) − a aᵀ) K, and Kᵀ(diag(a) − a aᵀ)."""
    D = k.shape[1]
    a = (k @ q / math.sqrt(D)).softmax(0)
    spread = torch.diag(a) - torch.outer(a, a)
    return torch.linalg.solve(preconditioner(k).T, spread @ k) / math.sqrt(D), k.T @ spread


@pytest.mark.parametrize("cosine", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("n", "D"), [(2, 3), (12, 3), (30, 8)])
def test_the_jacobian_is_the_papers_formula_and_does_not_vanish(n, D, cosine):
    q, k = torch.randn(D, dtype=torch.float64), shifted_keys(n, D, cosine=cosine)
    expected, spread = by_formula(q, k)
    J = jacobian(q, k)
    torch.testing.assert_close(J, expected, rtol=1e-10, atol=1e-12)
    # ‖P‖ ≤ n and ‖P⁻¹‖ ≤ 2 say by how much.
    assert spread.norm() > 1e-3
    assert spread.norm() / n <= J.norm() * math.sqrt(D) * (1 + 1e-9)
    assert J.norm() * math.sqrt(D) <= 2 * spread.norm() * (1 + 1e-9)


def test_the_jacobian_vanishes_where_the_softmax_is_one_hot():
    q, k = torch.randn(3, dtype=torch.float64), shifted_keys(12, 3)
    sizes = [jacobian(factor * q, k).norm().item() for factor in (1, 10, 100, 10000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1e-2
    assert sizes[-1] < 1e-12


def test_the_jacobian_vanishes_for_equal_keys_and_only_softly_for_nearly_equal_ones():
    q, k = torch.randn(3, dtype=torch.float64), shifted_keys(1, 3).expand(12, 3)
    assert jacobian(q, k).norm() < 1e-14
    nearly = k + 1e-3 * torch.randn(12, 3, dtype=torch.float64)
    expected, spread = by_formula(q, nearly)
    torch.testing.assert_close(jacobian(q, nearly), expected, rtol=1e-9, atol=1e-12)
    assert jacobian(q, nearly).norm() * math.sqrt(3) >= spread.norm() / 12
