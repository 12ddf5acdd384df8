"""DeltaFormer, FoX, gated attention and XSA by their definitions: token by token in float64, and in fla's naive code.

What every attention must do (cache, padding, packing) is in the contract tests.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import ATTENTIONS, precondition
from tests.ops.cases import error
from tests.ops.test_outside_witnesses import naive

from .contract import build, gradients, inputs

NAMES = ("deltaformer", "forgetting", "gated", "exclusive")


def by_definition(name: str, module: Any, x: Tensor) -> Tensor:
    """The output for x: [B, T, hidden], one token and one query head at a time."""
    q, k, v = module.project(x, torch.arange(x.shape[1]))
    _, heads, T, D = q.shape
    group = heads // k.shape[1]
    outputs = []
    for h in range(heads):
        keys, values = k[:, h // group], v[:, h // group]
        stored: list[Tensor] = []
        for t in range(T):
            value = values[:, t]
            if name == "deltaformer" and t:
                scores = torch.einsum("bd,bsd->bs", keys[:, t], keys[:, :t]) / math.sqrt(D)
                beta = torch.sigmoid(module.b_proj(x[:, t]))[:, h // group, None]
                value = value - beta * torch.einsum("bs,bse->be", scores.softmax(-1), torch.stack(stored, 1))
            stored.append(value)
        rows = []
        for t in range(T):
            scores = torch.einsum("bd,bsd->bs", q[:, h, t], keys[:, : t + 1]) / math.sqrt(D)
            if name == "forgetting":
                log_f = torch.log(torch.sigmoid(module.f_proj(x)))[:, :, h]
                scores = scores + torch.stack([log_f[:, s + 1 : t + 1].sum(1) for s in range(t + 1)], 1)
            o = torch.einsum("bs,bse->be", scores.softmax(-1), torch.stack(stored[: t + 1], 1))
            if name == "gated":
                o = o * torch.sigmoid(module.g_proj(x[:, t]))[:, h, None]
            if name == "exclusive":
                own = values[:, t]
                o = o - (o * own).sum(1, keepdim=True) / (own * own).sum(1, keepdim=True) * own
            rows.append(o)
        outputs.append(torch.stack(rows, 1))
    result: Tensor = module.o_proj(torch.stack(outputs, 2).flatten(2))
    return result


@pytest.mark.parametrize("name", NAMES)
def test_output_and_every_gradient_are_those_of_the_definition(name: str) -> None:
    module, x = build(name), inputs(2, 9).requires_grad_()
    ours, expected = module(x)[0], by_definition(name, module, x)
    assert error(ours, expected) < 1e-12
    # Not because the member does nothing here.
    plain = build("softmax", rope_base=None if module.rotary is None else 1e4)
    plain.load_state_dict(module.state_dict(), strict=False)
    assert error(plain(x)[0], expected) > 0.03
    theirs = gradients(module, expected)
    for weight, gradient in gradients(module, ours).items():
        assert error(gradient, theirs[weight]) < 1e-11, weight
    both = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (ours, expected))
    assert error(*both) < 1e-11


def test_deltaformer_is_that_of_flash_linear_attention() -> None:
    """Their naive code compares q with k in both places; with q = k they are the same."""
    module: Any = build("deltaformer", num_kv_heads=4, rope_base=None).float()
    module.q_proj.weight.data = module.k_proj.weight.data
    x = inputs(2, 40).float()
    q, k, v = module.project(x, None)
    arguments = [y.transpose(1, 2) for y in (q, k, v, module.beta(x))]
    theirs = naive("deltaformer").naive_deltaformer_attn(*arguments).flatten(2)
    assert error(module(x)[0], module.o_proj(theirs)) < 3e-6


def test_fox_is_that_of_flash_linear_attention_with_grouped_heads() -> None:
    pytest.importorskip("einops")
    module: Any = build("forgetting").float()
    x = inputs(2, 40).float()
    q, k, v = (y.transpose(1, 2) for y in module.project(x, None))
    log_f = torch.nn.functional.logsigmoid(module.f_proj(x))
    theirs = naive("forgetting_attn").naive_forgetting_attn(q, k, v, log_f).flatten(2)
    assert error(module(x)[0], module.o_proj(theirs)) < 3e-6


def test_fox_keeps_its_precision_at_the_end_of_thousands_of_tokens() -> None:
    """Sums of log f reach thousands; they are summed from the end, so those of near tokens stay small."""
    module: Any = build("forgetting").float()
    module.f_proj.bias.data -= 2
    x, wide = inputs(1, 3000).float(), build("forgetting")
    wide.load_state_dict(module.state_dict())
    ours, truth = module(x)[0], wide(x.double())[0]
    assert wide.log_decay(x.double(), None, None)[0, :, 0].max() < -3000  # type: ignore[operator]
    assert error(ours[:, -50:], truth[:, -50:]) < 3e-6
    assert error(ours, truth) < 3e-4


@pytest.mark.parametrize("beta_max", [1.5, 1.9])
def test_lucid_with_step_sizes_below_two_is_bounded_for_any_keys(beta_max: float) -> None:
    """‖Y‖ ≤ 2b/(2 − b) ‖V‖ for β ≤ b < 2 (docs/mathematics.md); tight for equal keys and b near 2."""
    for keys in (torch.ones(1, 1, 200, 4), torch.randn(1, 1, 200, 2) + 1):
        k = keys.double()
        beta = torch.full((1, 1, 200), beta_max, dtype=torch.float64)
        inverse = precondition(k, torch.eye(200, dtype=torch.float64)[None, None], beta=beta)[0, 0]
        assert torch.linalg.matrix_norm(inverse, 2) <= 2 * beta_max / (2 - beta_max) * (1 + 1e-9)


def test_with_step_sizes_of_two_equal_keys_add_up_linearly_and_never_faster() -> None:
    """Equal keys: the memory is 2v − (the memory before), so y grows with the length; no entry beyond 4T − 2."""
    T = 100
    beta = torch.full((1, 1, T), 2.0, dtype=torch.float64)
    signs = (-1.0) ** torch.arange(T, dtype=torch.float64)[None, None, :, None]
    y = precondition(torch.ones(1, 1, T, 3, dtype=torch.float64), signs, beta=beta)
    assert y.abs().max() == pytest.approx(4 * T - 2)


def test_double_beta_without_learned_beta_is_refused() -> None:
    with pytest.raises(ValueError, match="double_beta needs learn_beta=True"):
        ATTENTIONS["lucid"](24, 4, double_beta=True)
