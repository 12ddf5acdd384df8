"""The loss when layers become LUCID: against models that were made so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid
from lucid_attention.models.convert import KEYS
from lucid_lab.analysis.disturbance import disturbances
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


@torch.no_grad()
def loss(model: Any) -> float:
    return float(model(IDS, labels=IDS).loss)


def test_each_record_is_the_loss_of_the_model_with_these_settings() -> None:
    records = disturbances(llama(), IDS, SAMPLE, layers=[0, 2], sharpnesses=(30.0, 3.0))
    base, root = loss(llama()), math.sqrt(8)
    first = {"keys": "whitened", "layers": [], "sharpness": root, "loss": pytest.approx(base), "change": 0}
    assert records[0] == first
    cases = [([0], root), ([2], root), ([0, 1, 2], 30.0), ([0, 1, 2], 3.0)]
    assert [(x["keys"], x["layers"], x["sharpness"]) for x in records[1:]] == [
        (key, *case) for key in KEYS for case in cases
    ]
    for record in records[1:]:
        # Calibrated with softmax attention in all layers, then switched on in some.
        model = enable_lucid(llama(), strength=0, **KEYS[record["keys"]])
        if record["keys"] != "raw":
            model.calibrate(SAMPLE)
        for layer in record["layers"]:
            model.model.layers[layer].self_attn.lucid.strength.fill_(1)
            model.model.layers[layer].self_attn.lucid.sharpness.fill_(record["sharpness"])
        assert record["loss"] == pytest.approx(loss(model), abs=1e-6)
        assert record["change"] == pytest.approx(record["loss"] - base, abs=2e-6)
    assert len({round(record["loss"], 6) for record in records}) == len(records)


def test_layers_with_a_window_are_left_alone_and_what_cannot_be_measured_is_refused() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert [record["layers"] for record in disturbances(model, IDS, keys=["raw"])] == [[], *[[1]] * 4]
    with pytest.raises(ValueError, match=r"layers must be ones that can be LUCID, \[1\], got 0"):
        disturbances(model, IDS, keys=["raw"], layers=[0])
    with pytest.raises(ValueError, match="whitened keys need a sample to calibrate with, got none"):
        disturbances(model, IDS)
    with pytest.raises(ValueError, match="models of other architectures, got a LucidForCausalLM"):
        disturbances(LucidForCausalLM(LucidConfig(**SIZES, num_hidden_layers=1)), IDS)


def test_the_command_shows_raw_centred_and_whitened_keys_side_by_side(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["analyze", str(checkpoints["softmax"]), "--text", TEXT, "--what", "disturbance", "--sharpnesses", "64,8"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["LUCID", "in", "sharpness", *(word for name in KEYS for word in (name, "keys"))] in lines
    records = json.loads((tmp_path / "out" / "analysis.json").read_text())["results"]["disturbance"]
    assert [(x["keys"], x["sharpness"]) for x in records if len(x["layers"]) == 2] == [
        (k, c) for k in KEYS for c in (64, 8)
    ]
    last = [f"{record['change']:+.4f}" for record in records if len(record["layers"]) == 2 and record["sharpness"] == 8]
    assert ["2", "layers", "8", *last] in lines
