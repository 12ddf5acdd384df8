"""A source in another order, from a seed: the same one on every machine."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from .readers import Bad, Document, Part, refuse
from .sources import Source

# Documents in memory among which the next one is chosen.
BUFFER = 256


class ShuffledSource:
    """The parts of a source in random order, and their documents shuffled while they are read.

    A document moves among its BUFFER neighbours only; that is enough to choose some, as training shuffles them all.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed = source, seed

    def describe(self) -> dict[str, Any]:
        return self.source.describe()

    def changed_after(self, nanoseconds: int) -> str | None:
        return self.source.changed_after(nanoseconds)

    def parts(self, largest: int, bad: Bad = refuse) -> Sequence[Part]:
        # `random` alone gives the same numbers in every version of Python; `shuffle` may not.
        parts, chooser = self.source.parts(largest, bad), Random(self.seed)
        keys = [chooser.random() for _ in parts]
        order = sorted(range(len(parts)), key=keys.__getitem__)
        return [parts[index]._replace(number=number) for number, index in enumerate(order)]

    def documents(self, part: Part, bad: Bad = refuse) -> Iterator[Document]:
        chooser, waiting = Random(f"{self.seed} {part.number}"), list[Document]()
        for document in self.source.documents(part, bad):
            if len(waiting) < BUFFER:
                waiting.append(document)
                continue
            index = int(chooser.random() * BUFFER)
            yield waiting[index]
            waiting[index] = document
        while waiting:
            yield waiting.pop(int(chooser.random() * len(waiting)))
