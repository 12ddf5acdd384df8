"""`lucid compare`: differences on the same samples, and their intervals."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lucid_lab.evals.checkpoint import Checkpoint
from lucid_lab.evals.compare import paired_difference
from lucid_lab.evals.results import ResultsFolder

from .checkpoints import lucid, write_checkpoint, write_needle_tokenizer
from .test_runner import GRID, complaint


def test_the_interval_is_that_of_the_paired_standard_error_for_many_samples() -> None:
    random = np.random.default_rng(1)
    hard = random.random(2000)
    a = (random.random(2000) > hard).astype(float)
    b = (random.random(2000) > hard - 0.1).astype(float)
    interval = paired_difference(a.tolist(), b.tolist())
    error = (b - a).std(ddof=1) / np.sqrt(2000)
    assert interval.difference == pytest.approx((b - a).mean())
    assert interval.low == pytest.approx(interval.difference - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(interval.difference + 1.96 * error, abs=0.1 * error)
    assert interval.is_clear
    assert paired_difference(a.tolist(), b.tolist()) == interval


def test_the_interval_is_of_pairs() -> None:
    # Every sample gains the same, so the interval has no width, although the samples differ widely.
    a = np.linspace(0, 1, 50)
    assert paired_difference(a.tolist(), (a + 0.01).tolist()).low == pytest.approx(0.01)
    shuffled = np.random.default_rng(0).permutation(a + 0.01)
    assert not paired_difference(a.tolist(), shuffled.tolist()).is_clear


def test_equal_scores_have_no_difference() -> None:
    assert tuple(paired_difference([0.0, 1.0], [0.0, 1.0])) == (0, 0, 0)
    with pytest.raises(ValueError, match="same samples, got 1 and 2"):
        paired_difference([0.0], [0.0, 1.0])


@pytest.mark.parametrize("samples", [2, 7])
def test_equal_gaps_have_an_interval_without_width(samples: int) -> None:
    a, b = [0.0] * samples, [1.0] * samples
    assert tuple(paired_difference(a, b)) == (1, 1, 1)


def test_one_sample_has_no_interval() -> None:
    interval = paired_difference([0.0], [1.0])
    assert interval.difference == 1
    assert not interval.is_clear


def test_a_comparison_of_checkpoints_has_no_cells_of_earlier_options(
    lucid_folder: Path, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The grass is green. The sky is blue. " * 50)
    words = ("--tasks", "perplexity", "--text", text, "--lengths", 16, "--out", tmp_path / "results")
    assert lucid("compare", lucid_folder, llama_folder, *words, "--limit", 3) == 0
    capsys.readouterr()
    assert lucid("compare", lucid_folder, llama_folder, *words, "--limit", 1) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity")]
    assert len(rows) == 1
    # One sample: no interval, and no star.
    assert rows[0].endswith("[?, ?]")


def test_checkpoints_are_compared_on_the_same_samples(
    lucid_folder: Path, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*GRID, "--batch-size", 5, "--out", tmp_path)
    assert lucid("compare", lucid_folder, llama_folder, *words) == 0
    out = capsys.readouterr().out
    results = {
        ResultsFolder(folder).results()["checkpoint"]["name"]: ResultsFolder(folder) for folder in tmp_path.iterdir()
    }
    assert set(results) == {lucid_folder.name, llama_folder.name}
    first, second = (
        [(file.name, [record["target"] for record in folder.finished(file.stem) or []]) for file in files]
        for folder in results.values()
        for files in [sorted((folder.path / "samples").iterdir())]
    )
    assert first == second
    lines = out.splitlines()
    assert lines[0].split("  ")[-1].strip() == f"{llama_folder.name} − {lucid_folder.name}"
    assert sum(line.startswith("mniah task=multikey_1 needles=") for line in lines) == 4
    assert sum(line.startswith("mniah needles=") and "mean over task" in line for line in lines) == 4
    assert "paired bootstrap" in out

    # Finished results are read, not made again: with all scores set to 1, one checkpoint is clearly better.
    better = results[llama_folder.name]
    pair = [results[folder.name].path for folder in (lucid_folder, llama_folder)]
    content = better.results()
    for cell in content["cells"]:
        file = better.file(cell["name"])
        file.write_text(file.read_text().replace('"score": 0.0', '"score": 1.0'))
        # A changed file is not averaged, as long as its hash is not that of the record.
        assert f"{file} is not the file that results.json describes" in complaint(capsys, *pair, command="compare")
        cell["sha256"] = sha256(file.read_bytes()).hexdigest()
        (better.path / "results.json").write_text(json.dumps(content))
    message = complaint(capsys, *pair, "--lengths", 99, "--limit", 1, command="compare")
    assert "--lengths, --limit is for checkpoints, and these folders hold results" in message
    assert lucid("compare", *pair) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("+100.0 [+100.0, +100.0] *")
    (better.path / "samples").rename(tmp_path / "elsewhere")
    assert "is missing" in complaint(capsys, *pair, command="compare")


def test_every_checkpoint_is_looked_at_before_the_first_is_evaluated(
    lucid_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Checkpoint, "load", load)
    damaged = write_checkpoint(tmp_path / "damaged", lucid_folder)
    (damaged / "model.safetensors").write_bytes(b"nothing")
    for second in (tmp_path / "nope", damaged):
        message = complaint(capsys, lucid_folder, second, *GRID, "--out", tmp_path / "out", command="compare")
        assert str(second) in message
    assert not (tmp_path / "out").exists()


def test_results_of_other_samples_are_not_compared(
    lucid_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_checkpoint(tmp_path / "other", write_needle_tokenizer(tmp_path / "tokenizer", 1000))
    few = (
        "--tasks",
        "mniah",
        "--variants",
        "multikey_1",
        "--needles",
        2,
        "--lengths",
        320,
        "--haystack",
        "noise",
        "--samples",
        1,
    )
    message = complaint_after_bars(capsys, lucid_folder, other, *few, "--answer-tokens", 12, "--out", tmp_path / "out")
    assert "no cell in common" in message
    assert "two folders" in complaint(capsys, lucid_folder, command="compare")
    assert "give --tasks" in complaint(capsys, lucid_folder, other, command="compare")


def complaint_after_bars(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert lucid("compare", *words) == 1
    return capsys.readouterr().err
