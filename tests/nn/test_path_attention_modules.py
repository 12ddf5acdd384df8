"""The PaTH modules apply the moves of keys late: pending factors give the same as moved keys."""

import pytest
import torch
from torch import Tensor

from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.nn.attention import path as path_module
from lucid_attention.nn.attention.path import PathAttention, PathPast
from lucid_attention.ops.path.decode import keys_at_end

HIDDEN, T = 24, 21
NAMES = ["path", "lucid_path"]


def build(name: str) -> tuple[PathAttention, Tensor]:
    torch.manual_seed(3)
    module = ATTENTIONS[name](HIDDEN, 4, num_kv_heads=2).double()
    assert isinstance(module, PathAttention)
    with torch.no_grad():
        module.b_proj.bias.fill_(-2.0)  # a small β, so that distant tokens keep their weight
    return module, torch.randn(2, T, HIDDEN, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_single_tokens_equal_the_full_pass_across_flushes(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_module, "APPLY_EVERY", 3)
    module, x = build(name)
    mask = torch.ones(2, T, dtype=torch.bool)
    if padded:
        mask[0, :2] = mask[1, 9:12] = False
    flushes: list[int] = []
    with torch.no_grad():
        full, _ = module(x, key_mask=mask)
        o, past = module(x[:, :5], key_mask=mask[:, :5])
        outputs = [o]
        for t in range(5, T):
            o, past = module(x[:, t : t + 1], past=past, key_mask=mask[:, : t + 1])
            outputs.append(o)
            flushes.append(past.pending)
    torch.testing.assert_close(torch.cat(outputs, 1)[mask], full[mask])
    assert flushes == [5 + 3 * ((t - 5) // 3) for t in range(5, T)]


def test_a_past_of_a_training_pass_moves_its_keys_only_when_they_are_used() -> None:
    module, x = build("path")
    _, past = module(x)
    assert isinstance(past, PathPast)
    assert past.w is not None
    torch.testing.assert_close(past.k, module.k_proj(x).unflatten(-1, (2, -1)).transpose(1, 2))
    torch.testing.assert_close(past.keys_at_end(), keys_at_end(past.k, past.w, past.beta))
    assert not torch.allclose(past.keys_at_end(), past.k)


@pytest.mark.parametrize("name", NAMES)
def test_many_tokens_decoded_in_bfloat16_err_like_the_full_pass(name: str) -> None:
    """Keys since the last flush are moved with every token; rounded as often, they would drift away."""
    torch.manual_seed(0)
    module = ATTENTIONS[name](64, 1).to(torch.bfloat16)
    assert isinstance(module, PathAttention)
    x = torch.randn(1, 320, 64).to(torch.bfloat16)
    with torch.no_grad():
        module.b_proj.bias.fill_(-5.0)
        full, _ = module(x)
        _, past = module(x[:, :100])
        decoded = []
        for t in range(100, 320):
            o, past = module(x[:, t : t + 1], past=past)
            decoded.append(o)
        exact, _ = module.float()(x.float())

    def error(o: Tensor) -> float:
        return ((o.float() - exact[:, -60:]).norm() / exact[:, -60:].norm()).item()

    assert error(torch.cat(decoded, 1)[:, -60:]) < 1.3 * error(full[:, -60:])


@pytest.mark.parametrize("name", NAMES)
def test_factors_stay_in_float32_beside_narrow_weights(name: str) -> None:
    module, x = build(name)
    module = module.to(torch.bfloat16)
    w, beta, _ = module.factors(x.to(torch.bfloat16), None, None, None)
    assert w.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(w.shape[:3]))
    assert ((beta > 0) & (beta < 2)).all()


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_a_past_without_the_lengths_of_its_keys_is_refused(grad: bool, tokens: int) -> None:
    module, x = build("lucid_path")
    other, _ = build("path")
    with torch.set_grad_enabled(grad):
        _, past = other(x[:, :5])
        with pytest.raises(ValueError, match=r"past\.inverse_norms must be"):
            module(x[:, :tokens], past=past)
        _, past = module(x[:, :5])
        with pytest.raises(ValueError, match=r"past\.inverse_norms must be"):
            module(x[:, :tokens], past=past._replace(inverse_norms=past.inverse_norms[:, :, :4]))


@pytest.mark.parametrize("name", NAMES)
def test_a_rotary_embedding_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="rope_base must be None"):
        ATTENTIONS[name](HIDDEN, 4, rope_base=10_000.0)
