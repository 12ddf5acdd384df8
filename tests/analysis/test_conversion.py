"""The loss when layers become LUCID: against models that were made so."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lucid_attention import enable_lucid
from lucid_attention.models.convert import KEYS
from lucid_lab.analysis.conversion import disturbances, switched
from lucid_lab.cli import main

from .conftest import TEXT

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 31}
IDS, SAMPLE = torch.randint(3, 31, (2, 2, 40), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=3)).eval()
    for weight in model.parameters():
        weight.data.mul_(5 if weight.ndim == 2 else 1)
    return model


def calibrated() -> Any:
    model = llama()
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


def test_disturbances_of_all_three_kinds_of_keys() -> None:
    records = disturbances(llama(), IDS, SAMPLE, layers=[2])
    root = math.sqrt(8)
    cases = [([], root), ([2], root), *(([0, 1, 2], factor * root) for factor in (1, 1.5, 2, 4))]
    assert [(x["keys"], x["layers"], x["sharpness"]) for x in records] == [
        (keys, *case) for keys in KEYS for case in cases
    ]
    assert [x["change"] for x in records[: len(cases)]] == [x["change"] for x in switched(calibrated(), IDS, cases)]
    changes = {keys: [x["change"] for x in records if x["keys"] == keys] for keys in KEYS}
    assert len({tuple(values) for values in changes.values()}) == 3
    with pytest.raises(ValueError, match=r"layers must be ones that can be LUCID, \[0, 1, 2\], got 3"):
        disturbances(llama(), IDS, SAMPLE, layers=[3])


def test_the_command_shows_the_keys_side_by_side(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["analyze", str(checkpoints["softmax"]), "--text", TEXT, "--what", "disturbance"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = ["LUCID", "in", "sharpness", *(word for name in KEYS for word in (name, "keys"))]
    assert header in lines
    assert len(lines[lines.index(header) + 1]) >= 5
