"""At least float32 inside, the caller's dtype outside: 16-bit results are rounded, not computed in 16 bits.

The truth is float64 on the inputs as they were rounded, so that what is measured is only what the operator adds.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lucid_attention import lucid_attention, precondition

from . import oracles
from .cases import Case, assert_as_good_as, call, error, evaluate, widened

# Unit roundoff: the relative error of one rounding.
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}
LOW = [torch.bfloat16, torch.float16]
KINDS = {
    "plain": (Case(T=600, B=2, G=2, D=16, E=8, keys="close"), {}),
    "closest": (Case(T=300, G=2, D=64, E=64, keys="closest"), {}),
    "runs": (Case(T=300, G=2, D=64, E=64, keys="runs"), {}),
    "past": (Case(T=300, S=300, B=2, G=2, D=16, E=8, keys="close"), {}),
    "masked": (Case(T=300, B=2, G=2, D=16, E=8, keys="close"), {"key_mask": torch.arange(600).view(2, 300) % 400 > 9}),
    "packed": (Case(T=600, G=2, D=16, E=8, keys="close"), {"cu_seqlens": torch.tensor([0, 300, 301, 420, 600])}),
    "qk": (Case(T=300, G=2, D=16, E=8, keys="close"), {"norm": "qk"}),
    "row_max": (Case(T=300, G=2, D=16, E=8), {"norm": "row_max"}),
}  # fmt: skip


def norm_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_values_and_their_gradients_are_rounded_once(dtype, kind):
    """y and dv carry one rounding to 16 bits and a little float32: not the errors of a 16-bit P or solve."""
    case, options = KINDS[kind]
    tensors = case.tensors(dtype)
    weight = torch.randn(case.B, case.H, case.T, case.E).to(dtype)
    ours = evaluate(precondition, tensors, weight, **options)
    truth = evaluate(oracles.precondition, widened(tensors), weight.double(), **options)
    for name in ("out", "dv"):
        off = (ours[name].double() - truth[name]).abs()
        allowed = 1.01 * UNIT[dtype] * truth[name].abs() + 1e-4 * truth[name].abs().max()
        assert (off <= allowed).all(), f"{name}: {(off - allowed).max():.2e} too far"


def plain(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What one writes by hand: the solve in float32, y rounded, the read-out in `dtype` from start to end."""

    def lucid_attention(q, k, v, past=None, beta=None, norm="key", **masking):
        old = None if past is None else tuple(x.float() for x in past)
        steps = None if beta is None else beta.float()
        y = oracles.precondition(k.float(), v.float(), past=old, beta=steps, norm=norm, **masking).to(dtype)
        if past is not None:
            k, y = torch.cat([past[0], k], 2), torch.cat([past[1].to(dtype), y], 2)
        if norm == "qk":
            q, k = (F.rms_norm(x.float(), x.shape[-1:], eps=0.0) for x in (q, k))
        return oracles.read_out(q.to(dtype), k.to(dtype), y, **masking)

    return lucid_attention


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_attention_in_16_bits_is_as_good_as_the_plain_formula(dtype, kind):
    """dq is a sum of nearly equal keys with weights that add up to zero: in 16 bits few of its digits are left."""
    case, options = KINDS[kind]
    tensors = case.tensors(dtype, beta=True)
    weight = torch.randn(case.B, case.H * case.G, case.T, case.E).to(dtype)
    truth = evaluate(oracles.lucid_attention, widened(tensors), weight.double(), **options)
    by_hand = evaluate(plain(dtype), tensors, weight, **options)
    ours = evaluate(lucid_attention, tensors, weight, **options)
    assert_as_good_as(ours, by_hand, truth, multiple=2, floor=UNIT[dtype])
    assert {x.dtype for x in ours.values()} == {dtype}
    assert norm_error(ours["out"], truth["out"]) <= 2 * UNIT[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_gradient_of_the_solve_is_a_few_roundings_from_the_truth(dtype, kind):
    """y is kept in 16 bits for the backward pass, so some of these have a rounding more than dv."""
    case, options = KINDS[kind]
    tensors = case.tensors(dtype, beta=True, sharpness=True)
    weight = torch.randn(case.B, case.H, case.T, case.E).to(dtype)
    ours = evaluate(precondition, tensors, weight, **options)
    truth = evaluate(oracles.precondition, widened(tensors), weight.double(), **options)
    assert {x.dtype for x in ours.values()} == {dtype}
    errors = {name: norm_error(ours[name], truth[name]) / UNIT[dtype] for name in truth}
    if kind == "runs":
        del errors["dk"], errors["dsharpness"]  # nearly zero: see the next test
    assert all(e <= 3 for e in errors.values()), f"{errors} units"


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_vanishing_gradients_of_repeated_keys_are_small_also_in_16_bits(dtype):
    case, _ = KINDS["runs"]
    tensors = case.tensors(dtype, sharpness=True)
    weight = torch.randn(1, case.H, case.T, case.E).to(dtype)
    ordinary = evaluate(oracles.precondition, Case(T=300, D=64, E=64).tensors(sharpness=True), weight)
    truth = evaluate(oracles.precondition, widened(tensors), weight.double())
    ours = evaluate(precondition, tensors, weight)
    for name in ("dk", "dsharpness"):
        assert error(ours[name], truth[name], ordinary[name].abs().max().item()) <= 3 * UNIT[dtype], name


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_feeding_back_a_rounded_cache_costs_at_most_twice_its_rounding(dtype):
    """‖P⁻¹‖ ≤ 2: errors of a 16-bit y_past do not grow along the sequence."""
    case = Case(T=600, H=1, D=16, E=8, keys="close")
    k, v = (case.tensors(dtype)[name] for name in "kv")
    y = v[:, :, :0]
    for t in range(0, 600, 20):
        new = precondition(k[:, :, t : t + 20], v[:, :, t : t + 20], past=(k[:, :, :t], y))
        y = torch.cat([y, new], 2)
    truth = oracles.precondition(k.double(), v.double())
    assert norm_error(y, truth) <= 2 * UNIT[dtype]


@pytest.mark.parametrize("kind", ["plain", "past", "masked", "packed", "row_max"])
def test_autocast_changes_the_read_out_as_it_does_for_sdpa_and_the_solve_not_at_all(kind):
    case, options = KINDS[kind]
    tensors = case.tensors(torch.float32, beta=True)
    dy, do = (torch.randn(case.B, heads, case.T, case.E) for heads in (case.H, case.H * case.G))
    outside = evaluate(precondition, tensors, dy, **options)
    with torch.autocast("cpu", torch.bfloat16):
        inside = evaluate(precondition, tensors, dy, **options)
        ours = evaluate(lucid_attention, tensors, do, **options)
        assert call(lucid_attention, tensors, impl="reference", **options).dtype == torch.bfloat16
        y = call(precondition, tensors, impl="reference", **options)
        wide = call(lucid_attention, widened(tensors), **options)
    torch.testing.assert_close(y, outside["out"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(wide, call(lucid_attention, widened(tensors), **options), rtol=0, atol=0)
    for name, x in outside.items():
        torch.testing.assert_close(inside[name], x, rtol=0, atol=0)
    dtypes = {name: torch.bfloat16 if name == "out" else torch.float32 for name in ours}
    assert {name: x.dtype for name, x in ours.items()} == dtypes
    truth = evaluate(oracles.lucid_attention, widened(tensors), do, **options)
    by_hand = evaluate(plain(torch.bfloat16), tensors, do, **options)
    assert_as_good_as(ours, by_hand, truth, multiple=2, floor=UNIT[torch.bfloat16])
