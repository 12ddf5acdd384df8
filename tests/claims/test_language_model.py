"""`language_model`: it tunes both sides, gives softmax attention LUCID's time, and concludes what the losses say."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lucid_lab.claims import language_model
from lucid_lab.claims.language_model import FULL
from lucid_lab.toys.lab import SMALL, Record
from lucid_lab.toys.training import Toy

from .made_up import MadeUpLab, timed, trained

RATIO = 1.5
SETTINGS = ("tuned", "equal_time", "untuned", *language_model.VARIATIONS)

Loss = Callable[[Toy], float | None]


def lab_with(loss: Loss) -> MadeUpLab:
    """A lab in which losses are a function of the settings of a toy."""

    def rule(name: str, item: Any) -> Record:
        return timed(RATIO) if name == "time_steps" else trained(item, 50.0, loss(item))

    return MadeUpLab(SMALL, rule)


def best_at(points: dict[str, tuple[float, float]]) -> Loss:
    """Losses that are lowest at a learning rate and an embedding size of each side."""
    return lambda toy: 2.0 if (toy.rate, toy.embedding_std) == points[toy.attention] else 3.0


def lower_by(gaps: dict[str, float], spread: float = 0.0) -> MadeUpLab:
    """A lab in which LUCID's loss is lower by so much in a setting, with a spread over seeds."""

    def setting(toy: Toy) -> str:
        if (toy.rate, toy.embedding_std) == (3e-3, 0.02):
            return "untuned"
        if not toy.rope:
            return "no_positions"
        return "one_wide_head" if toy.heads == 1 else "long_context" if toy.length == 1024 else "tuned"

    def loss(toy: Toy) -> float | None:
        if toy.steps == FULL.sweep_steps:
            return best_at({"softmax": (1e-2, 1.0), "lucid": (1e-2, 1.0)})(toy)
        if toy.attention == "lucid":
            return 2.0 - gaps.get(setting(toy), 0.0) + spread * (toy.seed - 1)
        late = toy.steps > FULL.toy.steps
        return 2.0 - (gaps.get("tuned", 0.0) - gaps.get("equal_time", 0.0) if late else 0.0)

    return lab_with(loss)


def test_each_side_is_tuned_by_its_own_sweep_with_a_seed_that_is_not_compared() -> None:
    points = {"softmax": (3e-3, 1.0), "lucid": (1e-2, 0.02)}
    lab = lab_with(best_at(points))
    language_model.run(lab)
    swept = [toy for toy in lab.toys if toy.steps == FULL.sweep_steps]
    assert len({(toy.attention, toy.rate, toy.embedding_std) for toy in swept}) == len(swept) == 2 * 3 * 3
    assert not {toy.seed for toy in swept} & set(SMALL.seeds)
    compared = [toy for toy in lab.toys if toy not in swept]
    assert len(compared) == len(SETTINGS) * 2 * len(SMALL.seeds)
    for side, point in points.items():
        used = [(toy.rate, toy.embedding_std) for toy in compared if toy.attention == side]
        assert used.count(point) == 5 * used.count((3e-3, 0.02)) == 15


def test_a_diverged_run_is_not_chosen_and_can_be_shown() -> None:
    lab = lab_with(lambda toy: None if toy.rate > 3e-3 else 3.0 + toy.embedding_std)
    assert "Tuned: softmax rate 0.003, embeddings 0.02;" in language_model.run(lab).because
    conclusion = language_model.run(lab_with(lambda toy: None if toy.seed == 0 else 2.0))
    json.dumps([conclusion.figures, conclusion.tables], allow_nan=False)
    assert conclusion.tables[0]["rows"][0][1].startswith("3.182")  # the mean of ln 256, 2 and 2


def test_settings_change_what_they_say_and_nothing_else() -> None:
    for side in ("softmax", "lucid"):
        toys = language_model.settings(FULL, side, {"rate": 1e-2, "embedding_std": 0.3}, late=750)
        assert tuple(toys) == SETTINGS
        base, long = toys["tuned"], toys["long_context"]
        assert (base.attention, base.steps, base.rate, base.embedding_std) == (side, 500, 1e-2, 0.3)
        assert toys["equal_time"] == base.but(steps=750 if side == "softmax" else 500)
        assert toys["untuned"] == base.but(rate=3e-3, embedding_std=0.02)
        assert toys["no_positions"] == base.but(rope=False)
        assert toys["one_wide_head"] == base.but(heads=1, head_dim=64)
        assert (long.length, long.length * long.batch) == (4 * base.length, base.length * base.batch)


CASES: list[tuple[dict[str, float], float, str, str]] = [
    ({"tuned": 0.05, "equal_time": 0.03}, 0.01, "holds", "at equal steps and at equal time"),
    ({"tuned": 0.05, "equal_time": 0.005}, 0.01, "partly", "at equal steps and level at equal time"),
    ({"tuned": 0.05, "equal_time": -0.05}, 0.01, "does not hold", "at equal steps, and higher at equal time"),
    ({"no_positions": 0.1}, 0.01, "partly", "without RoPE"),
    ({"long_context": 0.1, "one_wide_head": 0.1}, 0.01, "partly", "one wide head, with the longer context"),
    ({"tuned": 0.005, "equal_time": 0.005}, 0.01, "does not hold", "in no setting"),
    ({"untuned": 0.05}, 0.01, "does not hold", "untuned"),
    (dict.fromkeys(SETTINGS, -0.05), 0.01, "does not hold", "in no setting"),
]


@pytest.mark.parametrize(
    ("gaps", "spread", "verdict", "because"), CASES, ids=[f"{case[2]} {case[0]}" for case in CASES]
)
def test_the_verdict_is_what_the_losses_say(gaps: dict[str, float], spread: float, verdict: str, because: str) -> None:
    conclusion = language_model.run(lower_by(gaps, spread))
    assert conclusion.verdict == verdict
    assert because in conclusion.because
    assert conclusion.seeds == 3


def test_it_says_where_the_difference_grows() -> None:
    gaps = {"tuned": 0.05, "no_positions": 0.1, "long_context": 0.055, "one_wide_head": 0.01}
    because = language_model.run(lower_by(gaps, 0.01)).because
    assert "The difference grows without RoPE, with small heads. It does not clearly grow with the longer" in because


def test_tables_show_gaps_seed_by_seed_and_softmax_gets_the_time_of_lucid() -> None:
    conclusion = language_model.run(lower_by({"tuned": 0.05, "equal_time": 0.03}, 0.01))
    rows: dict[str, Any] = {row[0]: row for row in conclusion.tables[0]["rows"]}
    assert rows["4 heads of 16, 256 tokens; 500 steps each"][1:4] == ["2.000 ± 0.000", "1.950 ± 0.010", "0.050 ± 0.010"]
    assert rows["equal time: 750 steps of softmax"][1:4] == ["1.980 ± 0.000", "1.950 ± 0.010", "0.030 ± 0.010"]
    assert conclusion.tables[1]["rows"] == [[1.0, RATIO, RATIO]]
    assert [figure["kind"] for figure in conclusion.figures] == ["lines"]
