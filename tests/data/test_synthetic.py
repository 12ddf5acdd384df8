"""The synthetic tasks: the context, and nothing else, holds the answers."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lucid_lab.data import IGNORED
from lucid_lab.data.synthetic import MemoryUpdate, Needles, overwrites

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


def read(task: MemoryUpdate | Needles, ids: list[int]) -> list[int]:
    """The labels, found by reading the tokens from left to right."""
    labels, latest = [IGNORED] * len(ids), {}
    for t, (token, following) in enumerate(pairwise(ids)):
        if 0 < token < task.first_value:
            if task.first_value <= following < task.first_filler:
                latest[token] = following
            else:
                labels[t + 1] = latest[token]
    return labels


def test_reading_the_input_gives_the_labels(task: MemoryUpdate | Needles) -> None:
    for item in task:
        assert read(task, item["input_ids"].tolist()) == item["labels"].tolist()


def test_items_have_the_documented_layout(task: MemoryUpdate | Needles) -> None:
    numbers_of_keys = set()
    for item in task:
        ids, labels = item["input_ids"], item["labels"]
        assert ids.dtype == labels.dtype == torch.int64
        assert ids.shape == labels.shape == (task.length,)
        assert ids.min() >= 0
        assert ids.max() < task.vocab_size
        n = int((labels != -100).sum())
        numbers_of_keys.add(n)
        assert (labels[-n:] != -100).all()
        assert ids[-1] == 0
        questions = ids[-n - 1 : -1].tolist()
        assert len(set(questions)) == n
        assert all(0 < key < task.first_value for key in questions)
        assert all(task.first_value <= value < task.first_filler for value in labels[-n:].tolist())
    assert numbers_of_keys == set(task.choices)


@pytest.mark.parametrize("case", TASKS)
def test_items_depend_on_seed_and_index_alone(case: str) -> None:
    kind, options = TASKS[case]
    task, same, other = (kind(**options, size=40, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(same[17]["input_ids"], task[17]["input_ids"])
    assert any(not torch.equal(other[i]["input_ids"], task[i]["input_ids"]) for i in range(40))
    assert len({tuple(item["input_ids"].tolist()) for item in task}) > 35


def test_needles_lie_at_all_even_positions_of_the_context() -> None:
    task = Needles(4, 65, size=200)
    positions = [t for item in task for t, token in enumerate(item["input_ids"].tolist()[:60]) if 0 < token < 65]
    assert all(t % 2 == 0 for t in positions)
    assert set(positions) == set(range(0, 60, 2))
    assert len(positions) == 4 * 200


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: MemoryUpdate(8, 24), "length must be at least 25 for 8 keys, got 24"),
        (lambda: MemoryUpdate(65, 1000), "1 to 64 keys, the number of key tokens, got 65"),
        (lambda: Needles(0, 65), "1 to 64 keys, the number of key tokens, got 0"),
        (lambda: Needles((), 65), "1 to 64"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


OVERWRITES = {
    "one key": (4, 1, 5),
    "few keys": (16, 3, 20),
    "as many writes as keys": (16, 8, 16),
    "many": (8, 16, 64),
    "one write": (2, 1, 2),
}


def make_overwrites(case: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    batch, keys, length = OVERWRITES[case]
    return overwrites(batch, keys, length, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", OVERWRITES)
def test_the_answer_to_an_overwritten_key_is_its_latest_value(case: str) -> None:
    batch, keys, length = OVERWRITES[case]
    inputs, labels = make_overwrites(case)
    assert inputs.shape == (batch, length, 2)
    assert labels.shape == (batch, length)
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        memory: dict[int, int] = {}
        questions = []
        for position, (key, value) in enumerate(tokens):
            if position < length - keys:
                assert answers[position] == IGNORED
                assert 0 <= value < 64
                memory[key] = value
            else:
                assert value == 64
                assert answers[position] == memory[key]
                questions.append(key)
        assert len(memory) == keys
        assert sorted(questions) == sorted(memory)


def test_keys_values_and_positions_are_spread_evenly() -> None:
    inputs, labels = overwrites(2000, 4, 20, torch.Generator().manual_seed(0))
    keys = inputs[:, 16:, 0].flatten().bincount(minlength=64)
    assert keys.min() > 70  # 125 expected
    assert labels[:, 16:].flatten().bincount(minlength=64).min() > 70
    # Each write is for the key of the first question in a quarter of the sequences, at any position.
    matches = (inputs[:, :16, 0] == inputs[:, 16, None, 0]).float()
    assert (matches.mean(0) - 0.25).abs().max() < 0.05


@pytest.mark.parametrize(("keys", "length"), [(0, 10), (6, 10), (65, 200)])
def test_a_number_of_keys_that_does_not_fit_is_refused(keys: int, length: int) -> None:
    with pytest.raises(ValueError, match=rf"keys must be 1 to .*, got {keys}"):
        overwrites(1, keys, length, torch.Generator())


def test_the_sizes_of_the_vocabularies_can_be_chosen() -> None:
    inputs, labels = overwrites(50, 3, 12, torch.Generator().manual_seed(0), values=5, key_tokens=4)
    assert inputs[..., 0].max() == 3
    assert inputs[:, 9:, 1].eq(5).all()
    assert inputs[:, :9, 1].max() == 4
    assert labels.max() == 4
