"""At least float32 inside, the caller's dtype outside, the state in working precision, whatever autocast says."""

import pytest
import torch

from .cases import assert_as_good_as, widened
from .linear_cases import OPERATORS, Sizes, call, evaluate, truth

UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SIZE = Sizes(T=200, H=1, G=2, D=16, E=8, keys="close")


def working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *UNIT], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_outputs_and_gradients_have_their_dtypes(operator, dtype):
    for T in (1, 70):
        for impl in ("chunkwise", "reference"):
            tensors = Sizes(T=T).tensors(operator, state=True, dtype=dtype)
            results = evaluate(call, operator, tensors, impl=impl)
            for name, x in results.items():
                wide = name in ("out1", "out2") or name.startswith("dstate")
                assert x.dtype == (working(dtype) if wide else dtype), name


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_16_bits_are_rounded_once_and_better_than_plain(operator, dtype):
    tensors = SIZE.tensors(operator, state=True, dtype=dtype)
    expected = evaluate(truth, operator, widened(tensors))
    ours = evaluate(call, operator, tensors)
    by_hand = evaluate(truth, operator, {name: x.to(dtype) for name, x in tensors.items()})
    assert_as_good_as(ours, by_hand, expected, multiple=1, floor=UNIT[dtype])
    for name in ("out0", "dq", "dk", "dv"):
        off = (ours[name].double() - expected[name]).abs()
        allowed = 1.01 * UNIT[dtype] * expected[name].abs() + 1e-4 * expected[name].abs().max()
        assert (off <= allowed).all(), f"{name}: {(off - allowed).max():.2e} too far"
    for name in ("out1", "out2"):
        if name in expected:
            torch.testing.assert_close(ours[name].double(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["chunkwise", "reference"])
@pytest.mark.parametrize("T", [1, 200])
@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast_rounds_the_output_and_nothing_else(operator, T, impl):
    tensors = Sizes(T=T, G=2, D=16, E=8).tensors(operator, state=True, dtype=torch.float32)
    o, *state = call(operator, tensors, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, *same = call(operator, tensors, impl=impl)
        mixed = dict(tensors, q=tensors["q"].bfloat16(), v=tensors["v"].bfloat16())
        assert call(operator, mixed, impl=impl)[0].dtype == torch.bfloat16
    torch.testing.assert_close(narrow, o.bfloat16(), rtol=0, atol=0)
    for a, b in zip(same, state, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_under_autocast_are_as_good_as_plain(operator):
    tensors = SIZE.tensors(operator, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = evaluate(call, operator, tensors)
    by_hand = evaluate(truth, operator, widened(tensors, torch.bfloat16))
    assert_as_good_as(ours, by_hand, evaluate(truth, operator, widened(tensors)), multiple=1, floor=2**-8)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float64_stays_float64_under_autocast(operator):
    tensors = Sizes(T=70).tensors(operator, state=True)
    expected = call(operator, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(call(operator, tensors), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gates_may_be_wider_than_keys(operator):
    tensors = SIZE.tensors(operator, dtype=torch.bfloat16)
    wide = {name: x.float() if name in ("beta", "log_decay", "s") else x for name, x in tensors.items()}
    for a, b in zip(call(operator, wide), call(operator, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
