"""The synthetic tasks: what they ask is answered by their contexts, and by nothing else."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lucid_attention.data.synthetic import MemoryUpdate, Needles, accuracy

TASKS: dict[str, tuple[type[MemoryUpdate] | type[Needles], dict[str, Any]]] = {
    "memory update": (MemoryUpdate, {"keys": 8, "length": 65}),
    "memory update, mixed": (MemoryUpdate, {"keys": (2, 4, 8, 16), "length": 65}),
    "memory update, odd context": (MemoryUpdate, {"keys": 3, "length": 21, "key_tokens": 3, "values": 2}),
    "memory update, shortest": (MemoryUpdate, {"keys": 5, "length": 16}),
    "needles": (Needles, {"n": (2, 4, 8, 16), "length": 65}),
    "needles, no room": (Needles, {"n": 4, "length": 13, "fillers": 1}),
    "one needle": (Needles, {"n": 1, "length": 256}),
}


@pytest.fixture(params=TASKS.values(), ids=TASKS)
def task(request: pytest.FixtureRequest) -> MemoryUpdate | Needles:
    kind, options = request.param
    return kind(**options, size=40, seed=5)


def test_the_oracle_finds_the_labels_in_the_input(task: MemoryUpdate | Needles) -> None:
    for item in task:
        assert torch.equal(task.solve(item["input_ids"]), item["labels"])
    rows = torch.stack([item["input_ids"] for item in task])
    assert torch.equal(task.solve(rows), torch.stack([item["labels"] for item in task]))


def test_items_have_the_shape_that_is_promised(task: MemoryUpdate | Needles) -> None:
    seen = set()
    for item in task:
        ids, labels = item["input_ids"], item["labels"]
        assert ids.dtype == labels.dtype == torch.int64
        assert ids.shape == labels.shape == (task.length,)
        assert ids.min() >= 0
        assert ids.max() < task.vocab_size
        n = int((labels != -100).sum())
        seen.add(n)
        assert (labels[-n:] != -100).all()
        assert ids[-1] == 0
        asked = ids[-n - 1 : -1].tolist()
        assert len(set(asked)) == n
        assert all(0 < key < task.first_value for key in asked)
        assert all(task.first_value <= value < task.first_filler for value in labels[-n:].tolist())
    assert seen == set(task.choices)


def test_items_depend_on_seed_and_index_alone(task: MemoryUpdate | Needles) -> None:
    kind, options = type(task), {"length": task.length, "size": 40}
    options |= (
        {"keys": task.choices, "key_tokens": task.first_value - 1} if kind is MemoryUpdate else {"n": task.choices}
    )
    options["values"] = task.first_filler - task.first_value
    if kind is Needles:
        options["fillers"] = task.vocab_size - task.first_filler
    same, other = kind(**options, seed=5), kind(**options, seed=6)
    assert torch.equal(same[17]["input_ids"], task[17]["input_ids"])
    assert torch.equal(task[-1]["input_ids"], task[39]["input_ids"])
    assert any(not torch.equal(other[i]["input_ids"], task[i]["input_ids"]) for i in range(40))
    assert len({tuple(item["input_ids"].tolist()) for item in task}) > 35
    with pytest.raises(IndexError):
        task[40]


def test_only_the_latest_value_is_right_and_older_ones_are_there() -> None:
    task = MemoryUpdate(4, 65, size=20)
    overwritten = 0
    for item in task:
        ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
        for t in range(len(ids) - 5, len(ids) - 1):
            values = [ids[s + 1] for s in range(0, 60, 2) if ids[s] == ids[t]]
            assert values[-1] == labels[t + 1]
            assert all(a != b for a, b in pairwise(values))
            overwritten += len(values) > 1
    assert overwritten > 70


def test_needles_lie_at_even_places_all_over_the_context() -> None:
    task = Needles(4, 65, size=200)
    places = [t for item in task for t, token in enumerate(item["input_ids"].tolist()[:60]) if 0 < token < 65]
    assert all(t % 2 == 0 for t in places)
    assert set(places) == set(range(0, 60, 2))
    assert len(places) == 4 * 200


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: MemoryUpdate(8, 24), "length must be at least 25 for 8 keys, got 24"),
        (lambda: MemoryUpdate(65, 1000), "1 to 64, the keys there are, got 65"),
        (lambda: Needles(0, 65), "1 to 64, the keys there are, got 0"),
        (lambda: Needles((), 65), "1 to 64"),
        (lambda: Needles(2, 65, values=1), "values must be at least 2, got 1"),
        (lambda: Needles(2, 65, fillers=0), "fillers must be at least 1, got 0"),
        (lambda: Needles(2, 65, size=0), "size must be at least 1, got 0"),
        (lambda: Needles(2, 65, seed=-1), "seed must not be negative, got -1"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_accuracy_holds_a_prediction_against_the_label_behind_it() -> None:
    labels = torch.tensor([[-100, -100, 7, 8], [-100, -100, -100, 9]])
    right = torch.tensor([[0, 7, 8, 0], [7, 8, 9, 9]])
    assert accuracy(right, labels) == 1.0
    assert accuracy(right + (right == 8), labels) == pytest.approx(2 / 3)
    assert accuracy(labels, labels) == 0.0
    with pytest.raises(ValueError, match=r"expected \(2, 4\), got \(2, 3\)"):
        accuracy(right[:, 1:], labels)
    with pytest.raises(ValueError, match="-100 everywhere"):
        accuracy(right, labels.fill_(-100))
