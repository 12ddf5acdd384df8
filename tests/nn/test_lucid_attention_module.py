"""`LucidAttention` is `lucid_attention` on its projections. The contract tests cover the rest."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lucid_attention.nn.attention.lucid as implementation
from lucid_attention import LucidAttention, lucid_attention, preconditioner
from lucid_attention.nn.causal import CausalAttention, Past
from lucid_attention.ops.lucid.decode import inverse_key_norms

from .contract import GROUPED, HIDDEN, SETTINGS, B, T, gradients, in_chunks, inputs

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
    "odd heads": {"head_dim": 5, "rope_base": None, "bias": True},
    "row_max, strength": {"norm": "row_max", "strength": 0.3, "learn_beta": True},
    "learned sharpness": {"learn_sharpness": True},
} | {
    case.removeprefix("lucid, "): options
    for case, (name, options) in SETTINGS.items()
    if name == "lucid" and not options.keys() & {"qk_norm", "double_beta"}
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str) -> LucidAttention:
    torch.manual_seed(1)
    module = LucidAttention(HIDDEN, **(GROUPED | VARIANTS[variant])).double()
    if module.log_sharpness is not None:
        # Heads must differ, or a mix-up of heads would not show.
        module.log_sharpness.data += torch.linspace(-0.3, 0.3, module.num_kv_heads)
    return module


@every_variant
def test_it_is_the_function_on_its_projections(variant: str) -> None:
    module, x = build(variant), inputs()
    output, past = module(x)

    def project(layer: torch.nn.Linear) -> Tensor:
        return F.linear(x, layer.weight, layer.bias).view(B, T, -1, module.head_dim).transpose(1, 2)

    q, k, v = project(module.q_proj), project(module.k_proj), project(module.v_proj)
    if module.rotary is not None:
        q, k = module.rotary(q, torch.arange(T)), module.rotary(k, torch.arange(T))
    options = {key: x for key, x in VARIANTS[variant].items() if key in ("norm", "impl", "sharpness", "strength")}
    if module.b_proj is not None:
        options["beta"] = (1 / (1 + torch.exp(-x @ module.b_proj.weight.T))).transpose(1, 2)
    if module.log_sharpness is not None:
        options["sharpness"] = module.log_sharpness.exp()
    o = lucid_attention(q, k, v, **options)
    expected = F.linear(o.transpose(1, 2).reshape(B, T, -1), module.o_proj.weight, module.o_proj.bias)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output), gradients(module, expected))
    torch.testing.assert_close(past.k, k)
    assert preconditioner(k).tril(-1).mean() > 0.02, "the keys of this test are not correlated"
    assert (past.y - v).abs().max() > 0.1, "LUCID had nothing to do"


def test_learned_settings_start_where_they_should() -> None:
    x = inputs()
    fixed, learned = build("sharpness"), LucidAttention(HIDDEN, **GROUPED, sharpness=4.0, learn_sharpness=True).double()
    learned.load_state_dict(fixed.state_dict(), strict=False)
    torch.testing.assert_close(learned(x)[0], fixed(x)[0])
    beta = build("beta").beta(x)
    assert beta is not None
    assert beta.shape == (B, 2, T)
    assert ((beta > 0) & (beta < 1)).all()
    assert build("paper").beta(x) is None
    added = set(build("qk, all learned").state_dict()) - set(build("paper").state_dict())
    assert added == {"b_proj.weight", "log_sharpness"}


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_strength_may_be_changed_later(impl: str) -> None:
    """A schedule of training raises it; what it is at a call counts, in a chunk and in a decoding step."""
    x = inputs()
    module = LucidAttention(HIDDEN, **GROUPED, strength=0.0, impl=impl).double()
    plain = CausalAttention(HIDDEN, **GROUPED).double()
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x)[0], plain(x)[0])
    for strength in (0.25, 1):
        module.strength = strength
        fixed = LucidAttention(HIDDEN, **GROUPED, strength=strength, impl=impl).double()
        fixed.load_state_dict(module.state_dict())
        expected, _ = fixed(x)
        torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(in_chunks(module, x, [T - 3, 1, 1, 1])[0], expected)
        assert (expected - plain(x)[0]).abs().max() > 1e-3
    module.strength = 1.5
    with pytest.raises(ValueError, match=r"strength must be a number from 0 to 1, got 1\.5"):
        module(x)
    assert "strength" not in module.state_dict()


def test_single_tokens_without_gradients_take_the_decoding_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build("paper"), inputs()
    calls = []
    step = implementation.lucid_decode

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return step(*args, **options)

    monkeypatch.setattr(implementation, "lucid_decode", counted)
    in_chunks(module, x, [9, 1, 1])
    assert not calls
    with torch.no_grad():
        in_chunks(module, x, [9, 1, 1])
    assert len(calls) == 2


@every_variant
def test_the_past_is_keys_and_preconditioned_values_however_the_tokens_arrive(variant: str) -> None:
    module, x = build(variant), inputs()
    key_mask = torch.arange(T) >= torch.tensor([[0], [4], [T - 1]])
    with torch.no_grad():
        for mask in (None, key_mask):
            _, whole = module(x, key_mask=mask)
            _, past = in_chunks(module, x, [4, 1, 1, 3, 1, 1], mask)
            torch.testing.assert_close((past.k, past.y), (whole.k, whole.y))
            if past.inverse_norms is not None:
                torch.testing.assert_close(past.inverse_norms, inverse_key_norms(past.k))
        assert not past.y.masked_fill(key_mask[:, None, :, None], 0).any()


def test_a_past_may_be_cropped() -> None:
    module, x = build("beta"), inputs()
    with torch.no_grad():
        _, past = in_chunks(module, x, [T - 1, 1])
        kept = Past(*(part[:, :, :5] for part in past))
        torch.testing.assert_close(module(x[:, 5:6], past=kept)[0], module(x[:, :6])[0][:, -1:])


def test_positions_matter_by_their_distances_only() -> None:
    module, x = build("paper"), inputs()
    output, _ = module(x)
    rows = torch.stack([torch.arange(T), torch.arange(T) + 5, torch.arange(T) + 100])
    torch.testing.assert_close(module(x, positions=torch.arange(T))[0], output, rtol=0, atol=0)
    torch.testing.assert_close(module(x, positions=rows)[0], output, rtol=1e-5, atol=1e-5)
    assert (module(x, positions=2 * torch.arange(T))[0] - output).abs().max() > 1e-3
    unturned = LucidAttention(HIDDEN, **GROUPED, rope_base=None).double()
    unturned.load_state_dict(module.state_dict())
    assert (unturned(x)[0] - output).abs().max() > 1e-3
    torch.testing.assert_close(unturned(x, positions=torch.zeros(T))[0], unturned(x)[0], rtol=0, atol=0)


def test_its_text_names_its_settings() -> None:
    assert "norm='key', beta=1, sharpness=√D" in repr(build("paper"))
    assert "sharpness=4.0" in repr(build("sharpness"))
    assert "sharpness=√D, strength=0.5" in repr(build("strength"))
    assert "strength" not in repr(build("paper"))
    assert "norm='qk', beta=learned, sharpness=learned" in repr(build("qk, all learned"))


@pytest.mark.parametrize("center", ["learned", "calibrated"])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_calibrated_module_ignores_a_vector_in_all_keys_and_decodes_as_it_reads(center, whiten):
    """The bias of k_proj is a vector that is added to all keys; without rotary embedding softmax does not see it."""
    module = LucidAttention(24, 4, num_kv_heads=2, rope_base=None, bias=True, center=center, whiten=whiten).double()
    assert ("key_center" in dict(module.named_parameters())) == (center == "learned")
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    mask = torch.arange(30) > torch.tensor([[3], [0]])
    outputs = []
    for bias in (0.0, 2.0):
        with torch.no_grad():
            module.k_proj.bias.fill_(bias)
        module.calibrate(x, key_mask=mask)
        outputs.append(module(x, key_mask=mask)[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    copy = LucidAttention(24, 4, num_kv_heads=2, rope_base=None, bias=True, center=center, whiten=whiten).double()
    copy.load_state_dict(module.state_dict())
    with torch.no_grad():
        _, past = copy(x[:, :20], key_mask=mask[:, :20])
        for t in range(20, 30):
            o, past = copy(x[:, t : t + 1], past=past, key_mask=mask[:, : t + 1])
            torch.testing.assert_close(o, outputs[1][:, t : t + 1].detach(), rtol=0, atol=1e-9)
    outputs[1].square().sum().backward()
    if center == "learned":
        assert all(x.grad.abs().max() > 0 for x in module.key_map() if x is not None)


def test_centers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="center must be one of 'none', 'learned', 'calibrated', got 'mean'"):
        LucidAttention(16, 2, center="mean")
    with pytest.raises(ValueError, match="whiten=True needs center="):
        LucidAttention(16, 2, whiten=True)
    with pytest.raises(ValueError, match="calibrate\\(\\) needs center="):
        LucidAttention(16, 2).calibrate(torch.randn(1, 3, 16))
