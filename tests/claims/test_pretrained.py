"""`pretrained`: the whole path on a tiny Llama, answers as without a cache, and a verdict by its rule."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from lucid_lab.evals.benchmarks.haystacks import Prose
from lucid_lab.evals.benchmarks.needles import Needles, draft, write

from lucid_attention import enable_lucid
from lucid_lab import cli
from lucid_lab.claims import pretrained
from lucid_lab.claims.engine.jobs import Store, Work
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.study import ExperimentError, run_experiment
from lucid_lab.claims.pretrained import Outcome, judge
from lucid_lab.claims.real import figures, given, questions, switching, tuning
from lucid_lab.claims.real.given import STAND_IN, open_model, open_tokenizer
from lucid_lab.claims.real.runs import ALL, ARMS, CHOSEN, SOFTMAX, STOCK, Plan, share_right
from lucid_lab.labels import IGNORED

from .faking import compute


def made_up_prose(name: str) -> Prose:
    """Sentences in place of Python's docstrings, whose parsing takes longer than all jobs."""
    random = Random(name)
    # The words of the questions, so that a prompt has few tokens.
    settings = Needles(length=256, haystack="noise")
    words = write(settings, draft(settings, 0), 5)[0].replace(".", "").split()
    return Prose([" ".join(random.choices(words, k=random.randint(5, 12))) + "." for _ in range(4200)])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The records of all jobs of the smallest scale."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given, "read_prose", made_up_prose)
        yield compute(pretrained, SMOKE, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def work(smoke: Store) -> Work:
    """The place of a job that comes after them."""
    return Work(smoke, Plan(SMOKE, smoke).corpus)


def test_it_runs_to_a_conclusion(smoke: Store) -> None:
    conclusion = pretrained.conclude(SMOKE, smoke)
    assert "κ(P)" in conclusion.ours
    assert len(conclusion.tables) == 8
    assert {figure["kind"] for figure in conclusion.figures} == {"lines"}


def test_without_a_model_it_is_skipped_with_a_sentence_and_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert pretrained.plan(SMALL, {}) == []
    with pytest.raises(ExperimentError, match="no --model and --texts were given"):
        run_experiment("pretrained", SMALL, tmp_path)
    assert cli.main(["experiment", "pretrained", "--out", str(tmp_path)]) == 1
    assert "python tools/get_smollm2.py" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    absent = replace(SMALL, model=str(tmp_path / "empty"), texts=str(tmp_path))
    assert "is no checkpoint" in str(pretrained.lacks(absent))


def test_a_scale_with_a_model_is_still_that_scale() -> None:
    assert replace(SMALL, model="a", texts="b") == SMALL


@pytest.mark.parametrize("lucid", [False, True])
def test_questions_after_one_context_are_answered_as_each_alone(work: Work, lucid: bool) -> None:
    model = open_model(work, STAND_IN)
    if lucid:
        enable_lucid(model)
    context = questions.update_prompts(open_tokenizer(work, STAND_IN), 4, 3, 0)
    assert len(context.questions) == 4
    records = questions.answered(model, context)
    for question, record in zip(context.questions, records, strict=True):
        ids = torch.tensor([[*context.ids, *question.ids, *question.answer]])
        alone = questions.token_losses(model, ids)[-len(question.answer) :].mean().item()
        assert record["loss"] == pytest.approx(alone, abs=0.02)


def test_needles_and_their_spans_are_in_the_prompt(work: Work, smoke: Store) -> None:
    tokenizer = open_tokenizer(work, STAND_IN)
    hay = questions.Haystacks(work, Plan(SMOKE, smoke).corpus).file("test")
    context = questions.needle_prompts(tokenizer, hay, 512, 3, 0, asked=2)
    assert len(context.questions) == 2
    for question in context.questions:
        ids = [*context.ids, *question.ids]
        assert len(ids) + len(question.answer) <= 512
        value = tokenizer.decode(question.answer).strip()
        assert value in tokenizer.decode(ids[slice(*question.span)])


def test_training_and_tests_have_different_needles(work: Work, smoke: Store) -> None:
    tokenizer = open_tokenizer(work, STAND_IN)
    hay = questions.Haystacks(work, Plan(SMOKE, smoke).corpus).file("train")
    seeds = (questions.TEST_SEED, questions.TRAIN_SEED)
    first, second = (questions.needle_prompts(tokenizer, hay, 256, 1, 3, asked=1, seed=seed) for seed in seeds)
    assert first.questions[0].answer != second.questions[0].answer


def test_a_packed_sequence_has_labels_on_its_answers_only(work: Work, smoke: Store) -> None:
    plan = Plan(SMOKE, smoke)
    run = tuning.Tuning(label="", layers=(), rate=0.0, marks=(8,), ramp=0, length=512)
    data = tuning._Data(work, STAND_IN, plan.corpus, run)
    tokenizer = open_tokenizer(work, STAND_IN)
    # The second sequence with needles has two of them.
    ids, labels = (tensor[0] for tensor in data.sequence(7))
    assert ids.shape == labels.shape
    assert len(ids) <= 512
    learned = labels != IGNORED
    assert torch.equal(ids[learned], labels[learned])
    text, answers = tokenizer.decode(ids), tokenizer.decode(labels[learned]).split()
    told = dict(re.findall(r"numbers for (\S+) is: (\d+)", text))
    asked = re.findall(r"number for (\S+) mentioned in the provided text is", text)
    assert len(set(asked)) == len(told) == 2
    assert answers == [told[key] for key in asked]
    plain, all_labels = data.sequence(6)
    assert torch.equal(plain, all_labels)


def test_the_share_of_answers_counts_every_question_once() -> None:
    assert share_right({"right": [[True, False, False], [True]]}) == 50


def test_a_rate_at_the_edge_of_its_sweep_is_named_as_such() -> None:
    rates = (1e-5, 1e-4, 1e-3)
    assert [figures._chosen_rate(rate, rates) for rate in rates] == [
        "1e-05, the smallest tried",
        "0.0001",
        "0.001, the largest tried",
    ]
    assert figures._chosen_rate(1e-4, (1e-4,)) == "0.0001"


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    work: Work, smoke: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(SMOKE, smoke)
    job = plan.final(ALL, 0)
    arguments = {**job.arguments, "run": {**job.arguments["run"], "save_every": 1, "keep": False}}
    monkeypatch.setattr(work, "folder", smoke.folder / "stopped")
    work.folder.mkdir()
    trained = tuning._State.train
    calls = []

    def stopping(state: tuning._State, sequence: tuple[torch.Tensor, torch.Tensor]) -> None:
        calls.append(state.step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        trained(state, sequence)

    monkeypatch.setattr(tuning._State, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(work, **arguments)
    record = tuning.tune(work, **arguments)
    assert calls == [0, 1, 2, 2, 3]
    # Step 2 was tested a second time.
    assert record["loss"] == pytest.approx(smoke[job]["loss"], abs=1e-6)
    assert record["test_loss"][-1] == pytest.approx(smoke[job]["test_loss"][-1], abs=1e-6)
    assert not (work.folder / tuning.STATE).exists()


def test_the_ramp_ends_at_the_root_of_the_head_size_and_is_saved(work: Work, smoke: Store) -> None:
    plan = Plan(SMOKE, smoke)
    record = smoke[plan.final(ALL, 0)]
    assert record["sharpness"][0] == 8 * 4
    assert record["sharpness"][-1] == 4
    model, _ = questions.open_asked(work, STAND_IN, plan.models(0)[CHOSEN])
    assert list(model.config.lucid["layers"]) == plan.chosen()
    assert plan.models(0)[STOCK] is None


def test_the_cheapest_layers_are_chosen_up_to_what_is_allowed() -> None:
    records = [[{"layers": [layer], "change": cost} for layer, cost in enumerate((0.5, 0.1, 0.2, 0.05))]]
    sets = switching.cheapest(records, (1, 2, 3))
    assert sets == [[3], [1, 3], [1, 2, 3]]
    assert switching.choose(sets, [[0.1, 0.2, 0.3]], 0.25) == [1, 3]
    assert switching.choose(sets, [[0.5, 0.6, 0.7]], 0.25) == [3]


SOFTMAX_END = Outcome(loss=2.4, fell=0.02, needles=(50.0, 60.0, 40.0, 70.0))
BETTER = (80.0, 95.0, 75.0, 98.0)


@pytest.mark.parametrize(
    ("chosen", "verdict"),
    [
        (Outcome(2.42, 0.0, BETTER), "holds"),
        (Outcome(2.42, 0.0, SOFTMAX_END.needles), "partly"),
        (Outcome(2.60, 0.2, BETTER), "partly"),
        (Outcome(2.60, 0.0, SOFTMAX_END.needles), "does not hold"),
        (Outcome(2.60, 0.2, SOFTMAX_END.needles), "too small to judge"),
    ],
)
def test_the_verdict_follows_the_rule(chosen: Outcome, verdict: str) -> None:
    everywhere = Outcome(loss=3.1, fell=0.3, needles=(0.0, 0.0, 10.0, 0.0))
    found, because = judge({ALL: everywhere, CHOSEN: chosen}, SOFTMAX_END)
    assert found == verdict
    assert because.count("too early to be judged") == 1 + (chosen.fell > 0.05)


def test_all_arms_see_the_same_sequences(work: Work, smoke: Store) -> None:
    plan = Plan(SMOKE, smoke)
    runs = [smoke[plan.final(arm, 0)] for arm in ARMS]
    assert all(run["needles"][:4] == runs[0]["needles"][:4] == [0, 0, 0, 1] for run in runs)
    assert runs[0]["sharpness"][0] == 0
    assert runs[ARMS.index(SOFTMAX)]["loss"][0] != runs[ARMS.index(ALL)]["loss"][0]
