"""`warm_start`: the ramp begins with exactly the softmax model, and the verdict is what the records say."""

from pathlib import Path
from typing import Any

import pytest

from lucid_lab.claims import warm_start
from lucid_lab.claims.warm_start import ABRUPT, CONTINUED, RAMP, go_on
from lucid_lab.toys.lab import SMALL, Record
from lucid_lab.toys.training import TINY_CHARACTER_MODEL, load_model, score, train

from .made_up import MadeUpLab, trained

Curves = dict[str, list[float]]


def test_a_ramp_begins_with_the_softmax_model_and_ends_with_lucid(tmp_path: Path) -> None:
    toy = TINY_CHARACTER_MODEL.but(attention="softmax", rate=1e-2, embedding_std=0.3)
    start = tmp_path / "start"
    start.mkdir()
    train(start, toy)
    settings = {"toy": toy, "trained": "start", "attention": "lucid", "ramp": 0, "steps": 4, "every": 2}
    abrupt, ramp, flat = (go_on(start, settings | {"ramp": steps}) for steps in (0, 2, 10**9))
    softmax = go_on(start, settings | {"attention": "softmax"})
    test = toy.make_task().test(toy.test_batch // 2, 0, toy.length)
    assert softmax["loss"][0] == score(load_model(start, toy), test)["loss"]
    assert ramp["loss"][0] == softmax["loss"][0] != abrupt["loss"][0]
    assert (ramp["strength"][0], ramp["strength"][-1]) == (0.0, 1.0)
    assert set(abrupt["strength"]) == {1.0}
    assert set(softmax["strength"]) == {0.0}
    assert ramp["loss"][-1] != softmax["loss"][-1]
    # A ramp that hardly rises is softmax attention continued.
    assert flat["loss"] == pytest.approx(softmax["loss"], abs=1e-5)
    assert flat["loss"][0] != flat["loss"][-1]


SOFTMAX = [2.0, 1.9, 1.8]
GOOD: Curves = {CONTINUED: SOFTMAX, ABRUPT: [2.5, 2.1, 1.85], RAMP: [2.0, 1.95, 1.81]}
HIGH: Curves = GOOD | {RAMP: [2.0, 2.2, 1.81]}
LEFT: Curves = GOOD | {RAMP: [2.0, 1.95, 1.86]}
BAD: Curves = GOOD | {RAMP: [2.0, 2.2, 1.86]}
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
    def rule(name: str, item: Any) -> Record:
        if name == "train":
            return trained(item, 50)
        way = CONTINUED if item["attention"] == "softmax" else RAMP if item["ramp"] else ABRUPT
        losses = {16: small, 64: wide}[item["toy"].head_dim][way]
        values = [loss + 0.01 * item["toy"].seed for loss in losses]
        return {"step": list(range(len(values))), "loss": values, "strength": values}

    lab = MadeUpLab(SMALL, rule)
    conclusion = warm_start.run(lab)
    assert conclusion.verdict == verdict
    assert because in conclusion.because
    further = [item for name, item in lab.calls if name == "go_on"]
    assert len(further) == 3 * 2 * 3
    assert all(lab.calls[int(item["trained"])][1] == item["toy"] for item in further)
