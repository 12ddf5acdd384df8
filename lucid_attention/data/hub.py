"""Data sets of the Hugging Face hub, streamed: nothing is downloaded that is not read."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import DataError, require
from .readers import Bad, Document, Part, checked, stop_at

ALTERNATIVE = "Without the hub, give a local file, folder or glob of .txt, .jsonl(.gz/.zst) or .parquet, or 'stdlib'"


class HubSource:
    """A data set by name, or a folder in one of the layouts that `datasets` knows. Its parts are its own shards."""

    def __init__(self, dataset: str, config: str | None = None, *, split: str = "train", field: str = "text") -> None:
        self.dataset = dataset
        self.config = config
        self.split = split
        self.field = field
        self._stream = self._load()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_stream"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._stream = self._load()

    def describe(self) -> dict[str, Any]:
        return {
            "name": f"hf:{self.dataset}" + (f":{self.config}" if self.config else ""),
            "dataset": self.dataset,
            "config": self.config,
            "split": self.split,
            "shards": self._stream.num_shards,
        }

    def parts(self, largest: int) -> list[Part]:
        return [Part(index, 0) for index in range(self._stream.num_shards)]

    def documents(self, part: Part, bad: Bad = stop_at) -> Iterator[Document]:
        rows = iter(self._stream.shard(num_shards=self._stream.num_shards, index=part.number))
        number = 0
        while True:
            with self._explained():
                row = next(rows, None)
            if row is None:
                return
            number += 1
            where = f"{self.dataset}, split {self.split}, shard {part.number}, row {number}"
            if self.field not in row:
                names = ", ".join(map(repr, row))
                raise DataError(f"{where}: no column {self.field!r}, got {names}: choose one with --field")
            try:
                text = checked(row[self.field], where, f"column {self.field!r}")
            except DataError as error:
                bad(error)
            else:
                yield Document(text, len(text))

    def _load(self) -> Any:
        datasets = require("datasets", f"SOURCE 'hf:{self.dataset}'")
        with self._explained():
            return datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """One sentence instead of a trace through five libraries, whose exceptions have no common class."""
        chatter = logging.getLogger("huggingface_hub")
        level = chatter.level
        chatter.setLevel(logging.ERROR)
        try:
            yield
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"data set {self.dataset!r} (config {self.config}, split {self.split!r}) cannot be read: {reason}. "
                f"{ALTERNATIVE}"
            ) from error
        finally:
            chatter.setLevel(level)
