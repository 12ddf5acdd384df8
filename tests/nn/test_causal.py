"""`CausalAttention` is plain softmax attention: `scaled_dot_product_attention` on its projections."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.nn.causal import CausalAttention

from .contract import HIDDEN, B, T, gradients, inputs

SHAPES = {
    "one head": {"num_heads": 1},
    "four heads": {"num_heads": 4},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "one kv head": {"num_heads": 3, "num_kv_heads": 1},
    "wide heads": {"num_heads": 2, "head_dim": 10},
    "odd heads": {"num_heads": 2, "head_dim": 5, "rope_base": None},
    "biases": {"num_heads": 4, "num_kv_heads": 2, "bias": True},
    "wide values": {"num_heads": 4, "num_kv_heads": 2, "value_dim": 9},
    "qk norm": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
}


def build(shape: str) -> CausalAttention:
    torch.manual_seed(1)
    module = CausalAttention(HIDDEN, **SHAPES[shape]).double()  # type: ignore[arg-type]
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            norm.weight.data += torch.rand(module.head_dim)
    return module


def by_hand(module: CausalAttention, x: Tensor, mask: Tensor) -> Tensor:
    """mask: [B or 1, 1, T, T], what each query may see."""
    D, positions = module.head_dim, torch.arange(x.shape[1])

    def project(layer: torch.nn.Linear, size: int = D) -> Tensor:
        return F.linear(x, layer.weight, layer.bias).view(*x.shape[:2], -1, size).transpose(1, 2)

    q, k, v = project(module.q_proj), project(module.k_proj), project(module.v_proj, module.value_dim)
    if module.q_norm is not None and module.k_norm is not None:
        q, k = (
            each / (each.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
            for each, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    if module.rotary is not None:
        q, k = module.rotary(q, positions), module.rotary(k, positions)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.linear(o.transpose(1, 2).reshape(*x.shape[:2], -1), module.o_proj.weight, module.o_proj.bias)


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_scaled_dot_product_attention_on_its_projections(shape: str) -> None:
    module, x = build(shape), inputs()
    output, past = module(x)
    expected = by_hand(module, x, CAUSAL)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output), gradients(module, expected))
    assert past.k.shape == (B, module.num_kv_heads, T, module.head_dim)
    assert past.y.shape == (B, module.num_kv_heads, T, module.value_dim)
    assert past.length == T
