"""GrowingTensor against torch.cat: it never overwrites rows of another view."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucid_attention.models.cache import GrowingTensor


@pytest.fixture(autouse=True)
def no_gradients():
    """With gradients GrowingTensor is torch.cat."""
    with torch.no_grad():
        yield


def rows(number, start=0, batch=2):
    """[batch, 1, number, 1], no value twice."""
    return (start + torch.arange(batch * number, dtype=torch.float32)).view(batch, 1, number, 1)


def test_rows_are_written_in_place_and_a_long_tensor_is_copied_seldom():
    growing, x, copies = GrowingTensor(), rows(0), 0
    for start in range(2000):
        before, place = growing.buffer, x.data_ptr()
        x = growing.append(x, rows(1, start))
        copies += growing.buffer is not before
        assert (x.data_ptr() == place) == (growing.buffer is before)
        assert growing.buffer.shape[2] <= max(1.25 * x.shape[2] + 1, x.shape[2] + 64)
    assert copies < 20


def test_a_tensor_of_inference_mode_grows_outside_of_it():
    growing = GrowingTensor()
    with torch.inference_mode():
        x = growing.append(None, rows(3))
    x = growing.append(x, rows(1, 100))
    with torch.inference_mode():
        x = growing.append(x, rows(1, 200))
    assert torch.equal(x, torch.cat([rows(3), rows(1, 100), rows(1, 200)], 2))


@pytest.mark.parametrize("needs", ["past", "new", "neither"])
@torch.enable_grad()
def test_gradients_reach_every_row_and_saved_rows_are_not_written(needs):
    growing = GrowingTensor()
    first, second = rows(3, 1).requires_grad_(needs == "past"), rows(2, 50).requires_grad_(needs == "new")
    factor = torch.ones((), requires_grad=True)
    x = growing.append(None, first)
    loss = (x * factor).square().sum()
    x = growing.append(x, second)
    loss = loss + (x * factor).square().sum()
    growing.append(x.detach(), rows(1, 9))
    loss.backward()
    squares = 2 * (first.square().sum() * 2 + second.square().sum())
    torch.testing.assert_close(factor.grad, squares.detach())
    for part, times in ((first, 2), (second, 1)):
        assert (part.grad is None) == (not part.requires_grad)
        assert part.grad is None or torch.equal(part.grad, 2 * times * part.detach())


@given(st.lists(st.tuples(st.sampled_from(["append", "crop", "reorder", "fork"]), st.integers(0, 90)), max_size=25))
def test_any_history_is_that_of_torch_cat(history):
    """Several views share one GrowingTensor, as shallow copies of a cache do."""
    growing = GrowingTensor()
    views = [(growing.append(None, rows(2)), rows(2))]
    for step, (action, number) in enumerate(history):
        at = number % len(views)
        x, expected = views[at]
        if action == "append":
            new = rows(1 + number % 70, 1000 * step)
            views[at] = growing.append(x, new), torch.cat([expected, new], 2)
        elif action == "crop":
            keep = number % (x.shape[2] + 1)
            views[at] = x[:, :, :keep], expected[:, :, :keep]
        elif action == "reorder":
            order = torch.tensor([number % 2, number // 2 % 2])
            views[at] = x.index_select(0, order), expected.index_select(0, order)
        else:
            views.append((x, expected))
        for view, truth in views:
            assert torch.equal(view, truth)
