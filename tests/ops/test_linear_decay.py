"""Decays of any strength: complete forgetting has no NaN, and weak decay after strong loses no digits."""

import pytest
import torch

from .cases import assert_as_good_as, assert_exact, widened
from .linear_cases import Sizes, call, evaluate, truth

GATED = ["gated_delta", "gla", "gsa"]
SIZE = Sizes(T=150, H=1, G=2, keys="close")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("strength", [20.0, 2000.0, 1e30])
@pytest.mark.parametrize("operator", GATED)
def test_strong_decay(operator, strength, dtype):
    """exp(−Σ log decay) over a chunk would be infinite in every dtype."""
    tensors = SIZE.tensors(operator, state=True, dtype=dtype)
    tensors["log_decay"] = -strength * torch.rand_like(tensors["log_decay"])
    expected = evaluate(truth, operator, widened(tensors))
    if dtype == torch.float64:
        assert_exact(evaluate(call, operator, tensors), expected)
    else:
        assert_as_good_as(evaluate(call, operator, tensors), evaluate(truth, operator, tensors), expected)


@pytest.mark.parametrize("often", [0.03, 0.5, 1.0])
@pytest.mark.parametrize("impl", ["chunkwise", "reference"])
@pytest.mark.parametrize("operator", GATED)
def test_complete_forgetting_has_a_gradient(operator, impl, often):
    tensors = SIZE.tensors(operator, state=True)
    g = tensors["log_decay"]
    g[torch.rand_like(g) < often] = -torch.inf
    ours, expected = evaluate(call, operator, tensors, impl=impl), evaluate(truth, operator, tensors)
    assert_exact(ours, expected)
    assert (ours["dlog_decay"][g.isinf()] == 0).all()


@pytest.mark.parametrize("operator", GATED)
def test_forgetting_completely_is_starting_anew(operator):
    tensors = SIZE.tensors(operator, state=True)
    tensors["log_decay"][:, :, 100] = -torch.inf
    later = {name: x[:, :, 100:] for name, x in tensors.items() if not name.startswith("state")}
    o, *state = call(operator, tensors)
    for a, b in zip((o[:, :, 100:], *state), call(operator, later), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", GATED)
def test_weak_decay_after_strong_decay_keeps_its_digits(operator):
    """In float32 the sum of the log decays of the first tokens is so large that later ones would drown in it."""
    tensors = Sizes(T=64, H=1, D=4, E=4, decay=0.01).tensors(operator, dtype=torch.float32)
    tensors["log_decay"][:, :, :20] *= 1e5
    expected, plain = evaluate(truth, operator, widened(tensors)), evaluate(truth, operator, tensors)
    assert_as_good_as(evaluate(call, operator, tensors), plain, expected, multiple=2, floor=1e-6)


@pytest.mark.parametrize("operator", GATED)
def test_growth_is_allowed(operator):
    """Nothing forbids a log decay above zero, as long as the recurrence itself stays finite."""
    tensors = SIZE.tensors(operator, state=True)
    tensors["log_decay"] = tensors["log_decay"] + 0.35
    expected = evaluate(truth, operator, tensors)
    assert_exact(evaluate(call, operator, tensors), expected, 1e-9)
