"""`warm_start`: the ramp begins with exactly the softmax model, and the verdict is what the records say."""

import json

import pytest

from lucid_lab.claims import warm_start
from lucid_lab.claims.engine.jobs import Job, Record, Store, Work
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.steps import check_steps
from lucid_lab.claims.small.training import SmallRun, load_small, score
from lucid_lab.claims.warm_start import ABRUPT, CONTINUED, RAMP, branch, extent, go_on, move

from .faking import compute

Curves = dict[str, list[float]]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The records of all jobs of the smallest scale."""
    return compute(warm_start, SMOKE, tmp_path_factory.mktemp("jobs"))


def records(curves: dict[int, Curves]) -> dict[Job, Record]:
    """Made-up branches: head size → way → losses; seeds differ by 0.01 in all of them."""
    made: dict[Job, Record] = {}
    for head, ways in curves.items():
        for way, losses in ways.items():
            for seed in SMALL.seeds:
                values = [loss + 0.01 * seed for loss in losses]
                record = {"step": list(range(len(values))), "loss": values, "strength": values}
                made[branch(SMALL, head, way, seed)] = record
    return made


SOFTMAX = [2.0, 1.9, 1.8]
GOOD: Curves = {CONTINUED: SOFTMAX, ABRUPT: [2.5, 2.1, 1.85], RAMP: [2.0, 1.95, 1.81]}
HIGH: Curves = GOOD | {RAMP: [2.0, 2.2, 1.81]}
LEFT: Curves = GOOD | {RAMP: [2.0, 1.95, 1.86]}
BAD: Curves = GOOD | {RAMP: [2.0, 2.2, 1.86]}


def test_it_runs_to_a_conclusion(smoke: Store) -> None:
    conclusion = warm_start.conclude(SMOKE, smoke)
    assert [len(figure["series"]) for figure in conclusion.figures] == [3, 3]
    json.dumps([conclusion.figures, conclusion.tables], allow_nan=False)


def test_the_ways_wait_for_the_trained_models() -> None:
    first = warm_start.plan(SMALL, {})
    assert len(first) == 6
    assert all(job.arguments["attention"] == "softmax" for job in first)
    later = warm_start.plan(SMALL, {job: {} for job in first})
    assert len(later) == 6 + 3 * 2 * 3


@pytest.mark.parametrize("head", extent(SMOKE).models)
def test_a_ramp_begins_with_the_softmax_model_and_ends_with_lucid(smoke: Store, head: int) -> None:
    softmax, abrupt, ramp = (smoke[branch(SMOKE, head, name, 0)] for name in (CONTINUED, ABRUPT, RAMP))
    assert ramp["loss"][0] == softmax["loss"][0] != abrupt["loss"][0]
    assert (ramp["strength"][0], ramp["strength"][-1]) == (0.0, 1.0)
    assert set(abrupt["strength"]) == {1.0}
    assert set(softmax["strength"]) == {0.0}
    assert ramp["loss"][-1] != softmax["loss"][-1]


def test_every_way_begins_with_the_trained_weights(smoke: Store) -> None:
    job = branch(SMOKE, 4, CONTINUED, 0)
    trained = SmallRun(**job.arguments["start"])
    test = trained.make_task().test(trained.test_batch // 2, 0, trained.length)
    assert smoke[job]["loss"][0] == score(load_small(Work(smoke, job), trained), test)["loss"]


def test_a_ramp_that_hardly_rises_is_softmax_attention_going_on(smoke: Store) -> None:
    job = branch(SMOKE, 4, RAMP, 0)
    flat = go_on(Work(smoke, job), **{**job.arguments, "ramp": 10**9})
    assert flat["loss"] == pytest.approx(smoke[branch(SMOKE, 4, CONTINUED, 0)]["loss"], abs=1e-5)
    assert flat["loss"][0] != flat["loss"][-1]


def test_costs_are_taken_seed_by_seed() -> None:
    cost = move(SMALL, 16, ABRUPT, records({16: GOOD}))
    assert [str(value) for value in (cost.jump, cost.worst, cost.end)] == [
        "0.500 ± 0.000",
        "0.500 ± 0.000",
        "0.050 ± 0.000",
    ]
    assert str(move(SMALL, 16, RAMP, records({16: HIGH})).worst) == "0.300 ± 0.000"


CASES: list[tuple[Curves, Curves, str, str]] = [
    (GOOD, GOOD, "holds", "above softmax going on with every head size"),
    (LEFT, GOOD, "partly", "above softmax going on with heads of 64 only"),
    (BAD, GOOD, "partly", "jump with heads of 64 only"),
    (HIGH, HIGH, "partly", "jump with no head size"),
    (LEFT, LEFT, "partly", "above softmax going on with no head size"),
    (BAD, BAD, "does not hold", "jump with no head size"),
]


@pytest.mark.parametrize(("small", "wide", "verdict", "because"), CASES, ids=[case[3] for case in CASES])
def test_the_verdict_is_what_the_records_say(small: Curves, wide: Curves, verdict: str, because: str) -> None:
    conclusion = warm_start.conclude(SMALL, records({16: small, 64: wide}))
    assert conclusion.verdict == verdict
    assert because in conclusion.because
    assert conclusion.seeds == 3


def test_the_papers_commands_can_run() -> None:
    steps = warm_start.paper()
    check_steps(steps)
    recipes = [recipe for recipe in (step.recipe() for step in steps) if recipe is not None]
    assert recipes[0].attention_options == {"strength": 0}
    assert [recipe.strength_steps for recipe in recipes] == [0, 0, 1, 0.5]
    assert [recipe.steps for recipe in recipes] == [11_000, 1100, 1100, 1100]
