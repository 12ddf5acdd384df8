"""Haystacks that are too short say so; BABILong's published sets are read from a folder as from the hub."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lucid_lab.evals.benchmarks import babilong, haystacks
from lucid_lab.evals.benchmarks.babilong import Babilong, published_samples, render_prompt
from lucid_lab.evals.benchmarks.needles import Needles, make_sample
from lucid_lab.evals.cells import EvalError, Options
from lucid_lab.evals.make_data import babilong_lines, needle_lines
from lucid_lab.evals.tokens import load_tokenizer

from .checkpoints import lucid

ROWS = [
    {"input": f"Mary went to the garden. Book {i}.", "question": "Where is Mary?", "target": "garden"} for i in range(3)
]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "babilong"
    for task, content in (("qa1", json.dumps(ROWS)), ("qa2", "\n".join(map(json.dumps, ROWS)))):
        (folder / "data" / task).mkdir(parents=True)
        (folder / "data" / task / "4k.json").write_text(content)
    return folder


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_a_published_set_is_read_from_a_folder(published: Path, task: str) -> None:
    samples = published_samples(str(published), task, 4096, 2)
    assert [sample["prompt"] for sample in samples] == [
        render_prompt(task, row["input"], row["question"]) for row in ROWS[:2]
    ]
    assert samples[0]["target"] == "garden"


def test_another_content_of_the_folder_makes_another_cell(published: Path, tokenizer_folder: Path) -> None:
    options = Options(
        tokenizer=str(tokenizer_folder), qa=("qa1",), lengths=(4096,), samples=2, babilong_hub=str(published)
    )
    before = babilong.cells(options)[0].metadata
    (published / "data" / "qa1" / "4k.json").write_text(json.dumps(ROWS[:2]))
    assert babilong.cells(options)[0].metadata != before
    with pytest.raises(EvalError, match=r"there is no file .*8k\.json"):
        babilong.cells(Options(tokenizer=str(tokenizer_folder), lengths=(8192,), babilong_hub=str(published)))


def test_the_published_training_set_becomes_prompts(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    words = ("--tasks", "qa1,qa2", "--lengths", "4096", "--samples", 2, "--babilong-hub", published)
    assert lucid("make-data", "babilong", out, *words) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 4
    assert lines[0]["prompt"] == render_prompt("qa1", ROWS[0]["input"], ROWS[0]["question"])
    assert lines[1]["prompt"] == render_prompt("qa2", ROWS[0]["input"], ROWS[0]["question"])
    assert {line["answer"] for line in lines} == {" garden"}


def test_a_text_repeats_only_beyond_its_size() -> None:
    prose = haystacks.Prose(["One two three.", "Four five."])
    hay = prose.from_random_place(Random(0))
    assert [hay.repeats(units) for units in (0, 1, 5, 6, 10, 11)] == [0, 0, 0, 1, 1, 2]
    assert haystacks.noise().repeats(10**6) == 0


@pytest.fixture
def short_text(tmp_path: Path) -> str:
    file = tmp_path / "short.txt"
    file.write_text("The river runs to the sea. " * 12)
    return str(file)


def test_repetition_is_recorded_and_said(
    short_text: str, tokenizer_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    sample = make_sample(Needles(1024, haystack=short_text), tokenizer, 0)
    assert sample["haystack_repeats"] >= 1
    assert make_sample(Needles(1024, haystack="prose"), tokenizer, 0)["haystack_repeats"] == 0
    story = babilong.make_sample(Babilong("qa1", 1024, background=short_text), tokenizer, 0)
    assert story["haystack_repeats"] >= 1
    haystacks.warn_of_repeats("x", 1024, [0, 0])
    haystacks.warn_of_repeats("x", 1024, [0, 2])
    options: dict[str, Any] = {"lengths": (1024,), "samples": 2, "seed": 0, "tokenizer": str(tokenizer_folder)}
    for lines in (
        needle_lines(needles=(2,), haystack=short_text, **options),
        babilong_lines(tasks=("qa1",), haystack=short_text, **options),
    ):
        assert all(line["haystack_repeats"] >= 1 for line in lines)
    assert "haystack_repeats" not in next(needle_lines(needles=(2,), **options))
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("--haystack x is too short for 1024 tokens: in 1 of 2 samples its text repeats")
    assert len(said) == 3
