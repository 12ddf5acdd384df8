"""Tasks of text for small models, word by word. A batch depends on its size, the seed and the step alone.

A word, a digit or a sign is a token, so that no tokenizer has to be trained, and an answer is one word.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import torch

from ...base.labels import IGNORED
from ...evals.benchmarks.babi import OBJECTS, PEOPLE, ROOMS, make_story
from ...evals.benchmarks.haystacks import NOISE
from ...evals.benchmarks.needles import NEEDLE
from ..small.tasks import TEST_SEED, Batch

# A line break is a token, too.
TOKEN = re.compile(r"\d|[A-Za-z]+|\n|[^\sA-Za-z\d]")
# Keys and values of needles are among as many words each.
WORDS = 60
# One story in HELD_OUT is for tests.
HELD_OUT = 5


class Stage(NamedTuple):
    """A part of the training. length: tokens of its sequences. n: numbers of needles, or tasks; a batch has one."""

    length: int
    n: tuple[int, ...]


def stage_of(stages: Sequence[Stage], steps: int, step: int) -> Stage:
    """The stage of a step. All stages have equally many steps."""
    return Stage(*stages[min(len(stages) - 1, step * len(stages) // max(1, steps))])


class Vocabulary:
    """The numbers of words. The vocabulary is complete when it is made."""

    def __init__(self, texts: Sequence[str]) -> None:
        words = dict.fromkeys(word for text in texts for word in TOKEN.findall(text))
        self.number: Mapping[str, int] = {word: number for number, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.number)

    def encode(self, text: str) -> list[int]:
        """The numbers of the words of a text."""
        return [self.number[word] for word in TOKEN.findall(text)]


@cache
def needle_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for keys and words for values: adjectives and nouns of RULER's."""
    from wonderwords import RandomWord

    generator, random = RandomWord(), Random("words of needles")
    found = (sorted(set(generator.filter(include_categories=[name]))) for name in ("adjective", "noun"))
    keys, values = (random.sample([word for word in words if TOKEN.fullmatch(word)], WORDS) for words in found)
    return tuple(keys), tuple(values)


class NeedleSentences:
    """RULER's needles, words for words, among RULER's noise; then every needle again, up to its value, as a question.

    A needle is `NEEDLE`: "One of the special magic words for KEY is: VALUE." Keys and values are single words. The
    questions come in random order, each with its right answer after it.
    """

    def __init__(self, stages: Sequence[Stage], steps: int) -> None:
        self.stages, self.steps = stages, steps
        self.keys, self.values = needle_words()
        self.vocabulary = Vocabulary([self._needle(key, value) for key in self.keys for value in self.values[:1]])
        self.vocabulary = Vocabulary([*self.vocabulary.number, *self.values, *NOISE])
        self.noise = [self.vocabulary.encode(sentence) for sentence in NOISE]
        self.tables, self.answers = [len(self.vocabulary)], len(self.vocabulary)
        # The words after a value: they are not part of the answer.
        self.after = len(
            self.vocabulary.encode(self._needle(self.keys[0], self.values[0]).rpartition(self.values[0])[2])
        )

    @staticmethod
    def _needle(key: str, value: str) -> str:
        return "\n" + NEEDLE.format(kind="words", key=key, value=value)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length], of the step's stage."""
        stage, random = stage_of(self.stages, self.steps, step), Random(f"needles/{seed}/{step}")
        return self._batch(size, random.choice(stage.n), stage.length, random)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n needles."""
        return self._batch(size, n, length, Random(f"needles/{TEST_SEED}/{n}/{length}"))

    def _batch(self, size: int, n: int, length: int, random: Random) -> Batch:
        return _stack([self._row(n, length, random) for _ in range(size)])

    def _row(self, n: int, length: int, random: Random) -> tuple[list[int], list[int]]:
        keys, values = random.sample(self.keys, n), random.choices(self.values, k=n)
        needles = [self.vocabulary.encode(self._needle(*pair)) for pair in zip(keys, values, strict=True)]
        asked = random.sample(needles, n)
        questions = [token for needle in asked for token in needle]
        # The last word after the last value is no input.
        hay = self._hay(length + 1 - 2 * len(questions), random)
        places = sorted(random.randrange(len(hay) + 1) for _ in needles)
        context, done = [], 0
        for place, needle in zip(places, needles, strict=True):
            context += [*hay[done:place], *needle]
            done = place
        tokens = [*context, *hay[done:], *questions]
        labels = [IGNORED] * length
        end = len(tokens) - self.after
        for needle in reversed(asked):
            labels[end - 2] = tokens[end - 1]
            end -= len(needle)
        return tokens[:-1], labels

    def _hay(self, tokens: int, random: Random) -> list[int]:
        if tokens < 0:
            raise ValueError(f"the needles and their questions must fit: {-tokens} tokens too many")
        hay: list[int] = []
        sentence = random.randrange(len(self.noise))
        while len(hay) < tokens:
            hay += self.noise[sentence % len(self.noise)]
            sentence += 1
        return hay[:tokens]


class Stories:
    """bAbI's stories QA1 to QA3 among RULER's noise, a question, and one room as its answer. n: 1 for QA1, and so on.

    Facts keep their order and stand between sentences of the noise. BABILong's instructions and examples are left out,
    because they would be most of a short text. Training and tests have different stories.
    """

    def __init__(self, stages: Sequence[Stage], steps: int) -> None:
        self.stages, self.steps = stages, steps
        random = Random("words of stories")
        stories = [make_story(f"qa{n}", random) for n in (1, 2, 3) for _ in range(300)]
        texts = [text for story in stories for text in (*story.facts, story.question)]
        self.vocabulary = Vocabulary([*texts, *ROOMS, *OBJECTS, *PEOPLE, *NOISE])
        self.noise = [self.vocabulary.encode(sentence) for sentence in NOISE]
        self.tables, self.answers = [len(self.vocabulary)], len(self.vocabulary)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length] and [size, length], of the step's stage."""
        stage, random = stage_of(self.stages, self.steps, step), Random(f"stories/{seed}/{step}")
        return self._batch(size, random.choice(stage.n), stage.length, random, test=False)

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with stories of one task."""
        return self._batch(size, n, length, Random(f"stories/{TEST_SEED}/{n}/{length}"), test=True)

    def _batch(self, size: int, n: int, length: int, random: Random, *, test: bool) -> Batch:
        return _stack([self._row(n, length, random, test) for _ in range(size)])

    def _row(self, n: int, length: int, random: Random, test: bool) -> tuple[list[int], list[int]]:
        for _ in range(1000):
            story = make_story(f"qa{n}", random)
            # A hash of the story, the same in every process.
            if (Random(f"{story.facts}{story.question}").randrange(HELD_OUT) == 0) != test:
                continue
            facts = [self.vocabulary.encode(fact) for fact in story.facts]
            question = self.vocabulary.encode(story.question)
            room = length - len(question) - sum(map(len, facts))
            if room >= 0:
                break
        else:
            raise ValueError(f"no story of QA{n} fits into {length} tokens")
        tokens = [*self._mixed(facts, room, random), *question]
        labels = [IGNORED] * length
        labels[-1] = self.vocabulary.number[story.answer]
        return tokens, labels

    def _mixed(self, facts: Sequence[Sequence[int]], room: int, random: Random) -> list[int]:
        """The facts in order at random places of the noise, which is `room` tokens long."""
        hay: list[list[int]] = []
        sentence = random.randrange(len(self.noise))
        while room > 0:
            hay.append(self.noise[sentence % len(self.noise)][:room])
            room -= len(hay[-1])
            sentence += 1
        places = sorted(random.randrange(len(hay) + 1) for _ in facts)
        mixed, done = [], 0
        for place, fact in zip(places, facts, strict=True):
            mixed += [*(token for piece in hay[done:place] for token in piece), *fact]
            done = place
        return [*mixed, *(token for piece in hay[done:] for token in piece)]


def _stack(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])


STAGED_TASKS: dict[str, type[NeedleSentences] | type[Stories]] = {
    "needle_sentences": NeedleSentences,
    "stories": Stories,
}
