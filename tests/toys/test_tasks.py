"""The tasks: labels are right by an independent reading of the tokens, batches depend on seed and step alone."""

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from lucid_lab.toys import tasks
from lucid_lab.toys.tasks import (
    IGNORED,
    TASKS,
    NeedleSentences,
    Stage,
    Stories,
    characters,
    is_held_out,
    overwrites,
    stage_of,
)

STAGES = [Stage(72, (2,)), Stage(144, (4, 8))]


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


def read_overwrites(tokens: Tensor) -> list[int]:
    """The labels of `overwrites`, found by reading (key, value) from left to right; value 64 asks."""
    latest: dict[int, int] = {}
    labels = []
    for key, value in tokens.tolist():
        labels.append(latest[key] if value == 64 else IGNORED)
        if value != 64:
            latest[key] = value
    return labels


def read_needles(tokens: Tensor) -> list[int]:
    """The labels of needles: a key that stands for the second time asks for the token after its first place."""
    ids = tokens.tolist()
    asks = [1 <= token <= 64 and token in ids[:t] for t, token in enumerate(ids)]
    return [ids[ids.index(token) + 1] if asked else IGNORED for token, asked in zip(ids, asks, strict=True)]


@pytest.mark.parametrize(("task", "reader"), [("overwrites", read_overwrites), ("needles", read_needles)])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_labels_are_what_a_reader_of_the_tokens_answers(
    task: str, reader: Callable[[Tensor], list[int]], n: int
) -> None:
    made = TASKS[task]((n,), 32)
    for inputs, labels in (made.batch(8, 0, 0), made.test(8, n, 40)):
        assert ((labels != IGNORED).sum(1) == n).all()
        for row, answers in zip(inputs, labels, strict=True):
            assert answers.tolist() == reader(row)


def read_recall(tokens: Tensor, n: int, updates: int) -> list[int]:
    """The labels of the recall tasks: the pairs at the start are writes, a key after them asks."""
    ids = tokens.tolist()
    context = 2 * (n + updates)
    latest = {ids[t]: ids[t + 1] for t in range(0, context, 2)}
    assert len(latest) == n
    return [latest.get(token, IGNORED) if t >= context else IGNORED for t, token in enumerate(ids)]


@pytest.mark.parametrize(("task", "updates"), [("mqar", 0), ("forgetting_mqar", 4)])
@pytest.mark.parametrize("n", [1, 4, 9])
def test_recall_asks_every_key_once_for_its_last_value(task: str, updates: int, n: int) -> None:
    made, updates = TASKS[task]((n,), 64), min(updates, n)
    places: list[int] = []
    for inputs, labels in (made.batch(64, 0, 0), made.test(64, n, 80)):
        assert ((labels != IGNORED).sum(1) == n).all()
        for row, answers in zip(inputs, labels, strict=True):
            assert answers.tolist() == read_recall(row, n, updates)
        places += (labels != IGNORED).nonzero()[:, 1].tolist()
        assert inputs.min() > 0
        assert inputs[:, 1 : 2 * (n + updates) : 2].min() >= 256 > inputs[:, : 2 * (n + updates) : 2].max()
    # Questions stand at even places, the first of them more often than any other.
    assert not any(place % 2 for place in places)
    assert max(set(places), key=places.count) == 2 * (n + updates) or n == 9
    with pytest.raises(ValueError, match="length must be even and at least"):
        made.test(1, n, 4 * n + 2 * updates - 2)


def test_hidden_bytes_are_asked_for_and_blocks_before_the_last_are_whole() -> None:
    whole = TASKS["characters"]((), 64).batch(20, 3, 4)[0]
    for task, start in (("masked_characters", 0), ("last_block", 48)):
        inputs, labels = TASKS[task]((50,), 64).batch(20, 3, 4)
        hidden = inputs == 256
        assert torch.equal(torch.where(hidden, labels, inputs), whole)
        assert torch.equal(labels == IGNORED, ~hidden)
        assert not hidden[:, :start].any()
        assert abs(hidden[:, start:].double().mean() - 0.5) < 0.1


def test_every_repeated_key_is_asked_once_and_shown_with_its_value() -> None:
    inputs, labels = TASKS["repeated_keys"]((10,), 100).batch(8, 0, 0)
    for row, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        shown = {key: value for key, value in row if value != 64}
        asked = [(key, answer) for (key, value), answer in zip(row, answers, strict=True) if value == 64]
        assert sorted(asked) == sorted(shown.items())
        assert len(shown) == 10
        assert all((value == 64) == (answer != IGNORED) for (_, value), answer in zip(row, answers, strict=True))
        assert all(shown[key] == value for key, value in row if value != 64)


def test_a_read_of_the_flip_flop_language_repeats_the_last_write() -> None:
    made = TASKS["flip_flop"]((80,), 200)
    for percent, (inputs, labels) in ((80, made.batch(50, 0, 0)), (10, made.test(50, 10, 200))):
        instructions, bits, asked = inputs[:, ::2], inputs[:, 1::2], labels[:, ::2]
        assert ((labels != IGNORED)[:, 1::2] == 0).all()
        assert (instructions[:, 0] == 0).all()
        assert (instructions[:, -1] == 2).all()
        assert abs(100 * (instructions == 1).double().mean() - percent) < 2
        for row, values, answers in zip(instructions.tolist(), bits.tolist(), asked.tolist(), strict=True):
            last = -1
            for instruction, bit, answer in zip(row, values, answers, strict=True):
                last = bit if instruction == 0 else last
                assert answer == (last if instruction == 2 else IGNORED)
                assert bit == last or instruction != 2


@pytest.mark.parametrize(("task", "order", "letters"), [("words_a5", 60, 60), ("words_swaps", 120, 11)])
def test_answers_of_word_problems_are_products_of_matrices(task: str, order: int, letters: int) -> None:
    """The independent reading: permutation matrices; the group is found from the table by its own identity."""
    inputs, labels = TASKS[task]((0,), 12).batch(100, 0, 0)
    group = [p for p in permutations(range(5)) if order == 120 or np.linalg.det(np.eye(5)[list(p)]) > 0]
    assert len(group) == order == TASKS[task]((0,), 12).answers
    matrices = np.stack([np.eye(5)[list(p)] for p in group])
    # A matrix of a swap has three ones on its diagonal.
    allowed = [i for i, matrix in enumerate(matrices) if letters == order or np.trace(matrix) >= 3]
    assert inputs.unique().tolist() == allowed
    assert len(allowed) == letters
    for row, answers in zip(inputs.numpy(), labels.numpy(), strict=True):
        product = np.eye(5)
        for token, answer in zip(row, answers, strict=True):
            product = product @ matrices[token]
            assert (product == matrices[answer]).all()


def test_more_keys_than_writes_are_refused() -> None:
    with pytest.raises(ValueError, match="keys must be 1 to 3 for length 8, got 5"):
        overwrites(1, 5, 8, torch.Generator())


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


def words(task: NeedleSentences | Stories, row: Tensor) -> list[str]:
    names = {number: word for word, number in task.number.items()}
    return [names[int(word)] for word in row[:, 0]]


def test_a_needle_is_asked_for_once_and_its_answer_follows_the_key_in_the_context() -> None:
    task = NeedleSentences(STAGES, steps=10)
    inputs, labels = task.test(4, 3, 100)
    assert inputs.shape == (4, 100, 2)
    names = {number: word for word, number in task.number.items()}
    for row, answers in zip(inputs, labels, strict=True):
        text = words(task, row)
        asked = (answers != IGNORED).nonzero()[:, 0].tolist()
        assert len(asked) == len({text[position] for position in asked}) == 3
        for position in asked:
            first = text.index(text[position])
            assert first < 100 - 3 * 9
            assert text[first + 1] == names[int(answers[position])]
    with pytest.raises(ValueError, match="12 needles and questions must fit into 100 tokens: 115 are too many"):
        task.test(1, 12, 100)


def test_the_stages_of_a_training_follow_each_other() -> None:
    task = NeedleSentences(STAGES, steps=10)
    assert [task.batch(1, 0, step)[0].shape[1] for step in (0, 4, 5, 9)] == [72, 72, 144, 144]
    assert stage_of(STAGES, 10, 99) == STAGES[1]
    assert torch.equal(task.batch(2, 1, 3)[0], task.batch(2, 1, 3)[0])
    assert not torch.equal(task.batch(2, 1, 3)[0], task.batch(2, 2, 3)[0])


def test_stories_keep_their_facts_in_order_and_end_with_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def keep(story: tasks.Story) -> bool:
        drawn.append(story)
        return is_held_out(story)

    monkeypatch.setattr(tasks, "is_held_out", keep)
    task = Stories([Stage(96, (1, 2))], steps=4)
    for n, held_out in ((1, True), (2, True), (1, False)):
        inputs, labels = task.test(1, n, 128) if held_out else task.batch(1, 0, 0)
        signs = ["", ".", ":", "?"]
        spelt = zip(words(task, inputs[0]), inputs[0, :, 1].tolist(), strict=True)
        story, text = drawn[-1], " ".join(word + signs[sign] for word, sign in spelt)
        assert is_held_out(story) == held_out
        places = [text.index(fact) for fact in story.facts if story.facts.count(fact) == 1]
        assert places == sorted(places)
        assert text.endswith(story.question)
        assert int(labels[0, -1]) == task.number[story.answer]
        assert (labels[0, :-1] == IGNORED).all()
