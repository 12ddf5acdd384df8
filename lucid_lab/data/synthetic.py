"""Synthetic tasks that a model solves by looking back.

`MemoryUpdate` and `Needles` are data sets for language models (`lucid train`): a pair (key, value) is two tokens.
Item i depends on the seed and on i alone. It is {"input_ids", "labels"}, each int64 [T]: a context, n questions, one
end token. Labels are for Transformers models, which compare the prediction at position t with labels[t + 1]: the answer
to the question at t is labels[t + 1], all other labels are -100. So the answers are the last n labels. The input tokens
at these positions do not reveal them.

`overwrites` makes batches for small models of one layer: a pair (key, value) is one token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import IGNORED

END = 0


class _Task(Dataset[dict[str, Tensor]], ABC):
    """Token ids are numbered in this order: END, keys, values, fillers."""

    def __init__(
        self, n: int | Sequence[int], length: int, *, keys: int, values: int, fillers: int, size: int, seed: int
    ) -> None:
        self.choices = (n,) if isinstance(n, int) else tuple(n)
        self.length, self.size, self.seed = length, size, seed
        self.first_value = 1 + keys
        self.first_filler = self.first_value + values
        self.vocab_size = self.first_filler + fillers
        if not self.choices or min(self.choices) < 1 or max(self.choices) > keys:
            raise ValueError(f"an item must have 1 to {keys} keys, the number of key tokens, got {n}")
        needed = 3 * max(self.choices) + 1
        if length < needed:
            raise ValueError(f"length must be at least {needed} for {max(self.choices)} keys, got {length}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"index must be 0 to {self.size - 1}, got {index}")
        random = np.random.default_rng([self.seed, index])
        n = int(random.choice(self.choices))
        keys = 1 + random.permutation(self.first_value - 1)[:n]
        input_ids = np.full(self.length, END, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        answers = self._write_context(input_ids[: self.length - n - 1], keys, random)
        questions = random.permutation(keys)
        input_ids[-n - 1 : -1] = questions
        labels[-n:] = [answers[int(key)] for key in questions]
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}

    @abstractmethod
    def _write_context(self, context: np.ndarray, keys: np.ndarray, random: np.random.Generator) -> dict[int, int]:
        """Fill the context. Returns the answer for every key."""


class MemoryUpdate(_Task):
    """Keys are written several times, then asked for: the answer is the latest value of the key.

    keys: number of keys in an item, n; or several numbers, from which each item draws one.
    length: T. The context is filled with pairs (key, value). Each pair writes one of the n keys, drawn at random, with
        a value that differs from the key's current one. Every key is written at least once and asked for once.
    key_tokens, values: numbers of tokens for keys and for values.
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
        # If the context has an odd length, its first token stays END.
        written = context[len(context) % 2 :]
        values = self.first_filler - self.first_value
        writes = random.permutation(np.concatenate([keys, random.choice(keys, pairs - len(keys))]))
        steps = random.integers(1, values, pairs)
        latest: dict[int, int] = {}
        for i, key in enumerate(writes.tolist()):
            # A step of 1 to values - 1, modulo values, always gives another value.
            before = latest.get(key, self.first_value + int(random.integers(values)))
            latest[key] = self.first_value + (before - self.first_value + int(steps[i])) % values
            written[2 * i : 2 * i + 2] = key, latest[key]
        return latest


class Needles(_Task):
    """Pairs (key, value) at random even positions among fillers. The questions ask for every key once.

    n: number of pairs in an item; or several numbers, from which each item draws one.
    length: T, with the n questions and the end token.
    keys, values, fillers: numbers of tokens of each kind.
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
        super().__init__(n, length, keys=keys, values=values, fillers=fillers, size=size, seed=seed)

    def _write_context(self, context: np.ndarray, keys: np.ndarray, random: np.random.Generator) -> dict[int, int]:
        context[:] = random.integers(self.first_filler, self.vocab_size, len(context))
        places = 2 * random.permutation(len(context) // 2)[: len(keys)]
        values = random.integers(self.first_value, self.first_filler, len(keys))
        context[places], context[places + 1] = keys, values
        return dict(zip(keys.tolist(), values.tolist(), strict=True))


def overwrites(
    batch: int, keys: int, length: int, generator: torch.Generator, *, values: int = 64, key_tokens: int = 64
) -> tuple[Tensor, Tensor]:
    """Memory update with key and value in one token. Returns inputs [batch, length, 2] and labels [batch, length].

    An input is (key, value). The first length − keys inputs write: a key, drawn at random from `keys` of the
    `key_tokens` keys, and a random value. Every key is written at least once. The last `keys` inputs ask for each key
    once; their value is `values`. The label of a question is the latest value of its key, all other labels are −100.

    `MemoryUpdate` writes key and value as two tokens, which takes two layers to join. Here one layer is enough, so a
    score measures the attention and not how layers work together.
    """
    writes = length - keys
    if not 1 <= keys <= min(key_tokens, writes):
        raise ValueError(f"keys must be 1 to {min(key_tokens, writes)} for length {length}, got {keys}")
    names = _permutations(batch, key_tokens, generator)[:, :keys]
    key_index = torch.randint(keys, (batch, writes), generator=generator)
    # Write every key at a random position of its own, so that none is missing.
    positions = _permutations(batch, writes, generator)[:, :keys]
    key_index.scatter_(1, positions, torch.arange(keys).expand(batch, keys))
    written_values = torch.randint(values, (batch, writes), generator=generator)
    questions = _permutations(batch, keys, generator)
    latest = torch.where(key_index[:, None] == questions[:, :, None], torch.arange(writes), -1).amax(-1)
    key = torch.cat([names.gather(1, key_index), names.gather(1, questions)], 1)
    value = torch.cat([written_values, torch.full_like(questions, values)], 1)
    labels = torch.full((batch, length), IGNORED)
    labels[:, writes:] = written_values.gather(1, latest)
    return torch.stack([key, value], -1), labels


def _permutations(batch: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, size, generator=generator).argsort(-1)
