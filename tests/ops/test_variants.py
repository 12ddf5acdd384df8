"""beta, sharpness, norm and scale: what each does, and where two of them coincide."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition

from . import oracles
from .cases import Case, assert_as_good_as, assert_exact, call, evaluate, shifted_keys, widened


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("norm", ["key", "row_max"])
def test_step_sizes_may_have_another_dtype_than_the_keys(norm):
    tensors = Case(T=300, D=4).tensors(torch.bfloat16)
    beta = torch.rand(1, 2, 300, requires_grad=True)
    y = call(precondition, tensors, beta=beta, norm=norm)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert beta.grad.dtype == torch.float32


# At 40 the factor e^−c moves from the matrix products into the exponent.
@pytest.mark.parametrize("sharpness", [1e-3, 0.5, 1, 8.0, 39.9, 40.1, 200.0, 1e4], ids=lambda x: f"{x:g}")
def test_any_sharpness_is_the_equation_in_float32(sharpness):
    tensors = Case(T=300, D=6, keys="closest").tensors(torch.float32)
    weight = randn(1, 2, 300, 3)
    truth, plain = (evaluate(oracles.precondition, x, weight, sharpness=sharpness) for x in (widened(tensors), tensors))
    assert_as_good_as(evaluate(precondition, tensors, weight, sharpness=sharpness), plain, truth)


@pytest.mark.parametrize("direction", ["growing", "shrinking"])
@pytest.mark.parametrize("S", [0, 100])
def test_raw_keys_that_grow_or_shrink_do_not_overflow(S, direction):
    """Above the diagonal exp(σ_ij − m_i) may be infinite; nothing may read it."""
    sizes = torch.logspace(-1, 1.3, S + 300)[:, None]
    keys = shifted_keys(1, 2, S + 300, 4, dtype=torch.float32) * (sizes if direction == "growing" else sizes.flip(0))
    tensors = Case(T=300, S=S, D=4).tensors(torch.float32, beta=True) | {"k": keys[:, :, S:].clone()}
    if S:
        tensors["k_past"] = keys[:, :, :S].clone()
    weight = randn(1, 2, 300, 3)
    truth, plain = (evaluate(oracles.precondition, x, weight, norm="row_max") for x in (widened(tensors), tensors))
    largest = (keys @ keys.mT).max().item() * 4**-0.5
    assert largest > 500
    # A score σ in float32 is uncertain by σ · 2⁻²⁴, and so is its exponential.
    ours = evaluate(precondition, tensors, weight, norm="row_max")
    assert_as_good_as(ours, plain, truth, floor=4 * largest * 2**-24)


@pytest.mark.parametrize("kind", ["plain", "past", "masked", "packed"])
@pytest.mark.parametrize("scale", [0.1, 2, 0, -0.5])
def test_the_scale_is_that_of_the_softmax_and_not_of_p(scale, kind):
    tensors = Case(T=40, G=2, D=4, S=9 if kind == "past" else 0).tensors()
    options = {"scale": scale}
    if kind == "masked":
        options["key_mask"] = torch.rand(1, 40) > 0.2
    if kind == "packed":
        options["cu_seqlens"] = torch.tensor([0, 11, 40])
    weight = randn(1, 4, 40, 3)
    truth = evaluate(oracles.lucid_attention, tensors, weight, **options)
    assert_exact(evaluate(lucid_attention, tensors, weight, **options), truth)
