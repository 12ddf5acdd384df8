"""`lucid analyze`, from the command line to the files."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from lucid_lab import cli
from lucid_lab.analysis import arguments, command, inputs
from lucid_lab.analysis.conditioning import condition_numbers
from lucid_lab.analysis.hit_rate import Query, average, hit_rates
from lucid_lab.analysis.inputs import find, is_file
from lucid_lab.analysis.jacobian import jacobians
from lucid_lab.locks import locked

from .conftest import TEXT

PHRASE = "magic number is 4711"


def analyze(*words: object) -> int:
    return cli.main(["analyze", *(str(word) for word in words)])


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "analysis.json").read_text())


@pytest.mark.parametrize("kind", ["lucid", "drop-in", "softmax", "path"])
def test_numbers_are_those_of_the_functions(kind, checkpoints, tmp_path, capsys):
    text = tmp_path / "prompt.txt"
    text.write_text(TEXT * 3)
    out = tmp_path / "out"
    folder = checkpoints[kind]
    words = ("--text", text, "--find", PHRASE, "--last", 2, "--lengths", "8,32", "--out", out)
    assert analyze(folder, *words, "--what", "conditioning,hit_rate,jacobian") == 0
    written = results(out)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(TEXT * 3, return_offsets_mapping=True)
    ids, offsets = torch.tensor([encoded["input_ids"]]), encoded["offset_mapping"]
    T = ids.shape[1]
    assert written["input"]["tokens"] == T
    spans = tuple(find(PHRASE, TEXT * 3, offsets))
    assert len(spans) == 3
    records = hit_rates(model, ids, [Query(T - 2, spans), Query(T - 1, spans)])
    expected = {
        "conditioning": condition_numbers(model, ids, [8, 32]),
        "hit_rate": records,
        "mean_hit_rate": average(records, ())[0],
        "jacobian": jacobians(model, ids),
    }
    assert written["results"] == expected
    shown = capsys.readouterr().out
    assert f"{written['results']['mean_hit_rate']['softmax']:.4f}" in shown
    assert str(out / "condition_numbers.png") in shown


def test_by_default_every_analysis_that_applies_is_made(checkpoints, tmp_path):
    out = tmp_path / "out"
    assert analyze(checkpoints["lucid"], "--text", TEXT * 2, "--out", out) == 0
    written = results(out)
    T = written["input"]["tokens"]
    assert list(written["results"]) == ["conditioning", "jacobian"]
    assert {each["length"] for each in written["results"]["conditioning"]} == {32, T}
    maps = json.loads((out / "maps.json").read_text())["maps"]
    assert [(each["layer"], each["head"]) for each in maps] == [(layer, head) for layer in (0, 1) for head in range(4)]
    for each in maps:
        effective, softmax = (torch.tensor(each[name]) for name in ("effective", "softmax"))
        assert effective.shape == softmax.shape == (T, T)
        torch.testing.assert_close(softmax.sum(1), torch.ones(T), rtol=1e-4, atol=1e-4)
        assert (effective - softmax).abs().max() > 0.01
    pictures = {"condition_numbers.png", "maps_layer_0.png", "maps_layer_1.png"}
    assert {file.name for file in out.iterdir()} == {"analysis.json", "maps.json", *pictures}
    for name in pictures:
        picture = Image.open(out / name).convert("RGB")
        assert min(picture.size) > 300
        assert len(picture.getcolors(1 << 24)) > 20


@pytest.mark.parametrize("obstacle", ["another run", "a file"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    obstacle, checkpoints, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "load_model", lambda *_: pytest.fail("the model was loaded"))
    out = tmp_path / "out"
    if obstacle == "a file":
        out.write_text("")
    with nullcontext() if obstacle == "a file" else locked(out, "lucid analyze"):
        assert analyze(checkpoints["lucid"], "--text", TEXT, "--out", out) == 1
    shown = capsys.readouterr().err
    assert str(out) in shown
    assert obstacle == "a file" or "is being written by another `lucid analyze`" in shown


def test_files_hold_no_path_of_the_machine(checkpoints, tmp_path):
    out = tmp_path / "out"
    words = ("--what", "conditioning", "--text", TEXT, "--length", 20, "--heads", "3", "--layers", "1", "--out", out)
    assert analyze(checkpoints["lucid"], *words) == 0
    text = (out / "analysis.json").read_text()
    assert str(tmp_path) not in text
    assert str(checkpoints["lucid"].parent) not in text
    written = json.loads(text)
    assert written["command"].startswith("lucid analyze lucid --what conditioning --text 'The grass")
    assert written["command"].endswith("--length 20 --layers 1 --heads 3")
    assert written["checkpoint"] == {"name": "lucid", "model_type": "lucid_attention", "attention": "lucid"}
    # Query head 3 reads with keys of head 1.
    assert [(each["layer"], each["head"], each["length"]) for each in written["results"]["conditioning"]] == [
        (1, 1, 20)
    ]
    before = text
    assert analyze(checkpoints["lucid"], *words) == 0
    assert (out / "analysis.json").read_text() == before


def test_only_what_was_asked_for_is_made(checkpoints, tmp_path):
    out = tmp_path / "out"
    words = ("--text", TEXT, "--what", "maps", "--layers", "1", "--heads", "0,2", "--bins", "6", "--out", out)
    assert analyze(checkpoints["softmax"], *words) == 0
    assert {file.name for file in out.iterdir()} == {"analysis.json", "maps.json", "maps_layer_1.png"}
    assert results(out)["results"] == {}
    maps = json.loads((out / "maps.json").read_text())["maps"]
    assert [(each["head"], len(each["borders"])) for each in maps] == [(0, 7), (2, 7)]
    assert all(each["effective"] == each["softmax"] for each in maps)


def test_a_task_needs_no_tokenizer_and_brings_its_questions(checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert analyze(checkpoints["bare"], "--task", "needles", "--what", "hit_rate", "--length", 40) == 0
    # A run's model has the name of the run.
    written = results(tmp_path / "runs" / "analysis" / "bare")
    assert written["input"]["tokens"] == 40
    assert len(written["results"]["hit_rate"]) == 2 * 4 * 8
    capsys.readouterr()
    assert analyze(checkpoints["bare"]) == 1
    assert "has no tokenizer that can be loaded" in capsys.readouterr().err


def test_a_corpus_is_read_as_far_as_it_is_needed(checkpoints, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The sky is blue. ")
    (tmp_path / "texts" / "b.txt").write_text(TEXT * 20)
    out = tmp_path / "out"
    words = ("--tokens-from", tmp_path / "texts", "--length", 50, "--what", "jacobian", "--out", out)
    assert analyze(checkpoints["softmax"], *words) == 0
    assert results(out)["input"]["tokens"] == 50
    assert analyze(checkpoints["softmax"], "--what", "jacobian", "--length", 30, "--out", out) == 0
    assert results(out)["input"] | {"sha256": ""} == {"about": "text of stdlib", "tokens": 30, "sha256": ""}


ERRORS = {
    "no folder": (["nowhere"], "CHECKPOINT must be a local folder, got 'nowhere'"),
    "a run instead of its model": (["{bare}/.."], "Did you mean"),
    "no weights": (["{tokenizer}"], "must hold a config.json"),
    "no softmax": (["{delta}", "--text", TEXT], "layer 0 has attention 'delta', which has no softmax"),
    "no phrase": (["{lucid}", "--text", TEXT, "--what", "hit_rate"], "give --find PHRASE, or --task NAME"),
    "a phrase that is not there": (["{lucid}", "--text", TEXT, "--find", "red"], "got 'red'"),
    "a phrase behind the end": (["{lucid}", "--text", TEXT, "--find", PHRASE, "--length", "9"], "of the 9 tokens"),
    "an empty phrase": (["{lucid}", "--text", TEXT, "--find", ""], "got an empty one"),
    "layers": (["{lucid}", "--text", TEXT, "--layers", "2"], "layers must be 0 to 1, of this model, got 2"),
    "heads": (["{lucid}", "--text", TEXT, "--what", "maps", "--heads", "4"], "0 to 3, got 4"),
    "lengths": (["{lucid}", "--text", "The sky is blue.", "--lengths", "4,999"], "got 999"),
    "length": (["{lucid}", "--text", TEXT, "--length", "1"], "--length must be 2 to 131072 tokens, got 1"),
    "a length without end": (["{lucid}", "--length", "99999999999"], "2 to 131072 tokens, got 99999999999"),
    "lengths without end": (["{lucid}", "--lengths", "8,99999999999"], "at most 131072 tokens, got 99999999999"),
    "a task without end": (["{bare}", "--task", "needles", "--length", "99999999999"], "got 99999999999"),
    "bins without end": (["{lucid}", "--bins", "99999999"], "--bins must be 1 to 1024, got 99999999"),
    "a file that is not there": (["{lucid}", "--text", "nofile.txt"], "got 'nofile.txt', which looks like a file"),
    "a path that is not there": (["{lucid}", "--text", "no/such/file"], "got 'no/such/file', which looks like"),
    "a name with a space": (["{lucid}", "--text", "my prompt.TXT"], "got 'my prompt.TXT', which looks like a file"),
    "a folder as a text": (["{lucid}", "--text", "."], "got the folder '.', which --tokens-from can read"),
    "a pipe as a text": (["{lucid}", "--text", "pipe"], "pipe: expected a file, got a pipe or device"),
    "a file in another encoding": (["{lucid}", "--text", "{latin}"], "expected text in UTF-8, got the byte 0xe9 at 1"),
    "last": (["{lucid}", "--text", "The sky is", "--find", "The", "--last", "99"], "--last must be 1 to"),
    "task": (["{lucid}", "--task", "neddles"], "--task must be one of memory_update, needles, got 'neddles'"),
    "vocabulary": (["{lucid}", "--task", "needles"], "--task needles has 161 ids"),
    "task with phrase": (["{bare}", "--task", "needles", "--find", "x"], "--find and --last are for texts"),
    "no source": (["{lucid}", "--tokens-from", "nowhere"], "SOURCE 'nowhere' does not exist"),
    "one token": (["{lucid}", "--text", "a"], "must have at least two tokens, got 1"),
}


@pytest.mark.parametrize(("words", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_what_was_expected_and_what_it_got(words, message, checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.txt").write_bytes("h\xe9".encode("latin-1"))
    monkeypatch.setitem(checkpoints, "latin", tmp_path / "latin.txt")
    if message.startswith("--task needles has"):
        monkeypatch.setitem(checkpoints, "lucid", _small_vocabulary(checkpoints["lucid"], tmp_path))
    assert analyze(*(word.format(**checkpoints) for word in words)) == 1
    output = capsys.readouterr()
    assert output.err.splitlines()[-1].startswith("lucid analyze: error: ")
    assert message in output.err
    assert "Traceback" not in output.err
    assert not (tmp_path / "runs").exists()


def _small_vocabulary(folder: Path, where: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(100)
    model.save_pretrained(where / "small")
    return where / "small"


@pytest.mark.parametrize(
    "words", [["--what", "kappa"], ["--layers", "a"], ["--lengths", "-3"], ["--what", ""]], ids=str
)
def test_arguments_that_cannot_be_read_are_refused(words, checkpoints, capsys):
    with pytest.raises(SystemExit) as stopped:
        analyze(checkpoints["lucid"], *words)
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["and/or it ends.", "Is it a.txt?", "one.\ntwo.txt", "1/2 cup", "notes.txt\n"])
def test_texts_that_do_not_look_like_files_are_texts(text):
    assert not is_file(text)


def test_phrases_are_found_wherever_they_stand():
    text = "ab cd ab cd"
    offsets = [(0, 0), (0, 2), (2, 5), (5, 8), (8, 10), (10, 11)]
    assert find("ab", text, offsets) == [(1, 2), (3, 4)]
    assert find("b c", text, offsets) == [(1, 3), (3, 5)]
    assert find("cd", text, offsets) == [(2, 3), (4, 6)]
    assert find("cd", text, offsets[:-1]) == [(2, 3)]


def test_the_help_names_every_task() -> None:
    assert set(arguments.TASKS) == set(inputs.TASKS)
