"""Gradients: over several blocks with every option at once, of frozen keys, and of one tensor used twice."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition
from lucid_attention.ops.triangular import ExponentialTiles

from . import oracles
from .cases import Case, assert_exact, call, evaluate

NORMS = ["key", "qk", "row_max"]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fn", [precondition, lucid_attention])
def test_several_blocks_with_a_past_a_mask_and_every_option(fn, norm):
    tensors = Case(T=600, B=2, G=2, S=300, D=6, E=4).tensors(beta=True, sharpness=True)
    key_mask = torch.rand(2, 900) > 0.2
    weight = torch.randn(2, 2 if fn is precondition else 4, 600, 4, dtype=torch.float64)
    oracle = oracles.precondition if fn is precondition else oracles.lucid_attention
    truth = evaluate(oracle, tensors, weight, norm=norm, key_mask=key_mask)
    assert_exact(evaluate(fn, tensors, weight, norm=norm, key_mask=key_mask), truth, tolerance=1e-10)


@pytest.mark.parametrize("norm", NORMS)
def test_a_step_size_of_zero_still_has_a_gradient(norm):
    """y = 0 at β = 0, so dβ cannot be had from y alone."""
    tensors = Case(T=300, D=4).tensors(beta=True)
    tensors["beta"][:, :, ::3] = 0
    weight = torch.randn(1, 2, 300, 3, dtype=torch.float64)
    truth = evaluate(oracles.precondition, tensors, weight, norm=norm)
    assert truth["dbeta"][:, :, ::3].abs().min() > 0
    assert_exact(evaluate(precondition, tensors, weight, norm=norm), truth)


def test_frozen_keys_cost_no_key_gradient(monkeypatch):
    tensors = Case(T=300, S=20).tensors(beta=True)
    weight = torch.randn(1, 2, 300, 3, dtype=torch.float64)
    together = evaluate(precondition, tensors, weight)

    def refuse(*args: object) -> None:
        raise AssertionError("a tile was pulled back to keys that have no gradient")

    monkeypatch.setattr(ExponentialTiles, "pull_back", refuse)
    leaves = {name: x.clone().requires_grad_("k" not in name) for name, x in tensors.items()}
    call(precondition, leaves).backward(weight)
    for name in ("v", "beta", "y_past"):
        torch.testing.assert_close(leaves[name].grad, together[f"d{name}"], rtol=1e-12, atol=1e-12)


def test_gradients_add_up_over_two_uses_of_one_tensor():
    k = Case(T=20, D=4, E=4).tensors()["k"].requires_grad_()
    grad = torch.autograd.grad(lucid_attention(k, k, k).square().sum(), k)[0]
    expected = torch.autograd.grad(oracles.lucid_attention(k, k, k).square().sum(), k)[0]
    torch.testing.assert_close(grad, expected)
