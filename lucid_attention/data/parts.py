"""One part of a source to shards of its own: what a worker does. The result depends on the part, not on the worker."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .errors import DataError
from .readers import Part, stop_at
from .shards import UNFINISHED, Shard, ShardWriter, check_shard, id_type, write_whole
from .sources import Source
from .tokenizer import Encoder

Report = Callable[[int], None]


class Job(NamedTuple):
    """What every worker is told."""

    out: Path
    validation: float
    shard_tokens: int
    skip_bad: bool
    limit: int | None


class Record(NamedTuple):
    """What became of a part. `limit` is the number of documents at which it was told to stop."""

    part: int
    limit: int | None
    documents: int
    bytes: int
    empty: int
    bad: int
    shards: tuple[Shard, ...]


def is_validation(text: str, share: float) -> bool:
    """Whether a document is held out: decided by its content, so equal documents are never on both sides."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def encode_part(source: Source, encoder: Encoder, part: Part, job: Job, report: Report) -> Record:
    """Write the shards of a part, and then its record: a part with a record is finished."""
    bad = 0

    def skip(error: DataError) -> None:
        nonlocal bad
        bad += 1

    documents = size = empty = 0
    shards = _Shards(job, part.number, encoder)
    try:
        for document in source.documents(part, skip if job.skip_bad else stop_at):
            text = document.text
            if not text.strip():
                empty += 1
            else:
                shards.add(encoder(text), "validation" if is_validation(text, job.validation) else "train")
                documents += 1
                size += len(text.encode())
            report(document.size)
            if documents == job.limit:
                break
        record = Record(part.number, job.limit, documents, size, empty, bad, shards.close())
    finally:
        shards.abandon()
    content = record._asdict() | {"shards": [shard._asdict() for shard in record.shards]}
    write_whole(_record_file(job.out, part.number), json.dumps(content).encode())
    return record


def finished_part(out: Path, index: int, encoder: Encoder) -> Record | None:
    """The record of a part, if it is finished and its shards are there."""
    try:
        content = json.loads(_record_file(out, index).read_bytes())
        shards = tuple(Shard(**shard) for shard in content.pop("shards"))
        record = Record(shards=shards, **content)
        for shard in shards:
            check_shard(out, shard, id_type(encoder.vocab_size), encoder.sha256)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record


def _record_file(out: Path, index: int) -> Path:
    return out / UNFINISHED / f"part-{index:06d}.json"


class _Shards:
    """The shards that a part has open: one of each split at a time."""

    def __init__(self, job: Job, part: int, encoder: Encoder) -> None:
        self._job = job
        self._part = part
        self._tokenizer_hash = encoder.sha256
        self._dtype = id_type(encoder.vocab_size)
        self._open: dict[str, ShardWriter] = {}
        self._closed: list[Shard] = []

    def add(self, ids: list[int], split: str) -> None:
        writer = self._open.get(split)
        if writer and writer.tokens + len(ids) > self._job.shard_tokens:
            self._closed.append(self._open.pop(split).close())
            writer = None
        if writer is None:
            number = sum(shard.split == split for shard in self._closed)
            name = f"{split}-{self._part:06d}-{number:03d}"
            writer = ShardWriter(self._job.out, name, split, self._dtype, self._tokenizer_hash)
            self._open[split] = writer
        writer.add(ids)

    def close(self) -> tuple[Shard, ...]:
        while self._open:
            self._closed.append(self._open.popitem()[1].close())
        return tuple(sorted(self._closed))

    def abandon(self) -> None:
        for writer in self._open.values():
            writer.abandon()
