"""The delta rule: closed answers, other people's code, and write strengths at their limits."""

import pytest
import torch
import torch.nn.functional as F

from lucid_attention.ops.linear.delta import delta_attention

from .cases import assert_exact, error, shifted_keys
from .linear_cases import Sizes, call, evaluate, truth
from .test_outside_witnesses import naive


@pytest.mark.parametrize("T", [1, 70])
def test_without_decay_it_is_their_delta_rule(T):
    x = Sizes(T=T, B=2, keys="close").tensors("delta", state=True, dtype=torch.float32)
    o, state = delta_attention(**x)
    theirs, their_state = naive("delta_rule").delta_rule_recurrence(
        x["q"], x["k"], x["v"], x["beta"], initial_state=x["state"]
    )
    assert error(o, theirs) < 3e-6
    assert error(state, their_state) < 3e-6


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("T", [1, 70])
def test_with_decay_it_is_their_gated_delta_rule(T, scale):
    x = Sizes(T=T, B=2, keys="close").tensors("gated_delta", state=True, dtype=torch.float32)
    o, state = delta_attention(**x, scale=scale)
    time_first = {name: x[name].transpose(1, 2) for name in ("q", "k", "v", "beta")} | {"scale": scale}
    for fn in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"):
        theirs, their_state = getattr(naive("gated_delta_rule"), fn)(
            **time_first, g=x["log_decay"].transpose(1, 2), initial_state=x["state"], output_final_state=True
        )
        assert error(o, theirs.transpose(1, 2)) < 3e-6
        assert error(state, their_state) < 3e-6


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("keys", ["equal", "repeated", "closest"])
@pytest.mark.parametrize("operator", ["delta", "gated_delta"])
def test_write_strengths_at_their_limits(operator, keys, beta):
    """β = 1 projects, β = 2 reflects: the inner system is then as far from the identity as it gets."""
    tensors = Sizes(T=130, H=1, keys=keys).tensors(operator, state=True)
    tensors["beta"] = torch.full_like(tensors["beta"], beta)
    assert_exact(evaluate(call, operator, tensors), evaluate(truth, operator, tensors), 1e-10)


def test_a_repeated_key_reads_what_was_written_last():
    k = F.normalize(shifted_keys(1, 1, 1, 6), dim=-1).repeat(1, 1, 100, 1)
    v = torch.randn(1, 1, 100, 3).double()
    o, state = delta_attention(k, k, v, torch.ones(1, 1, 100).double(), scale=1.0)
    torch.testing.assert_close(o, v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(k[:, :, :1] @ state, v[:, :, -1:], rtol=1e-12, atol=1e-12)


def test_orthonormal_keys_are_linear_attention():
    k = torch.eye(70).double()[None, None]
    q, v = torch.randn(1, 1, 70, 70).double(), torch.randn(1, 1, 70, 3).double()
    o, _ = delta_attention(q, k, v, torch.ones(1, 1, 70).double())
    torch.testing.assert_close(o, (q @ k.mT / 70**0.5).tril() @ v, rtol=1e-12, atol=1e-12)


def test_no_decay_is_a_decay_of_one():
    tensors = Sizes(T=130, G=2, keys="close").tensors("delta", state=True)
    with_decay = call("gated_delta", tensors | {"log_decay": torch.zeros_like(tensors["beta"])})
    for a, b in zip(call("delta", tensors), with_decay, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_float32_stays_accurate_over_a_long_sequence_of_repeated_keys():
    """Unit keys and 0 ≤ β ≤ 2 cannot let an error grow: after 64 chunks it is that of the recurrence."""
    k = F.normalize(shifted_keys(1, 1, 30, 16, cosine=0.9), dim=-1)[:, :, torch.randint(30, (4096,))].float()
    q, v, beta = torch.randn(1, 1, 4096, 16), torch.randn(1, 1, 4096, 16), 2 * torch.rand(1, 1, 4096)
    expected, _ = delta_attention(q.double(), k.double(), v.double(), beta.double(), impl="reference")
    plain, _ = delta_attention(q, k, v, beta, impl="reference")
    o, _ = delta_attention(q, k, v, beta)
    assert error(o, expected) <= 3 * error(plain, expected) + 2e-6
