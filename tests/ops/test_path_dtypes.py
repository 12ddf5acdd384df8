"""PaTH in float32 and below: as good as the plain formula in the same precision, and long contractions stay exact."""

import math

import pytest
import torch

from lucid_attention.ops.path import tree
from lucid_attention.ops.path.tree import key_side, row_side

from .cases import assert_as_good_as, error
from .path_cases import OPERATORS, PathCase, call, evaluate, five_masks

UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
LOW = list(UNIT)
KINDS = {
    "plain": (PathCase(T=300, B=2, G=2, D=16, E=8, keys="close", beta="small"), {}),
    "uniform": (PathCase(T=300, G=2, D=32, E=32, keys="repeated"), {}),
    "reflections": (PathCase(T=300, G=2, D=16, E=8, keys="close", beta="2"), {}),
    "past": (PathCase(T=150, S=100, B=2, D=16, E=8, keys="close", beta="small"), {}),
    "masked": (PathCase(T=150, B=5, D=16, E=8, keys="close", beta="small"), {"key_mask": five_masks(150)}),
    "packed": (PathCase(T=300, D=16, E=8, keys="close"), {"cu_seqlens": torch.tensor([0, 270, 271, 300])}),
}


def wide(tensors):
    return {name: x.double() for name, x in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_float32_is_as_good_as_the_plain_formula(operator, kind):
    case, options = KINDS[kind]
    tensors, weight = case.tensors(operator, torch.float32, sharpness=True), case.weight(operator).float()
    exact = evaluate(call, operator, wide(tensors), weight.double(), **options, impl="reference")
    plain = evaluate(call, operator, tensors, weight, **options, impl="reference")
    ours = evaluate(call, operator, tensors, weight, **options)
    assert {name: x.dtype for name, x in ours.items()} == dict.fromkeys(ours, torch.float32)
    if "dsharpness" in ours:
        # A sum over all pairs in which most cancels: a few more digits are lost than in the dense formula.
        assert error(ours.pop("dsharpness"), exact.pop("dsharpness")) < 1e-4
    assert_as_good_as(ours, plain, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bits_come_out_rounded_and_are_not_computed_with(dtype, operator, kind):
    """Against float64 on the rounded inputs: a few roundings of outputs and of what is kept for the backward pass."""
    case, options = KINDS[kind]
    tensors, weight = case.tensors(operator, dtype, sharpness=True), case.weight(operator).to(dtype)
    exact = evaluate(call, operator, wide(tensors), weight.double(), **options)
    ours = evaluate(call, operator, tensors, weight, **options)
    assert {name: x.dtype for name, x in ours.items()} == dict.fromkeys(ours, dtype)
    for name, x in ours.items():
        assert x.isfinite().all(), name
        off = (x.double() - exact[name]).norm() / exact[name].norm().clamp(min=0.1)
        assert off <= 6 * UNIT[dtype], f"{name}: {off / UNIT[dtype]:.1f} units"


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_factors_in_float32_next_to_16_bit_tokens_keep_their_length(operator, impl):
    """β = 2 reflects only if ‖w‖ = 1: rounded to 16 bits, 600 factors would stretch or shrink the keys."""
    case = PathCase(T=600, G=2, D=16, E=8, keys="close", beta="2", H=1)
    tensors, weight = case.tensors(operator, torch.float32), case.weight(operator).bfloat16()
    narrow = {name: x if name in ("w", "beta") else x.bfloat16() for name, x in tensors.items()}
    ours = evaluate(call, operator, narrow, weight, impl=impl)
    assert {n for n, x in ours.items() if x.dtype == torch.float32} == {"dw", "dbeta"}
    exact = evaluate(call, operator, wide(narrow), weight.double())
    for name, x in ours.items():
        off = (x.double() - exact[name]).norm() / exact[name].norm()
        assert off <= 6 * UNIT[torch.bfloat16], name
    rounded = narrow | {"w": narrow["w"].bfloat16().float()}
    assert error(call(operator, wide(rounded)), exact["out"]) > 0.01


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("kind", ["plain", "past", "masked", "packed"])
def test_autocast_narrows_the_output_and_nothing_else(kind, impl):
    case, options = KINDS[kind]
    for operator in OPERATORS:
        tensors, weight = case.tensors(operator, torch.float32), case.weight(operator).bfloat16().float()
        outside, exact = (call(operator, x, impl=impl, **options) for x in (tensors, wide(tensors)))
        with torch.autocast("cpu", torch.bfloat16):
            inside = call(operator, tensors, impl=impl, **options)
            assert torch.equal(call(operator, wide(tensors), impl=impl, **options), exact)
        expected = torch.float32 if operator == "precondition" else torch.bfloat16
        assert inside.dtype == expected
        torch.testing.assert_close(inside, outside.to(expected), rtol=0, atol=0)
        if impl == "blockwise":
            plain = evaluate(call, operator, tensors, weight, **options)
            with torch.autocast("cpu", torch.bfloat16):
                ours = evaluate(call, operator, tensors, weight, **options)
            for name in plain:
                torch.testing.assert_close(ours[name], plain[name].to(ours[name].dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", ["path", "precondition"])
@pytest.mark.parametrize("beta", ["1", "uniform"])
def test_a_long_contraction_loses_nothing_to_denormal_numbers(beta, operator):
    """Keys shrink by orders of magnitude with every token; what falls below eps² is cut, and must not be missed."""
    case = PathCase(T=2000, H=1, D=8, E=4, beta=beta)
    tensors, weight = case.tensors(operator, torch.float32), case.weight(operator).float()
    exact = evaluate(call, operator, wide(tensors), weight.double())
    for name, x in evaluate(call, operator, tensors, weight).items():
        assert error(x, exact[name]) < 1e-5, name
    if beta == "1":
        assert error(exact["out"], call(operator, wide(tensors), impl="reference")) < 1e-12


def test_the_tree_of_a_long_contraction_holds_no_denormal_numbers(monkeypatch):
    """They would slow down every matrix product by an order of magnitude."""
    usual, count, D = tree.CUT_FROM, 32, 5
    q, k, w = (torch.randn(count, 64, D) for _ in range(3))
    unit, beta = torch.nn.functional.normalize(w, dim=-1), torch.full((count, 64, 1), 0.9)
    tiny = torch.finfo(torch.float32).tiny

    def denormal(cut_from: int) -> int:
        monkeypatch.setattr(tree, "CUT_FROM", cut_from)
        made = key_side(k, unit, beta)
        rows, keys, products = (x[None] for x in (row_side(q, k, unit, made).rows, made.k, made.product))
        joins = list(tree.climb([rows], keys, products, keep_below=count, to_the_root=True))
        large = [x for join in joins if join.size * 64 >= 512 for x in (*join.rows, join.k, join.left, join.right)]
        assert len(large) == 8
        return sum(((x != 0) & (x.abs() < tiny)).sum().item() for x in (*large, rows))

    assert denormal(10**9) > 100
    assert denormal(usual) == 0


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6, 1e15], ids=lambda x: f"{x:g}")
@pytest.mark.parametrize("operator", OPERATORS)
def test_small_keys_with_large_queries_and_the_reverse_are_read_as_any_other(operator, size):
    """The scores are the same: only products of query and key count, over any length."""
    tensors = PathCase(T=1100, H=1, D=8, E=4, beta="small").tensors(operator, torch.float32)
    expected = call(operator, tensors)
    scaled = tensors | {"k": size * tensors["k"]}
    if "q" in tensors:
        scaled["q"] = tensors["q"] / size
    assert error(call(operator, scaled), expected) < 1e-5


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_large_scores_do_not_overflow(size):
    case = PathCase(T=300, G=2, D=8, E=4, beta="small", H=1)
    tensors, weight = case.tensors("path", torch.float32), case.weight("path").float()
    tensors["q"] *= size
    exact = evaluate(call, "path", wide(tensors), weight.double(), impl="reference")
    plain = evaluate(call, "path", tensors, weight, impl="reference")
    assert exact["out"].abs().max() < math.inf
    # Scores of this size have few digits after the point, and a softmax in parts rounds them once more.
    assert_as_good_as(evaluate(call, "path", tensors, weight), plain, exact, multiple=10)
