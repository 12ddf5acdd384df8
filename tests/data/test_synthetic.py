"""The synthetic tasks: the context, and nothing else, holds the answers."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lucid_lab.data import IGNORED
from lucid_lab.data.synthetic import LatestValue, Needles

TASKS: dict[str, dict[str, Any]] = {
    "mixed": {"n": (2, 4, 8, 16), "length": 65},
    "no room": {"n": 4, "length": 13},
    "one needle": {"n": 1, "length": 256},
}


@pytest.mark.parametrize("options", TASKS.values(), ids=TASKS)
def test_the_needles_in_the_context_give_the_labels(options: dict[str, Any]) -> None:
    task, numbers = Needles(**options, size=40, seed=5), set()
    for item in task:
        ids, labels, latest = item["input_ids"].tolist(), [IGNORED] * task.length, {}
        for t, (token, following) in enumerate(pairwise(ids)):
            if 0 < token < task.first_value:
                if token not in latest:
                    assert task.first_value <= following < task.first_filler
                    assert t % 2 == 0
                    latest[token] = following
                else:
                    labels[t + 1] = latest.pop(token)
        assert labels == item["labels"].tolist()
        assert not latest
        assert (min(ids), ids[-1]) == (0, 0)
        numbers.add(sum(label != IGNORED for label in labels))
    assert numbers == set(task.choices)


def test_reading_the_words_gives_the_latest_things() -> None:
    task = LatestValue(64, size=30, seed=5)
    for item in task:
        words, labels, latest = task.tokenizer.decode(item["input_ids"]).split(), [IGNORED] * 64, {}
        assert task.tokenizer(" ".join(words))["input_ids"] == item["input_ids"].tolist()
        for t, word in enumerate(words):
            name, _, thing = word.partition(":")
            if thing:
                latest[name] = thing
            elif word.endswith("?"):
                assert words[t + 1] == latest.pop(word[:-1])
                labels[t + 1] = int(item["input_ids"][t + 1])
        assert labels == item["labels"].tolist()
        assert not latest


@pytest.mark.parametrize("make", [Needles, LatestValue])
def test_items_depend_on_seed_and_index_alone(make: Any) -> None:
    task, same, other = (make(length=65, size=40, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(same[17]["input_ids"], task[17]["input_ids"])
    assert any(not torch.equal(other[i]["input_ids"], task[i]["input_ids"]) for i in range(40))
    assert len({tuple(item["input_ids"].tolist()) for item in task}) > 35


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Needles(8, 24), "length must be at least 25 for 8 keys, got 24"),
        (lambda: Needles(65, 1000), "1 to 64 keys, the number of key tokens, got 65"),
        (lambda: Needles(0, 65), "1 to 64 keys, the number of key tokens, got 0"),
        (lambda: Needles((), 65), "1 to 64"),
        (lambda: LatestValue(23), "length must be at least 24 for 8 names, got 23"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()
