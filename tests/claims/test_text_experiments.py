"""needle_lm, babilong, longqa: end to end, nothing asked that was trained on, verdicts that follow the numbers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lucid_lab.evals.benchmarks.babilong import Babilong
from lucid_lab.evals.benchmarks.babilong import make_sample as make_story_sample
from lucid_lab.evals.benchmarks.longqa import documents
from lucid_lab.evals.benchmarks.needles import Needles, make_sample

from lucid_lab.claims import babilong, longqa, needle_lm
from lucid_lab.claims.engine.jobs import Job, Record, Store, Work
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.result import Spread
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.steps import check_steps
from lucid_lab.claims.text.comparison import EQUAL_TIME, Comparison, judge
from lucid_lab.claims.text.docstring_questions import NAMES, SPLITS, row, side
from lucid_lab.claims.text.training import DATA, PROMPTS, TOKENIZER, TextRun, new_model
from lucid_lab.evals.tokens import count_tokens, load_tokenizer

EXPERIMENTS: dict[str, Any] = {"needle_lm": needle_lm, "babilong": babilong, "longqa": longqa}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with the texts of all three experiments."""
    made = Store(tmp_path_factory.mktemp("jobs"))
    for experiment in EXPERIMENTS.values():
        (job,) = experiment.plan(SMOKE, made)
        assert do(job, made.folder) is None
    return made


def texts(store: Store, name: str) -> tuple[Path, list[dict[str, str]]]:
    folder = store.folder_of(EXPERIMENTS[name].comparison(SMOKE).base.texts_job())
    return folder, [json.loads(line) for line in (folder / PROMPTS).read_text().splitlines()]


def test_needles_run_end_to_end_and_conclude(store: Store) -> None:
    rounds = 0
    while fresh := [job for job in needle_lm.plan(SMOKE, store) if job not in store]:
        rounds += 1
        for job in fresh:
            failed = do(job, store.folder)
            assert failed is None, Path(failed).read_text()
    assert rounds == 1
    conclusion = needle_lm.conclude(SMOKE, store)
    assert [figure["kind"] for figure in conclusion.figures] == ["heatmaps", "bars", "lines"]
    json.dumps([*conclusion.figures, *conclusion.tables], allow_nan=False)
    for job in needle_lm.plan(SMOKE, store)[1:]:
        record, folder = store[job], store.folder_of(job)
        assert {tuple(cell["labels"].values()) for cell in record["cells"]} == {
            ("multikey_1", 1, 256),
            ("multikey_1", 2, 256),
        }
        assert all(0 <= cell["scores"]["score"] <= 1 for cell in record["cells"])
        # The model stays for later analyses; the checkpoints of the training are removed.
        assert (folder / "run" / "model" / "config.json").exists()
        assert not [*(folder / "run").glob("checkpoint-*")]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_full_recipe_can_be_run(name: str) -> None:
    steps = EXPERIMENTS[name].paper()
    check_steps(steps)
    assert {step.words[0] for step in steps} >= {"train", "eval"}


def test_needles_that_are_asked_were_not_trained_on(store: Store) -> None:
    folder, lines = texts(store, "needle_lm")
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    options = needle_lm.comparison(SMALL).base.asked["options"]
    trained = " ".join(line["prompt"] + line["answer"] for line in lines)
    for n in options["needles"]:
        settings = Needles(256, needles=n, keys="words", haystack="noise", answer_tokens=options["answer_tokens"])
        for index in range(20):
            asked = make_sample(settings, tokenizer, index)
            assert not any(f"for {needle['key']} is: {needle['value']}." in trained for needle in asked["needles"])


def test_needle_prompts_are_whole_and_their_answers_right(store: Store) -> None:
    folder, lines = texts(store, "needle_lm")
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    length = needle_lm.comparison(SMOKE).base.sequence_length
    assert len(lines) == 200
    for line in lines:
        # A longer one would lose its middle in training, and with it perhaps its needle.
        assert count_tokens(tokenizer, line["prompt"]) + count_tokens(tokenizer, line["answer"]) < length
        key = line["prompt"].rpartition(" for ")[2].partition(" mentioned")[0]
        assert f"for {key} is:{line['answer']}" in line["prompt"]


def test_stories_that_are_asked_were_not_trained_on(store: Store) -> None:
    folder, lines = texts(store, "babilong")
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    trained = {line["prompt"] for line in lines}
    asked = {make_story_sample(Babilong("qa1", 0), tokenizer, index)["prompt"] for index in range(100)}
    assert trained
    assert not trained & asked


def test_functions_that_are_asked_for_are_in_the_text_and_not_in_training(store: Store) -> None:
    folder, lines = texts(store, "longqa")
    asked = [document for name in NAMES for document in documents(name, "held_out", str(folder / DATA))]
    assert asked
    for document in asked:
        assert all(answer in document["prompt"] for answer in document["answers"])
    trained = " ".join(line["prompt"] + line["answer"] for line in lines)
    assert not any(answer in trained for document in asked for answer in document["answers"])
    for line in lines:
        assert line["answer"].strip() in line["prompt"]


def test_the_sides_of_the_stand_in_share_no_function_and_no_line() -> None:
    sides = [side(split) for split in SPLITS]
    assert len(sides[0]) > 500
    assert len(sides[1]) > 100
    assert not {function.does for function in sides[0]} & {function.does for function in sides[1]}
    assert row("train", 4, 0, 1) != row("train", 4, 0, 2)
    name, _, rest = row("validation", 4, 0, 1)["input"].partition(" do?\n\n")
    assert f"{name.removeprefix('What does ')}: {row('validation', 4, 0, 1)['output']}" in rest.split("\n")


def test_a_new_model_is_the_same_for_the_same_seed_only(store: Store, tmp_path: Path) -> None:
    run = needle_lm.comparison(SMOKE).base
    tokenizer = texts(store, "needle_lm")[0] / TOKENIZER
    same = [new_model(run, tokenizer, tmp_path / name) / "model.safetensors" for name in "ab"]
    other = new_model(run.but(seed=1), tokenizer, tmp_path / "c") / "model.safetensors"
    assert same[0].read_bytes() == same[1].read_bytes() != other.read_bytes()


def test_softmax_is_given_the_time_that_lucid_takes() -> None:
    runs = Comparison(TextRun(texts={"kind": "needles", "samples": 1}, asked={}, steps=100), (0, 1), (1, 1))
    done: dict[Job, Record] = {runs.base.texts_job(): {}}
    first = runs.plan(done)
    assert len(first) == 5
    speeds = {"softmax": 300.0, "lucid": 200.0}
    done |= {job: {"tokens_per_second": speeds[job.arguments["attention"]]} for job in first[1:]}
    longer = runs.plan(done)[5:]
    assert [(job.arguments["attention"], job.arguments["steps"]) for job in longer] == [("softmax", 150)] * 2


@pytest.mark.parametrize(
    ("lucid", "softmax", "longer", "verdict"),
    [
        (80, 40, 50, "holds"),
        (80, 40, 80, "partly"),
        (40, 80, 80, "does not hold"),
        (50, 49, 50, "does not hold"),
        (4, 3, 3, "too small to judge"),
        (99, 98, 98, "too small to judge"),
    ],
)
def test_verdicts_follow_the_numbers(lucid: float, softmax: float, longer: float, verdict: str) -> None:
    scores = {"lucid": lucid, "softmax": softmax, EQUAL_TIME: longer}
    spreads = {name: Spread(value, 2.0, 3) for name, value in scores.items()}
    assert judge(spreads, floor=10, ceiling=95, what="found")[0] == verdict


def records(experiment: Any, lucid: float, softmax: float) -> Iterator[tuple[Job, Record]]:
    """Made-up records of the small scale, with one score for all cells of an attention."""
    done: dict[Job, Record] = {}
    while fresh := [job for job in experiment.plan(SMALL, done) if job not in done]:
        for job in fresh:
            if job.function.endswith("make_texts"):
                done[job] = {}
                continue
            score = (lucid if job.arguments["attention"] == "lucid" else softmax) + 0.001 * job.arguments["seed"]
            options = job.arguments["asked"]["options"]
            labels = [
                {"needles": n, "length": length, "task": task}
                for n in options.get("needles", (0,))
                for length in options.get("lengths", (0,))
                for task in options.get("qa", ("qasper",))
            ]
            values = {"score": score, "strict": score, **dict.fromkeys(("f1", "rouge1", "rougeL"), 100 * score)}
            done[job] = {
                "cells": [{"labels": cell, "scores": values} for cell in labels],
                "validation_loss": 1.5,
                "curve": {"step": [1, 2], "loss": [2.0, 1.0]},
                "tokens_per_second": 100.0 if job.arguments["attention"] == "lucid" else 150.0,
            }
    yield from done.items()


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize(
    ("lucid", "softmax", "verdict"),
    [(0.8, 0.4, "holds"), (0.4, 0.8, "does not hold"), (0.02, 0.01, "too small to judge")],
)
def test_conclusions_follow_the_records(name: str, lucid: float, softmax: float, verdict: str) -> None:
    conclusion = EXPERIMENTS[name].conclude(SMALL, dict(records(EXPERIMENTS[name], lucid, softmax)))
    # Without PaTH and without long contexts, nothing is said about BABILong.
    assert conclusion.verdict == ("too small to judge" if name == "babilong" else verdict)
    assert conclusion.seeds == 3
    assert "1.50 times" in conclusion.tables[0]["note"]
    assert f"{100 * lucid + 0.1:.1f} ± 0.1" in conclusion.ours
    assert ("stand-in" in conclusion.because) == (name == "longqa")


def test_a_job_that_was_killed_makes_its_texts_again(store: Store, tmp_path: Path) -> None:
    job = longqa.comparison(SMOKE).base.texts_job()
    again = Store(tmp_path)
    left = Work(again, job).folder / PROMPTS
    left.write_text("half a li")
    assert do(job, again.folder) is None
    assert left.read_bytes() == (store.folder_of(job) / PROMPTS).read_bytes()
