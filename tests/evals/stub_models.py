"""Models without weights for the harness, which say nothing or know the answer, and a way to ask them a cell."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lucid_lab.evals.benchmarks.longqa import ask_with_choices
from lucid_lab.evals.cells import Cell, Record
from lucid_lab.evals.harness import HarnessCell


class Mute:
    """Says nothing."""

    length = 0

    def generate_until(self, requests: list[Any]) -> list[str]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> str:
        return ""

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [(0.0, False) for _ in requests]


class AnswerKey(Mute):
    """Looks the answer up in a field of the document, and keeps the prompts."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.prompts: list[str] = []

    def answer(self, request: Any) -> str:
        self.prompts.append(request.args[0])
        return self._look_up(request.doc)

    def _look_up(self, doc: dict[str, Any]) -> str:
        answer = doc[self.field]
        return f" {answer if isinstance(answer, str) else answer[0]}"

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        right = [request.args[1].lower() == self._look_up(request.doc).lower() for request in requests]
        return [(0.0 if is_right else -1.0, is_right) for is_right in right]


class PromptReader(Mute):
    """Finds the answer of a RULER task in the prompt, as a person would."""

    def answer(self, request: Any) -> str:
        return self.read(request.args[0])

    def read(self, prompt: str) -> str:
        if "special magic" in prompt:
            return needles(prompt)
        if "VAR" in prompt:
            return tracked(prompt)
        if "numbered list" in prompt:
            words = re.findall(r"\d+\. (\S+)", prompt.rsplit("numbered list of words", 1)[1].split("\nQuestion")[0])
            return " ".join(word for word, _ in Counter(words).most_common(10))
        coded = prompt.split("coded words. ", 1)[1].split("\nQuestion")[0].split()
        return " ".join(word for word, _ in Counter(word for word in coded if word != "...").most_common(3))

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        raise AssertionError("RULER's questions are answered by generation")


def needles(prompt: str) -> str:
    """The values of the keys that the last line asks for."""
    context, question = prompt.rsplit("\n", 1)
    asked = re.search(r"for (.*?) mentioned", question)
    assert asked is not None
    keys = re.split(r", and |, ", asked[1])
    return ", ".join(
        value for key in keys for value in re.findall(rf"special magic \w+ for {re.escape(key)} is: (\S+)\.", context)
    )


def tracked(prompt: str) -> str:
    """The variables that have the value in the question."""
    # The prompt begins with an example, which has variables of its own.
    text = prompt.rsplit("Memorize and track", 1)[1]
    asked = re.search(r"assigned the value (\d+)", text)
    assert asked is not None
    variables = re.findall(rf"VAR (\w+) = {asked[1]}\b", text)
    for variable in variables:
        variables += re.findall(rf"VAR (\w+) = VAR {variable}\b", text)
    return " ".join(variables)


def ask(cell: Cell, lm: Any, batch_size: int = 2) -> list[Record]:
    """The records of all samples of a cell, in order."""
    records: Iterator[Record]
    if cell.task is None:
        assert cell.evaluate is not None
        # `evaluate` is a partial function of the cell with its harness task.
        loaded = HarnessCell(cell.evaluate.args[0], lm)  # type: ignore[attr-defined]
        records = ask_with_choices(loaded, range(cell.samples), batch_size)
    else:
        loaded = HarnessCell(cell, lm)
        records = loaded(range(loaded.samples), batch_size)
    return sorted(records, key=lambda record: record["id"])


def mean(records: Sequence[Record]) -> float:
    return sum(record["score"] for record in records) / len(records)
