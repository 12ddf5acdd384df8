"""`DiffAttention` against the published arithmetic (microsoft/unilm, Diff-Transformer), written out densely."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.nn.attention.diff import DiffAttention

B, T, HIDDEN = 2, 7, 24


def build(**options: int) -> DiffAttention:
    torch.manual_seed(1)
    module = DiffAttention(HIDDEN, 4, rope_base=None, **options).double()
    module.o_norm.weight.data += torch.rand(module.value_dim)
    return module


def inputs() -> Tensor:
    return torch.randn(B, T, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1


def published(module: DiffAttention, x: Tensor, depth: int, repeat: int) -> Tensor:
    """With half of num_heads as number of heads. Queries, keys and weights stand in pairs before the difference."""
    heads, size = module.num_heads // 2, module.head_dim
    q = module.q_proj(x).view(B, T, heads, 2, size)
    k = module.k_proj(x).view(B, T, heads // repeat, 2, size).repeat_interleave(repeat, 2)
    v = module.v_proj(x).view(B, T, heads // repeat, 2 * size).repeat_interleave(repeat, 2)
    scores = torch.einsum("bthid,bshid->bhits", q, k) * size**-0.5
    weights = (scores + torch.full((T, T), -math.inf, dtype=x.dtype).triu(1)).softmax(-1)
    start = 0.8 - 0.6 * math.exp(-0.3 * depth)
    first = torch.exp(torch.dot(module.lambda_q1, module.lambda_k1))
    second = torch.exp(torch.dot(module.lambda_q2, module.lambda_k2))
    weights = weights[:, :, 0] - (first - second + start) * weights[:, :, 1]
    o = torch.einsum("bhts,bshe->bthe", weights, v)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.o_norm.weight
    return F.linear((o * (1 - start)).reshape(B, T, -1), module.o_proj.weight)


@pytest.mark.parametrize("depth", [0, 1, 11])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_is_the_published_module(depth: int, kv_heads: int) -> None:
    module, x = build(num_kv_heads=kv_heads, layer_index=depth), inputs()
    output, past = module(x)
    expected = published(module, x, depth, 4 // kv_heads)
    torch.testing.assert_close(output, expected)
    parameters = list(module.parameters())
    ours, theirs = (torch.autograd.grad(y.square().sum(), parameters) for y in (output, expected))
    torch.testing.assert_close(ours, theirs)
    assert past.k.shape == (B, kv_heads, T, 6)
    assert past.y.shape == (B, kv_heads // 2, T, 12)


def test_lambda_starts_where_the_layer_says() -> None:
    starts = [build(layer_index=i).lambda_init for i in (0, 1, 30)]
    torch.testing.assert_close(starts, [0.2, 0.8 - 0.6 * math.exp(-0.3), 0.8], rtol=1e-3, atol=1e-3)
    torch.manual_seed(0)
    vectors = torch.cat([DiffAttention(4096, 2).lambda_q1.detach() for _ in range(3)])
    assert vectors.dtype == torch.float32
    assert abs(vectors.std().item() - 0.1) < 0.01
    module = build()
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        getattr(module, name).data.zero_()
    assert module.lam().item() == pytest.approx(0.2)
    assert "lambda_init=0.2" in repr(module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, r"num_heads must be even.*got 3"),
        ({"num_kv_heads": 1}, r"num_kv_heads must be even.*got 1"),
        ({"layer_index": -1}, r"layer_index must be an integer from 0 on, got -1"),
    ],
)
def test_a_bad_setting_is_explained(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffAttention(**({"hidden_size": HIDDEN, "num_heads": 4} | options))
