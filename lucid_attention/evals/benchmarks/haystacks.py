"""The text around needles: RULER's noise, lines that look like needles, or prose."""

import ast
import re
import sysconfig
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random

from ...data import DataError
from ...data.sources import open_source
from ..runs import EvalError

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
KINDS = ("noise", "needles", "prose", "essays")
ESSAYS = "baber/paul_graham_essays"
# More would only be read: 131 072 tokens have some 600 000 characters.
LONGEST_TEXT = 20_000_000
SENTENCE = re.compile(r"(?<=[.!?])\s+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Haystack:
    """The hay of one sample, in units that a length is made up of. Needles may stand between its pieces.

    take: from a number of units to pieces of text: the first so many, the same ones every time.
    separator: what stands between pieces.
    """

    take: Callable[[int], list[str]]
    separator: str


def noise() -> Haystack:
    """RULER's sentences, five to a line. A unit is a sentence."""

    def take(units: int) -> list[str]:
        lines, over = divmod(units, len(NOISE))
        return [" ".join(NOISE)] * lines + ([" ".join(NOISE[:over])] if over else [])

    return Haystack(take, "\n")


def lines(make: Callable[[], str]) -> Haystack:
    """A new line from `make` for every unit."""
    made: list[str] = []

    def take(units: int) -> list[str]:
        while len(made) < units:
            made.append(make())
        return made[:units]

    return Haystack(take, "\n")


@dataclass(frozen=True)
class Prose:
    """Sentences of a text, and how many words there are up to the end of each."""

    sentences: list[str]
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", list(accumulate(len(each.split(" ")) for each in self.sentences)))

    def from_random_place(self, random: Random) -> Haystack:
        """The text from some sentence on, and around when it ends. A unit is a word; the last sentence may be cut."""
        first = random.randrange(len(self.sentences))
        before = self.ends[first - 1] if first else 0

        def take(units: int) -> list[str]:
            rounds, last_word = divmod(before + units, self.ends[-1])
            last = bisect_left(self.ends, last_word)
            whole = self.sentences * rounds + self.sentences[:last]
            words = last_word - (self.ends[last - 1] if last else 0)
            cut = [" ".join(self.sentences[last].split(" ")[:words])] if words else []
            return (whole + cut)[first:]

        return Haystack(take, " ")


def sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line."""
    return [each for each in SENTENCE.split(" ".join(text.split())) if each]


@cache
def read_prose(name: str) -> Prose:
    """Prose by its name: "prose" (docstrings of Python's standard library), "essays" (of the hub), or a source of
    `lucid tokenize`: a file, a folder, a glob, hf:NAME."""
    if name == "prose":
        found = _docstrings()
    elif name == "essays":
        found = _read(f"hf:{ESSAYS}", "--haystack essays")
    elif name.startswith("hf:") or "*" in name or Path(name).exists():
        found = _read(name, f"--haystack {name}")
    else:
        raise EvalError(
            f"--haystack must be one of {', '.join(KINDS)}, or a text file or folder, got {name!r}, which is none"
        )
    if len(found) < 2:
        raise EvalError(f"--haystack {name!r} must have sentences, got {len(found)}")
    return Prose(found)


def _read(name: str, what: str) -> list[str]:
    found: list[str] = []
    size = 0
    try:
        source = open_source(name)
        for part in source.parts(LONGEST_TEXT):
            for document in source.documents(part):
                found.extend(sentences(document.text))
                size += len(document.text)
                if size >= LONGEST_TEXT:
                    return found
    except DataError as error:
        raise EvalError(f"{what}: {error}") from error
    return found


def _docstrings() -> list[str]:
    """Sentences in the docstrings of the standard library's modules: 500 000 characters that are always there."""
    found: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            for paragraph in re.split(r"\n\s*\n", text or ""):
                if ">>>" not in paragraph:
                    found.extend(each for each in sentences(paragraph) if _reads_well(each))
    return found


def _reads_well(sentence: str) -> bool:
    """A sentence of words, rather than of code or a table."""
    words = sum(letter.isalpha() or letter == " " for letter in sentence)
    return sentence[0].isupper() and sentence[-1] == "." and 20 < len(sentence) < 300 and words > 0.88 * len(sentence)
