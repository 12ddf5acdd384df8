"""What small models are trained on. A batch is a function of (seed, step), and nothing else.

Labels stand where the answer is given: the output at t is held against labels[t]; −100 is left out.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...data.sources import open_source
from ...data.synthetic import Needles, overwrites

IGNORED = -100
TEST_SEED = 1_000_003

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """tables: sizes of the embedding tables. answers: size of the output."""

    tables: list[int]
    answers: int

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """inputs [size, T] or [size, T, tables], labels [size, T]."""

    def test(self, size: int, n: int, length: int) -> Batch:
        """Unseen ones, the same for every model."""


class Overwrites:
    """`data.synthetic.overwrites`: n keys, of which a batch takes one number."""

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables, self.answers = [64, 65], 64

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length, 2] and [size, length]."""
        generator = torch.Generator().manual_seed(seed * TEST_SEED + step + 1)
        n = self.n[int(torch.randint(len(self.n), (), generator=generator))]
        return overwrites(size, n, self.length, generator)

    def test(self, size: int, n: int, length: int) -> Batch:
        """With n keys."""
        return overwrites(size, n, length, torch.Generator().manual_seed(TEST_SEED * (1000 + n) + length))


class NeedleRecall:
    """`data.synthetic.Needles`: pairs among fillers."""

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables = [Needles(self.n, length + 1).vocab_size]
        self.answers = self.tables[0]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]."""
        items = Needles(self.n, self.length + 1, size=(step + 1) * size, seed=seed)
        return _stacked(items, range(step * size, (step + 1) * size))

    def test(self, size: int, n: int, length: int) -> Batch:
        """With n needles."""
        return _stacked(Needles(n, length + 1, size=size, seed=TEST_SEED), range(size))


def _stacked(items: Needles, which: range) -> Batch:
    """The end token goes; labels move to where they are said."""
    rows = [items[i] for i in which]
    inputs, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    return inputs[:, :-1], labels[:, 1:]


class Characters:
    """The next byte of the sources of the Python standard library; the last tenth of them is for tests."""

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.length = length
        self.tables, self.answers = [256], 256

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]."""
        train, _ = characters()
        random = np.random.default_rng([seed, step])
        return _windows(train, random.integers(len(train) - self.length - 1, size=size), self.length)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Windows of the unseen part, evenly spread."""
        _, test = characters()
        return _windows(test, np.linspace(0, len(test) - length - 2, size).astype(np.int64), length)


@lru_cache(1)
def characters() -> tuple[np.ndarray, np.ndarray]:
    """Bytes for training and for tests."""
    source = open_source("stdlib")
    documents = [document.text for part in source.parts(1 << 30) for document in source.documents(part)]
    text = np.frombuffer("\n".join(documents).encode(), dtype=np.uint8)
    border = len(text) * 9 // 10
    return text[:border], text[border:]


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    rows = torch.from_numpy(np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


TASKS: dict[str, type[Overwrites] | type[NeedleRecall] | type[Characters]] = {
    "overwrites": Overwrites,
    "needles": NeedleRecall,
    "characters": Characters,
}
