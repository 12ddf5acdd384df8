"""Gated linear attention: closed answers and other people's code."""

import pytest
import torch

from lucid_attention.ops.linear.gated import gla_attention

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
