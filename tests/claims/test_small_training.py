"""Small training runs: what they train on, what their records say, and what they leave for others."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lucid_lab.claims.engine.jobs import Record, Store, Work
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.small.tasks import TASKS, characters
from lucid_lab.claims.small.training import (
    SmallRun,
    load_small,
    loss_of,
    score,
    time_job,
    time_steps,
    train_steps,
)
from lucid_lab.labels import IGNORED

RUN = SmallRun(
    n=(2,), length=12, width=16, heads=1, steps=4, batch=4, test_n=(2, 3), test_lengths=(12, 16), test_batch=70
)


def done(run: SmallRun, store: Store) -> Record:
    failed = do(run.job(), store.folder)
    assert failed is None, Path(failed).read_text()
    return store[run.job()]


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_depends_on_seed_and_step_and_on_nothing_else(task: str) -> None:
    first = TASKS[task]((2, 3), 32)
    inputs, labels = first.batch(4, seed=1, step=5)
    assert inputs.shape[:2] == labels.shape == (4, 32)
    torch.manual_seed(99)
    again = TASKS[task]((2, 3), 32).batch(4, seed=1, step=5)
    assert torch.equal(inputs, again[0])
    assert torch.equal(labels, again[1])
    for seed, step in ((2, 5), (1, 6)):
        assert not torch.equal(inputs, first.batch(4, seed=seed, step=step)[0])


@pytest.mark.parametrize("task", TASKS)
def test_tests_are_the_same_for_every_run_and_unseen(task: str) -> None:
    one, other = TASKS[task]((2,), 32), TASKS[task]((4, 8), 48)
    (inputs, labels), (again, _) = one.test(6, 2, 40), other.test(6, 2, 40)
    assert torch.equal(inputs, again)
    assert inputs.shape[:2] == labels.shape == (6, 40)
    assert (labels != IGNORED).any(1).all()
    # No seed and step of training gives a sequence of the tests, not even where numbers meet: seed n, step length − 1.
    rows = {tuple(row.flatten().tolist()) for row in inputs}
    trained = TASKS[task]((2,), 40)
    for seed, step in ((0, 0), (2, 39), (1, 40)):
        assert not rows & {tuple(row.flatten().tolist()) for row in trained.batch(6, seed, step)[0]}


def test_needles_are_answered_where_their_key_is_asked() -> None:
    inputs, labels = TASKS["needles"]((3,), 24).batch(5, 0, 0)
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        asked = [t for t, answer in enumerate(answers) if answer != IGNORED]
        assert len(asked) == 3
        for t in asked:
            assert answers[t] == tokens[tokens.index(tokens[t]) + 1]


def test_characters_are_the_next_byte_and_tests_the_last_tenth() -> None:
    train, test = characters()
    assert len(test) == pytest.approx(len(train) / 9, rel=1e-3)
    task = TASKS["characters"]((), 16)
    for (inputs, labels), text in ((task.batch(3, 0, 0), train), (task.test(3, 0, 16), test)):
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        whole = np.ascontiguousarray(text).tobytes()
        for row, label in zip(inputs, labels, strict=True):
            assert bytes([*row.tolist(), int(label[-1])]) in whole
    assert bytes(task.test(3, 0, 16)[0][0].tolist()) == test[:16].tobytes()


def test_the_score_is_the_share_of_right_answers_and_their_loss() -> None:
    model = RUN.make_model()
    batch = RUN.make_task().test(70, 3, 12)
    right, losses = 0, []
    with torch.no_grad():
        logits = model(batch[0])
        for row, labels in zip(logits, batch[1].tolist(), strict=True):
            for scores, label in zip(row.tolist(), labels, strict=True):
                if label != IGNORED:
                    right += max(range(64), key=scores.__getitem__) == label
                    losses.append(math.log(sum(map(math.exp, scores))) - scores[label])
    found = score(model, batch)
    assert found["accuracy"] == pytest.approx(100 * right / len(losses))
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert float(loss_of(model, batch)) == pytest.approx(found["loss"], rel=1e-5)
    # A model that is right everywhere scores 100, one that is wrong nowhere else 0.
    oracle: Any = type("Oracle", (), {"hidden": lambda self, x: x, "out": lambda self, x: x})()
    answers = torch.tensor([[1, IGNORED, 0]])
    sure = 50.0 * torch.nn.functional.one_hot(torch.tensor([[1, 1, 0]]), 3).float()
    assert score(oracle, (sure, answers))["accuracy"] == 100.0
    assert score(oracle, (sure.flip(1), answers))["accuracy"] == 0.0


def test_training_is_repeatable_and_depends_on_the_seed(tmp_path: Path) -> None:
    first, again, other = (Store(tmp_path / name) for name in ("first", "again", "other"))
    record, repeated, different = done(RUN, first), done(RUN, again), done(RUN.but(seed=1), other)
    assert record["curve"]["loss"] == repeated["curve"]["loss"]
    assert record["tests"] == repeated["tests"]
    assert record["curve"]["loss"] != different["curve"]["loss"]
    weights = [RUN.but(seed=seed).make_model().out.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert record["curve"]["step"] == [1, 2, 3, 4]
    assert [(test["n"], test["length"]) for test in record["tests"]] == [(2, 12), (3, 12), (2, 16), (3, 16)]
    assert record["parameters"] == sum(weight.numel() for weight in RUN.make_model().parameters())


def test_the_curve_is_the_mean_loss_between_its_points(tmp_path: Path) -> None:
    run = RUN.but(steps=45)
    losses = [float(loss) for loss in train_steps(run, run.make_model())]
    curve = done(run, Store(tmp_path))["curve"]
    assert curve["step"] == [*range(2, 45, 2), 45]
    expected = [sum(losses[i : i + 2]) / 2 for i in range(0, 44, 2)] + [losses[44]]
    assert curve["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_trained_model_comes_back_as_it_was_and_others_go_on_from_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = RUN.but(steps=40)
    record = done(run, store)
    work = Work(store, RUN.but(seed=9).job())
    model = load_small(work, run)
    assert not model.training
    assert score(model, run.make_task().test(70, 2, 12)) == {
        name: record["tests"][0][name] for name in ("accuracy", "loss")
    }
    start = store.entry(run.job())
    assert start is not None
    # Settings as a record has them: lists for tuples.
    further = RUN.but(seed=3, start=start["job"]["arguments"], attention="softmax", steps=1, rate=1e-9)
    losses = done(further, store)["curve"]["loss"]
    with torch.no_grad():
        softmax = further.make_model()
        softmax.load_state_dict(model.state_dict())
        expected = loss_of(softmax, further.make_task().batch(4, 3, 0))
    assert losses[0] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(KeyError, match="not finished"):
        load_small(work, RUN.but(seed=77))


def test_a_run_that_diverges_leaves_a_record_that_says_so(tmp_path: Path) -> None:
    record = done(RUN.but(steps=8, rate=1e30), Store(tmp_path))
    assert record["curve"]["loss"][-1] is None
    assert record["tests"][0]["loss"] is None


def test_the_learning_rate_rises_then_falls_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def watched(self: Any, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        assert self.defaults["betas"] == (0.9, 0.99)
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run = RUN.but(steps=200, batch=1, rate=0.01)
    model = run.make_model()
    norms = []
    for _ in train_steps(run, model):
        norms.append(float(torch.stack([w.grad.norm() for w in model.parameters() if w.grad is not None]).norm()))
    assert rates[:50] == pytest.approx([0.01 * (i + 1) / 50 for i in range(50)])
    assert rates[50:] == pytest.approx(
        [0.005 * (1 + math.cos(math.pi * i / 150)) for i in range(150)], rel=1e-3, abs=1e-8
    )
    assert max(norms) <= 1.001


def test_lucid_learns_what_softmax_without_positions_cannot() -> None:
    accuracy = {}
    for attention in ("softmax", "lucid"):
        run = SmallRun(n=(4,), length=32, attention=attention, rope=False, heads=1, steps=200, rate=1e-2)
        model = run.make_model()
        for _ in train_steps(run, model):
            pass
        accuracy[attention] = score(model, run.make_task().test(64, 4, 32))["accuracy"]
    assert accuracy["lucid"] > 90
    assert accuracy["softmax"] < 45


def test_a_run_takes_as_long_as_itself_and_a_longer_one_longer(tmp_path: Path) -> None:
    job = time_job(RUN, RUN.but(seed=5))
    assert job.alone
    assert job == time_job(RUN.but(seed=7), RUN)
    work = Work(Store(tmp_path), job)
    found = time_steps(work, **job.arguments, rounds=15)
    assert 0.5 < found["ratio"] < 2
    assert found["ratio"] == pytest.approx(found["milliseconds"][0] / found["milliseconds"][1])
    longer = time_job(RUN.but(layers=6), RUN)
    assert time_steps(work, **longer.arguments, rounds=10)["ratio"] > 2
