"""Synthetic tasks that a model solves by looking back.

`LatestValue` and `Needles` are data sets for language models (`lucid train`). Item i depends on the seed and on i.
It is {"input_ids", "labels"}, each int64 [T]. Labels are for Transformers models, which compare the prediction at
position t with labels[t + 1]; all labels but the answers are -100.

`overwrites` makes batches for small models of one layer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from . import IGNORED

END = 0


class LatestValue(Dataset[dict[str, Tensor]]):
    """`overwrites` in words: who has what, and then the question who has what now. The latest write counts.

        Ada:key Ben:cup Ada:hat ... Ben? cup Ada? hat

    length: T: T − 2·8 writes, then every name once with its answer.
    size: number of items.
    """

    NAMES = ("Ada", "Ben", "Cora", "Dan", "Eve", "Finn", "Gus", "Hal")
    THINGS = ("apple", "book", "cup", "dice", "egg", "flute", "globe", "hat", "ink", "jar", "key", "lamp")

    def __init__(self, length: int = 64, *, size: int = 1 << 20, seed: int = 0) -> None:
        if length < 3 * len(self.NAMES):
            raise ValueError(f"length must be at least {3 * len(self.NAMES)} for {len(self.NAMES)} names, got {length}")
        self.length, self.size, self.seed = length, size, seed
        self.vocab_size = len(self.words())

    @classmethod
    def words(cls) -> list[str]:
        """The vocabulary: writes, questions, answers, padding."""
        writes = [f"{name}:{thing}" for name in cls.NAMES for thing in cls.THINGS]
        return [*writes, *(f"{name}?" for name in cls.NAMES), *cls.THINGS, "[PAD]"]

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A word is a token."""
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(self.words())}, unk_token="[PAD]"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _check_index(index, self.size)
        names, things = len(self.NAMES), len(self.THINGS)
        generator = torch.Generator().manual_seed(int(np.random.default_rng([self.seed, index]).integers(1 << 62)))
        pairs, latest = overwrites(1, names, self.length - names, generator, values=things, key_tokens=names)
        (key, value), answers = pairs[0].T, latest[0, -names:]
        questions = torch.stack([names * things + key[-names:], names * (things + 1) + answers], 1).flatten()
        input_ids = torch.cat([(key * things + value)[:-names], questions])
        labels = torch.full_like(input_ids, IGNORED)
        labels[-2 * names + 1 :: 2] = questions[1::2]
        return {"input_ids": input_ids, "labels": labels}


class Needles(Dataset[dict[str, Tensor]]):
    """Pairs (key, value) of two tokens at random even positions among fillers; then n questions and an end token.

    The questions ask for every key once. The input tokens after them do not reveal the answers, which are the last n
    labels. Token ids are numbered in this order: END, keys, values, fillers.

    n: number of pairs in an item; or several numbers, from which each item draws one.
    length: T, with the n questions and the end token.
    size: number of items.
    """

    # Numbers of tokens of each kind.
    KEYS, VALUES, FILLERS = 64, 64, 32
    first_value = 1 + KEYS
    first_filler = first_value + VALUES
    vocab_size = first_filler + FILLERS

    def __init__(
        self, n: int | Sequence[int] = (2, 4, 8, 16), length: int = 65, *, size: int = 1 << 20, seed: int = 0
    ) -> None:
        self.choices = (n,) if isinstance(n, int) else tuple(n)
        self.length, self.size, self.seed = length, size, seed
        if not self.choices or min(self.choices) < 1 or max(self.choices) > self.KEYS:
            raise ValueError(f"an item must have 1 to {self.KEYS} keys, the number of key tokens, got {n}")
        needed = 3 * max(self.choices) + 1
        if length < needed:
            raise ValueError(f"length must be at least {needed} for {max(self.choices)} keys, got {length}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _check_index(index, self.size)
        random = np.random.default_rng([self.seed, index])
        n = int(random.choice(self.choices))
        keys = 1 + random.permutation(self.first_value - 1)[:n]
        input_ids = np.full(self.length, END, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        context = input_ids[: self.length - n - 1]
        context[:] = random.integers(self.first_filler, self.vocab_size, len(context))
        places = 2 * random.permutation(len(context) // 2)[:n]
        values = random.integers(self.first_value, self.first_filler, n)
        context[places], context[places + 1] = keys, values
        order = random.permutation(n)
        input_ids[-n - 1 : -1], labels[-n:] = keys[order], values[order]
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def _check_index(index: int, size: int) -> None:
    if not 0 <= index < size:
        raise IndexError(f"index must be 0 to {size - 1}, got {index}")


def overwrites(
    batch: int, keys: int, length: int, generator: torch.Generator, *, values: int = 64, key_tokens: int = 64
) -> tuple[Tensor, Tensor]:
    """Memory update with key and value in one token. Returns inputs [batch, length, 2] and labels [batch, length].

    An input is (key, value). The first length − keys inputs write: a key, drawn at random from `keys` of the
    `key_tokens` keys, and a random value. Every key is written at least once. The last `keys` inputs ask for each key
    once; their value is `values`. The label of a question is the latest value of its key, all other labels are −100.

    With key and value as two tokens, two layers would have to join them. Here one layer is enough, so a score measures
    the attention and not how layers work together.
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
