"""Gated linear attention and gated slot attention: closed answers and other people's code."""

import pytest
import torch

from lucid_attention.ops.linear.gated import gla_attention, gsa_attention

from .cases import error
from .linear_cases import Sizes
from .test_outside_witnesses import naive


@pytest.mark.parametrize("decay", [0.1, 3.0])
@pytest.mark.parametrize("T", [1, 70])
def test_it_is_their_gated_linear_attention(T, decay):
    x = Sizes(T=T, B=2, keys="close", decay=decay).tensors("gla", state=True, dtype=torch.float32)
    o, state = gla_attention(**x)
    theirs, their_state = naive("gla").naive_recurrent_gla(
        *(x[name].transpose(1, 2) for name in ("q", "k", "v", "log_decay")),
        initial_state=x["state"],
        output_final_state=True,
    )
    assert error(o, theirs.transpose(1, 2)) < 3e-6
    assert error(state, their_state) < 3e-6


def test_without_decay_it_is_linear_attention():
    x = Sizes(T=150, keys="close").tensors("gla")
    o, state = gla_attention(x["q"], x["k"], x["v"], torch.zeros_like(x["k"]))
    torch.testing.assert_close(o, (x["q"] @ x["k"].mT / 5**0.5).tril() @ x["v"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, x["k"].mT @ x["v"], rtol=1e-12, atol=1e-12)


def test_a_constant_decay_counts_the_tokens_in_between():
    x = Sizes(T=150, keys="close").tensors("gla")
    rates = torch.tensor([0.9, 0.5, 0.99, 1.0, 0.1], dtype=torch.float64)
    o, _ = gla_attention(x["q"], x["k"], x["v"], rates.log().expand_as(x["k"]), scale=1.0)
    steps = (torch.arange(150)[:, None] - torch.arange(150)).clamp(min=0)
    weights = torch.einsum("bhid,bhjd,ijd->bhij", x["q"], x["k"], rates ** steps[..., None])
    torch.testing.assert_close(o, weights.tril() @ x["v"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("T", [1, 70])
def test_it_is_their_gated_slot_attention(T, scale):
    x = Sizes(T=T, B=2, G=2, keys="close").tensors("gsa", state=True, dtype=torch.float32)
    memory = x.pop("state0"), x.pop("state1")
    o, state = gsa_attention(**x, state=memory, scale=scale)
    theirs, their_state = naive("gsa").naive_recurrent_gsa(
        *(x[name].transpose(1, 2) for name in ("q", "k", "v", "s", "log_decay")),
        scale=scale,
        initial_state=memory,
        output_final_state=True,
    )
    assert error(o, theirs.transpose(1, 2)) < 3e-6
    for a, b in zip(state, their_state, strict=True):
        assert error(a, b) < 3e-6


def test_one_slot_is_read_whatever_is_asked():
    x = Sizes(T=150).tensors("gsa")
    s, log_decay = x["s"][..., :1], x["log_decay"][..., :1]
    o, (_, values) = gsa_attention(x["q"], x["k"], x["v"], s, log_decay)
    memory = torch.zeros_like(x["v"][:, :, 0])
    for t in range(150):
        memory = log_decay[:, :, t].exp() * memory + s[:, :, t] * x["v"][:, :, t]
        torch.testing.assert_close(o[:, :, t], memory, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(values[:, :, 0], memory, rtol=1e-10, atol=1e-10)


def test_a_slot_for_every_token_is_softmax_attention():
    """Tokens written whole to slots of their own; slots not yet written hold zero keys and values, like masked ones."""
    T = 20
    x = Sizes(T=T, D=6, E=3).tensors("gsa")
    s = torch.eye(T, dtype=torch.float64).expand(1, 2, T, T)
    o, (keys, values) = gsa_attention(x["q"], x["k"], x["v"], s, torch.zeros_like(s))
    scores = (x["q"] @ x["k"].mT / 6**0.5).tril()
    torch.testing.assert_close(o, scores.softmax(-1).tril() @ x["v"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(keys.mT, x["k"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values, x["v"], rtol=1e-12, atol=1e-12)
