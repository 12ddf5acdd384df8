"""`language_model`: it runs, tunes both sides, gives softmax attention LUCID's time, and says what the records say."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from lucid_lab.claims import language_model
from lucid_lab.claims.engine.jobs import Job, Record, Store, Work
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.steps import check_steps
from lucid_lab.claims.language_model.runs import (
    SETTINGS,
    choose,
    extent,
    finite_loss,
    loss_of,
    position_jobs,
    range_ends,
    setting_jobs,
    setting_run,
    sweep_jobs,
    timing,
)
from lucid_lab.claims.small.training import SmallRun, load_small, score

from .faking import compute, fake

RATIO = 1.5


Loss = Callable[[SmallRun], float | None]


def records(loss: Loss) -> dict[Job, Record]:
    """Records of all jobs, with losses that are a function of the settings of a run."""

    def rule(job: Job) -> Record:
        if job.function == "language_model.runs:loss_by_position":
            run = SmallRun(**job.arguments["run"])
            ends = range_ends(run.length)
            return {"ends": ends, "losses": [finite_loss(loss(run))] * len(ends)}
        if job.function != "small.training:train_small":
            return {"milliseconds": [60.0, 40.0], "ratio": RATIO}
        last = loss(SmallRun(**job.arguments))
        curve = {"step": [1, job.arguments["steps"]], "loss": [5.0, last], "seconds": [0.1, 1.0]}
        return {"curve": curve, "tests": [{"n": 0, "length": 256, "accuracy": 50.0, "loss": last}]}

    return fake(language_model, SMALL, rule)


def best_at(points: dict[str, tuple[float, float]]) -> Callable[[SmallRun], float]:
    """Losses that are lowest at a learning rate and an embedding size of each side."""

    def loss(run: SmallRun) -> float:
        return 2.0 if (run.rate, run.embedding_std) == points[run.attention] else 3.0

    return loss


def lower_by(gaps: dict[str, float], spread: float = 0.0) -> dict[Job, Record]:
    """Records in which LUCID's loss is lower by so much in a setting, with a spread over seeds."""

    def setting(run: SmallRun) -> str:
        if (run.rate, run.embedding_std) == (3e-3, 0.02):
            return "untuned"
        if not run.rope:
            return "no_positions"
        return "one_wide_head" if run.heads == 1 else "long_context" if run.length == 1024 else "tuned"

    def loss(run: SmallRun) -> float:
        if run.steps == extent(SMALL).sweep_steps:
            return best_at({"softmax": (1e-2, 1.0), "lucid": (1e-2, 1.0)})(run)
        if run.attention == "lucid":
            return 2.0 - gaps.get(setting(run), 0.0) + spread * (run.seed - 1)
        late = run.steps > extent(SMALL).steps
        return 2.0 - (gaps.get("tuned", 0.0) - gaps.get("equal_time", 0.0) if late else 0.0)

    return records(loss)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The records of all jobs of the smallest scale."""
    return compute(language_model, SMOKE, tmp_path_factory.mktemp("jobs"))


def test_it_runs_to_a_conclusion(smoke: Store) -> None:
    conclusion = language_model.conclude(SMOKE, smoke)
    assert [figure["kind"] for figure in conclusion.figures] == ["lines", "lines", "lines", "heatmaps"]
    assert len(conclusion.tables[0]["rows"]) == len(SETTINGS)
    json.dumps([conclusion.figures, conclusion.tables], allow_nan=False)


def test_the_loss_by_position_is_the_loss_of_the_model(smoke: Store) -> None:
    job = position_jobs(choose(SMOKE, smoke))[-1]
    run = SmallRun(**job.arguments["run"])
    record, lengths = smoke[job], []
    for start, end in zip([0, *record["ends"]], record["ends"], strict=False):
        lengths.append(end - start)
    mean = sum(a * b for a, b in zip(record["losses"], lengths, strict=True)) / run.length
    batch = run.make_task().test(2 * run.test_batch, 0, run.length)
    whole = score(load_small(Work(smoke, job), run), batch)["loss"]
    assert mean == pytest.approx(whole, rel=1e-5)
    assert len(set(record["losses"])) == len(lengths) > 1


def test_ranges_of_positions_double_up_to_the_length() -> None:
    assert range_ends(256) == [8, 16, 32, 64, 128, 256]
    assert range_ends(40) == [8, 16, 32, 40]
    assert range_ends(8) == [8]


def test_first_come_the_sweeps_and_the_times() -> None:
    size = extent(SMALL)
    jobs = language_model.plan(SMALL, {})
    trained = [SmallRun(**job.arguments) for job in jobs if "train_small" in job.function]
    points = {(run.attention, run.rate, run.embedding_std) for run in trained}
    assert len(points) == len(trained) == 2 * len(size.rates) * len(size.stds)
    assert not {run.seed for run in trained} & set(SMALL.seeds)
    assert [job.alone for job in jobs if job not in sweep_jobs(SMALL)[: len(trained)]] == [True, True]


def test_the_loss_by_position_waits_for_the_models() -> None:
    done = lower_by({})
    assert not any("by_position" in job.function for job in language_model.plan(SMALL, {}))
    assert set(position_jobs(choose(SMALL, done))) <= set(language_model.plan(SMALL, done))
    unfinished = {job: done[job] for job in sweep_jobs(SMALL)}
    planned = language_model.plan(SMALL, unfinished)
    assert set(setting_jobs(choose(SMALL, done))) <= set(planned)
    assert not any("by_position" in job.function for job in planned)


def test_each_side_gets_what_its_own_sweep_found() -> None:
    points = {"softmax": (3e-3, 1.0), "lucid": (1e-2, 0.02)}
    choice = choose(SMALL, records(best_at(points)))
    for side, (rate, std) in points.items():
        assert choice.tuned[side] == {"rate": rate, "embedding_std": std}
        for setting in SETTINGS:
            run = setting_run(choice, setting, side, 1)
            assert (run.rate, run.embedding_std) == ((3e-3, 0.02) if setting == "untuned" else (rate, std))
            assert (run.attention, run.seed) == (side, 1)


def test_a_diverged_run_is_not_chosen() -> None:
    def loss(run: SmallRun) -> float | None:
        return None if run.rate > 3e-3 else 3.0 + run.embedding_std

    assert choose(SMALL, records(loss)).tuned["softmax"] == {"rate": 3e-3, "embedding_std": 0.02}
    assert loss_of({"tests": [{"loss": None}]}) == pytest.approx(math.log(256))
    conclusion = language_model.conclude(SMALL, records(lambda run: None if run.seed == 0 else 2.0))
    json.dumps([conclusion.figures, conclusion.tables], allow_nan=False)


def test_softmax_attention_gets_the_time_of_lucid() -> None:
    choice = choose(SMALL, lower_by({}))
    steps = extent(SMALL).steps
    late = setting_run(choice, "equal_time", "softmax", 0)
    assert late.steps == round(RATIO * steps) > steps
    assert setting_run(choice, "equal_time", "lucid", 0) == setting_run(choice, "tuned", "lucid", 0)
    timed = timing(SMALL).arguments
    assert (timed["run"]["attention"], timed["against"]["attention"]) == ("lucid", "softmax")


def test_settings_change_what_they_say_and_nothing_else() -> None:
    choice = choose(SMALL, lower_by({}))
    base = setting_run(choice, "tuned", "lucid", 0)
    long = setting_run(choice, "long_context", "lucid", 0)
    assert long.length == 4 * base.length
    assert long.length * long.batch == base.length * base.batch
    assert setting_run(choice, "no_positions", "lucid", 0) == base.but(rope=False)
    assert setting_run(choice, "one_wide_head", "lucid", 0) == base.but(heads=1, head_dim=64)


CASES: list[tuple[dict[str, float], float, str, str]] = [
    ({"tuned": 0.05, "equal_time": 0.03}, 0.01, "holds", "at equal steps and at equal time"),
    ({"tuned": 0.05, "equal_time": 0.005}, 0.01, "partly", "at equal steps, and not at equal time"),
    ({"tuned": 0.05, "equal_time": -0.05}, 0.01, "partly", "at equal steps, and not at equal time"),
    ({"no_positions": 0.1}, 0.01, "partly", "without RoPE"),
    ({"long_context": 0.1, "one_wide_head": 0.1}, 0.01, "partly", "one wide head, with the longer context"),
    ({"tuned": 0.005, "equal_time": 0.005}, 0.01, "does not hold", "in no setting"),
    ({"untuned": 0.05}, 0.01, "does not hold", "untuned"),
    (dict.fromkeys(SETTINGS, -0.05), 0.01, "does not hold", "in no setting"),
]


@pytest.mark.parametrize(
    ("gaps", "spread", "verdict", "because"), CASES, ids=[f"{case[2]} {case[0]}" for case in CASES]
)
def test_the_verdict_is_what_the_records_say(gaps: dict[str, float], spread: float, verdict: str, because: str) -> None:
    conclusion = language_model.conclude(SMALL, lower_by(gaps, spread))
    assert conclusion.verdict == verdict
    assert because in conclusion.because
    assert conclusion.seeds == 3


def test_it_says_where_the_difference_grows() -> None:
    gaps = {"tuned": 0.05, "no_positions": 0.1, "long_context": 0.055, "one_wide_head": 0.01}
    because = language_model.conclude(SMALL, lower_by(gaps, 0.01)).because
    assert "The difference grows without RoPE, with small heads. It does not clearly grow with the longer" in because


def test_tables_show_gaps_seed_by_seed() -> None:
    tables = language_model.conclude(SMALL, lower_by({"tuned": 0.05, "equal_time": 0.03}, 0.01)).tables
    rows: dict[str, Any] = {row[0]: row for row in tables[0]["rows"]}
    assert rows["4 heads of 16, 256 tokens; 500 steps each"][1:4] == ["2.000 ± 0.000", "1.950 ± 0.010", "0.050 ± 0.010"]
    assert rows["equal time: 750 steps of softmax"][1:4] == ["1.980 ± 0.000", "1.950 ± 0.010", "0.030 ± 0.010"]
    assert tables[1]["rows"][0][1:] == ["40.0", "60.0", "1.50"]


def test_the_papers_commands_can_run() -> None:
    steps = language_model.paper()
    check_steps(steps)
    recipes = [recipe for recipe in (step.recipe() for step in steps) if recipe is not None]
    assert [recipe.attention for recipe in recipes] == ["softmax", "lucid"] * 4
    assert [recipe.sequence_length for recipe in recipes] == [4096, 4096, 32_768, 32_768] * 2
    assert recipes[4].model == {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 16}
    assert recipes[6].model == {"rope_theta": None}
