"""Tasks of text for toys, word by word. A batch depends on its size, the seed and the step alone.

A token is a word and the sign after it, with an embedding each, so that no tokenizer has to be trained. An answer is
one word.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple
from zlib import crc32

import torch

from ..evals.babi import OBJECTS, PEOPLE, ROOMS, Story, make_story
from ..evals.haystacks import NOISE
from .tasks import IGNORED, TEST_SEED, Batch

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


class Stage(NamedTuple):
    """A part of the training. length: tokens of its sequences. n: numbers of needles, or tasks; a batch has one."""

    length: int
    n: tuple[int, ...]


def stage_of(stages: Sequence[Stage], steps: int, step: int) -> Stage:
    """The stage of a step. All stages have equally many steps."""
    return Stage(*stages[min(len(stages) - 1, step * len(stages) // max(1, steps))])


Token = tuple[int, int]


class Vocabulary:
    """The numbers of words."""

    def __init__(self, texts: Sequence[str]) -> None:
        words = dict.fromkeys(word for text in texts for word, _ in TOKEN.findall(text))
        self.number: Mapping[str, int] = {word: number for number, word in enumerate(words)}
        self.tables, self.answers = [len(self.number), len(SIGNS)], len(self.number)

    def encode(self, text: str) -> list[Token]:
        """The tokens of a text: (word, sign)."""
        return [(self.number[word], SIGNS[sign]) for word, sign in TOKEN.findall(text)]


@cache
def needle_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for keys and words for values: adjectives and nouns of RULER's."""
    from wonderwords import RandomWord

    generator, random = RandomWord(), Random("words of needles")
    found = (sorted(set(generator.filter(include_categories=[name]))) for name in ("adjective", "noun"))
    keys, values = (
        random.sample([word for word in words if word.isalpha() and word.isascii()], WORDS) for words in found
    )
    return tuple(keys), tuple(values)


class NeedleSentences:
    """Needles among RULER's noise; then every needle again, in random order, as a question with its right answer.

    A needle is `NEEDLE` with one word as its key and one as its value. The question ends with the key.
    """

    def __init__(self, stages: Sequence[Stage], steps: int) -> None:
        self.stages, self.steps = stages, steps
        self.keys, self.values = needle_words()
        vocabulary = Vocabulary([NEEDLE.format(key="", value=""), *self.keys, *self.values, *NOISE])
        self.vocabulary, self.tables, self.answers = vocabulary, vocabulary.tables, vocabulary.answers
        self.noise = [vocabulary.encode(sentence) for sentence in NOISE]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length, 2] and [size, length], of the step's stage."""
        stage, random = stage_of(self.stages, self.steps, step), Random(f"needles/{seed}/{step}")
        n = random.choice(stage.n)
        return _stack([self._row(n, stage.length, random) for _ in range(size)])

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with n needles."""
        random = Random(f"needles/{TEST_SEED}/{n}/{length}")
        return _stack([self._row(n, length, random) for _ in range(size)])

    def _row(self, n: int, length: int, random: Random) -> tuple[list[Token], list[int]]:
        keys, values = random.sample(self.keys, n), random.choices(self.values, k=n)
        pairs = zip(keys, values, strict=True)
        needles = [self.vocabulary.encode(NEEDLE.format(key=key, value=value)) for key, value in pairs]
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


class Stories:
    """bAbI's stories QA1 to QA3 among RULER's noise, a question, and one room as its answer. n: 1 for QA1, and so on.

    Facts keep their order and stand between sentences of the noise. BABILong's instructions and examples are left out,
    because they would be most of a short text. Training and tests have different stories.
    """

    def __init__(self, stages: Sequence[Stage], steps: int) -> None:
        self.stages, self.steps = stages, steps
        vocabulary = Vocabulary([*story_words(), *NOISE])
        self.vocabulary, self.tables, self.answers = vocabulary, vocabulary.tables, vocabulary.answers
        self.noise = [vocabulary.encode(sentence) for sentence in NOISE]

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """[size, length, 2] and [size, length], of the step's stage."""
        stage, random = stage_of(self.stages, self.steps, step), Random(f"stories/{seed}/{step}")
        n = random.choice(stage.n)
        return _stack([self._row(n, stage.length, random, test=False) for _ in range(size)])

    def test(self, size: int, n: int, length: int) -> Batch:
        """Sequences with stories of one task."""
        random = Random(f"stories/{TEST_SEED}/{n}/{length}")
        return _stack([self._row(n, length, random, test=True) for _ in range(size)])

    def _row(self, n: int, length: int, random: Random, *, test: bool) -> tuple[list[Token], list[int]]:
        for _ in range(DRAWS):
            story = make_story(f"qa{n}", random)
            if is_held_out(story) != test:
                continue
            facts, question = (
                [self.vocabulary.encode(fact) for fact in story.facts],
                self.vocabulary.encode(story.question),
            )
            room = length - len(question) - sum(map(len, facts))
            if room >= 0:
                break
        else:
            raise ValueError(f"a story of QA{n} must fit into {length} tokens, and none of {DRAWS} does")
        hay = _noise(self.noise, room, random)
        labels = [IGNORED] * length
        labels[-1] = self.vocabulary.number[story.answer]
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


def _stack(rows: Sequence[tuple[list[Token], list[int]]]) -> Batch:
    return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])


SENTENCE_TASKS: dict[str, type[NeedleSentences] | type[Stories]] = {
    "needle_sentences": NeedleSentences,
    "stories": Stories,
}
