"""Linear memory: no T × T tensor is ever made, and what is kept for the backward pass grows with T alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lucid_attention import lucid_attention, precondition

from .cases import Case, call

T = 5120
KINDS: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case(T=T, H=1, D=4, E=4), {}),
    "grouped": (Case(T=T, H=1, G=2, D=4, E=3), {}),
    "masked": (Case(T=T, H=1, D=4, E=4), {"key_mask": torch.arange(T)[None] >= 500}),
    "past": (Case(T=4500, S=4500, H=1, D=4, E=4), {}),
    "packed": (Case(T=T, H=1, D=4, E=4), {"cu_seqlens": torch.tensor([0, 3000, 3001, T])}),
    "row_max": (Case(T=T, H=1, D=4, E=4), {"norm": "row_max"}),
}


def largest_allocation(run: Callable[[], None]) -> int:
    """Bytes of the largest allocation that survives an operation, also inside custom operators."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    return max(event.self_cpu_memory_usage for event in record.events())


def forward_and_backward(case: Case, **options: Any) -> Callable[[], None]:
    tensors = {name: x.requires_grad_() for name, x in case.tensors(torch.float32, beta=True).items()}
    return lambda: call(lucid_attention, tensors, **options).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_no_square_tensor_is_made(kind):
    case, options = KINDS[kind]
    square = 4 * case.T * (case.S + case.T)
    assert largest_allocation(forward_and_backward(case, **options)) < square / 8


@pytest.mark.parametrize("length", [64, 512])
def test_the_check_above_sees_the_square_of_the_dense_reference(length):
    run = forward_and_backward(Case(T=length, H=1, D=4, E=4), impl="reference")
    assert largest_allocation(run) >= 4 * length * length


def test_the_solve_does_not_keep_its_values_for_the_backward_pass():
    tensors = Case(T=64, H=2, D=4, E=4).tensors()
    k, v = (tensors[name].requires_grad_() for name in "kv")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        y = precondition(k, v)
    assert k.data_ptr() in kept
    assert v.data_ptr() not in kept
    truth = torch.autograd.grad(precondition(k, v, impl="reference").square().sum(), (k, v))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (k, v)), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_for_the_backward_pass_is_linear(kind):
    case, options = KINDS[kind]
    tensors = {name: x.requires_grad_() for name, x in case.tensors(torch.float32, beta=True).items()}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() / 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call(lucid_attention, tensors, **options)
    per_token = sum(kept.values()) / (case.S + case.T)
    # q, k, v, y, z, o and their padded or joined copies, a few numbers each.
    assert 4 * case.D <= per_token <= 40 * case.D
