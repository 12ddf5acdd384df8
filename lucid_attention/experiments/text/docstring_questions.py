"""Questions about real text that is on every machine: what a function of Python's standard library does.

A stand-in for LongBench and SCROLLS, which are not: a text lists functions with what they do, a question names one of
them, the answer is its line. Files have the format of SCROLLS, so that `lucid make-data` and `lucid eval` read them.
"""

import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import NamedTuple

# One function in so many is for evaluation.
HELD_OUT = 5
SPLITS = ("train", "validation")
# Of the two data sets whose place it takes: F1 is Qasper's metric, ROUGE is QMSum's.
NAMES = ("qasper", "qmsum")


class Function(NamedTuple):
    """does: the first line of its docstring."""

    name: str
    does: str

    @property
    def split(self) -> str:
        """The side that it belongs to, by its name alone."""
        digest = sha256(self.name.encode()).digest()
        return "validation" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


@cache
def functions() -> tuple[Function, ...]:
    """Functions in modules of the library whose name and line no other one has, sorted."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found = [each for file in files for each in _documented(file)]
    names, lines = Counter(each.name for each in found), Counter(each.does for each in found)
    return tuple(sorted(each for each in found if names[each.name] == 1 and lines[each.does] == 1))


@cache
def side(split: str) -> tuple[Function, ...]:
    """Those of a split."""
    return tuple(each for each in functions() if each.split == split)


def _documented(file: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            line = (ast.get_docstring(node) or "").strip().partition("\n\n")[0]
            if line.isascii() and "\n" not in line and line.endswith(".") and 20 < len(line) < 70:
                yield Function(node.name, line)


def row(split: str, count: int, seed: int, index: int) -> dict[str, str]:
    """A question of a split, as SCROLLS has them: {"id", "input": question and text, "output"}.

    The text lists `count` functions of the split.
    """
    random = Random(f"docstrings/{split}/{count}/{seed}/{index}")
    chosen = random.sample(side(split), count)
    asked = random.choice(chosen)
    text = "\n".join(f"{each.name}: {each.does}" for each in chosen)
    return {"id": str(index), "input": f"What does {asked.name} do?\n\n{text}", "output": asked.does}


def write_questions(folder: Path, *, count: int, samples: int, held_out: int, seed: int = 0) -> None:
    """NAME/SPLIT.jsonl of both data sets. samples, held_out: questions of each to learn from and to be asked."""
    for number, name in enumerate(NAMES):
        for split in SPLITS:
            file = folder / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            wanted = samples if split == "train" else held_out
            # The data sets ask different questions.
            rows = (row(split, count, seed, number * 1_000_000 + index) for index in range(wanted))
            file.write_text("".join(json.dumps(each) + "\n" for each in rows))
