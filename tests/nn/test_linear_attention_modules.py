"""DeltaNet, Gated DeltaNet, GLA and GSA against the published layers, written token by token for one row and head."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention import ATTENTIONS
from lucid_attention.nn.recurrent import RecurrentAttention, RecurrentPast, log_sigmoid_gate

from .contract import CASES, HIDDEN, build, gradients, inputs

LAYERS = ("delta", "gated_delta", "gla", "gsa")


def projected(module: RecurrentAttention, x: Tensor, letter: str, size: int) -> Tensor:
    """[T, hidden] -> [T, heads, size], through the convolution if there is one."""
    y = getattr(module, f"{letter}_proj")(x)
    if module.convolutions is not None and letter in module.convolutions:
        weight = module.convolutions[letter].weight
        left = weight.shape[1] - 1
        y = F.silu(F.conv1d(F.pad(y.T, (left, 0)), weight[:, None], groups=weight.shape[0]).T)
    return y.unflatten(-1, (-1, size))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def l2(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta(module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    beta = module.b_proj(x)[:, h].sigmoid() * (2 if module.double_beta else 1)
    if module.convolutions is None:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    decay = torch.ones_like(beta)
    if hasattr(module, "A_log"):
        decay = torch.exp(-module.A_log[h].exp() * F.softplus(module.a_proj(x)[:, h] + module.dt_bias[h]))
    q, k = l2(q) / math.sqrt(q.shape[-1]), l2(k)
    S, outputs = torch.zeros(k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(len(x)):
        S = decay[t] * S
        S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
        outputs.append(S.T @ q[t])
    return torch.stack(outputs)


def gla(module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    decay = module.f_proj(x).unflatten(-1, (-1, k.shape[-1]))[:, h].sigmoid() ** (1 / 16)
    S, outputs = torch.zeros(k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(len(x)):
        S = decay[t][:, None] * S + torch.outer(k[t], v[t])
        outputs.append(S.T @ q[t] / math.sqrt(q.shape[-1]))
    return torch.stack(outputs)


def gsa(module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    decay = module.f_proj(x).unflatten(-1, (-1, module.num_slots))[:, h].sigmoid() ** (1 / 8)
    q, k, v = F.silu(q), F.silu(k), F.silu(v)
    keys = torch.zeros(module.num_slots, k.shape[-1], dtype=x.dtype)
    values, outputs = torch.zeros(module.num_slots, v.shape[-1], dtype=x.dtype), []
    for t in range(len(x)):
        keys = decay[t][:, None] * keys + torch.outer(1 - decay[t], k[t])
        values = decay[t][:, None] * values + torch.outer(1 - decay[t], v[t])
        outputs.append(values.T @ (keys @ q[t]).softmax(0))
    return torch.stack(outputs)


def published(name: str, module: Any, x: Tensor) -> Tensor:
    """x: [T, hidden] -> [T, hidden]."""
    recurrence = {"delta": delta, "gated_delta": delta, "gla": gla, "gsa": gsa}[name]
    q, k = (projected(module, x, letter, module.head_dim) for letter in "qk")
    v = projected(module, x, "v", module.value_dim)
    groups = q.shape[1] // k.shape[1]
    o = torch.stack(
        [recurrence(module, x, q[:, i], k[:, i // groups], v[:, i // groups], i // groups) for i in range(q.shape[1])],
        1,
    )
    if name == "gsa":
        return module.o_proj(rms(F.silu(o).flatten(1), module.o_norm.weight))
    o = rms(o, module.o_norm.weight)
    if name != "delta":
        o = o * F.silu(module.g_proj(x).unflatten(-1, (-1, module.value_dim)))
    return module.o_proj(o.flatten(1))


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name in LAYERS])
def test_it_is_the_published_layer(case: str) -> None:
    module, x = build(case, bias=True), inputs()
    output, past = module(x)
    expected = torch.stack([published(CASES[case][0], module, row) for row in x])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output), gradients(module, expected))
    assert isinstance(past, RecurrentPast)


def test_decays_start_as_published() -> None:
    torch.manual_seed(0)
    module: Any = ATTENTIONS["gated_delta"](64, 4096, head_dim=2)
    rates, steps = module.A_log.detach().exp(), F.softplus(module.dt_bias.detach())
    assert 0 < rates.min() < 0.1
    assert 15.9 < rates.max() <= 16
    assert abs(rates.mean().item() - 8) < 0.3
    torch.testing.assert_close((steps.min(), steps.max()), (torch.tensor(0.001), torch.tensor(0.1)), rtol=0.02, atol=0)
    assert abs(steps.log().mean().item() - math.log(0.01)) < 0.1


def test_decays_of_a_narrow_module_are_not_narrow() -> None:
    """Near 1, where memories are long, bfloat16 knows 0.996 and 1 and nothing between."""
    logits = torch.linspace(-3, 12, 50).bfloat16()
    expected = F.logsigmoid(logits.double()) / 16
    torch.testing.assert_close(log_sigmoid_gate(logits, 16.0).double(), expected, rtol=1e-5, atol=0)
    module: Any = build("gated_delta").bfloat16()
    x = inputs().bfloat16()
    steps = F.softplus(module.a_proj(x).double() + module.dt_bias.double())
    expected = (-module.A_log.double().exp() * steps).transpose(1, 2)
    torch.testing.assert_close(module.log_decay(x).double(), expected, rtol=1e-5, atol=0)


BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "rotary": ("delta", {"rope_base": 1e4}, ValueError, "rope_base must be None: DeltaAttention has no rotary"),
    "qk_norm": ("gla", {"qk_norm": True}, TypeError, "qk_norm"),
    "conv_size": ("delta", {"conv_size": 0}, ValueError, "conv_size must be a positive integer, got 0"),
    "impl": ("gla", {"impl": "blockwise"}, ValueError, "impl must be one of .*'chunkwise'.* got 'blockwise'"),
    "temperature": ("gla", {"gate_temperature": 0}, ValueError, "gate_temperature must be a positive finite number"),
    "slots": ("gsa", {"num_slots": -1}, ValueError, "num_slots must be a positive integer, got -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_setting_is_explained(case: str) -> None:
    name, options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ATTENTIONS[name](HIDDEN, 4, **options)


def test_a_past_that_does_not_fit_is_explained() -> None:
    module, x = build("delta"), inputs()
    past = module(x)[1]
    two = RecurrentPast(past.state, past.tails[:2], past.length)
    with pytest.raises(ValueError, match=r"past\.tails must be a tuple of 3 convolution tails, got 2"):
        module(x, past=two)
    with pytest.raises(ValueError, match=r"tail must be \[B, size − 1, C\] = \[2, 3, 24\], got shape \[3, 3, 24\]"):
        module(x[:2], past=past)
    one_row = RecurrentPast(past.state[:1], past.tails, past.length)
    with pytest.raises(ValueError, match=r"state must be .* = \[3, 2, 6, 6\], got shape \[1, 2, 6, 6\]"):
        module(x, past=one_row)
    with pytest.raises(ValueError, match=r"past\.tails must be a tuple of 0 convolution tails, got 3"):
        build("gla")(x, past=past)


@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_row_may_be_continued_at_its_last_document(name: str) -> None:
    module, x = build(name), inputs(1)
    _, past = module(x, cu_seqlens=torch.tensor([0, 3, 9, 11, 11]))
    torch.testing.assert_close(module(x, past=past)[0], module(torch.cat([x[:, 9:], x], 1))[0][:, 2:])
