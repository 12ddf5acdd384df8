"""Tasks of tokens that a model solves by looking back. Items are made on demand from (seed, index), and nothing else.

An item is {"input_ids", "labels"}, each int64 [T]: a context, then n questions, then one end token. Labels follow
Transformers models, where the prediction at position t is held against labels[t + 1]: the answer to the question at t
is labels[t + 1], and all other labels are -100. So the answers are the last n labels, and they are not in the input.
"""

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

IGNORED = -100
END = 0

Item = dict[str, torch.Tensor]


class _Task(Dataset[Item], ABC):
    """Ids are END, then keys, then values, then fillers."""

    def __init__(
        self, n: int | Sequence[int], length: int, *, keys: int, values: int, fillers: int, size: int, seed: int
    ) -> None:
        self.choices = (n,) if isinstance(n, int) else tuple(n)
        self.length = length
        self.size = size
        self.seed = seed
        self.first_value = 1 + keys
        self.first_filler = self.first_value + values
        self.vocab_size = self.first_filler + fillers
        if not self.choices or min(self.choices) < 1 or max(self.choices) > keys:
            raise ValueError(f"the number of keys in an item must be 1 to {keys}, the keys there are, got {n}")
        needed = 3 * max(self.choices) + 1
        if length < needed:
            raise ValueError(f"length must be at least {needed} for {max(self.choices)} keys, got {length}")
        if values < 2:
            raise ValueError(f"values must be at least 2, got {values}")
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Item:
        item = operator.index(index)
        item += self.size if item < 0 else 0
        if not 0 <= item < self.size:
            raise IndexError(f"index must be below {self.size}, got {index}")
        random = np.random.default_rng([self.seed, item])
        n = int(random.choice(self.choices))
        keys = 1 + random.permutation(self.first_value - 1)[:n]
        input_ids = np.full(self.length, END, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        last = self._write_context(input_ids[: self.length - n - 1], keys, random)
        asked = random.permutation(keys)
        input_ids[-n - 1 : -1] = asked
        labels[-n:] = [last[int(key)] for key in asked]
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}

    @abstractmethod
    def _write_context(self, context: np.ndarray, keys: np.ndarray, random: np.random.Generator) -> dict[int, int]:
        """Fill the context; gives the answer for every key."""

    def solve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The labels, [.., T], found from input_ids [.., T] by reading them as a person would."""
        if input_ids.ndim > 1:
            return torch.stack([self.solve(row) for row in input_ids])
        ids = input_ids.tolist()
        labels = [IGNORED] * len(ids)
        last: dict[int, int] = {}
        for t, (token, following) in enumerate(itertools.pairwise(ids)):
            if not self._is_key(token):
                continue
            if self._is_value(following):
                last[token] = following
            else:
                labels[t + 1] = last[token]
        return torch.tensor(labels)

    def _is_key(self, token: int) -> bool:
        return END < token < self.first_value

    def _is_value(self, token: int) -> bool:
        return self.first_value <= token < self.first_filler


class MemoryUpdate(_Task):
    """The latest value of a key wins.

    keys: how many keys an item uses, n, or several numbers of which each item takes one.
    length: T. The context is a pair (key, value) after another, as many as fit before n questions and the end token;
        each writes one of the n keys, drawn at random, with a value that is not the one the key has. Every key is
        written at least once and asked for once.
    key_tokens, values: how many different tokens there are for keys and for values.
    size: number of items.
    """

    def __init__(
        self,
        keys: int | Sequence[int] = 8,
        length: int = 65,
        *,
        key_tokens: int = 64,
        values: int = 64,
        size: int = 1 << 20,
        seed: int = 0,
    ) -> None:
        super().__init__(keys, length, keys=key_tokens, values=values, fillers=0, size=size, seed=seed)

    def _write_context(self, context: np.ndarray, keys: np.ndarray, random: np.random.Generator) -> dict[int, int]:
        pairs = len(context) // 2
        # One token may be over: at the front, where it is before everything.
        written = context[len(context) % 2 :]
        values = self.first_filler - self.first_value
        writes = random.permutation(np.concatenate([keys, random.choice(keys, pairs - len(keys))]))
        steps = random.integers(1, values, pairs)
        last: dict[int, int] = {}
        for i, key in enumerate(writes.tolist()):
            # A step of 1 to values - 1 around the circle of values never leads back to the same one.
            before = last.get(key, self.first_value + int(random.integers(values)))
            last[key] = self.first_value + (before - self.first_value + int(steps[i])) % values
            written[2 * i : 2 * i + 2] = key, last[key]
        return last


class Needles(_Task):
    """Pairs (key, value) at random even places among fillers; the last questions ask for all of them.

    n: how many pairs, or several numbers of which each item takes one.
    length: T. Before n questions and the end token.
    keys, values, fillers: how many different tokens there are of each kind.
    size: number of items.
    """

    def __init__(
        self,
        n: int | Sequence[int] = (2, 4, 8, 16),
        length: int = 65,
        *,
        keys: int = 64,
        values: int = 64,
        fillers: int = 32,
        size: int = 1 << 20,
        seed: int = 0,
    ) -> None:
        if fillers < 1:
            raise ValueError(f"fillers must be at least 1, got {fillers}")
        super().__init__(n, length, keys=keys, values=values, fillers=fillers, size=size, seed=seed)

    def _write_context(self, context: np.ndarray, keys: np.ndarray, random: np.random.Generator) -> dict[int, int]:
        context[:] = random.integers(self.first_filler, self.vocab_size, len(context))
        places = 2 * random.permutation(len(context) // 2)[: len(keys)]
        values = random.integers(self.first_value, self.first_filler, len(keys))
        context[places], context[places + 1] = keys, values
        return dict(zip(keys.tolist(), values.tolist(), strict=True))


def accuracy(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the answers that are right.

    predictions: [.., T], the most likely token after each position: logits.argmax(-1) of a model.
    labels: [.., T], as the tasks give them: the one at t + 1 is held against the prediction at t.
    """
    if predictions.shape != labels.shape:
        raise ValueError(
            f"predictions must have the shape of labels: expected {tuple(labels.shape)}, got {tuple(predictions.shape)}"
        )
    answers = labels[..., 1:]
    asked = answers != IGNORED
    if not asked.any():
        raise ValueError("labels must hold an answer, got -100 everywhere")
    return float((predictions[..., :-1] == answers)[asked].double().mean())
