"""Weights: applied to the values they give the output of the layer, with identity values that of the operators."""

import pytest
import torch
from torch import Tensor

from lucid_attention import enable_lucid
from lucid_lab.analysis import layer as layer_module
from lucid_lab.analysis.layer import Layer
from tests.ops import oracles

from .subjects import Plain, layers_of, llama, tokens

T = 23
CASES = {
    "softmax": {},
    "sliding": {"window": 5},
    "lucid": {},
    "lucid, row max": {"norm": "row_max"},
    "lucid, qk": {"norm": "qk"},
    "lucid, beta": {"learn_beta": True},
    "lucid, sharpness": {"learn_sharpness": True, "sharpness": 1.5},
    "lucid, strength": {"strength": 0.4},
    "lucid, off": {"strength": 0.0},
    "lucid, wide values": {"value_dim": 11},
    "path": {},
    "lucid_path": {},
    "lucid_path, sharpness": {"learn_sharpness": True, "sharpness": 1.5},
    "diff": {},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one block of rows in every test."""
    monkeypatch.setattr(layer_module, "BLOCK", 7)


def subject(case: str) -> Plain:
    name = case.partition(",")[0]
    model = Plain(name, name, **CASES[case]).double()
    with torch.no_grad():
        for layer in model.layers:
            if getattr(layer, "log_sharpness", None) is not None:
                layer.log_sharpness += torch.tensor([-0.4, 0.5])
    return model


def read(layer: Layer, rows: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """o of some rows, [B, heads, n, E], by W and the values alone."""
    o = torch.zeros(layer.q.shape[0], layer.query_heads, len(rows), layer.v.shape[-1], dtype=torch.float64)
    for head in layer.heads():
        asked = rows if key_mask is None else rows[key_mask[head.row, rows]]
        where = torch.isin(rows, asked).nonzero()[:, 0]
        got = head.effective(head.rows_of(asked.tolist())) @ head.v
        o[head.row, torch.tensor(head.query_heads)[:, None], where] = got
    return o


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padding", [False, True], ids=["plain", "padded"])
def test_what_is_read_with_effective_weights_is_the_output_of_the_layer(case, padding):
    model = subject(case)
    mask = torch.ones(2, T, dtype=torch.bool)
    if padding:
        mask[0, :4], mask[1, 9:11] = False, False
    inputs = {"input_ids": tokens(2, T), "key_mask": mask if padding else None}
    rows = torch.tensor([22, 4, 12, 17, 8, 9])
    outputs = []
    for module in model.layers:
        module.register_forward_hook(lambda module, x, o: outputs.append(o[0]))
    layers = layers_of(model, inputs)
    assert len(layers) == len(outputs) == 2
    for layer, module, o in zip(layers, model.layers, outputs, strict=True):
        mine = read(layer, rows, mask if padding else None)
        if case == "diff":
            mine = (1 - module.lambda_init) * module.o_norm(mine)
        mine = module.o_proj(mine.transpose(1, 2).flatten(2))
        kept = mask[:, rows]
        torch.testing.assert_close(mine[kept], o[:, rows][kept], rtol=1e-9, atol=1e-10)


def mapped_llama():
    """Another strength, centre and matrix in every head."""
    model = enable_lucid(llama("sdpa"), center="calibrated", whiten=True, learned=["strength"])
    for name, x in model.state_dict().items():
        if "lucid.center" in name or "lucid.matrix" in name:
            x.add_(0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))
        elif "lucid.strength" in name:
            x.copy_(torch.tensor([0.4, 0.9]))
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "lucid", "mapped"])
def test_a_transformers_model_reads_its_values_with_these_weights(implementation):
    # Transformers' eager attention needs float32: its masks overflow in float64.
    model = mapped_llama() if implementation == "mapped" else llama(implementation)
    model = model.to(torch.float32 if implementation == "eager" else torch.float64)
    ids, mask = tokens(2, T), torch.ones(2, T, dtype=torch.long)
    mask[0, :6] = 0
    outputs = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, x: outputs.append(x[0]))
    layers = layers_of(model, {"input_ids": ids, "attention_mask": mask})
    assert len(layers) == len(outputs) == 3
    rows = torch.tensor([22, 6, 12])
    for layer, o in zip(layers, outputs, strict=True):
        assert layer.preconditioned == (implementation in ("lucid", "mapped"))
        mine = read(layer, rows, mask.bool()).transpose(1, 2).flatten(2)
        off = {"rtol": 1e-5, "atol": 3e-6} if implementation == "eager" else {"rtol": 1e-9, "atol": 1e-10}
        torch.testing.assert_close(mine, o[:, rows].double(), **off)


def test_the_settings_of_a_drop_in_model_reach_the_analysis():
    model = enable_lucid(llama("sdpa"), layers=[1, 2], strength=0.5, sharpness=1.5)
    off, *on = layers_of(model, tokens(1, T))
    assert (off.preconditioned, off.strength, off.attention) == (False, 1.0, "softmax")
    assert [(each.preconditioned, each.strength, each.sharpness, each.attention) for each in on] == [
        (True, 0.5, 1.5, "lucid")
    ] * 2
    layer = on[0]
    identity = torch.eye(T, dtype=torch.float64).expand(1, 2, T, T)
    truth = oracles.lucid_attention(layer.q.double(), layer.k.double(), identity, sharpness=1.5, strength=0.5)
    for head in layer.heads([3]):
        torch.testing.assert_close(head.effective(torch.arange(T))[0], truth[0, 3], rtol=1e-9, atol=1e-10)


def test_windows_and_caps_of_an_architecture_are_followed():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3, "initializer_range": 0.5}
    config = Gemma2Config(vocab_size=48, num_key_value_heads=2, head_dim=8, **sizes, **options)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    outputs = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, x: outputs.append(x[0]))
    layers = layers_of(model, tokens(1, T))
    assert [each.attention for each in layers] == ["sliding", "softmax"]
    rows = torch.tensor([3, 22])
    for layer, o in zip(layers, outputs, strict=True):
        assert layer.softcap == 0.5
        mine = read(layer, rows).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mine, o[:, rows], rtol=1e-5, atol=2e-6)
