"""`SlidingAttention`: its window, its short past, and padding between tokens. The contract tests cover the rest."""

from typing import Any

import pytest
import torch

from lucid_attention.nn.attention.sliding import SlidingAttention, SlidingPast

from .contract import GROUPED, HIDDEN, B, T, alone, build, gradients, in_chunks, inputs

NARROW = "sliding, narrow"


def test_a_token_sees_its_window_and_nothing_before():
    module, x = build(NARROW), inputs()
    output, _ = module(x)
    for t in range(T):
        changed, _ = module(torch.cat([x[:, :t], -3 * x[:, t : t + 1], x[:, t + 1 :]], 1))
        off = (changed - output).abs().amax((0, 2))
        assert (off[t : t + 3] > 1e-3).all()
        assert not off[:t].any()
        assert not off[t + 3 :].any()


def test_a_wide_window_is_softmax_attention():
    module, plain = build("sliding"), build("softmax")
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(inputs())[0], plain(inputs())[0])
    assert module.window == 512


@pytest.mark.parametrize("window", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[T - 1, 1], [2] * 5 + [1], [1, 1, 1, 8], [4, 1, 6]], ids=str)
def test_the_past_keeps_the_window_and_counts_everything(window, sizes):
    module, x = build("sliding", window=window), inputs()
    output, past = in_chunks(module, x, sizes)
    full, whole = module(x)
    torch.testing.assert_close(output, full)
    torch.testing.assert_close(past, whole)
    torch.testing.assert_close(gradients(module, output), gradients(module, full))
    assert past.k.shape == (B, 2, window - 1, 6)
    assert past.length == T


def test_a_left_padded_prompt_may_be_continued_through_the_cache():
    module, x = build(NARROW), inputs(length=T + 4)
    key_mask = torch.arange(T + 4) >= torch.tensor([[0], [4], [T - 1]])
    expected = alone(module, x, key_mask)
    for sizes in ([T, 1, 1, 1, 1], [T, 2, 2], [3, T - 3, 4]):
        output, past = in_chunks(module, x, sizes, key_mask)
        torch.testing.assert_close(output[key_mask], expected)
        torch.testing.assert_close(gradients(module, output[key_mask]), gradients(module, expected))
        assert past.length == T + 4


def test_a_hole_counts_in_the_window_and_may_be_continued():
    """As in Transformers: what the window covers are places, not tokens."""
    module, x = build(NARROW, rope_base=None), inputs(1)
    key_mask = torch.ones(1, T, dtype=torch.bool)
    key_mask[0, 4:6] = False
    output, _ = module(x, key_mask=key_mask)
    torch.testing.assert_close(output[:, 6], module(x[:, 6:7])[0][:, 0])  # sees places 4, 5, 6
    torch.testing.assert_close(output[:, 7], module(x[:, 6:8])[0][:, 1])
    torch.testing.assert_close(output[:, 8:], module(x)[0][:, 8:])
    for sizes in ([5, 6], [6, 1, 4], [1] * T):
        torch.testing.assert_close(in_chunks(module, x, sizes, key_mask)[0], output)


def test_a_past_that_lacks_part_of_the_window_is_refused():
    module, x = build(NARROW), inputs()
    past = module(x)[1]
    for wrong in (
        SlidingPast(past.k[:, :, 1:], past.v[:, :, 1:], past.length),
        build("sliding", window=4)(x)[1],
        SlidingPast(past.k, past.v, 1),
    ):
        kept = min(wrong.length, 2)
        with pytest.raises(ValueError, match=rf"past must hold the last min\(length, window − 1\) = {kept} of its"):
            module(x[:, :1], past=wrong)
    with pytest.raises(ValueError, match="y_past must be"):
        module(x[:, :1], past=SlidingPast(past.k, past.v[:, :1], past.length))


@pytest.mark.parametrize("window", [0, 2.0, True])
def test_a_bad_window_is_explained(window: Any):
    with pytest.raises(ValueError, match="window must be a positive integer, got"):
        SlidingAttention(HIDDEN, **GROUPED, window=window)
