"""Other people's code, and another member of the family through the same solver.

flash-linear-attention's naive implementations are loaded by file path: importing the package would need triton.
"""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from lucid_attention import lucid_attention, precondition
from lucid_attention.ops.triangular import Schedule, solve_, solve_adjoint_

from .cases import error, shifted_keys


def naive(operator: str) -> ModuleType:
    locations = importlib.util.find_spec("fla").submodule_search_locations
    path = Path(locations[0], "ops", operator, "naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operator}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cosine", [0.5, 0.9])
@pytest.mark.parametrize("D", [3, 16])
def test_deltaformer_with_the_row_sums_as_step_sizes_is_lucid(D, cosine):
    """DeltaFormer's rows sum to β_t. With β_t = Σ_{s<t} P_ts, on normalised keys, they are LUCID's."""
    B, H, T = 2, 2, 70
    k_rn = math.sqrt(D) * F.normalize(shifted_keys(B, H, T, D, cosine=cosine, dtype=torch.float32), dim=-1)
    v = torch.randn(B, H, T, D)
    beta = (k_rn @ k_rn.mT / math.sqrt(D) - math.sqrt(D)).exp().tril(-1).sum(-1)
    args = [x.transpose(1, 2) for x in (k_rn, k_rn, v, beta)]
    theirs = naive("deltaformer").naive_deltaformer_attn(*args).transpose(1, 2)
    assert error(lucid_attention(k_rn, k_rn, v), theirs) < 3e-6
    # Not because P does nothing here.
    assert error(F.scaled_dot_product_attention(k_rn, k_rn, v, is_causal=True), theirs) > 0.03
    assert error(precondition(k_rn, v), v) > 0.03


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_adjoint_of_the_solver_is_right_for_a_matrix_that_is_not_symmetric(block):
    """LUCID's diagonal blocks are symmetric before they are cut, which would hide a missing transposition."""
    n, T, S, E = 2, 23, 5, 3
    full = torch.randn(n, S + T, S + T, dtype=torch.float64) / 4
    beta = torch.rand(n, T, 1, dtype=torch.float64)
    v, y_past = torch.randn(n, T, E, dtype=torch.float64), torch.randn(n, S, E, dtype=torch.float64)
    dy = torch.randn(n, T, E, dtype=torch.float64)

    class DenseTiles:
        alpha = 0.5
        grad = torch.zeros_like(full)

        def make(self, rows, cols):
            return full[:, rows, cols] / self.alpha

        def pull_back(self, rows, cols, tile, left, right, diagonal):
            grad = -left @ right.mT
            self.grad[:, rows, cols] += grad.tril(-1) if diagonal else grad

    leaves = [x.clone().requires_grad_() for x in (full, v, beta, y_past)]
    L, b = leaves[0][:, S:].tril(S - 1), leaves[2]
    eye = torch.eye(T, dtype=torch.float64)
    truth = torch.linalg.solve(eye + b * L[:, :, S:], b * (leaves[1] - L[:, :, :S] @ leaves[3]))
    dL, dv, dbeta, dy_past = torch.autograd.grad(truth, leaves, dy)

    tiles, schedule = DenseTiles(), Schedule(n, block, block * block)
    y, z = v.clone(), torch.empty_like(v)
    solve_(y, tiles, schedule, beta=beta, z=z, y_past=y_past)
    torch.testing.assert_close(y, truth.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(beta * z, truth.detach(), rtol=1e-11, atol=1e-11)
    g, gbeta, gpast = dy.clone(), torch.empty_like(beta), torch.zeros_like(y_past)
    solve_adjoint_(g, y, tiles, schedule, beta=beta, z=z, dbeta=gbeta, y_past=y_past, dy_past=gpast)
    for ours, expected in ((g, dv), (gbeta, dbeta), (gpast, dy_past), (tiles.grad, dL)):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
