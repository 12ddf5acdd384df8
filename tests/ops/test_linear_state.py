"""The state is all that is left of the past: cutting a sequence anywhere changes nothing, and its cost is linear."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lucid_attention.ops.linear import chunks

from .cases import assert_exact
from .linear_cases import OPERATORS, Sizes, call, evaluate


def in_pieces(operator, tensors, *, cuts, **options):
    """The sequence from cut to cut, each piece from the state of the one before."""
    state = {name: x for name, x in tensors.items() if name.startswith("state")}
    names = sorted(state)
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, tensors["k"].shape[2]], strict=True):
        piece = {name: x[:, :, start:stop] for name, x in tensors.items() if name not in state}
        o, *left = call(operator, piece | state, **options)
        state = dict(zip(names, left, strict=True))
        outputs.append(o)
    return torch.cat(outputs, 2), *state.values()


@pytest.mark.parametrize("cuts", [[1], [64], [63, 64, 65], [40, 41, 129]], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_pieces_equal_the_whole_with_every_gradient(operator, cuts):
    tensors = Sizes(T=140, H=1, G=2, keys="close").tensors(operator, state=True)
    assert_exact(evaluate(in_pieces, operator, tensors, cuts=cuts), evaluate(call, operator, tensors))


@given(st.sampled_from(OPERATORS), st.integers(2, 20), st.integers(0, 2**16), st.data())
def test_splitting_anywhere_equals_the_whole(operator, length, seed, data):
    torch.manual_seed(seed)
    tensors = Sizes(T=length, G=2, D=2, E=2).tensors(operator, state=True)
    cut = data.draw(st.integers(1, length - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", data.draw(st.sampled_from([1, 2, 4, 8, 64])))
        pieces, whole = in_pieces(operator, tensors, cuts=[cut]), call(operator, tensors)
    for a, b in zip(pieces, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@given(st.sampled_from(OPERATORS), st.integers(2, 20), st.integers(0, 2**16), st.data())
def test_future_tokens_do_not_change_the_past(operator, length, seed, data):
    torch.manual_seed(seed)
    tensors = Sizes(T=length, D=2, E=2).tensors(operator)
    cut = data.draw(st.integers(1, length - 1))
    other = {name: torch.cat([x[:, :, :cut], torch.rand_like(x[:, :, cut:]) - 1], 2) for name, x in tensors.items()}
    for a, b in zip(call(operator, tensors)[:1], call(operator, other)[:1], strict=True):
        torch.testing.assert_close(a[:, :, :cut], b[:, :, :cut], rtol=1e-10, atol=1e-10)


class Written(TorchDispatchMode):
    """Counts the elements that operations write, and the operations."""

    elements = operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.elements += x.numel()
            self.operations += 1
        return out


@pytest.mark.parametrize("impl", ["chunkwise", "reference"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_work_grows_linearly_forward_and_backward(operator, impl, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 8)
    monkeypatch.setattr(chunks, "CPU_SEGMENT", 32)

    def work(length):
        tensors = Sizes(T=length, H=1, D=4, E=4).tensors(operator)
        with Written() as forward:
            call(operator, tensors, impl=impl)
        with Written() as both:
            evaluate(call, operator, tensors, impl=impl)
        return [forward.elements, forward.operations, both.elements, both.operations]

    assert all(b <= 2.1 * a for a, b in zip(work(96), work(192), strict=True))


@pytest.mark.parametrize(("operator", "operations"), [("delta", 12), ("gated_delta", 14), ("gla", 12), ("gsa", 18)])
def test_decoding_a_token_is_a_few_small_products(operator, operations):
    tensors = Sizes(T=1, G=2, D=8, E=8).tensors(operator, state=True, dtype=torch.float32)
    state = sum(x.numel() for name, x in tensors.items() if name.startswith("state"))
    with torch.no_grad(), Written() as count:
        call(operator, tensors)
    assert count.operations <= operations
    # The state is decayed and written, not copied over and over.
    assert count.elements <= 4 * state
