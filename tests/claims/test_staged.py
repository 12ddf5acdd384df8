"""Tasks of text for small models, runs in stages, and the conclusions of `--scale hours` from made-up records."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_attention.nn.attention.sliding import SlidingAttention
from lucid_lab.claims import babilong, hybrid, length_extrapolation, needle_lm
from lucid_lab.claims.engine.against import judge_against, outcome
from lucid_lab.claims.engine.jobs import Job, Record, Store
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.result import Spread
from lucid_lab.claims.engine.scale import HOURS, SMALL, SMOKE
from lucid_lab.claims.staged.sizes import HOURS_SIZES
from lucid_lab.claims.staged.tasks import NeedleSentences, Stage, Stories, is_held_out, stage_of
from lucid_lab.claims.staged.training import StagedRun
from lucid_lab.labels import IGNORED
from tests.claims.faking import fake, small_run

STAGES = [Stage(72, (2,)), Stage(144, (4, 8))]


def words(task: NeedleSentences | Stories, row: torch.Tensor) -> list[str]:
    names = {number: word for word, number in task.vocabulary.number.items()}
    return [names[int(word)] for word in row[:, 0]]


def test_a_needle_is_asked_for_once_and_its_answer_follows_the_key_in_the_context() -> None:
    task = NeedleSentences(STAGES, steps=10)
    inputs, labels = task.test(4, 3, 100)
    assert inputs.shape == (4, 100, 2)
    names = {number: word for word, number in task.vocabulary.number.items()}
    for row, answers in zip(inputs, labels, strict=True):
        text = words(task, row)
        asked = (answers != IGNORED).nonzero()[:, 0].tolist()
        assert len(asked) == 3
        assert len({text[position] for position in asked}) == 3
        for position in asked:
            first = text.index(text[position])
            assert first < 100 - 3 * 9
            assert text[first + 1] == names[int(answers[position])]


def test_the_stages_of_a_training_follow_each_other() -> None:
    task = NeedleSentences(STAGES, steps=10)
    assert [task.batch(1, 0, step)[0].shape[1] for step in (0, 4, 5, 9)] == [72, 72, 144, 144]
    assert stage_of(STAGES, 10, 99) == STAGES[1]
    assert torch.equal(task.batch(2, 1, 3)[0], task.batch(2, 1, 3)[0])
    assert not torch.equal(task.batch(2, 1, 3)[0], task.batch(2, 2, 3)[0])


def test_needles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="12 needles and questions must fit into 100 tokens: 115 are too many"):
        NeedleSentences(STAGES, steps=10).test(1, 12, 100)


def test_stories_keep_their_facts_in_order_and_end_with_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    from lucid_lab.claims.staged import tasks

    told = []

    def keep(story: Any) -> bool:
        told.append(story)
        return is_held_out(story)

    monkeypatch.setattr(tasks, "is_held_out", keep)
    task = Stories([Stage(96, (1, 2))], steps=4)
    for n, held_out in ((1, True), (2, True), (1, False)):
        inputs, labels = task.test(1, n, 128) if held_out else task.batch(1, 0, 0)
        signs = ["", ".", ":", "?"]
        spelt = zip(words(task, inputs[0]), inputs[0, :, 1].tolist(), strict=True)
        story, text = told[-1], " ".join(word + signs[sign] for word, sign in spelt)
        assert is_held_out(story) == held_out
        places = [text.index(fact) for fact in story.facts if story.facts.count(fact) == 1]
        assert places == sorted(places)
        assert text.endswith(story.question)
        assert int(labels[0, -1]) == task.vocabulary.number[story.answer]
        assert (labels[0, :-1] == IGNORED).all()


def test_a_local_layer_is_a_sliding_window_and_the_others_are_not() -> None:
    model = StagedRun(task="needles", layers=2, local={"0": 16}, token_shift=True).make_model()
    assert isinstance(model.layers[0].attention, SlidingAttention)
    assert model.layers[0].attention.window == 16
    assert not isinstance(model.layers[1].attention, SlidingAttention)


@pytest.mark.parametrize("name", HOURS_SIZES)
def test_a_staged_run_trains_and_tests(name: str, tmp_path: Path) -> None:
    run = HOURS_SIZES[name].run
    tiny = run.but(steps=len(run.stages), batch=2, test_batch=2, test_lengths=run.test_lengths[:1])
    job = tiny.job()
    assert do(job, tmp_path) is None
    record = Store(tmp_path)[job]
    assert [test["n"] for test in record["tests"]] == list(run.test_n)
    assert record["curve"]["step"] == list(range(1, len(run.stages) + 1))
    assert record["seconds"] > 0


def staged_record(job: Job, accuracy: float, loss: float = 1.0) -> Record:
    record = small_run(job, accuracy, loss)
    return {**record, "seconds": {"softmax": 10.0, "path": 20.0}.get(job.arguments["attention"], 30.0)}


@pytest.mark.parametrize("experiment", [needle_lm, babilong])
@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ({"lucid": 99, "lucid_path": 99}, "holds"),
        ({"lucid": 95, "lucid_path": 95, "path": 96}, "partly"),
        ({"lucid": 95, "lucid_path": 95, "softmax": 95}, "does not hold"),
        ({"lucid": 10, "lucid_path": 10, "else": 10}, "too small to judge"),
    ],
)
def test_every_baseline_counts_at_the_scale_of_hours(experiment: Any, scores: dict[str, float], verdict: str) -> None:
    def rule(job: Job) -> Record:
        return staged_record(job, scores.get(job.arguments["attention"], scores.get("else", 50)))

    done = fake(experiment, HOURS, rule)
    conclusion = experiment.conclude(HOURS, done)
    assert conclusion.verdict == verdict
    json.dumps([*conclusion.figures, *conclusion.tables], allow_nan=False)
    assert "PaTH" in conclusion.because


def test_every_arm_takes_the_better_of_the_same_rates_and_faster_arms_get_more_time() -> None:
    def rule(job: Job) -> Record:
        diverged = job.arguments["attention"] == "lucid" and job.arguments["rate"] == 6e-3
        return staged_record(job, 50, loss=None if diverged else 1 - 10 * job.arguments["rate"])  # type: ignore[arg-type]

    done = fake(needle_lm, HOURS, rule)
    contest = needle_lm.contest(HOURS)
    assert {arm: contest.rate(arm, done) for arm in ("softmax", "lucid")} == {"softmax": 6e-3, "lucid": 3e-3}
    steps = {member.label: member.run.steps for member in contest.members(done)}
    base = contest.size.run.steps
    assert steps["softmax, the time of LUCID"] == 3 * base
    assert steps["PaTH, the time of LUCID-PaTH"] == round(1.5 * base)


def test_a_lead_must_be_larger_than_both_deviations() -> None:
    ours = Spread(60, 3, 3)
    standard = {"softmax": Spread(50, 3, 3)}
    assert judge_against(ours, standard, {}, floor=0) == "holds"
    assert judge_against(ours, {"softmax": Spread(50, 8, 3)}, {}, floor=0) == "does not hold"
    assert judge_against(ours, standard, {"path": Spread(58, 1, 3)}, floor=0) == "partly"
    # Both read 100.0 ± 0.0: they are not told apart, even if one is ahead by less than a digit that is shown.
    assert outcome(Spread(99.99, 0.001, 3), Spread(99.97, 0.001, 3)) == "level"


def extrapolated(lucid: float, softmax: float, trained: float = 99.0) -> Any:
    def rule(job: Job) -> Record:
        record = small_run(job, trained)
        for test in record["tests"]:
            if test["length"] > 64:
                test["accuracy"] = lucid if "lucid" in job.arguments["attention"] else softmax
        return record

    return rule


@pytest.mark.parametrize(
    ("lucid", "softmax", "trained", "verdict"),
    [(90, 50, 99, "holds"), (50, 90, 99, "does not hold"), (90, 50, 30, "too small to judge")],
)
def test_length_extrapolation_compares_what_both_have_learned(
    lucid: float, softmax: float, trained: float, verdict: str
) -> None:
    done = fake(length_extrapolation, SMALL, extrapolated(lucid, softmax, trained))
    conclusion = length_extrapolation.conclude(SMALL, done)
    assert conclusion.verdict == verdict
    assert ("not compared" in conclusion.because) == (trained < 80)
    json.dumps([*conclusion.figures, *conclusion.tables], allow_nan=False)


@pytest.mark.parametrize(("lucid", "verdict"), [(90, "holds"), (52, "does not hold")])
def test_a_hybrid_gains_if_lucid_is_ahead_at_equal_time(lucid: float, verdict: str) -> None:
    def rule(job: Job) -> Record:
        return staged_record(job, lucid if job.arguments["attention"] == "lucid" else 50)

    done = fake(hybrid, SMALL, rule)
    conclusion = hybrid.conclude(SMALL, done)
    assert conclusion.verdict == verdict
    # Of 16 keys asked one after the other, a window of 16 holds a share of (15/16)¹⁶; see `share_in_window`.
    assert hybrid.share_in_window(hybrid.SETTINGS["overwrites"], 16) == pytest.approx((15 / 16) ** 16, abs=0.02)
    assert "holds the answers of" in conclusion.because
    assert {job.arguments["steps"] for job in done} == {500, 1000, 1500, 3000}


def test_the_new_experiments_plan_next_to_nothing_at_smoke() -> None:
    for experiment in (length_extrapolation, hybrid):
        assert max(job.arguments["steps"] for job in experiment.plan(SMOKE, {})) == 2
