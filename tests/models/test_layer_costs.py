"""`lucid convert --layers-from`: layers chosen by their measured cost, and what is said about the way from there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid
from lucid_attention.files import read_json, write_record
from lucid_attention.models.convert import layers_within
from lucid_lab import cli
from lucid_lab.analysis.disturbance import disturbances, disturbances_together
from lucid_lab.data.tokenize import train

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 320}
# Changes by layers, at strength 1 and c = √D.
SETS = {(0,): 0.6, (1,): 0.01, (2,): 0.02, (3,): -0.01, (1, 3): 0.05, (1, 2, 3): 0.2, (0, 1, 2, 3): 7.0}


def record(layers: tuple[int, ...], change: float, strength: float = 1.0, sharpness: float = 8.0) -> dict[str, Any]:
    return {"layers": list(layers), "strength": strength, "sharpness": sharpness, "loss": 2 + change, "change": change}


def analysis(folder: Path, **content: Any) -> Path:
    # Cheap only because LUCID acts less: these must not be chosen.
    gentle = [record((0, 1, 2, 3), 0.001, strength=0.1), record((0, 1, 2, 3), 0.002, sharpness=64.0)]
    records = [record((), 0.0, strength=0.0), *gentle, *(record(layers, change) for layers, change in SETS.items())]
    head = {"checkpoint": {"name": "m", "model_type": "llama"}, "input": {"tokens": 40}}
    return write_record(folder / "analysis.json", head | {"results": {"disturbance": records}} | content)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=4))
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("most", "layers"), [(0.0, [3]), (0.05, [1, 3]), (0.19, [1, 3]), (0.2, [1, 2, 3]), (9.0, [0, 1, 2, 3])]
)
def test_the_largest_set_that_costs_little_enough_is_chosen(most: float, layers: list[int], tmp_path: Path) -> None:
    choice = layers_within(analysis(tmp_path), most, "llama")
    assert (choice.layers, choice.change, choice.tokens) == (layers, SETS[tuple(layers)], 40)


def test_of_sets_of_one_size_the_cheapest_is_chosen(tmp_path: Path) -> None:
    assert layers_within(analysis(tmp_path), 0.03, "llama").layers == [3]


@pytest.mark.parametrize(
    ("most", "kind", "content", "message"),
    [
        (-0.5, "llama", {}, r"costs so little; the cheapest, 3, costs -0\.01 nats"),
        (float("nan"), "llama", {}, "must be a number of nats, got nan"),
        (0.1, "qwen3", {}, "architecture 'llama', expected 'qwen3'"),
        (0.1, "llama", {"results": {"conditioning": []}}, "expected the numbers of `lucid analyze"),
        (0.1, "llama", {"results": {"disturbance": [record((), 0.0)]}}, "no layer was measured"),
    ],
    ids=["too little", "no number", "another model", "another analysis", "no layers"],
)
def test_what_cannot_be_chosen_is_refused_with_the_reason(
    most: float, kind: str, content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        layers_within(analysis(tmp_path, **content), most, kind)


def test_the_cheapest_layers_are_measured_together(llama: Path) -> None:
    ids = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    records = disturbances(model, ids, strengths=(), sharpnesses=())
    found = disturbances_together(model, ids, records)
    order = sorted(records[1:], key=lambda one: one["change"])
    assert [one["layers"] for one in found] == [
        sorted(layer for alone in order[:count] for layer in alone["layers"]) for count in (2, 3)
    ]
    for one in found:
        fresh = enable_lucid(AutoModelForCausalLM.from_pretrained(llama).eval(), layers=one["layers"])
        with torch.no_grad():
            loss = float(fresh(ids, labels=ids).loss)
        assert one["loss"] == pytest.approx(loss, abs=1e-6)
        assert one["change"] == pytest.approx(loss - records[0]["loss"], abs=2e-6)
    torch.manual_seed(0)
    own = LucidForCausalLM(LucidConfig(**SIZES, num_hidden_layers=3)).eval()
    assert disturbances_together(own, ids, disturbances(own, ids, strengths=(), sharpnesses=())) == []


def test_the_commands_go_from_the_analysis_to_the_checkpoint(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "out" / "analysis.json"
    train([Path(__file__).read_text()], 300).save_pretrained(llama)
    argv = [
        "analyze",
        str(llama),
        "--tokens-from",
        "stdlib",
        "--length",
        "30",
        "--what",
        "disturbance",
        "--out",
        str(numbers.parent),
    ]
    assert cli.main(argv) == 0
    assert "the 3 cheapest" in capsys.readouterr().out
    content = read_json(numbers)
    assert content["checkpoint"]["attention"] == "sdpa", "the attention before it was changed"
    measured = [one for one in content["results"]["disturbance"] if len(one["layers"]) == 3]
    chosen = ["--layers-from", str(numbers), "--most-change", str(measured[0]["change"] + 1e-9)]
    assert cli.main(["convert", str(llama), str(tmp_path / "lucid"), *chosen, "--sharpness", "64"]) == 0
    shown = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lucid")
    assert len(model.config.lucid["layers"]) >= 3
    assert "nats together" in shown
    assert "Its sharpness is 64, and LUCID's is √D = 2.828" in shown
    assert f"--from {tmp_path / 'lucid'} --data TOKENS --set sharpness_steps=0.5 --set sharpness_start=64" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--most-change", "0.1"], "got no --layers-from"),
        (["--layers-from", "a.json"], "got no --most-change"),
        (["--layers-from", "a.json", "--most-change", "0.1", "--layers", "0"], "expected no --layers with it"),
        (["--layers-from", "a.json", "--most-change", "0.1", "--to", "softmax"], "expected no --to softmax"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], message: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(llama), str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--strength", "0"], "set strength_steps=0.5"),
        (["--sharpness", "32"], "SharpnessRamp(steps=0.5, start=32)"),
        ([], "--sharpness 64 and a ramp in training are gentler"),
    ],
)
def test_convert_says_how_to_train_from_there(
    options: list[str], line: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(llama), str(tmp_path / "out"), *options]) == 0
    assert line in capsys.readouterr().out
