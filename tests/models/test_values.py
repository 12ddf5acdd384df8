"""Setting the strength and the sharpness of whole models."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid, set_sharpness, set_strength
from lucid_attention.models.preconditioner import Preconditioner
from lucid_attention.nn.attention import LucidAttention

IDS = torch.arange(2, 18).repeat(2, 1) % 5 + 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROOT = math.sqrt(8)


def dropin() -> Any:
    torch.manual_seed(0)
    return enable_lucid(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=31, **SIZES)))


def own(attention: Any = "lucid", **options: Any) -> LucidForCausalLM:
    torch.manual_seed(0)
    return LucidForCausalLM(LucidConfig(vocab_size=31, **SIZES, attention=attention, attention_options=options))


MODELS = {
    "drop-in": dropin,
    "own": own,
    "hybrid": lambda: own(["lucid", "delta"], lucid={"sharpness": 2.0}, delta={"conv_size": 2}),
}
SETTERS: dict[str, Any] = {"strength": set_strength, "sharpness": set_sharpness}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
both = pytest.mark.parametrize("name", SETTERS)


def value(model: Any, name: str) -> float:
    """The value that all heads of all LUCID layers compute with."""
    found = []
    for module in model.modules():
        if isinstance(module, Preconditioner):
            found += getattr(module, name).tolist()
        elif isinstance(module, LucidAttention):
            found.append(module.strength if name == "strength" else module.fixed_sharpness or ROOT)
    assert len(set(found)) == 1
    return found[0]


@both
@every_model
def test_a_value_acts_and_is_saved_and_other_options_stay(make: Any, name: str, tmp_path: Path) -> None:
    model = make().eval()
    before = getattr(model.config, "attention_options", {})
    with torch.no_grad():
        one = model(IDS).logits
        SETTERS[name](model, 0.25)
        changed = model(IDS).logits
    assert not torch.allclose(one, changed, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert value(model, name) == value(again, name) == 0.25
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, changed)
    if "delta" in before:
        assert again.config.attention_options == before | {"lucid": before["lucid"] | {name: 0.25}}


@every_model
def test_a_large_sharpness_is_softmax_attention(make: Any) -> None:
    """Tokens differ here, so no two keys have the same direction."""
    model = make().eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        set_sharpness(model, 1e6)
        sharp = model(ids).logits
        set_strength(model, 0.0)
        torch.testing.assert_close(sharp, model(ids).logits)


def test_what_cannot_be_set_is_refused() -> None:
    with pytest.raises(ValueError, match="must have LUCID layers"):
        set_strength(own("softmax"), 0.5)
    with pytest.raises(ValueError, match="strength"):
        set_strength(own(), 1.5)
    for learned in (own(learn_sharpness=True), enable_lucid(dropin(), learned=["sharpness"])):
        with pytest.raises(ValueError, match="sharpness of this model is learned"):
            set_sharpness(learned, 3.0)
