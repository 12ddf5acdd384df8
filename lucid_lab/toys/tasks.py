"""The token tasks of toys. A batch depends on its size, the seed and the step alone.

The output at t is compared with labels[t]; positions with the label IGNORED are left out.
"""

import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..data import IGNORED as IGNORED
from ..data.synthetic import Needles, overwrites

TEST_SEED = 1_000_003

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """tables: sizes of the embedding tables. answers: size of the output."""

    tables: list[int]
    answers: int

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """inputs [size, T] or [size, T, tables], labels [size, T]."""

    def test(self, size: int, n: int, length: int) -> Batch:
        """Unseen sequences with n keys or needles, the same for every model."""


class Overwrites:
    """Keys are written again and again, then asked for: the answer is the latest value. A batch has one of n keys.

    A token is a pair of key and value, so one layer is enough, and a score measures the attention and not how layers
    work together. The task `memory_update` of `lucid train` writes the pair as two tokens.
    """

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables, self.answers = [64, 65], 64

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length, 2] and [size, length]."""
        generator = torch.Generator().manual_seed(seed * TEST_SEED + step + 1)
        n = self.n[int(torch.randint(len(self.n), (), generator=generator))]
        return overwrites(size, n, self.length, generator)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n keys."""
        return overwrites(size, n, length, torch.Generator().manual_seed(TEST_SEED * (1000 + n) + length))


class NeedleRecall:
    """Sequences of `data.synthetic.Needles`: pairs of key and value among fillers. n: numbers of needles."""

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables = [Needles(self.n, length + 1).vocab_size]
        self.answers = self.tables[0]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]."""
        items = Needles(self.n, self.length + 1, size=(step + 1) * size, seed=seed)
        return _stack(items, range(step * size, (step + 1) * size))

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n needles."""
        return _stack(Needles(n, length + 1, size=size, seed=TEST_SEED), range(size))


def _stack(items: Needles, indices: range) -> Batch:
    """Drop the end token, and shift the labels by one: an answer is given one position before its token."""
    rows = [items[i] for i in indices]
    inputs, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    return inputs[:, :-1], labels[:, 1:]


class Characters:
    """The next byte of the sources of the Python standard library; their last tenth is for tests. n is not used."""

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.length = length
        self.tables, self.answers = [256], 256

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]."""
        train, _ = characters()
        random = np.random.default_rng([seed, step])
        return _windows(train, random.integers(len(train) - self.length - 1, size=size), self.length)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Windows of the unseen tenth, evenly spread."""
        _, test = characters()
        return _windows(test, np.linspace(0, len(test) - length - 2, size).astype(np.int64), length)


@cache
def characters() -> tuple[np.ndarray, np.ndarray]:
    """Bytes for training and for tests. Python's own tests are left out: some have broken encodings on purpose."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    root = Path(sysconfig.get_path("stdlib"))
    names = (file.relative_to(root) for file in root.rglob("*.py"))
    files = sorted(name.as_posix() for name in names if not skipped.intersection(name.parts))
    text = np.frombuffer("\n".join((root / file).read_text("utf-8") for file in files).encode(), dtype=np.uint8)
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
