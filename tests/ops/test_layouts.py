"""Inputs in any memory layout, and never modified."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition

from .cases import Case, assert_exact, call, evaluate

OPTIONS = {
    "plain": (Case(T=300, B=2, G=2, D=4), {}),
    "past": (Case(T=300, S=20, B=2, G=2, D=4), {}),
    "masked": (Case(T=300, B=2, G=2, D=4), {"key_mask": torch.arange(300).expand(2, 300) % 7 > 0}),
    "packed": (Case(T=300, G=2, D=4), {"cu_seqlens": torch.tensor([0, 3, 3, 290, 300])}),
    "long packed": (Case(T=600, G=2, D=4), {"cu_seqlens": torch.tensor([0, 290, 600])}),
    "row_max": (Case(T=300, B=2, G=2, D=4), {"norm": "row_max"}),
    "reference": (Case(T=300, B=2, G=2, D=4), {"impl": "reference"}),
}


def transposed(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, *] seen as [B, H, T, *]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 1 else x


def part_of_a_projection(x: torch.Tensor) -> torch.Tensor:
    """The middle third of a wider tensor, as q, k, v of one fused projection."""
    return torch.cat([x + 1, x, x - 1], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def column_major(x: torch.Tensor) -> torch.Tensor:
    """What `solve_triangular` returns, among others."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else x


@pytest.mark.parametrize("layout", [transposed, part_of_a_projection, column_major])
@pytest.mark.parametrize("kind", OPTIONS)
def test_strided_inputs_give_what_contiguous_ones_give_and_stay_as_they_were(kind, layout):
    case, options = OPTIONS[kind]
    tensors = case.tensors(beta=True, sharpness=True)
    for fn in (precondition, lucid_attention):
        heads = case.H * (1 if fn is precondition else case.G)
        weight = torch.randn(case.B, heads, case.T, case.E, dtype=torch.float64)
        expected = evaluate(fn, tensors, weight, **options)
        # `evaluate` clones, and a clone keeps strides only if it is dense; so the leaves are laid out inside.
        ours = evaluate(_laid_out(fn, layout), tensors, layout(weight), **options)
        assert_exact(ours, expected)
        strided = {name: layout(x) for name, x in tensors.items()}
        before = {name: x.clone() for name, x in strided.items()}
        call(fn, strided, **options)
        for name, x in strided.items():
            assert torch.equal(x, before[name]), name


def _laid_out(fn, layout):
    def laid_out(**arguments):
        if "past" in arguments:
            arguments["past"] = tuple(layout(x) for x in arguments["past"])
        names = ("q", "k", "v", "beta", "sharpness")
        return fn(**{n: layout(x) if n in names else x for n, x in arguments.items()})

    laid_out.__name__ = fn.__name__
    return laid_out


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_neither_pass_modifies_an_input_or_the_upstream_gradient(dtype, kind):
    """In the working dtype buffers are used in place, where that is a temptation."""
    case, options = OPTIONS[kind]
    tensors = {name: x.requires_grad_() for name, x in case.tensors(dtype, beta=True, sharpness=True).items()}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    for fn in (precondition, lucid_attention):
        out = call(fn, tensors, **options)
        weight = torch.randn_like(out)
        kept, kept_out = weight.clone(), out.detach().clone()
        out.backward(weight)
        assert torch.equal(weight, kept)
        assert torch.equal(out, kept_out)
        for name, x in tensors.items():
            assert torch.equal(x, before[name]), name


@pytest.mark.parametrize("kind", OPTIONS)
def test_two_backward_passes_give_the_same_gradients(kind):
    """What the forward pass kept is not used up by the first backward pass."""
    case, options = OPTIONS[kind]
    tensors = {name: x.requires_grad_() for name, x in case.tensors(beta=True).items()}
    out = call(lucid_attention, tensors, **options)
    weight = torch.randn_like(out)
    first = torch.autograd.grad(out, list(tensors.values()), weight, retain_graph=True)
    second = torch.autograd.grad(out, list(tensors.values()), weight)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
