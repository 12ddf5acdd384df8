"""Language models of few words, for the harness, and a tokenizer for them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lucid_attention.data.tokenizer import train
from lucid_attention.evals.benchmarks.haystacks import NOISE
from lucid_attention.evals.benchmarks.longqa_choices import answered
from lucid_attention.evals.harness import Asked
from lucid_attention.evals.runs import Record, Run


def write_tokenizer(folder: Path, texts: Sequence[str] = (), size: int = 600) -> str:
    """A byte-level tokenizer that knows some of the words."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in train([*NOISE, *texts] * 3, size).items():
        (folder / name).write_bytes(content)
    return str(folder)


class Perfect:
    """Looks the answer up. field: of a document, where it is."""

    def __init__(self, field: str) -> None:
        self.field, self.length = field, 0
        self.asked: list[str] = []

    def generate_until(self, requests: list[Any]) -> list[str]:
        self.asked += [request.args[0] for request in requests]
        return [self._answer(request.doc) for request in requests]

    def _answer(self, doc: dict[str, Any]) -> str:
        found = doc[self.field]
        return f" {found if isinstance(found, str) else found[0]}"

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        right = [request.args[1].lower() == self._answer(request.doc).lower() for request in requests]
        return [(0.0 if each else -1.0, each) for each in right]


class Mute:
    """Says nothing."""

    length = 0

    def generate_until(self, requests: list[Any]) -> list[str]:
        return ["" for _ in requests]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [(0.0, False) for _ in requests]


def ask(run: Run, lm: Any, batch_size: int = 2) -> list[Record]:
    """The records of all samples of a run, in order."""
    records: Iterator[Record]
    if run.task is None:
        assert run.evaluate is not None
        # The run with its task is what `evaluate` was made for.
        asked = Asked(run.evaluate.args[0], lm)  # type: ignore[attr-defined]
        records = answered(asked, range(run.samples), batch_size)
    else:
        asked = Asked(run, lm)
        records = asked(range(asked.samples), batch_size)
    return sorted(records, key=lambda record: record["id"])


def mean(records: Sequence[Record]) -> float:
    return sum(record["score"] for record in records) / len(records)
