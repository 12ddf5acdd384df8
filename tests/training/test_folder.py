"""The folder of a run: when it is refused, resumed, restarted or left alone."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from lucid_attention.files import read_json
from lucid_lab.data.tokenize import tokenize
from lucid_lab.data.tokenizer import train as train_tokenizer
from lucid_lab.locks import locked
from lucid_lab.training.checkpoints import checkpoints
from lucid_lab.training.recipe import Recipe

from .running import METRICS, around, assert_same, die, finished, killed, losses, lucid, read_metrics, words


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 4 and has the checkpoint 2."""
    return killed(words("tiny_needle", tmp_path_factory.mktemp("stopped") / "run"), 4)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_recipe_as_it_ran_is_in_the_folder(whole: Path) -> None:
    recipe = Recipe.from_dict(read_json(whole / "recipe.json"))
    assert (recipe.steps, recipe.model["hidden_size"], recipe.data_options) == (8, 32, {"n": [2, 4, 8]})


def test_a_finished_run_is_not_trained_again(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    before = contents(run)
    ended = lucid(words("tiny_needle", run))
    assert ended.code == 0
    assert f"{run}: finished already. --restart trains again" in ended.out
    assert "validation loss" in ended.out
    assert contents(run) == before


@pytest.mark.parametrize("which", ["whole", "stopped"])
def test_another_recipe_in_the_same_folder_is_refused_with_the_differences(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    before = contents(run)
    ended = lucid(
        words("tiny_needle", run, "--attention", "softmax", learning_rate=0.01, model__hidden_size=64, keep=3)
    )
    assert ended.code == 1
    assert f"{run} holds a run of another recipe: " in ended.err
    assert "learning_rate was 0.003, is 0.01" in ended.err
    assert "attention was 'lucid', is 'softmax'" in ended.err
    assert "'hidden_size': 64" in ended.err
    assert "keep" not in ended.err
    assert contents(run) == before


def test_settings_that_do_not_affect_the_result_may_change(stopped: Path, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    changes: dict[str, Any] = {"save_every": 3, "evaluate_every": 5, "keep": 5, "workers": 1, "about": "other words"}
    ended = lucid(words("tiny_needle", run, **changes))
    assert ended.code == 0, ended
    assert_same(run, whole)
    assert {path.name for path in checkpoints(run)} == {f"checkpoint-{step}" for step in (2, 3, 6, 8)}
    assert next(entry["step"] for entry in read_metrics(run / METRICS) if "eval_loss" in entry) == 5
    assert json.loads((run / "recipe.json").read_text())["about"] == "other words"


def test_a_resumed_run_logs_in_the_new_interval(stopped: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    assert lucid(words("tiny_needle", run, log_every=5, save_every=4)).code == 0
    # Steps 1 and 2 are from before. Then every 5 steps, and with every checkpoint.
    assert list(losses(run)) == [1, 2, 4, 5, 8]


def test_a_second_run_in_the_same_folder_is_refused(stopped: Path, tmp_path: Path) -> None:
    for run in (shutil.copytree(stopped, tmp_path / "stopped"), tmp_path / "new"):
        with locked(run, "lucid train"):
            for more in ((), ("--restart",)):
                before = contents(run)
                ended = lucid(words("tiny_needle", run, *more))
                assert ended.code != 0
                assert f"{run} is being written by another `lucid train` (process {os.getpid()} on " in ended.err
                assert contents(run) == before
        finished(words("tiny_needle", run))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": 3', "[" * 100_000])
def test_a_damaged_summary_is_named_and_written_again(content: str, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "summary.json").write_text(content)
    ended = lucid(words("tiny_needle", run))
    assert ended.code == 1
    assert f"{run / 'summary.json'} is damaged: remove it" in ended.err
    if not content:
        (run / "summary.json").unlink()
        finished(words("tiny_needle", run))
        assert_same(run, whole, same_lines=True)


def test_altered_numbers_of_a_finished_run_are_named_and_written_again(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    files = {name: run / name for name in ("summary.json", "metrics.jsonl")}
    for name, file in files.items():
        before = file.read_bytes()
        file.write_bytes(re.sub(rb'loss": (\d)', lambda match: b'loss": 1' + match[1], before, count=1))
        assert file.read_bytes() != before
        ended = lucid(words("tiny_needle", run))
        assert ended.code == 1
        assert str(file) in ended.err
        if name == "summary.json":
            file.write_bytes(before)
    files["summary.json"].unlink()
    finished(words("tiny_needle", run))
    assert_same(run, whole, same_lines=True)


def test_restart_trains_again(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    argv = words("tiny_needle", run, "--restart", steps=2, learning_rate=0.01)
    ended = lucid(argv)
    assert ended.code == 0
    assert "resuming" not in ended.out
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2"]
    assert list(losses(run)) == [1, 2]


def test_a_restart_killed_halfway_leaves_a_folder_that_can_be_restarted(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    argv = words("tiny_needle", run, "--restart")
    lucid(argv, before=lambda: around(shutil, "rmtree", call=2, do=die))
    assert (run / "recipe.json").exists()
    assert lucid(argv).code == 0
    assert_same(run, whole)


@pytest.mark.parametrize("more", [(), ("--restart",)])
def test_a_folder_with_other_files_is_left_alone(more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    ended = lucid(words("tiny_needle", tmp_path / "run", *more))
    assert ended.code == 1
    assert "must be new, empty or the folder of a run, got a folder with other files" in ended.err
    assert contents(tmp_path / "run") == {"thesis.tex": b"years of work"}


def test_a_run_can_start_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    finished(words("tiny_needle", tmp_path / "run", steps=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"model.hiden_size": 3},
        {"data": "nowhere"},
        {"data_options.m": 3},
        {"sequence_length": 9},
        {"strength_steps": 1.5},
        {"strength_steps": 2, "sharpness_steps": 2},
    ],
    ids=str,
)
def test_a_command_that_cannot_run_leaves_no_run_in_the_folder(wrong: dict[str, Any], tmp_path: Path) -> None:
    ended = lucid(words("tiny_needle", tmp_path / "run", **{"steps": 2, **wrong}))
    assert ended.code == 1
    assert "lucid train: error: " in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()
    finished(words("tiny_needle", tmp_path / "run", steps=2))


def test_a_recipe_that_cannot_be_read_is_named(stopped: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    (run / "recipe.json").write_text("{")
    ended = lucid(words("tiny_needle", run))
    assert ended.code == 1
    assert f"{run / 'recipe.json'} cannot be read" in ended.err


def test_the_default_folder_is_named_after_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = words("tiny_needle", tmp_path / "run", "--attention", "softmax", "--seed", "3", steps=1)
    out = argv.index("--out")
    assert lucid(argv[:out] + argv[out + 2 :]).code == 0
    assert (tmp_path / "runs" / "tiny_needle-softmax-3" / "summary.json").exists()


def token_folder(folder: Path, words_of_text: str) -> None:
    texts = folder.with_name(f"{folder.name}-texts")
    texts.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"{number} {words_of_text} " * 20}) for number in range(40)]
    (texts / "texts.jsonl").write_text("\n".join(lines))
    tokenizer = folder.with_name("tokenizer")
    if not tokenizer.exists():
        tokenizer.mkdir()
        for name, content in train_tokenizer([words_of_text] * 9, 300).items():
            (tokenizer / name).write_bytes(content)
    tokenize(str(texts), folder, tokenizer=str(tokenizer), validation=0.3, workers=1)


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_on_other_tokens_at_the_same_path_is_not_resumed(tmp_path: Path, is_finished: bool) -> None:
    tokens = tmp_path / "tokens"
    token_folder(tokens, "apples and pears")
    argv = words("tiny_lm", tmp_path / "run", "--data", str(tokens), steps=4)
    argv = [word for word in argv if "data_options" not in word]
    if is_finished:
        finished(argv)
    else:
        killed(argv, 4)
    shutil.rmtree(tokens)
    token_folder(tokens, "bread and butter")
    ended = lucid(argv)
    assert ended.code == 1
    assert f"data {tokens} has changed since it began" in ended.err
    # The same content, tokenized again, is the same data.
    shutil.rmtree(tokens)
    token_folder(tokens, "apples and pears")
    inputs = tmp_path / "run" / "inputs.json"
    before = inputs.read_bytes()
    for content, complaint in (("{", f"{inputs}: not JSON"), ("{}", f"data {tokens} has changed since it began")):
        inputs.write_text(content)
        ended = lucid(argv)
        assert ended.code == 1
        assert complaint in ended.err
    inputs.write_bytes(before)
    assert lucid(argv).code == 0


def test_a_run_from_other_weights_at_the_same_path_is_not_resumed(tmp_path: Path, whole: Path) -> None:
    start = shutil.copytree(whole / "model", tmp_path / "start")
    argv = words("tiny_needle", tmp_path / "run", "--from", str(start), steps=2)
    argv = [word for word in argv if not word.startswith("--set=model.")]
    finished(argv)
    tensors = safetensors.torch.load_file(start / "model.safetensors")
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, start / "model.safetensors", {"format": "pt"})
    ended = lucid(argv)
    assert ended.code == 1
    assert f"start {start} has changed since it began" in ended.err
