"""For every attention: tokens may arrive in chunks of any size, and a past may be reordered and stored."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .contract import HIDDEN, B, T, build, every_case, every_name, gradients, in_chunks, inputs, rows


@every_case
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without gradients"])
def test_cached_chunks_and_single_tokens_equal_the_full_pass(case: str, grad: bool) -> None:
    module, x = build(case), inputs()
    with torch.set_grad_enabled(grad):
        full, whole = module(x)
        for sizes in ([4, 1, 1, 3, 1, 1], [1] * T, [10, 1], [1, 10]):
            output, past = in_chunks(module, x, sizes)
            torch.testing.assert_close(output, full)
            assert type(past) is type(whole)
            if grad:
                torch.testing.assert_close(gradients(module, output), gradients(module, full))


@every_name
def test_a_long_run_of_single_tokens_equals_the_full_pass(name: str) -> None:
    module, x = build(name), inputs(1, 150)
    with torch.inference_mode():
        torch.testing.assert_close(in_chunks(module, x, [70] + [1] * 80)[0], module(x)[0], rtol=1e-5, atol=1e-5)


@every_case
def test_rows_of_a_past_may_be_reordered(case: str) -> None:
    module, x = build(case), inputs()
    order, token = torch.tensor([2, 0, 0]), inputs(length=1)
    expected = module(torch.cat([x[order], token], 1))[0][:, -1:]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            _, past = in_chunks(module, x, [T - 1, 1])
            torch.testing.assert_close(module(token, past=rows(past, order))[0], expected)


@every_name
def test_a_call_leaves_its_past_as_it_was(name: str) -> None:
    """Two continuations of one prompt do not disturb each other; a past that was stored is as good."""
    module, x = build(name), inputs()
    with torch.no_grad():
        _, past = in_chunks(module, x, [T - 1, 1])
        before = pickle.loads(pickle.dumps(past))
        assert type(before) is type(past)
        first, _ = module(x[:, :2], past=past)
        module(-x[:, :1], past=past)
        assert all(map(equal, tree_leaves(past), tree_leaves(before)))
        assert torch.equal(module(x[:, :2], past=past)[0], first)
        assert torch.equal(module(x[:, :2], past=before)[0], first)


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def kept_numbers(name: str, length: int) -> int:
    """How much memory the past holds on to, views counted as what they are views of."""
    with torch.no_grad():
        past = build(name)(inputs(1, length))[1]
    storages = {leaf.untyped_storage().data_ptr(): leaf for leaf in tree_leaves(past) if isinstance(leaf, Tensor)}
    return sum(leaf.untyped_storage().nbytes() for leaf in storages.values())


@pytest.mark.parametrize("name", ["delta", "gated_delta", "gla", "gsa", "sliding, narrow"])
def test_the_past_of_a_recurrence_or_a_window_does_not_grow(name: str) -> None:
    assert kept_numbers(name, 100) == kept_numbers(name, 10)


@every_name
def test_the_past_of_another_attention_is_refused(name: str) -> None:
    module, x = build(name), inputs()
    other = build("gla" if name != "gla" else "softmax")
    past = other(x)[1]
    if type(past) is type(module(x)[1]):
        past = build("softmax")(x)[1]
    expected = type(module(x)[1]).__name__
    for wrong in (past, x, 5, "past"):
        message = f"past must be a {expected} as returned by the module, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=message):
            module(x, past=wrong)


@every_name
def test_x_and_masks_of_another_shape_are_refused(name: str) -> None:
    module, x = build(name), inputs()
    past = module(x)[1]
    with pytest.raises(ValueError, match=rf"key_mask must be \[B, S \+ T\] = \[{B}, {T + 2}\], got shape \[{B}, 2\]"):
        module(x[:, :2], past=past, key_mask=torch.ones(B, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="cu_seqlens and past exclude each other"):
        module(x[:1, :2], past=rows(past, torch.tensor([0])), cu_seqlens=torch.tensor([0, 1, 2]))
    for wrong in (x[0], x[..., 1:], x[:, :0]):
        with pytest.raises(ValueError, match=rf"x must be \[B, T, {HIDDEN}\].*got shape"):
            module(wrong)
