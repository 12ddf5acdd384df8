"""`needle_lm` and `babilong`: rates, equal time, and every verdict at its borders."""

import json
from typing import Any

import pytest

from lucid_lab.claims import babilong, needle_lm
from lucid_lab.toys.contest import TRIAL_SEED
from lucid_lab.toys.lab import HOURS, SMALL, Record, Scale
from lucid_lab.toys.results import Spread
from lucid_lab.toys.training import Toy

from .made_up import MadeUpLab, trained

SECONDS = {"softmax": 10.0, "path": 20.0}


def contest_lab(scores: dict[str, float], scale: Scale = HOURS) -> MadeUpLab:
    """A lab with an accuracy for every attention; 50 for those that are not named."""

    def rule(name: str, toy: Toy) -> Record:
        accuracy = scores.get(toy.attention, scores.get("else", 50.0))
        return trained(toy, accuracy, 1 - 10 * toy.rate, SECONDS.get(toy.attention, 30.0))

    return MadeUpLab(scale, rule)


@pytest.mark.parametrize("claim", [needle_lm, babilong])
@pytest.mark.parametrize("scale", [HOURS, SMALL])
@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ({"lucid": 99, "lucid_path": 99, "else": 95}, "holds"),
        ({"lucid": 95, "lucid_path": 95, "path": 96}, "partly"),
        ({"lucid": 95, "lucid_path": 95, "softmax": 95}, "does not hold"),
        ({"lucid": 10, "lucid_path": 10, "else": 10}, "too small to judge"),
    ],
)
def test_every_baseline_counts(claim: Any, scale: Scale, scores: dict[str, float], verdict: str) -> None:
    conclusion = claim.run(contest_lab(scores, scale))
    assert conclusion.verdict == verdict
    assert conclusion.seeds == 3
    json.dumps([*conclusion.figures, *conclusion.tables], allow_nan=False)
    assert "PaTH" in conclusion.because


def test_every_attention_takes_the_better_of_the_same_rates_and_the_faster_ones_get_more_time() -> None:
    lab = contest_lab({})
    diverges, rule = ("lucid", 6e-3), lab.rule
    lab.rule = lambda name, toy: trained(toy, 50, None) if (toy.attention, toy.rate) == diverges else rule(name, toy)
    conclusion = needle_lm.run(lab)
    trials = [toy for toy in lab.toys if toy.seed == TRIAL_SEED]
    assert {(toy.attention, toy.rate) for toy in trials} == {
        (name, rate) for name in needle_lm.CONTEST.attentions for rate in (3e-3, 6e-3)
    }
    assert {(toy.steps, toy.test_lengths) for toy in trials} == {(400, ())}
    rows = {row[0]: row[-3:] for row in conclusion.tables[0]["rows"]}
    assert rows["LUCID"] == [1000, 3e-3, 30]
    assert rows["softmax"] == [1000, 6e-3, 10]
    assert rows["softmax, the time of LUCID"] == [3000, 6e-3, 10]
    assert rows["PaTH, the time of LUCID-PaTH"] == [1500, 6e-3, 20]


def needle_verdict(lucid: float, single: float = 90.0) -> str:
    scores = {"lucid": Spread(lucid, 0, 3), "softmax": Spread(20, 0, 3), "path": Spread(20, 0, 3)}
    return needle_lm.judge(scores | {"lucid_path": Spread(99, 0, 3)}, single, guess=24.0)


def test_needles_are_judged_from_ten_points_above_picking_any_and_ninety_percent_of_single_ones() -> None:
    assert needle_verdict(34.1) == "holds"
    assert needle_verdict(34.0) == "too small to judge"
    assert needle_verdict(34.1, single=89.9) == "too small to judge"


def test_stories_are_judged_by_lucid_path_from_fifteen_points_above_any_room() -> None:
    scores = {"lucid_path": Spread(50, 0, 3), "softmax": Spread(20, 0, 3), "path": Spread(20, 0, 3)}
    learned = babilong.CHANCE + 15
    assert babilong.judge(scores | {"lucid": Spread(1, 0, 3)}, learned) == "holds"
    assert babilong.judge(scores | {"path+equal_time": Spread(50, 0, 3)}, learned) == "partly"
    assert babilong.judge(scores, learned - 0.1) == "too small to judge"
