"""Every operator with a state, each implementation, against its recurrence: outputs, states and every gradient."""

import pytest
import torch

from lucid_attention.ops.linear import chunks

from .cases import along_random_directions, assert_as_good_as, assert_exact, widened
from .linear_cases import OPERATORS, Sizes, call, evaluate, truth

SIZES = [
    Sizes(T=1, B=2, G=2),
    Sizes(T=2),
    Sizes(T=3, D=1, E=1),
    Sizes(T=37, B=2, G=3, keys="close"),
    Sizes(T=64, H=1, E=7),
    Sizes(T=65, B=2, H=1, G=2, keys="repeated"),
    Sizes(T=150, H=1, D=8, E=4, keys="runs"),
]


@pytest.fixture(params=["usual", "small"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Also with chunks and segments so small that short examples have several of both."""
    if request.param == "small":
        monkeypatch.setattr(chunks, "CHUNK", 4)
        monkeypatch.setattr(chunks, "CPU_SEGMENT", 24)
    return request.param


@pytest.mark.parametrize("state", [False, True], ids=["empty", "state"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_chunks_compute_the_recurrence(operator, size, state, chunk_size):
    tensors = size.tensors(operator, state=state)
    assert_exact(evaluate(call, operator, tensors), evaluate(truth, operator, tensors))


@pytest.mark.parametrize("size", [SIZES[0], SIZES[3]], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reference_is_the_recurrence(operator, size):
    tensors = size.tensors(operator, state=True)
    expected = evaluate(truth, operator, tensors, scale=-0.7)
    assert_exact(evaluate(call, operator, tensors, scale=-0.7, impl="reference"), expected)
    assert_exact(evaluate(call, operator, tensors, scale=-0.7, impl="chunkwise"), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float32_is_as_good_as_the_recurrence_in_float32(operator):
    tensors = Sizes(T=300, H=1, D=16, E=8, keys="close").tensors(operator, state=True, dtype=torch.float32)
    expected = evaluate(truth, operator, widened(tensors))
    plain = evaluate(truth, operator, tensors)
    assert_as_good_as(evaluate(call, operator, tensors), plain, expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradcheck(operator, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 4)
    tensors = Sizes(T=6, H=1, G=2, D=2, E=2).tensors(operator, state=True)
    leaves = [x.clone().requires_grad_() for x in tensors.values()]

    def fn(*args):
        return call(operator, dict(zip(tensors, args, strict=True)), impl="chunkwise")

    assert along_random_directions(fn, leaves)
    assert torch.autograd.gradgradcheck(fn, leaves, fast_mode=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_layout_does_not_matter_and_inputs_are_left_alone(operator):
    tensors = Sizes(T=70, B=2, G=2).tensors(operator, state=True)
    expected = call(operator, tensors)
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    copies = {name: x.clone() for name, x in strided.items()}
    for a, b in zip(call(operator, strided), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for name, x in strided.items():
        torch.testing.assert_close(x, copies[name], rtol=0, atol=0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_same_tensor_may_be_handed_over_by_expansion(operator):
    tensors = Sizes(T=70, H=1).tensors(operator)
    expanded = {name: x.expand(3, *x.shape[1:]) for name, x in tensors.items()}
    for a, b in zip(call(operator, expanded), call(operator, tensors), strict=True):
        torch.testing.assert_close(a, b.expand_as(a), rtol=1e-12, atol=1e-12)
