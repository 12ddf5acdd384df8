"""The loss when layers become LUCID: against models that were made so."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lucid_attention import enable_lucid
from lucid_lab.analysis.conversion import switched

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 31}
IDS, SAMPLE = torch.randint(3, 31, (2, 2, 40), generator=torch.Generator().manual_seed(0))


def calibrated() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=3)).eval()
    for weight in model.parameters():
        weight.data.mul_(5 if weight.ndim == 2 else 1)
    enable_lucid(model, strength=0, center="calibrated", whiten=True)
    model.calibrate(SAMPLE)
    return model


@torch.no_grad()
def test_each_record_is_the_loss_of_the_model_with_these_settings() -> None:
    cases = [([], math.sqrt(8)), ([2], math.sqrt(8)), ([0, 1, 2], 30.0), ([0, 1, 2], 3.0)]
    records = switched(calibrated(), IDS, cases)
    assert [(record["layers"], record["sharpness"]) for record in records] == cases
    for record in records:
        model = calibrated()
        for layer in record["layers"]:
            model.model.layers[layer].self_attn.lucid.strength.fill_(1)
            model.model.layers[layer].self_attn.lucid.sharpness.fill_(record["sharpness"])
        loss = float(model(IDS, labels=IDS).loss)
        assert record["loss"] == pytest.approx(loss, abs=1e-6)
        assert record["change"] == pytest.approx(loss - records[0]["loss"], abs=2e-6)
    assert len({round(record["loss"], 6) for record in records}) == len(records)
