"""The token tasks of toys. A batch depends on its size, the seed and the step alone.

The output at t is compared with labels[t]; positions with the label IGNORED are left out.
"""

import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..data import IGNORED as IGNORED
from ..data.synthetic import Needles, overwrites

TEST_SEED = 1_000_003
# Tokens of the recall tasks.
VOCABULARY = 512

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


class MaskedCharacters(Characters):
    """As `Characters`, but n percent of the bytes are hidden as token 256, and these are asked for."""

    hidden_from = 0

    def __init__(self, n: Sequence[int], length: int) -> None:
        super().__init__(n, length)
        self.n, self.tables = list(n), [257]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]. A batch hides one of n percent."""
        random = np.random.default_rng([seed, step, 1])
        return self._hide(super().batch(size, seed, step)[0], int(random.choice(self.n)), random)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Windows of the unseen tenth with n percent hidden."""
        return self._hide(super().test(size, n, length)[0], n, np.random.default_rng([TEST_SEED, n, length]))

    def _hide(self, rows: Tensor, n: int, random: np.random.Generator) -> Batch:
        hidden = torch.from_numpy(random.random(rows.shape) < n / 100)
        hidden[:, : self.hidden_from] = False
        # So that every row has an answer.
        hidden[:, -1] = True
        return rows.masked_fill(hidden, 256), rows.masked_fill(~hidden, IGNORED)


class LastBlock(MaskedCharacters):
    """Block diffusion: bytes are hidden in the last 16 only; the blocks before are final."""

    hidden_from = -16


class RepeatedKeys:
    """Recall in any order. A token is a pair of key and value; n keys, each with one value, repeat by Zipf's law.

    Every key is asked once, by a token without its value among the others, and has its value at least once.
    """

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables, self.answers = [256, 65], 64

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length, 2] and [size, length]. A batch has one of n keys."""
        random = np.random.default_rng([seed, step])
        return self._rows(size, int(random.choice(self.n)), self.length, random)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n keys."""
        return self._rows(size, n, length, np.random.default_rng([TEST_SEED, n, length]))

    def _rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        keys, values = _distinct(size, 256, n, random), random.integers(64, size=(size, n))
        frequency = 1 / np.arange(1, n + 1)
        again = random.choice(n, size=(size, length - 2 * n), p=frequency / frequency.sum())
        each = np.broadcast_to(np.arange(n), (size, n))
        order = _distinct(size, length, length, random)
        which = np.take_along_axis(np.concatenate([each, each, again], 1), order, 1)
        asked = order < n
        key, value = np.take_along_axis(keys, which, 1), np.take_along_axis(values, which, 1)
        rows = np.stack([key, np.where(asked, 64, value)], -1)
        return torch.from_numpy(rows), torch.from_numpy(np.where(asked, value, IGNORED))


class Recall:
    """Multi-query associative recall (MQAR, Arora et al. 2023): n pairs of key and value, then each key is asked once.

    Tokens are 1 … VOCABULARY/2 − 1 for keys, the rest for values; keys and values of a row are distinct. Questions
    stand at even places after the pairs, near them by a power law (exponent 0.01 − 1); other places hold random tokens.
    The published vocabulary is 8192. With 512, one random token in 512/n would be a key of the row and look like
    another write, so here random tokens are none of the row's keys.
    """

    updates = 0

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables, self.answers = [VOCABULARY], VOCABULARY

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]. A batch has one of n pairs."""
        random = np.random.default_rng([seed, step])
        return self._rows(size, int(random.choice(self.n)), self.length, random)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n pairs."""
        return self._rows(size, n, length, np.random.default_rng([TEST_SEED, n, length]))

    def _rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        updates, half = min(self.updates, n), VOCABULARY // 2
        context = 2 * (n + updates)
        if length % 2 or context + 2 * n > length or n >= half:
            raise ValueError(f"length must be even and at least {context + 2 * n} for {n} pairs, got {length}")
        keys = 1 + _distinct(size, half - 1, n, random)
        values = half + _distinct(size, half, n + updates, random)
        again = _distinct(size, n, updates, random)
        rows = np.zeros((size, length), np.int64)
        rows[:, 0 : 2 * n : 2], rows[:, 1 : 2 * n : 2] = keys, values[:, :n]
        rows[:, 2 * n : context : 2], rows[:, 2 * n + 1 : context : 2] = (
            np.take_along_axis(keys, again, 1),
            values[:, n:],
        )
        latest = values[:, :n].copy()
        np.put_along_axis(latest, again, values[:, n:], 1)
        # Places without replacement and with weights x^(0.01 − 1): the largest of log weight + Gumbel noise.
        slots = (length - context) // 2
        chances = -0.99 * np.log(np.arange(1, slots + 1)) + random.gumbel(size=(size, slots))
        places = context + 2 * np.argsort(-chances, 1)[:, :n]
        # Which of the keys is asked first does not depend on the order in which they were written.
        order = _distinct(size, n, n, random)
        labels = np.full((size, length), IGNORED)
        np.put_along_axis(labels, places, np.take_along_axis(latest, order, 1), 1)
        np.put_along_axis(rows, places, np.take_along_axis(keys, order, 1), 1)
        # Random tokens: number j of those that are not 0 and none of the row's keys.
        others = np.sort(
            np.arange(1, VOCABULARY) + VOCABULARY * (np.arange(1, VOCABULARY)[:, None] == keys[:, None]).any(-1)
        )
        noise = np.take_along_axis(others, random.integers(VOCABULARY - 1 - n, size=(size, length)), 1)
        return torch.from_numpy(np.where(rows == 0, noise, rows)), torch.from_numpy(labels)


class ForgettingRecall(Recall):
    """Forgetting MQAR (zoology, 2026): after the pairs, four of the keys are written again; the last value counts."""

    updates = 4


def _distinct(size: int, choices: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`count` different numbers below `choices` in every row: [size, count]."""
    return random.random((size, choices)).argsort(1)[:, :count]


class FlipFlop:
    """The flip-flop language (Liu et al. 2023): write, ignore and read, each with a bit; a read repeats the last write.

    n: percent of ignore. The first instruction is a write, the last one a read; the others write and read
    equally often.
    Tokens: write 0, ignore 1, read 2, bits 3 and 4. Only the bits of reads are asked for: the others are random.
    """

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length
        self.tables, self.answers = [5], 5

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]."""
        random = np.random.default_rng([seed, step])
        return self._rows(size, int(random.choice(self.n)), self.length, random)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n percent of ignore."""
        return self._rows(size, n, length, np.random.default_rng([TEST_SEED, n, length]))

    def _rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        pairs = length // 2
        instructions = random.choice(3, size=(size, pairs), p=[0.5 - n / 200, n / 100, 0.5 - n / 200])
        instructions[:, 0], instructions[:, -1] = 0, 2
        bits = 3 + random.integers(2, size=(size, pairs))
        written = np.maximum.accumulate(np.where(instructions == 0, np.arange(pairs), 0), 1)
        bits = np.where(instructions == 2, np.take_along_axis(bits, written, 1), bits)
        labels = np.where(instructions == 2, bits, IGNORED)
        rows = np.stack([instructions, bits], -1).reshape(size, -1)
        labels = np.stack([labels, np.full_like(labels, IGNORED)], -1).reshape(size, -1)
        return torch.from_numpy(rows), torch.from_numpy(labels)


class Words:
    """Word problems (Merrill et al. 2024): tokens are even permutations of five things, answers the product so far.

    n is not used.
    """

    even, moved = True, 5

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.length = length
        self.letters, self.product = permutation_group(self.even, self.moved)
        self.tables, self.answers = [len(self.product)], len(self.product)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length]."""
        return self._rows(size, self.length, np.random.default_rng([seed, step]))

    def test(self, size: int, n: int, length: int) -> Batch:
        """Random words."""
        return self._rows(size, length, np.random.default_rng([TEST_SEED, length]))

    def _rows(self, size: int, length: int, random: np.random.Generator) -> Batch:
        rows = random.choice(self.letters, size=(size, length))
        labels = rows.copy()
        for t in range(1, length):
            labels[:, t] = self.product[labels[:, t - 1], rows[:, t]]
        return torch.from_numpy(rows), torch.from_numpy(labels)


class Swaps(Words):
    """Word problems of all permutations whose letters move at most two things (Grazzi et al. 2024)."""

    even, moved = False, 2


@cache
def permutation_group(even: bool, moved: int) -> tuple[np.ndarray, np.ndarray]:
    """Permutations of five things, or the even ones, by their lexicographic number.

    Returns the numbers of those that move at most `moved` things, and a table: first a, then b is number table[a, b].
    """
    group = [np.array(one) for one in permutations(range(5))]
    if even:
        # The sign is that of the number of pairs out of order.
        group = [one for one in group if (one[:, None] > one).astype(int)[np.triu_indices(5, 1)].sum() % 2 == 0]
    number = {tuple(one): index for index, one in enumerate(group)}
    letters = [index for index, one in enumerate(group) if (one != np.arange(5)).sum() <= moved]
    return np.array(letters), np.array([[number[tuple(b[a])] for b in group] for a in group])


TASKS: dict[str, Callable[[Sequence[int], int], Task]] = {
    "overwrites": Overwrites,
    "needles": NeedleRecall,
    "characters": Characters,
    "masked_characters": MaskedCharacters,
    "last_block": LastBlock,
    "repeated_keys": RepeatedKeys,
    "mqar": Recall,
    "forgetting_mqar": ForgettingRecall,
    "flip_flop": FlipFlop,
    "words_a5": Words,
    "words_swaps": Swaps,
}
