"""The tasks of toys: tokens, then words. A batch depends on its size, the seed and the step alone.

The output at t is compared with labels[t]; positions with the label IGNORED are left out.

In tasks of words a token is a word and the sign after it, with an embedding each, so that no tokenizer has to be
trained. An answer is one word. They are trained in stages.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import permutations
from random import Random
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..data import IGNORED as IGNORED
from ..data.synthetic import Needles, overwrites
from ..data.text import library_files
from ..evals.babilong import OBJECTS, PEOPLE, ROOMS, Story, make_story
from ..evals.haystacks import NOISE
from ..evals.needles import ruler_words

TEST_SEED = 1_000_003
# Tokens of the recall tasks.
VOCABULARY = 512
TOKEN = re.compile(r"([A-Za-z]+)([.:?]?)")
SIGNS = {"": 0, ".": 1, ":": 2, "?": 3}
# RULER's needle without its "is": the key and its value are neighbours. With words between them, a model has to carry
# the key over them first; in trials of up to 1200 steps it did not get beyond a value of any needle.
NEEDLE = "One of the special magic words for {key}: {value}."
# Keys and values of needles are among as many words each.
WORDS = 60
# One story in HELD_OUT is for tests.
HELD_OUT = 5
# Draw at most this many stories in search of one that fits.
DRAWS = 1000

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
    work together.
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
    """Bytes of Python's standard library for training and for tests."""
    text = np.frombuffer("\n".join(file.read_text("utf-8") for file in library_files()).encode(), dtype=np.uint8)
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


class DrawnRows:
    """Tasks whose batches are rows of one of n keys, drawn from a generator."""

    tables: list[int]
    answers: int

    def __init__(self, n: Sequence[int], length: int) -> None:
        self.n, self.length = list(n), length

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length], or [size, length, tables], and [size, length]."""
        random = np.random.default_rng([seed, step])
        return self.rows(size, int(random.choice(self.n)), self.length, random)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n keys."""
        return self.rows(size, n, length, np.random.default_rng([TEST_SEED, n, length]))

    def rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        """A batch."""
        raise NotImplementedError


class RepeatedKeys(DrawnRows):
    """Recall in any order. A token is a pair of key and value; n keys, each with one value, repeat by Zipf's law.

    Every key is asked once, by a token without its value among the others, and has its value at least once.
    """

    tables, answers = [256, 65], 64

    def rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        """[size, length, 2] and [size, length]."""
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


class Recall(DrawnRows):
    """Multi-query associative recall (MQAR, Arora et al. 2023): n pairs of key and value, then each key is asked once.

    Tokens are 1 … VOCABULARY/2 − 1 for keys, the rest for values; keys and values of a row are distinct. Questions
    stand at even places after the pairs, near them by a power law (exponent 0.01 − 1); other places hold random tokens.
    The published vocabulary is 8192. With 512, one random token in 512/n would be a key of the row and look like
    another write, so here random tokens are none of the row's keys.
    """

    tables, answers = [VOCABULARY], VOCABULARY
    updates = 0

    def rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        """[size, length] and [size, length]."""
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


class FlipFlop(DrawnRows):
    """The flip-flop language (Liu et al. 2023): write, ignore and read, each with a bit; a read repeats the last write.

    n: percent of ignore. The first instruction is a write, the last one a read; the others write and read
    equally often.
    Tokens: write 0, ignore 1, read 2, bits 3 and 4. Only the bits of reads are asked for: the others are random.
    """

    tables, answers = [5], 5

    def rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        """[size, length] and [size, length]."""
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


class Words(DrawnRows):
    """Word problems (Merrill et al. 2024): tokens are even permutations of five things, answers the product so far.

    n is not used.
    """

    even, moved = True, 5

    def __init__(self, n: Sequence[int], length: int) -> None:
        super().__init__((0,), length)
        self.letters, self.product = permutation_group(self.even, self.moved)
        self.tables, self.answers = [len(self.product)], len(self.product)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Random words."""
        return self.rows(size, n, length, np.random.default_rng([TEST_SEED, length]))

    def rows(self, size: int, n: int, length: int, random: np.random.Generator) -> Batch:
        """[size, length] and [size, length]."""
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


class Stage(NamedTuple):
    """A part of the training. length: tokens of its sequences. n: numbers of needles, or tasks; a batch has one."""

    length: int
    n: tuple[int, ...]


def stage_of(stages: Sequence[Stage], steps: int, step: int) -> Stage:
    """The stage of a step. All stages have equally many steps."""
    return Stage(*stages[min(len(stages) - 1, step * len(stages) // max(1, steps))])


Token = tuple[int, int]


class Sentences:
    """Tasks of words, trained in stages. number: of every word."""

    name = ""

    def __init__(self, stages: Sequence[Stage], steps: int, texts: Sequence[str]) -> None:
        self.stages, self.steps = stages, steps
        words = dict.fromkeys(word for text in (*texts, *NOISE) for word, _ in TOKEN.findall(text))
        self.number: Mapping[str, int] = {word: number for number, word in enumerate(words)}
        self.tables, self.answers = [len(self.number), len(SIGNS)], len(self.number)
        self.noise = [self.encode(sentence) for sentence in NOISE]

    def encode(self, text: str) -> list[Token]:
        """The tokens of a text: (word, sign)."""
        return [(self.number[word], SIGNS[sign]) for word, sign in TOKEN.findall(text)]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length, 2] and [size, length], of the step's stage."""
        stage, random = stage_of(self.stages, self.steps, step), Random(f"{self.name}/{seed}/{step}")
        return self._rows(size, random.choice(stage.n), stage.length, random, test=False)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n needles, or of a task."""
        return self._rows(size, n, length, Random(f"{self.name}/{TEST_SEED}/{n}/{length}"), test=True)

    def _rows(self, size: int, n: int, length: int, random: Random, *, test: bool) -> Batch:
        rows = [self.row(n, length, random, test=test) for _ in range(size)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])

    def row(self, n: int, length: int, random: Random, *, test: bool) -> tuple[list[Token], list[int]]:
        """Tokens and labels."""
        raise NotImplementedError


@cache
def needle_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for keys and words for values: adjectives and nouns of RULER's."""
    random = Random("words of needles")
    keys, values = (
        random.sample([word for word in words if word.isalpha() and word.isascii()], WORDS) for words in ruler_words()
    )
    return tuple(keys), tuple(values)


class NeedleSentences(Sentences):
    """Needles among RULER's noise; then every needle again, in random order, as a question with its right answer.

    A needle is `NEEDLE` with one word as its key and one as its value. The question ends with the key.
    """

    name = "needles"

    def __init__(self, stages: Sequence[Stage], steps: int) -> None:
        self.keys, self.values = needle_words()
        super().__init__(stages, steps, [NEEDLE.format(key="", value=""), *self.keys, *self.values])

    def row(self, n: int, length: int, random: Random, *, test: bool) -> tuple[list[Token], list[int]]:
        """Tokens and labels."""
        keys, values = random.sample(self.keys, n), random.choices(self.values, k=n)
        pairs = zip(keys, values, strict=True)
        needles = [self.encode(NEEDLE.format(key=key, value=value)) for key, value in pairs]
        asked = random.sample(needles, n)
        room = length + 1 - 2 * sum(map(len, needles))
        if room < 0:
            raise ValueError(f"{n} needles and questions must fit into {length} tokens: {-room} are too many")
        hay = _noise(self.noise, room, random)
        tokens = [*_mixed(needles, hay, random), *(token for needle in asked for token in needle)]
        labels = [IGNORED] * length
        end = len(tokens)
        for needle in reversed(asked):
            # The answer is the word that ends the needle, and it is given one token before.
            labels[end - 2] = tokens[end - 1][0]
            end -= len(needle)
        return tokens[:-1], labels


class Stories(Sentences):
    """bAbI's stories QA1 to QA3 among RULER's noise, a question, and one room as its answer. n: 1 for QA1, and so on.

    Facts keep their order and stand between sentences of the noise. BABILong's instructions and examples are left out,
    because they would be most of a short text. Training and tests have different stories.
    """

    name = "stories"

    def __init__(self, stages: Sequence[Stage], steps: int) -> None:
        super().__init__(stages, steps, story_words())

    def row(self, n: int, length: int, random: Random, *, test: bool) -> tuple[list[Token], list[int]]:
        """Tokens and labels."""
        for _ in range(DRAWS):
            story = make_story(f"qa{n}", random)
            if is_held_out(story) != test:
                continue
            facts, question = [self.encode(fact) for fact in story.facts], self.encode(story.question)
            room = length - len(question) - sum(map(len, facts))
            if room >= 0:
                break
        else:
            raise ValueError(f"a story of QA{n} must fit into {length} tokens, and none of {DRAWS} does")
        hay = _noise(self.noise, room, random)
        labels = [IGNORED] * length
        labels[-1] = self.number[story.answer]
        return [*_mixed(facts, hay, random), *question], labels


@cache
def story_words() -> tuple[str, ...]:
    """Every word of the stories. Stories draw theirs from short lists, so that a few hundred of them hold all."""
    random = Random("words of stories")
    stories = [make_story(f"qa{n}", random) for n in (1, 2, 3) for _ in range(300)]
    texts = [text for story in stories for text in (*story.facts, story.question)]
    return tuple(
        dict.fromkeys([*ROOMS, *OBJECTS, *PEOPLE, *(word for text in texts for word, _ in TOKEN.findall(text))])
    )


def is_held_out(story: Story) -> bool:
    """Whether a story is for tests. The content decides, the same in every process."""
    return crc32(" ".join((*story.facts, story.question)).encode()) % HELD_OUT == 0


def _noise(sentences: Sequence[list[Token]], tokens: int, random: Random) -> list[list[Token]]:
    """Sentences in turn, from a random one on, with exactly `tokens` tokens: the last one may be cut."""
    noise: list[list[Token]] = []
    number = random.randrange(len(sentences))
    while tokens > 0:
        noise.append(sentences[number % len(sentences)][:tokens])
        tokens -= len(noise[-1])
        number += 1
    return noise


def _mixed(inserted: Sequence[list[Token]], hay: Sequence[list[Token]], random: Random) -> list[Token]:
    """The inserted sentences in their order, at random places between the pieces of hay."""
    places = sorted(random.randrange(len(hay) + 1) for _ in inserted)
    mixed: list[Token] = []
    done = 0
    for place, sentence in zip(places, inserted, strict=True):
        mixed += [*(token for piece in hay[done:place] for token in piece), *sentence]
        done = place
    return [*mixed, *(token for piece in hay[done:] for token in piece)]


SENTENCE_TASKS: dict[str, type[NeedleSentences] | type[Stories]] = {
    "needle_sentences": NeedleSentences,
    "stories": Stories,
}
