"""The commands of the full recipes: a command that the cluster would refuse is refused before any runs."""

from pathlib import Path

import pytest

from lucid_lab.claims.engine import steps
from lucid_lab.claims.engine.full_scale import read_steps
from lucid_lab.claims.engine.steps import Step, check_steps, evaluate, tokenized, train, tune

TOKENIZE = tokenized()
PRETRAIN = train("pretrain_2k", "lucid")
TUNE = tune("finetune_64k", "runs/paper/pretrain_2k-lucid/model", "runs/paper/long")
EVALUATE = evaluate("runs/paper/long/model", "mniah", "runs/paper/scores", "--needles", "2,4", "--lengths", "4096")


def test_a_step_is_a_line_that_can_be_typed() -> None:
    assert Step(("recipes",)).line == "lucid recipes"
    assert PRETRAIN.line == (
        "torchrun --nproc-per-node=8 -m lucid_lab.cli train pretrain_2k --attention lucid "
        "--out runs/paper/pretrain_2k-lucid"
    )
    assert "'a b'" in Step(("eval", "a b")).line


def test_a_chain_of_steps_is_accepted() -> None:
    check_steps([TOKENIZE, PRETRAIN, TUNE, EVALUATE])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (train("pretrain_3k", "lucid"), "pretrain_2k"),
        (train("pretrain_2k", "lucyd"), "lucid"),
        (train("pretrain_2k", "lucid", "--sett", "steps=3"), "does not take"),
        (train("pretrain_2k", "lucid", "--set", "stepss=3"), "stepss"),
        (evaluate("./model", "mniah", "runs/x", "--needle-count", "3"), "does not take"),
        (Step(("evaluate", "./model")), "evaluate"),
    ],
    ids=["recipe", "attention", "option of train", "field", "option of eval", "command"],
)
def test_a_command_that_would_be_refused_is_refused_before_it_runs(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_steps([step])


PROMPTS = Step(("make-data", "needles", "data/prompts.jsonl", "--tokenizer", "runs/paper/pretrain_2k-lucid/model"))
ANALYZE = Step(("analyze", "runs/paper/pretrain_2k-lucid/model", "--samples", "data/prompts.jsonl", "--out", "runs/a"))
ANSWERS = tune("qasper", "runs/paper/pretrain_2k-lucid/model", "runs/paper/q", "--data=data/qasper.jsonl")
LOSSES = evaluate("runs/paper/pretrain_2k-lucid/model", "perplexity", "runs/p", "--text", "data/other")


@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        ([TOKENIZE, TUNE], "runs/paper/pretrain_2k-lucid/model"),
        ([TOKENIZE, PRETRAIN, EVALUATE], "runs/paper/long/model"),
        ([TOKENIZE, TUNE, PRETRAIN], "runs/paper/pretrain_2k-lucid/model"),
        ([PRETRAIN], "data/dolma"),
        ([TOKENIZE, PROMPTS], "runs/paper/pretrain_2k-lucid/model"),
        ([TOKENIZE, PRETRAIN, ANALYZE], "data/prompts.jsonl"),
        ([TOKENIZE, PRETRAIN, ANSWERS], "data/qasper.jsonl"),
        ([TOKENIZE, PRETRAIN, LOSSES], "data/other"),
    ],
    ids=["tune", "eval", "order", "tokens", "tokenizer", "prompts", "answers", "text"],
)
def test_a_step_that_reads_what_no_earlier_step_writes_is_refused(wrong: list[Step], missing: str) -> None:
    with pytest.raises(ValueError, match=f"nothing before it writes {missing}$"):
        check_steps(wrong)


def test_two_different_steps_do_not_write_the_same() -> None:
    with pytest.raises(ValueError, match=r"lucid tokenize .* writes data/dolma, too"):
        check_steps([TOKENIZE, tokenized(tokens=7)])
    check_steps([TOKENIZE, TOKENIZE])


def test_only_training_is_estimated() -> None:
    needs = PRETRAIN.estimate()
    assert needs is not None
    assert (needs.gpus, needs.device, needs.fits) == (8, "H100", True)
    assert needs.parameters == pytest.approx(1.11e9, rel=0.01)
    assert EVALUATE.estimate() is None


def test_a_step_runs_as_its_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    class Ended:
        returncode = 3

    def record(words: list[str], check: bool) -> Ended:
        ran.append(words[1:])
        return Ended()

    monkeypatch.setattr(steps.subprocess, "run", record)
    assert Step(("recipes",)).run() == 3
    assert PRETRAIN.run() == 3
    assert ran[0] == ["-m", "lucid_lab.cli", "recipes"]
    assert ran[1][:5] == ["-m", "torch.distributed.run", "--nproc-per-node=8", "-m", "lucid_lab.cli"]
    assert ran[1][5:] == list(PRETRAIN.words)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": [1]}', '{"steps": 3', "null"])
@pytest.mark.parametrize(("word", "name"), [("train", "summary.json"), ("eval", "results.json")])
def test_a_damaged_result_of_a_step_is_named(word: str, name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is not what lucid {word} .* writes .*: remove it and run"):
        read_steps([Step((word, "x", "--out", str(tmp_path)))])
