"""Keys at the edge: zero, equal, in runs, opposite, tiny, huge."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition

from . import oracles
from .cases import Case, assert_as_good_as, assert_exact, error, evaluate, keys_of, shifted_keys, upstream, widened


@pytest.mark.parametrize("zeros", [[0], [36], [3, 4, 5, 20], list(range(37))], ids=["first", "last", "some", "all"])
@pytest.mark.parametrize("fn", [precondition, lucid_attention])
def test_a_zero_key_is_orthogonal_to_every_key_and_has_no_gradient_in_p(fn, zeros):
    tensors = Case(T=37, B=2, D=4).tensors(beta=True, sharpness=True)
    tensors["k"][:, :, zeros] = 0
    oracle = oracles.precondition if fn is precondition else oracles.lucid_attention
    weight = upstream(tensors, precondition)
    ours = evaluate(fn, tensors, weight)
    assert_exact(ours, evaluate(oracle, tensors, weight))
    if fn is precondition:
        assert (ours["dk"][:, :, zeros] == 0).all()


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("norm", ["qk", "row_max"])
def test_zero_keys_and_queries_are_finite_in_the_other_norms(norm, impl):
    tensors = Case(T=40, B=2, D=4).tensors()
    tensors["k"][:, :, 7:9] = 0
    tensors["q"][:, :, 5] = 0
    for name, x in evaluate(lucid_attention, tensors, upstream(tensors, precondition), norm=norm, impl=impl).items():
        assert x.isfinite().all(), name


@pytest.mark.parametrize("D", [1, 4, 64])
@pytest.mark.parametrize("T", [64, 256, 1100])
def test_equal_keys_keep_their_accuracy_in_float32(T, D):
    """Where a solve by powers of L (Neumann) would lose every digit: they grow like binomial coefficients."""
    k, v = keys_of("equal", 1, 1, T, D, dtype=torch.float32), torch.randn(1, 1, T, 3)
    expected = torch.cat([v[:, :, :1], v.diff(dim=2)], 2)
    assert error(precondition(k, v), expected) < 3e-5


@pytest.mark.parametrize("kind", ["equal", "repeated", "runs"])
@pytest.mark.parametrize("D", [4, 68])
def test_repeated_keys_have_a_small_gradient_and_ours_is_as_small(kind, D):
    """The true dk of equal keys nearly vanishes: errors count in units of dk on ordinary keys."""
    tensors = Case(T=600, D=D, keys=kind).tensors(torch.float32)
    ordinary = Case(T=600, D=D).tensors()
    weight = upstream(tensors, precondition)
    unit = evaluate(oracles.precondition, ordinary, weight)["dk"].abs().max().item()
    truth, plain = (evaluate(oracles.precondition, x, weight) for x in (widened(tensors), tensors))
    ours = evaluate(precondition, tensors, weight)
    assert_as_good_as(ours, plain, truth, dk=unit)
    if kind == "equal":
        assert ours["dk"].abs().max() < 1e-4 * unit


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("size", [0.01, 1e-20, 1e-36, 1e18, 1e37], ids=lambda x: f"{x:g}")
def test_the_length_of_keys_does_not_reach_the_values(size, impl):
    """No eps in the norm, and no square that overflows or vanishes, in float32."""
    tensors = Case(T=300, D=8).tensors(torch.float32)
    weight = upstream(tensors, precondition)
    plain = evaluate(precondition, tensors, weight)
    scaled = evaluate(precondition, tensors | {"k": tensors["k"] * size}, weight, impl=impl)
    scale = torch.tensor(size, dtype=torch.float64)
    assert error(scaled["out"], plain["out"]) < 1e-5
    assert error(scaled["dv"], plain["dv"]) < 1e-5
    if 1e-30 < size < 1e30:  # beyond, dk itself leaves float32
        assert error(scaled["dk"].double() * scale, plain["dk"]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_16_bit_keys_keep_their_direction(dtype):
    """In float16 squares below 1e-7 vanish; they are taken in float32."""
    k, v = (shifted_keys(1, 2, 200, 8) / 4096).to(dtype), torch.randn(1, 2, 200, 3).to(dtype)
    enlarged = precondition(k.float() * 4096, v.float()).to(dtype)  # exact: a power of two
    torch.testing.assert_close(precondition(k, v), enlarged, rtol=0, atol=0)
