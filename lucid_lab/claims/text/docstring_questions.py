"""Questions about text that every machine has: what does a function of Python's standard library do?

The questions stand in for LongBench and SCROLLS, which have to be downloaded. A text lists functions with the first
lines of their docstrings, a question names one of them, the answer is its line. Files have the format of SCROLLS, so
that `lucid make-data` and `lucid eval` read them.
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

# One function in five is for evaluation.
HELD_OUT = 5
SPLITS = ("train", "validation")
# The data sets of SCROLLS whose metrics are used: F1 is Qasper's, ROUGE is QMSum's.
NAMES = ("qasper", "qmsum")


class Function(NamedTuple):
    """A function of the library. does: the first line of its docstring."""

    name: str
    does: str

    @property
    def split(self) -> str:
        """The split of the function. It depends on the name alone."""
        digest = sha256(self.name.encode()).digest()
        return "validation" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


@cache
def functions() -> tuple[Function, ...]:
    """The functions of the library whose name and line no other function has, sorted."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    documented = [function for file in files for function in _documented(file)]
    names, lines = Counter(function.name for function in documented), Counter(function.does for function in documented)
    return tuple(sorted(f for f in documented if names[f.name] == 1 and lines[f.does] == 1))


@cache
def side(split: str) -> tuple[Function, ...]:
    """The functions of a split."""
    return tuple(function for function in functions() if function.split == split)


def _documented(file: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            line = (ast.get_docstring(node) or "").strip().partition("\n\n")[0]
            if line.isascii() and "\n" not in line and line.endswith(".") and 20 < len(line) < 70:
                yield Function(node.name, line)


def row(split: str, count: int, seed: int, index: int) -> dict[str, str]:
    """A question of a split in the format of SCROLLS: {"id", "input": question and text, "output"}.

    The text lists `count` functions of the split.
    """
    random = Random(f"docstrings/{split}/{count}/{seed}/{index}")
    listed_functions = random.sample(side(split), count)
    asked_function = random.choice(listed_functions)
    text = "\n".join(f"{function.name}: {function.does}" for function in listed_functions)
    return {"id": str(index), "input": f"What does {asked_function.name} do?\n\n{text}", "output": asked_function.does}


def write_questions(folder: Path, *, count: int, samples: int, held_out: int, seed: int = 0) -> None:
    """Write NAME/SPLIT.jsonl of both data sets. samples, held_out: questions of each for training and evaluation."""
    for number, name in enumerate(NAMES):
        for split in SPLITS:
            file = folder / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            size = samples if split == "train" else held_out
            # Offset, so that the data sets ask different questions.
            rows = (row(split, count, seed, number * 1_000_000 + index) for index in range(size))
            file.write_text("".join(json.dumps(question) + "\n" for question in rows))
