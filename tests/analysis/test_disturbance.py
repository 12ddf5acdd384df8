"""The loss when layers become LUCID: against models that were made so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid
from lucid_lab.analysis.disturbance import disturbances
from lucid_lab.cli import main

from .conftest import TEXT

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 31}
IDS = torch.randint(3, 31, (1, 40), generator=torch.Generator().manual_seed(0))


def llama(**lucid: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=3)).eval()
    return enable_lucid(model, **lucid) if lucid else model


def loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(IDS, labels=IDS).loss)


def test_each_record_is_the_loss_of_the_model_with_these_settings() -> None:
    records = disturbances(llama(), IDS, strengths=(0.5,), sharpnesses=(30.0, math.sqrt(8)))
    base = loss(llama())
    assert records[0] == {
        "layers": [],
        "strength": 0,
        "sharpness": math.sqrt(8),
        "loss": records[0]["loss"],
        "change": 0,
    }
    assert records[0]["loss"] == pytest.approx(base, abs=1e-6)
    everywhere = [0, 1, 2]
    assert [record["layers"] for record in records[1:]] == [[0], [1], [2], everywhere, everywhere, everywhere]
    for record in records[1:]:
        settings = {name: record[name] for name in ("layers", "strength", "sharpness")}
        assert record["loss"] == pytest.approx(loss(llama(**settings)), abs=1e-6)
        assert record["change"] == pytest.approx(record["loss"] - base, abs=2e-6)
    assert len({round(record["loss"], 7) for record in records}) == len(records)


def test_layers_with_a_window_are_left_alone() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert [record["layers"] for record in disturbances(model, IDS)] == [[], [1], *[[1]] * 7]
    with pytest.raises(ValueError, match=r"layers must be ones that can be LUCID, \[1\], got 0"):
        disturbances(model, IDS, layers=[0])


def test_the_own_decoder_is_measured_by_its_lucid_layers() -> None:
    def own(attention: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        config = LucidConfig(**SIZES, num_hidden_layers=2, attention=attention, attention_options=options)
        return LucidForCausalLM(config).eval()

    records = disturbances(own(["softmax", "lucid"]), IDS, strengths=(), sharpnesses=(3.0,))
    assert records[0]["loss"] == pytest.approx(loss(own("softmax")), abs=1e-6)
    assert [record["layers"] for record in records[1:]] == [[1], [1]]
    assert records[2]["loss"] == pytest.approx(loss(own(["softmax", "lucid"], lucid={"sharpness": 3.0})), abs=1e-6)
    with pytest.raises(ValueError, match="needs layers that can be LUCID"):
        disturbances(own("softmax"), IDS)


def test_the_command_prints_a_table_and_keeps_the_numbers(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["analyze", str(checkpoints["softmax"]), "--text", TEXT, "--what", "disturbance"]
    assert main([*argv, "--strengths", "0.5", "--sharpnesses", "64,8", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["none", "(softmax)"] for line in lines)
    assert sum(line.startswith("2 layers") for line in lines) == 3
    records = json.loads((tmp_path / "out" / "analysis.json").read_text())["results"]["disturbance"]
    assert [record["sharpness"] for record in records[-2:]] == [64, 8]
