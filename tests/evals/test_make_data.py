"""`lucid make-data`: its prompts are never in an evaluation, and its files are whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.evals.babilong import make_story_sample, render_prompt
from lucid_lab.evals.longqa import HALVED, documents
from lucid_lab.evals.needles import make_needles
from lucid_lab.evals.tokens import load_tokenizer

from .checkpoints import lucid
from .test_babilong import ROWS
from .test_longqa import data  # noqa: F401


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_needles_and_stories_are_made_for_training(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, how = load_tokenizer(str(tokenizer_folder)), ("--tokenizer", tokenizer_folder, "--haystack", "noise")
    made = {}
    for kind, words in {
        "needles": ("--needles", "1,3", "--lengths", "512,600"),
        "babilong": ("--tasks", "qa1,qa4", "--lengths", "0,2000"),
    }.items():
        out = tmp_path / "new" / f"{kind}.jsonl"
        assert lucid("make-data", kind, out, *words, "--samples", 5, *how) == 0
        assert "20 prompts with answers" in capsys.readouterr().out
        made[kind] = lines(out)
        for line in made[kind]:
            ids = tokenizer(line["prompt"])["input_ids"]
            assert line["answer"].startswith(" ")
            for span in line["answer_spans"]:
                part = tokenizer.decode(ids[slice(*span)])
                if kind == "needles":
                    assert part.strip() in line["answer"]
                else:
                    assert part.strip().endswith(".")
    assert sum(1900 < len(tokenizer(line["prompt"])["input_ids"]) <= 2000 for line in made["babilong"]) == 10
    asked = {make_story_sample(tokenizer, task, 0, index=i).prompt for task in ("qa1", "qa4") for i in range(50)}
    asked |= {make_needles(tokenizer, 512, n, haystack="noise", index=i).prompt for n in (1, 3) for i in range(5)}
    assert not asked & {line["prompt"] for kind in made.values() for line in kind}


@pytest.mark.parametrize(("kind", "tasks"), [("longbench", HALVED), ("qasper", ("qasper",)), ("qmsum", ("qmsum",))])
def test_questions_for_training_are_not_evaluated(
    kind: str,
    tasks: tuple[str, ...],
    tmp_path: Path,
    data: str,  # noqa: F811
) -> None:
    out = tmp_path / "train.jsonl"
    assert lucid("make-data", kind, out, "--data-dir", data) == 0
    trained = {line["prompt"] for line in lines(out)}
    assert trained
    assert not trained & {doc["prompt"] for task in tasks for doc in documents(task, "held_out", data)}


def test_the_published_training_set_becomes_prompts(tmp_path: Path) -> None:
    (tmp_path / "data" / "qa1").mkdir(parents=True)
    (tmp_path / "data" / "qa1" / "4k.json").write_text(json.dumps(ROWS))
    out = tmp_path / "train.jsonl"
    words = ("--tasks", "qa1", "--lengths", "4096", "--samples", 2, "--babilong-hub", tmp_path)
    assert lucid("make-data", "babilong", out, *words) == 0
    prompts = [render_prompt("qa1", row["input"], row["question"]) for row in ROWS[:2]]
    assert lines(out) == [{"prompt": prompt, "answer": " garden"} for prompt in prompts]
    assert lucid("make-data", "babilong", tmp_path / "plain.jsonl", *words, "--plain") == 0
    plain = [f"{row['input']} {row['question']}" for row in ROWS[:2]]
    assert [line["prompt"] for line in lines(tmp_path / "plain.jsonl")] == plain


def test_all_rows_become_plain_prompts_as_the_authors_take_them(tmp_path: Path, data: str) -> None:  # noqa: F811
    assert lucid("make-data", "longbench", tmp_path / "all.jsonl", "--data-dir", data, "--part", "all", "--plain") == 0
    prompts = [doc["prompt"] for task in HALVED for doc in documents(task, "all", data, plain=True)]
    assert [line["prompt"] for line in lines(tmp_path / "all.jsonl")] == prompts
    assert len(prompts) > len([doc for task in HALVED for doc in documents(task, "train", data)])
    assert not any("Answer" in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["poems", "OUT"], "KIND must be one of needles"),
        (["babilong", "OUT"], "--tokenizer is needed"),
        (["babilong", "OUT", "--samples", "0"], "--samples must be 1 to 1048576 of 0 tokens, got 0"),
        (["needles", "OUT", "--lengths", "99999999999"], "--lengths must be 0 to 131072, got 99999999999"),
        (["needles", "OUT", "--seed", "1000003"], "--seed must be 0 to 1000002"),
        (["babilong", "OUT", "--tasks", "qa9", "--tokenizer", "TOKENIZER"], "stories must be some of qa1"),
        (["qasper", "OUT", "--data-dir", "nowhere"], "there is no file"),
        (["needles", "OUT", "--tasks", "qa1"], ", and not --tasks"),
        (["babilong", "OUT", "--plain"], "--plain is for published stories"),
        (["longbench", "OUT", "--part", "half"], "--part must be train"),
    ],
)
def test_an_error_is_a_message_and_leaves_no_file(
    words: list[str], message: str, tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"OUT": tmp_path / "out.jsonl", "TOKENIZER": tokenizer_folder}
    assert lucid("make-data", *(places.get(word, word) for word in words)) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
