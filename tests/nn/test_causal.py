"""`CausalAttention` is plain softmax attention: `scaled_dot_product_attention` on its projections."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.nn.causal import CausalAttention, Past

B, T, HIDDEN = 2, 9, 24
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


def inputs() -> Tensor:
    return torch.randn(B, T, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1


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


def gradients(module: CausalAttention, output: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * weight).sum(), list(module.parameters()), retain_graph=True))


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


@pytest.mark.parametrize("shape", ["grouped", "odd heads"])
def test_padding_on_the_right_is_a_mask_of_keys(shape: str) -> None:
    module, x = build(shape), inputs()
    key_mask = torch.arange(T) < torch.tensor([[T], [T - 3]])
    output, expected = module(x, key_mask=key_mask)[0], by_hand(module, x, CAUSAL & key_mask[:, None, None])
    torch.testing.assert_close(output[key_mask], expected[key_mask])
    torch.testing.assert_close(
        gradients(module, output * key_mask[..., None]), gradients(module, expected * key_mask[..., None])
    )


def test_packed_documents_do_not_see_each_other() -> None:
    module, x = build("grouped"), inputs()[:1]
    document = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    output, _ = module(x, cu_seqlens=torch.tensor([0, 4, 5, 9], dtype=torch.int32))
    expected = by_hand(module, x, CAUSAL & (document == document[:, None]))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output), gradients(module, expected))


@pytest.mark.parametrize("sizes", [(4, 5), (1,) * T, (6, 1, 2)], ids=str)
def test_a_cached_run_equals_the_full_pass(sizes: tuple[int, ...]) -> None:
    module, x = build("grouped"), inputs()
    full, whole = module(x)
    past: Past | None = None
    outputs = []
    for chunk in x.split(sizes, 1):
        output, past = module(chunk, past=past)
        outputs.append(output)
    assert past is not None
    torch.testing.assert_close(torch.cat(outputs, 1), full)
    torch.testing.assert_close((past.k, past.y), (whole.k, whole.y))
    torch.testing.assert_close(gradients(module, torch.cat(outputs, 1)), gradients(module, full))


def test_a_variant_overrides_what_is_stored_and_how_it_is_read() -> None:
    class Doubled(CausalAttention):
        def values(self, x: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
            return 2 * v

        def readout(self, q: Tensor, k: Tensor, y: Tensor, *rest: Tensor | None) -> Tensor:
            return 3 * super().readout(q, k, y, *rest)

    plain, x = build("four heads"), inputs()
    doubled = Doubled(HIDDEN, 4).double()
    doubled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(doubled(x)[0], 6 * plain(x)[0])
    torch.testing.assert_close(doubled(x)[1].y, 2 * plain(x)[1].y)
