"""PaTH and LUCID-PaTH against explicit products of Householder factors, other people's code and closed forms."""

import pytest
import torch
import torch.nn.functional as F

from lucid_attention.ops.lucid.api import lucid_attention, precondition
from lucid_attention.ops.path import blockwise, tree
from lucid_attention.ops.path.api import lucid_path_attention, path_attention, path_precondition
from lucid_attention.ops.softmax import strips
from lucid_attention.ops.triangular import Schedule

from .cases import assert_exact, error
from .path_cases import OPERATORS, PathCase, call, evaluate, truth
from .test_outside_witnesses import naive

CASES = [
    PathCase(T=1, B=2, G=2),
    PathCase(T=5, B=2, G=2, D=1, E=4),
    PathCase(T=63, G=3, D=7, beta="edges"),
    PathCase(T=64, B=2, keys="close", w="repeated", beta="small"),
    PathCase(T=65, G=2, keys="repeated", w="equal", beta="2"),
    PathCase(T=128, B=2, D=3, E=8, beta="edges"),
    PathCase(T=129, H=1, G=2, D=8, keys="equal", beta="small"),
    PathCase(T=200, H=3, keys="runs", w="runs", beta="edges"),
    PathCase(T=256, G=2, D=9, keys="close"),
    PathCase(T=257, H=1, D=4, E=7, keys="repeated", beta="small"),
    PathCase(T=513, H=1, G=2, D=4, w="close", beta="2"),
    PathCase(T=700, H=1, D=4, keys="closest", w="repeated", beta="small"),
    PathCase(T=1100, H=1, D=6, w="runs", beta="small"),
    PathCase(T=70, S=9, B=2, G=2, keys="close", beta="edges"),
    PathCase(T=300, S=70, H=1, G=2, D=4, E=6, beta="small"),
    PathCase(T=3, S=300, B=2, G=2, D=7, beta="2"),
    PathCase(T=600, S=1, H=1, D=4, keys="repeated", beta="small"),
]


@pytest.mark.parametrize(
    ("case", "operator"),
    # The long ones for its two parts only.
    [pytest.param(c, name, id=f"{name}-{c}") for c in CASES for name in OPERATORS if name != "lucid_path" or c.T < 500],
)
def test_outputs_and_all_gradients_are_those_of_the_explicit_product(case, operator):
    tensors, weight = case.tensors(operator, sharpness=True), case.weight(operator)
    expected = evaluate(truth, operator, tensors, weight)
    assert_exact(evaluate(call, operator, tensors, weight), expected)
    if case.T < 500:
        assert_exact(evaluate(call, operator, tensors, weight, impl="reference"), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_right_where_w_has_any_length_and_beta_any_size(operator):
    """They do not assume ‖w‖ = 1: a learned w is normalised outside."""
    case = PathCase(T=6, D=3, E=2)
    tensors, weight = case.tensors(operator), case.weight(operator)
    tensors["w"] *= torch.rand_like(tensors["beta"])[..., None] + 0.5
    tensors["beta"] -= 0.7
    assert_exact(evaluate(call, operator, tensors, weight), evaluate(truth, operator, tensors, weight))


@pytest.mark.parametrize("scale", [0.0, -0.7, 2.5])
@pytest.mark.parametrize("operator", ["path", "lucid_path"])
def test_the_scale_is_that_of_the_scores(operator, scale):
    case = PathCase(T=150, G=2, S=4)
    tensors, weight = case.tensors(operator), case.weight(operator)
    expected = evaluate(truth, operator, tensors, weight, scale=scale)
    assert_exact(evaluate(call, operator, tensors, weight, scale=scale), expected)


@pytest.mark.parametrize("sharpness", [1e-3, 0.3, 39.0, 41.0, 700.0])
@pytest.mark.parametrize("operator", ["lucid_path", "precondition"])
def test_the_sharpness_may_be_any_positive_number(operator, sharpness):
    case = PathCase(T=300, H=1, keys="repeated", beta="edges", w="repeated")
    tensors, weight = case.tensors(operator), case.weight(operator)
    expected = evaluate(truth, operator, tensors, weight, sharpness=sharpness)
    assert_exact(evaluate(call, operator, tensors, weight, sharpness=sharpness), expected, tolerance=1e-10)
    one = torch.tensor([sharpness], dtype=torch.float64)
    assert error(call(operator, tensors, sharpness=one), expected["out"]) < 1e-11


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", [c for c in CASES if c.T in (65, 257, 700) or c.S > 50], ids=str)
def test_without_the_flash_kernel_plain_products_give_the_same(case, operator, monkeypatch):
    monkeypatch.setattr(strips, "flash_kernel_for", lambda x: False)
    monkeypatch.setattr(strips, "RECTANGLE_ELEMENTS", 5000)  # several strips, the last one shorter
    tensors, weight = case.tensors(operator), case.weight(operator)
    assert_exact(evaluate(call, operator, tensors, weight), evaluate(truth, operator, tensors, weight))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("S", [0, 3])
# In blocks of 16: whole and broken ones, joins of incomplete nodes on one and several levels, alone and after others.
@pytest.mark.parametrize("T", [5, 16, 17, 33, 50, 90, 112, 161, 176, 200, 231])
def test_trees_of_every_shape_are_those_of_the_explicit_product(T, S, operator, monkeypatch):
    """Leaves of 4 positions instead of 64: as many levels as thousands of tokens would have."""
    monkeypatch.setattr(tree, "LEAF", 4)
    assert tree.Layout.of(T).leaves == -(-T // 4)
    case = PathCase(T=T, S=S, H=1, G=2, D=3, beta="small", keys="close")
    tensors, weight = case.tensors(operator), case.weight(operator)
    assert_exact(evaluate(call, operator, tensors, weight), evaluate(truth, operator, tensors, weight))


def test_how_much_is_in_flight_changes_nothing(monkeypatch):
    case = PathCase(T=530, B=3, H=3, G=2, S=20, D=3, beta="small")
    tensors, weight = case.tensors("lucid_path", sharpness=True), case.weight("lucid_path")
    expected = evaluate(call, "lucid_path", tensors, weight)
    for heads, elements in ((1, 1), (2, 256 * 300), (4, 10**6), (9, 256 * 256)):
        schedule = Schedule(heads, 256, elements)
        monkeypatch.setattr(blockwise, "pick_schedule", lambda *args, picked=schedule: picked)
        assert_exact(evaluate(call, "lucid_path", tensors, weight), expected)


@pytest.mark.parametrize(("T", "G"), [(1, 1), (64, 2), (150, 2), (600, 1)])
def test_path_attention_is_that_of_flash_linear_attention(T, G):
    case = PathCase(T=T, B=2, G=G, D=16, E=16)
    tensors = case.tensors("path", torch.float32)
    args = [x.transpose(1, 2) for x in tensors.values()]
    theirs = naive("path_attn").naive_path_attn(*args, torch.zeros(2, T, 2 * G), 0.25).transpose(1, 2)
    assert error(path_attention(**tensors), theirs) < 3e-6
    if T > 1:
        plain = tensors | {"beta": 0 * tensors["beta"]}
        assert error(path_attention(**plain), theirs) > 0.03


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("T", [1, 70, 600])
def test_without_factors_it_is_plain_attention_and_plain_lucid(T, impl):
    tensors = PathCase(T=T, B=2, G=2, D=6, keys="close", beta="0").tensors("path")
    q, k, v = (tensors[name] for name in "qkv")
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert error(path_attention(**tensors, impl=impl), plain) < 1e-12
    assert error(lucid_path_attention(**tensors, impl=impl), lucid_attention(q, k, v)) < 1e-12
    tensors.pop("q")
    for sharpness in (None, 0.5, torch.tensor([0.5, 3.0], dtype=torch.float64)):
        y = path_precondition(**tensors, sharpness=sharpness, impl=impl)
        assert error(y, precondition(k, v, sharpness=sharpness)) < 1e-12
