"""The text around needles and facts: RULER's noise, lines that look like needles, or prose; and how much of it fits."""

import ast
import re
import sys
import sysconfig
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from lucid_attention.messages import first_line

from ..data.text import documents

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
# RULER's essays, as the harness reads them, and PG19, whose books are BABILong's background.
HUB = {"essays": "hf:baber/paul_graham_essays", "pg19": "hf:emozilla/pg19"}
KINDS = ("noise", "needles", "prose", *HUB)
# Characters to read from a source: 131 072 tokens need only about 600 000.
LONGEST_TEXT = 20_000_000
SENTENCE = re.compile(r"(?<=[.!?])\s+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The first guess of `most_units` is max(PROBE, room / PROBE) units.
PROBE = 64


@dataclass(frozen=True)
class Haystack:
    """The hay of one sample, measured in units. Needles may be inserted between its pieces.

    take: from a number of units to the pieces of text that hold the first units, the same in every call.
    separator: the text between two pieces.
    size: units after which a text starts again; 0 for hay without end or that repeats by design.
    """

    take: Callable[[int], list[str]]
    separator: str
    size: int = 0

    def repeats(self, units: int) -> int:
        """How often the text starts again and so repeats itself, in a sample with this many units."""
        return max(0, units - 1) // self.size if self.size else 0


def noise(separator: str = "\n") -> Haystack:
    """RULER's sentences, five to a line. A unit is a sentence."""

    def take(units: int) -> list[str]:
        lines, over = divmod(units, len(NOISE))
        return [" ".join(NOISE)] * lines + ([" ".join(NOISE[:over])] if over else [])

    return Haystack(take, separator)


def lines(make: Callable[[], str]) -> Haystack:
    """Lines from `make`. A unit is a line."""
    made: list[str] = []

    def take(units: int) -> list[str]:
        while len(made) < units:
            made.append(make())
        return made[:units]

    return Haystack(take, "\n")


@dataclass(frozen=True)
class Prose:
    """The sentences of a text. ends: the number of words up to the end of each sentence."""

    sentences: list[str]
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", list(accumulate(len(sentence.split(" ")) for sentence in self.sentences)))

    def from_random_place(self, random: Random) -> Haystack:
        """The text from a random sentence on; after the end, it starts again. A unit is a word.

        The last sentence may be cut.
        """
        first = random.randrange(len(self.sentences))
        before = self.ends[first - 1] if first else 0

        def take(units: int) -> list[str]:
            rounds, last_word = divmod(before + units, self.ends[-1])
            last = bisect_left(self.ends, last_word)
            whole = self.sentences * rounds + self.sentences[:last]
            words = last_word - (self.ends[last - 1] if last else 0)
            cut = [" ".join(self.sentences[last].split(" ")[:words])] if words else []
            return (whole + cut)[first:]

        return Haystack(take, " ", self.ends[-1])


def warn_of_repeats(name: str, length: int, repeats: Iterable[int]) -> None:
    """Say on stderr that a haystack is shorter than its samples. repeats: of every sample."""
    counts = list(repeats)
    if any(counts):
        print(
            f"--haystack {name} is too short for {length} tokens: in {sum(map(bool, counts))} of {len(counts)} samples "
            f"its text repeats, up to {max(counts)} times (haystack_repeats of the samples). A longer text: --haystack "
            "essays, pg19, or a folder",
            file=sys.stderr,
        )


def most_units(count: Callable[[int], int], room: int, slack: int, complaint: Callable[[int], str]) -> int:
    """The most units of hay with which a sample has at most `room` tokens.

    slack: the search stops early when at most this many tokens of the room are unused.
    count: from a number of units to the tokens of the sample; every unit adds at least one token.
    complaint: the error message for a sample that does not fit without hay, from its number of tokens.
    The search interpolates, then halves: mostly two or three calls of `count`, at most about 25.
    """
    base = count(0)
    if base > room:
        raise ValueError(complaint(base))
    low, left, high = 0, room - base, room - base + 1
    guess = min(max(PROBE, room // PROBE), high - 1)
    for step in range(64):
        if left <= slack or high - low <= 1:
            break
        # Interpolation may converge slowly; halving always ends.
        units = min(max(guess, low + 1), high - 1) if step < 6 else (low + high) // 2
        tokens = count(units)
        if tokens <= room:
            low, left = units, room - tokens
        else:
            high = units
        guess = int((room - slack // 2 - base) * units / max(tokens - base, 1))
    return low


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line."""
    return [sentence for sentence in SENTENCE.split(" ".join(text.split())) if sentence]


@cache
def read_prose(name: str) -> Prose:
    """Prose by its name: "prose" (docstrings of Python's standard library), "essays" or "pg19" (from the hub), or what
    `lucid tokenize` reads."""
    if name == "prose":
        sentences = _docstrings()
    else:
        if name not in HUB and not name.startswith("hf:") and not (name and Path(name).exists()):
            raise ValueError(
                f"--haystack must be one of {', '.join(KINDS)}, or a text file or folder, got {name!r}, which is none"
            )
        sentences, size = [], 0
        for text in documents(HUB.get(name, name)):
            sentences += split_sentences(text)
            size += len(text)
            if size >= LONGEST_TEXT:
                break
    if len(sentences) < 2:
        raise ValueError(f"--haystack {name!r} must have sentences, got {len(sentences)}")
    return Prose(sentences)


def read_rows(what: str, *names: str, advice: str = "", **how: Any) -> Iterator[dict[str, Any]]:
    """The rows of `datasets.load_dataset`, streamed. what, advice: for the error message, which is one sentence."""
    from datasets import load_dataset

    try:
        yield from load_dataset(*names, streaming=True, **how)
    # The libraries below `load_dataset` have no common class of exceptions.
    except Exception as error:
        raise ValueError(f"{what} cannot be read: {first_line(error)}{advice and '. ' + advice}") from error


def check_fields(row: dict[str, Any], what: str, *fields: tuple[str, ...]) -> None:
    """Refuse a row that lacks all names of one of the tuples."""
    for names in fields:
        if not any(name in row for name in names):
            raise ValueError(f"{what} must have a field {' or '.join(map(repr, names))}, got {', '.join(row)}")


def _docstrings() -> list[str]:
    """Sentences from docstrings of the standard library: 500 000 characters that every Python has."""
    sentences: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            for paragraph in re.split(r"\n\s*\n", text or ""):
                if ">>>" not in paragraph:
                    sentences.extend(sentence for sentence in split_sentences(paragraph) if _reads_well(sentence))
    return sentences


def _reads_well(sentence: str) -> bool:
    """Whether a sentence consists of words, not of code or a table."""
    letters = sum(letter.isalpha() or letter == " " for letter in sentence)
    return sentence[0].isupper() and sentence[-1] == "." and 20 < len(sentence) < 300 and letters > 0.88 * len(sentence)
