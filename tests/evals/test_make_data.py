"""`lucid make-data`: its prompts are never in an evaluation, and `lucid train` can read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lucid_lab import cli
from lucid_lab.data.datasets import PromptAnswers
from lucid_lab.evals.arguments import KINDS
from lucid_lab.evals.benchmarks.babilong import Babilong, make_sample
from lucid_lab.evals.benchmarks.haystacks import read_prose
from lucid_lab.evals.benchmarks.longqa import HALVED, documents
from lucid_lab.evals.cells import TRAINING_SEED, EvalError, Options
from lucid_lab.evals.make_data import MAKERS, OPTIONS, needle_lines
from lucid_lab.evals.tokens import count_tokens, load_tokenizer
from lucid_lab.labels import IGNORED

from .checkpoints import write_tokenizer
from .test_longqa import data  # noqa: F401


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["Where is the football? In the kitchen."]))


def make(*words: Any) -> int:
    return cli.main(["make-data", *map(str, words)])


def test_every_kind_of_the_help_is_made() -> None:
    assert list(KINDS) == list(MAKERS)


def lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_babilong_is_made_for_training(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "babilong_train.jsonl"
    options = ["--tasks", "qa1,qa4", "--lengths", "0,2000", "--samples", 5, "--haystack", "noise"]
    assert make("babilong", out, *options, "--tokenizer", tokenizer) == 0
    assert "20 prompts with answers" in capsys.readouterr().out
    made, loaded = lines(out), load_tokenizer(tokenizer)
    assert all(line["answer"].startswith(" ") and line["answer"].strip() for line in made)
    assert sum(1900 < count_tokens(loaded, line["prompt"]) <= 2000 for line in made) == 10
    evaluated = {make_sample(Babilong(task, 0), loaded, i)["prompt"] for task in ("qa1", "qa4") for i in range(50)}
    assert not evaluated & {line["prompt"] for line in made}


def test_lucid_train_learns_the_answer_and_nothing_else(tmp_path: Path, tokenizer: str) -> None:
    out = tmp_path / "train.jsonl"
    assert make("babilong", out, "--tasks", "qa2", "--lengths", 0, "--samples", 4, "--tokenizer", tokenizer) == 0
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    for item in PromptAnswers(out, loaded, 1024, validation=0):  # type: ignore[attr-defined]
        learned = loaded.decode(item["labels"][item["labels"] != IGNORED])
        assert learned.startswith(" The ")
        assert learned.endswith(".<|eos|>")


@pytest.mark.parametrize(
    ("kind", "tasks"), [("longbench", HALVED), ("qasper", ("qasper",)), ("qmsum", ("qmsum",))], ids=lambda x: str(x)
)
def test_questions_for_training_are_not_evaluated(
    kind: str, tasks: tuple[str, ...], tmp_path: Path, data: str, tokenizer: str  # noqa: F811
) -> None:  # fmt: skip
    out = tmp_path / "train.jsonl"
    assert make(kind, out, "--data-dir", data) == 0
    trained = {line["prompt"] for line in lines(out)}
    evaluated = {document["prompt"] for task in tasks for document in documents(task, "held_out", data)}
    assert trained
    assert not trained & evaluated
    assert len(PromptAnswers(out, AutoTokenizer.from_pretrained(tokenizer), 256, validation=0)) == len(lines(out))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["babilong", "OUT"], "--tokenizer is needed"),
        (["babilong", "OUT", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["babilong", "OUT", "--tasks", "qa9", "--tokenizer", "TOKENIZER"], "task must be one of qa1"),
        (["qasper", "OUT", "--data-dir", "nowhere"], "there is no file"),
    ],
)
def test_an_error_is_a_message_and_leaves_no_file(
    words: list[str], message: str, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"OUT": tmp_path / "out.jsonl", "TOKENIZER": tokenizer}
    assert make(*(places.get(word, word) for word in words)) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert make("qasper", out, "--data-dir", "nowhere") == 1
    assert "OUT must be new" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "option"), [("needles", "--tasks"), ("babilong", "--needles"), ("qasper", "--samples")]
)
def test_an_option_of_another_kind_is_refused(
    kind: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(kind, tmp_path / "out.jsonl", option, 1) == 1
    assert f", and not {option}" in capsys.readouterr().err
    assert set(OPTIONS) == set(MAKERS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--samples", 1_000_000_000), "--samples must be at most 10000000, got 1000000000"),
        (("--lengths", 99_999_999_999), "--lengths must be at most 131072, got 99999999999"),
    ],
)
def test_what_would_not_end_is_refused(
    words: tuple[Any, ...], message: str, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("needles", "babilong"):
        assert make(kind, tmp_path / "out.jsonl", *words, "--tokenizer", tokenizer) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [-1, -TRAINING_SEED, TRAINING_SEED])
def test_no_seed_makes_training_prompts_of_what_evaluations_ask(tokenizer_folder: Path, seed: int) -> None:
    how: dict[str, Any] = {"lengths": (1024,), "samples": 1, "seed": seed, "tokenizer": str(tokenizer_folder)}
    with pytest.raises(EvalError, match="--seed must be 0 to 1000002"):
        next(needle_lines(needles=(2,), **how))
    with pytest.raises(EvalError, match="--seed must be 0 to 1000002"):
        Options(seed=seed)


def test_a_negative_number_of_questions_is_refused() -> None:
    with pytest.raises(EvalError, match="--questions must not be negative, got -1"):
        Options(questions=-1)


def test_an_empty_haystack_is_not_the_current_folder() -> None:
    with pytest.raises(EvalError, match="--haystack must be one of"):
        read_prose("")


def test_a_bad_haystack_is_not_answered_with_an_option_of_another_command(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(EvalError, match="not JSON") as caught:
        read_prose(str(tmp_path))
    assert "--skip-bad" not in str(caught.value)
