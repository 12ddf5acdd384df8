"""The commands of the full recipes: a command that the cluster would refuse is refused before any runs."""

from pathlib import Path

import pytest

from lucid_attention.experiments.engine import steps
from lucid_attention.experiments.engine.full_scale import read_steps
from lucid_attention.experiments.engine.steps import (
    PEAK,
    REACHED,
    Step,
    check_steps,
    evaluate,
    parameters,
    train,
    training_operations,
    tune,
)
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny

PRETRAIN = train("pretrain_2k", "lucid")
TUNE = tune("finetune_64k", "runs/paper/pretrain_2k-lucid/model", "runs/paper/long", "--attention", "lucid")
EVALUATE = evaluate("runs/paper/long/model", "mniah", "runs/paper/scores", "--needles", "2,4", "--lengths", "4096")


def test_a_step_is_a_line_that_can_be_typed() -> None:
    assert Step(("recipes",)).line == "lucid recipes"
    assert PRETRAIN.line == (
        "torchrun --nproc-per-node=8 -m lucid_attention.cli train pretrain_2k --attention lucid "
        "--out runs/paper/pretrain_2k-lucid"
    )
    assert "'a b'" in Step(("eval", "a b")).line


def test_a_chain_of_steps_is_accepted() -> None:
    check_steps([PRETRAIN, TUNE, EVALUATE])


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


@pytest.mark.parametrize("wrong", [[TUNE], [PRETRAIN, EVALUATE], [TUNE, PRETRAIN]], ids=["tune", "eval", "order"])
def test_a_step_that_reads_what_no_earlier_step_writes_is_refused(wrong: list[Step]) -> None:
    with pytest.raises(ValueError, match="nothing before it writes runs/paper/"):
        check_steps(wrong)


def test_parameters_are_those_of_the_model_that_is_trained() -> None:
    for attention in ("softmax", "path"):
        recipe = train("tiny_lm", attention).recipe()
        assert recipe is not None
        model = LucidForCausalLM(tiny(attention, **recipe.model))
        assert parameters(recipe) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("preset", ["gemma3_1b", "gemma3_4b", "qwen2_5_1_5b"])
def test_published_shapes_have_their_published_sizes(preset: str) -> None:
    for attention in ("softmax", "lucid"):
        step = train("pretrain_2k", attention, "--set", f"preset={preset}")
        step.check()
        recipe = step.recipe()
        assert recipe is not None
        published = {"gemma3_1b": 999_885_952, "gemma3_4b": 3_880_263_168, "qwen2_5_1_5b": 1_543_714_304}
        assert parameters(recipe) == pytest.approx(published[preset], rel=0.01)


def test_hours_follow_from_the_count_of_operations() -> None:
    recipe = PRETRAIN.recipe()
    assert recipe is not None
    tokens = 11_000 * 256 * 2048
    # 6 operations a weight and token, and causal attention: 7 products of D for half the pairs, for 32 + 4 heads of 68.
    weights, attention = 6 * 1.11e9, 7 * 2 * 68 * 2048 / 2 * (32 + 4) * 22
    expected = tokens * (weights + attention)
    if recipe.gradient_checkpointing:
        expected *= 4 / 3
    assert training_operations(recipe) == pytest.approx(expected, rel=0.08)
    assert PRETRAIN.gpu_hours() == pytest.approx(training_operations(recipe) / (PEAK * REACHED) / 3600)
    assert EVALUATE.gpu_hours() is None
    softmax = train("pretrain_2k", "softmax").gpu_hours()
    assert softmax is not None
    assert 1.0 < (PRETRAIN.gpu_hours() or 0) / softmax < 1.05
    twice = train("pretrain_2k", "softmax", "--set", "steps=22000").gpu_hours()
    assert twice == pytest.approx(2 * softmax)


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
    assert ran[0] == ["-m", "lucid_attention.cli", "recipes"]
    assert ran[1][:5] == ["-m", "torch.distributed.run", "--nproc-per-node=8", "-m", "lucid_attention.cli"]
    assert ran[1][5:] == list(PRETRAIN.words)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": [1]}', '{"steps": 3', "null"])
@pytest.mark.parametrize(("word", "name"), [("train", "summary.json"), ("eval", "results.json")])
def test_a_damaged_result_of_a_step_is_named(word: str, name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is not what lucid {word} .* writes .*: remove it and run"):
        read_steps([Step((word, "x", "--out", str(tmp_path)))])
