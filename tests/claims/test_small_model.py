"""The small model: causal with every attention, and with the controls."""

from typing import Any

import pytest
import torch
from torch import nn

from lucid_attention.nn.attention import ATTENTIONS
from lucid_lab.claims.small.model import Shifted, SmallModel

OPTIONS: dict[str, dict[str, Any]] = {"sliding": {"window": 4}}


def small(attention: str = "lucid", **changes: Any) -> SmallModel:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "attention": attention,
        "options": OPTIONS.get(attention, {}),
        "layers": 2,
        "width": 16,
        "heads": 2,
        "head_dim": 8,
        "rope": True,
        "mlp": 2.0,
        "token_shift": False,
        "embedding_std": 1.0,
    }
    return SmallModel([11, 7], 5, **{**settings, **changes})


def tokens(length: int = 9) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(size, (2, length), generator=random) for size in (11, 7)], -1)


@pytest.mark.parametrize("shift", [False, True], ids=["plain", "token shift"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_token_changes_what_comes_after_it_and_nothing_before(attention: str, shift: bool) -> None:
    model, x = small(attention, token_shift=shift).double(), tokens()
    for module in model.modules():
        if isinstance(module, Shifted):
            nn.init.normal_(module.before)
    before = model(x)
    assert before.shape == (2, 9, 5)
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    after = model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=1e-9, atol=1e-11)
    assert (after[:, 5:] - before[:, 5:]).abs().amax(-1).min() > 1e-6


def test_the_token_shift_adds_the_token_before_channel_by_channel() -> None:
    shifted = Shifted(nn.Linear(4, 3)).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(shifted(x), shifted.projection(x))  # nothing at the beginning of training
    nn.init.normal_(shifted.before)
    y, got = shifted.projection(x), shifted(x)
    torch.testing.assert_close(got[:, 0], y[:, 0])
    for t in range(1, 5):
        torch.testing.assert_close(got[:, t], y[:, t] + shifted.before * y[:, t - 1])


def test_keys_and_values_are_shifted_and_queries_are_not() -> None:
    for layer in small(token_shift=True).layers:
        attention: Any = layer.attention
        assert isinstance(attention.k_proj, Shifted)
        assert isinstance(attention.v_proj, Shifted)
        assert isinstance(attention.q_proj, nn.Linear)
    assert not any(isinstance(module, Shifted) for module in small().modules())


def test_embeddings_of_all_columns_are_added_at_the_size_that_was_asked_for() -> None:
    model = small(embedding_std=0.02, width=512, head_dim=16)
    for table in model.embeddings:
        assert float(table.weight.detach().std()) == pytest.approx(0.02, rel=0.1)  # type: ignore[operator]
    x = tokens()
    alone = SmallModel(
        [11], 5, attention="lucid", options={}, layers=0, width=16, heads=2, head_dim=8, rope=True, mlp=0.0,
        token_shift=False, embedding_std=1.0,
    )  # fmt: skip
    torch.testing.assert_close(alone(x[..., 0]), alone(x[..., :1]))
    two = small(layers=0)
    first, second = (table(x[..., i]) for i, table in enumerate(two.embeddings))
    torch.testing.assert_close(two(x), two.out(two.norm(first + second)))


def test_without_positions_softmax_reads_a_set_and_with_them_it_does_not() -> None:
    x = tokens()
    turned = torch.cat([x[:, :8].flip(1), x[:, 8:]], 1)
    for rope in (False, True):
        model = small("softmax", layers=1, rope=rope)
        same = torch.allclose(model(x)[:, 8], model(turned)[:, 8], atol=1e-5)
        assert same is not rope


def test_the_layer_is_norm_attention_residual_and_the_same_with_an_mlp() -> None:
    model, x = small(), torch.randn(2, 6, 16)
    layer: Any = model.layers[0]
    after = x + layer.attention(layer.norm(x))[0]
    torch.testing.assert_close(layer(x), after + layer.mlp(after))
    assert layer.mlp[1].out_features == 32
    plain: Any = small(mlp=0.0).layers[0]
    assert plain.mlp is None
    torch.testing.assert_close(plain(x), x + plain.attention(plain.norm(x))[0])


def test_options_reach_the_attention_and_a_misspelt_one_is_refused() -> None:
    layer: Any = small(options={"sharpness": 4.0}).layers[0]
    assert layer.attention.fixed_sharpness == 4.0
    with pytest.raises(TypeError, match="sharpnes"):
        small(options={"sharpnes": 4.0})


def test_differential_attention_knows_which_layer_it_is_in() -> None:
    first, second = (dict(layer.attention.named_buffers()) | vars(layer.attention) for layer in small("diff").layers)
    assert any(isinstance(first[name], float) and first[name] != second[name] for name in first if name in second)
