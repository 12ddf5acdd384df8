"""Heads divided over threads of Python."""

import os
import threading

import pytest
import torch

from lucid_attention import precondition
from lucid_attention.ops.threads import _pool, in_threads

from .cases import Case


@pytest.fixture(params=[2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("T", [9, 300])
def test_the_solve_and_its_gradients_are_those_of_one_thread(T, threads):
    def run(count):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        x = Case(T=T, B=2, H=4, D=4).tensors(beta=True)
        x = {name: x[name].requires_grad_() for name in ("k", "v", "beta")}
        sharpness = torch.tensor([0.7, 1.1, 1.5, 1.9], dtype=torch.float64, requires_grad=True)
        y = precondition(x["k"], x["v"], beta=x["beta"], sharpness=sharpness)
        y.square().sum().backward()
        return [y.detach(), sharpness.grad, *(tensor.grad for tensor in x.values())]

    for got, expected in zip(run(threads), run(1), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_threads_follow_inference_mode_and_keep_the_number_of_threads(threads):
    x = Case(T=300, B=1, H=4).tensors()
    with torch.inference_mode():
        y = precondition(x["k"].clone(), x["v"].clone())
    torch.testing.assert_close(y.clone(), precondition(x["k"], x["v"]))
    assert torch.get_num_threads() == threads


def test_an_error_in_a_thread_is_raised(threads):
    def fail(item):
        if item == 7:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        in_threads(fail, range(8), threads)
    assert torch.get_num_threads() == threads


def test_nobody_waits_for_a_thread_that_has_not_started(threads):
    gate, here, done = threading.Event(), threading.get_ident(), []

    def work(item):
        done.append((item, threading.get_ident()))

    # The pool has as many threads as the machine has processors: all are busy until the gate opens.
    busy = [_pool(os.getpid()).submit(gate.wait, 60) for _ in range(os.cpu_count() or 1)]
    in_threads(work, range(5), threads)
    assert done == [(item, here) for item in range(5)]
    assert not any(other.done() for other in busy)
    gate.set()
