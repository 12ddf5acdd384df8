"""PaTH's gradients: for any w, one at a time, and of second order."""

import pytest
import torch
from torch.autograd import gradgradcheck

from .cases import assert_exact, error
from .path_cases import OPERATORS, PathCase, call, evaluate, truth

MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 0]]).bool()
KINDS = {
    "plain": (PathCase(T=6, G=2, D=3, E=2), {}),
    "past and mask": (PathCase(T=5, S=3, B=2, G=2, H=1, D=3, E=2), {"key_mask": MASK}),
    "packed": (
        PathCase(T=9, D=3, E=2),
        {"cu_seqlens": torch.tensor([0, 1, 5, 5, 9]), "key_mask": torch.arange(9)[None] != 3},
    ),
}


def positional(operator, tensors, **options):
    def function(*values: torch.Tensor) -> torch.Tensor:
        return call(operator, dict(zip(tensors, values, strict=True)), **options)

    return function, [x.clone().requires_grad_() for x in tensors.values()]


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_right_where_w_has_any_length_and_beta_any_size(operator):
    """They do not assume ‖w‖ = 1: a learned w is normalised outside."""
    case = PathCase(T=6, D=3, E=2)
    tensors, weight = case.tensors(operator), case.weight(operator)
    tensors["w"] *= torch.rand_like(tensors["beta"])[..., None] + 0.5
    tensors["beta"] -= 0.7
    assert_exact(evaluate(call, operator, tensors, weight), evaluate(truth, operator, tensors, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reference_has_second_derivatives(operator, kind):
    case, options = KINDS[kind]
    tensors = case.tensors(operator, sharpness=True)
    assert gradgradcheck(*positional(operator, tensors, **options, impl="reference"), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_double_backward_is_refused_and_the_message_says_what_to_use(operator, kind):
    case, options = KINDS[kind]
    function, inputs = positional(operator, case.tensors(operator, sharpness=True), **options)
    for x in inputs:
        (dx,) = torch.autograd.grad(function(*inputs).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no second derivative.*impl='reference'"):
            dx.sum().backward()


@pytest.mark.parametrize("operator", OPERATORS)
def test_forward_mode_is_right_in_the_reference_and_refused_elsewhere(operator):
    tensors = PathCase(T=7, S=3, D=3).tensors(operator, sharpness=True)
    for name, x in tensors.items():
        tangent = torch.randn_like(x)

        def of(x: torch.Tensor, impl: str, name: str = name) -> torch.Tensor:
            return call(operator, tensors | {name: x}, impl=impl)

        _, forward = torch.func.jvp(lambda x, of=of: of(x, "reference"), (x,), (tangent,))
        difference = (of(x + 1e-6 * tangent, "blockwise") - of(x - 1e-6 * tangent, "blockwise")) / 2e-6
        assert error(forward, difference) < 1e-6, name
        with pytest.raises(RuntimeError, match=r"no forward-mode derivative.*impl='reference'"):
            torch.func.jvp(lambda x, of=of: of(x, "blockwise"), (x,), (tangent,))


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_gradient_asked_for_alone_is_the_one_asked_for_with_the_others(operator):
    case = PathCase(T=70, G=2, S=7, D=4)
    tensors, weight = case.tensors(operator, sharpness=True), case.weight(operator)
    together = evaluate(call, operator, tensors, weight)
    for alone in tensors:
        only = {name: x.clone().requires_grad_(name == alone) for name, x in tensors.items()}
        call(operator, only).backward(weight)
        torch.testing.assert_close(only[alone].grad, together[f"d{alone}"], rtol=1e-12, atol=1e-12)
        assert all(x.grad is None for name, x in only.items() if name != alone)


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_expanded_or_strided_upstream_gradient_is_read_rightly(operator):
    case = PathCase(T=300, B=2, G=2, S=3, D=3)
    tensors, shape = case.tensors(operator), case.weight(operator).shape
    dense = evaluate(call, operator, tensors, torch.ones(shape))
    assert_exact(evaluate(call, operator, tensors, torch.ones(1, dtype=torch.float64).expand(shape)), dense)
    weight = case.weight(operator)
    across = weight.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    assert_exact(evaluate(call, operator, tensors, across), evaluate(call, operator, tensors, weight))
