"""`lucid analyze`, from the command line to the files, and to the page of `lucid report`."""

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lucid_lab import cli
from lucid_lab.analysis.command import find
from lucid_lab.analysis.conditioning import condition_numbers
from lucid_lab.analysis.hit_rate import Query, average, hit_rates
from lucid_lab.analysis.jacobian import jacobians

from .conftest import TEXT

PHRASE = "magic number is 4711"


def analyze(*words: object) -> int:
    return cli.main(["analyze", *(str(word) for word in words)])


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "analysis.json").read_text())


@pytest.mark.parametrize("kind", ["lucid", "drop-in", "softmax", "path"])
def test_numbers_are_those_of_the_functions(kind, checkpoints, tmp_path, capsys):
    text, out, folder = tmp_path / "prompt.txt", tmp_path / "out", checkpoints[kind]
    text.write_text(TEXT * 3)
    words = ("--text", text, "--find", PHRASE, "--lengths", "8,32", "--out", out)
    assert analyze(folder, *words, "--what", "conditioning,hit_rate,jacobian") == 0
    written = results(out)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(TEXT * 3, return_offsets_mapping=True)
    ids = torch.tensor([encoded["input_ids"]])
    T = ids.shape[1]
    assert written["input"]["tokens"] == T
    spans = tuple(find(PHRASE, TEXT * 3, encoded["offset_mapping"]))
    assert len(spans) == 3
    records = hit_rates(model, ids, [Query(T - 1, spans)])
    assert written["results"] == {
        "conditioning": condition_numbers(model, ids, [8, 32]),
        "hit_rate": records,
        "mean_hit_rate": average(records, ())[0],
        "jacobian": jacobians(model, ids),
    }
    shown = capsys.readouterr().out
    assert f"{average(records, ('layer',))[1]['signed']:.4g}" in shown
    assert f"{median(r['kappa'] for r in written['results']['conditioning'][1:8:2] if r['layer'] == 0):.4g}" in shown
    assert str(out / "analysis.json") in shown


def test_by_default_every_analysis_that_applies_is_made_and_the_report_shows_it(checkpoints, tmp_path):
    out = tmp_path / "out"
    assert analyze(checkpoints["lucid"], "--text", TEXT * 2, "--out", out) == 0
    written = results(out)
    T = written["input"]["tokens"]
    assert list(written["results"]) == ["conditioning", "jacobian"]
    assert {record["length"] for record in written["results"]["conditioning"]} == {32, T}
    maps = json.loads((out / "maps.json").read_text())["figures"]
    assert [(drawn["layer"], drawn["head"]) for drawn in maps] == [
        (layer, head) for layer in (0, 1) for head in range(4)
    ]
    for drawn in maps:
        softmax, effective = (torch.tensor(panel["values"]) for panel in drawn["panels"])
        assert effective.shape == softmax.shape == (T, T)
        torch.testing.assert_close(softmax.sum(1), torch.ones(T), rtol=1e-4, atol=1e-4)
        assert (effective - softmax).abs().max() > 0.01
    assert {file.name for file in out.iterdir()} == {"analysis.json", "maps.json"}
    assert cli.main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/svg+xml") == 2 + 2 * len(maps)


def test_files_hold_no_path_of_the_machine_and_equal_commands_write_equal_files(checkpoints, tmp_path):
    out = tmp_path / "out"
    words = ("--what", "conditioning", "--text", TEXT, "--length", 20, "--layers", "1", "--out", out)
    assert analyze(checkpoints["lucid"], *words) == 0
    text = (out / "analysis.json").read_text()
    assert str(tmp_path) not in text
    assert str(checkpoints["lucid"].parent) not in text
    written = json.loads(text)
    assert written["checkpoint"] == {"name": "lucid", "model_type": "lucid_attention", "attention": "lucid"}
    assert analyze(checkpoints["lucid"], *words) == 0
    assert (out / "analysis.json").read_text() == text


def test_tokens_come_from_texts_a_token_folder_or_the_standard_library(checkpoints, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The sky is blue. ")
    (tmp_path / "texts" / "b.txt").write_text(TEXT * 20)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7], list(range(90))]})
    DatasetDict({"train": rows}).save_to_disk(tmp_path / "tokens")
    for source, about in (("texts", "text of texts"), ("tokens", "tokens of tokens"), (None, "text of stdlib")):
        words = ["--length", 50, "--what", "jacobian", "--out", tmp_path / "out"]
        words += [] if source is None else ["--tokens-from", tmp_path / source]
        assert analyze(checkpoints["softmax"], *words) == 0
        assert results(tmp_path / "out")["input"]["tokens"] == 50
        assert results(tmp_path / "out")["input"]["about"] == about


ERRORS = {
    "no tokenizer": (["{bare}"], "has no tokenizer that can be loaded"),
    "no folder": (["nowhere"], "CHECKPOINT must be a local folder, got 'nowhere'"),
    "no softmax": (["{delta}", "--text", TEXT], "layer 0 has attention 'delta', which has no softmax"),
    "no phrase": (["{lucid}", "--text", TEXT, "--what", "hit_rate"], "give --find PHRASE"),
    "a phrase after the end": (["{lucid}", "--text", TEXT, "--find", PHRASE, "--length", "9"], "of the 9 tokens"),
    "layers": (["{lucid}", "--text", TEXT, "--layers", "2"], "layers must be 0 to 1, of this model, got 2"),
    "lengths": (["{lucid}", "--text", "The sky is blue.", "--lengths", "4,999"], "got 999"),
    "what": (["{lucid}", "--what", "kappa"], "--what must be some of conditioning"),
    "two sources": (["{lucid}", "--text", "a b", "--tokens-from", "stdlib"], "expected one source of tokens"),
    "a file that is not there": (["{lucid}", "--text", "no/file.txt"], "got 'no/file.txt', which looks like a file"),
    "no source": (["{lucid}", "--tokens-from", "nowhere"], "nowhere"),
    "one token": (["{lucid}", "--text", "a"], "must have at least two tokens, got 1"),
    "device": (["{lucid}", "--text", TEXT, "--device", "warp"], "--device must be auto, cpu"),
}


@pytest.mark.parametrize(("words", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_what_was_expected_and_what_it_got(words, message, checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert analyze(*(word.format(**checkpoints) for word in words)) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("lucid analyze: error: ")
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_a_text_of_unknown_words_alone_is_refused(checkpoints, tmp_path, capsys):
    folder = shutil.copytree(checkpoints["lucid"], tmp_path / "model")
    words = Tokenizer(models.WordLevel({"known": 0, "[PAD]": 1}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    assert analyze(folder, "--text", "no such words", "--out", tmp_path / "out") == 1
    assert "must have tokens that the model knows, got 3 unknown or padding ones" in capsys.readouterr().err
    assert analyze(folder, "--text", "a known word", "--out", tmp_path / "out") == 0


def test_phrases_are_found_wherever_they_are():
    text, offsets = "ab cd ab cd", [(0, 0), (0, 2), (2, 5), (5, 8), (8, 10), (10, 11)]
    assert find("ab", text, offsets) == [(1, 2), (3, 4)]
    assert find("b c", text, offsets) == [(1, 3), (3, 5)]
    assert find("cd", text, offsets[:-1]) == [(2, 3)]
