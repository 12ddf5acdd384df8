"""Parts of a source to token shards, in this process or in several. The shards of a part depend on the part alone."""

import hashlib
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lucid_attention.files import read_json, write_record

from ..processes import WorkerPool
from .readers import DataError, Part, stop_at
from .shards import UNFINISHED, Shard, ShardWriter, check_shard, id_type
from .sources import Source
from .tokenizer import Encoder

Report = Callable[[int], None]


class Job(NamedTuple):
    """The settings that every part is encoded with.

    limit, limit_tokens: stop a part once it has this number of documents or tokens.
    min_document_tokens: leave out documents with fewer tokens.
    """

    out: Path
    validation: float
    shard_tokens: int
    skip_bad: bool
    limit: int | None
    limit_tokens: int | None = None
    min_document_tokens: int = 0


class Record(NamedTuple):
    """The result of a part: its shards and counts. `limit`, `limit_tokens` and `validation` are those of its job.

    content: the files of the part, as `content_of` describes them.
    bad_example: the error of its first bad document, empty if it has none.
    hashes: the smallest and the largest `document_hash`, None for a part without documents.
    files: documents and tokens of each file.
    """

    part: int
    limit: int | None
    limit_tokens: int | None
    validation: float
    content: str
    documents: int
    bytes: int
    empty: int
    short: int
    bad: int
    bad_example: str
    hashes: tuple[int, int] | None
    files: dict[str, list[int]]
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def is_cut(self) -> bool:
        """Whether the part was stopped by a limit, and may have more documents."""
        by_documents = self.limit is not None and self.documents >= self.limit
        return by_documents or (self.limit_tokens is not None and self.tokens >= self.limit_tokens)


class Stopped(Exception):
    """Raised in a worker process when another part has failed or the user has stopped the run."""


def document_hash(text: str) -> int:
    """A hash of a document, below 2^64. It decides about the split, so equal documents are in the same one."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_validation(text: str, share: float) -> bool:
    """Whether a document is held out, if about `share` of all documents are."""
    return document_hash(text) < share * 2**64


def content_of(part: Part) -> str:
    """The identity of the part's files: names, ranges, sizes and times of change. Empty for a data set of the hub."""
    pieces = []
    for path, start, stop in part.pieces:
        if isinstance(path, Path):
            status = path.stat()
            pieces.append([path.name, start, stop, status.st_size, status.st_mtime_ns])
        else:
            pieces.append([str(path), start, stop])
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest() if pieces else ""


def encode_part(source: Source, encoder: Encoder, part: Part, job: Job, report: Report) -> Record:
    """Write the shards of a part, then its record: a part that has a record is finished.

    report: called after every document with the bytes that were read.
    """
    bad, bad_example = 0, ""

    def skip(error: DataError) -> None:
        nonlocal bad, bad_example
        bad += 1
        bad_example = bad_example or str(error)

    documents = tokens = size = empty = short = 0
    files: dict[str, list[int]] = {}
    hashes: tuple[int, int] | None = None
    # Before reading: files that change while they are read are then encoded again by the next run.
    content = content_of(part)
    shards = _PartShards(job, part.number, encoder)
    try:
        for document in source.documents(part, skip if job.skip_bad else stop_at):
            text = document.text
            ids = encoder(text) if text.strip() else []
            if not ids:
                empty += 1
            elif len(ids) < job.min_document_tokens:
                short += 1
            else:
                shards.add(ids, "validation" if is_validation(text, job.validation) else "train")
                number = document_hash(text)
                hashes = (min(hashes[0], number), max(hashes[1], number)) if hashes else (number, number)
                counts = files.setdefault(document.file, [0, 0])
                counts[0], counts[1] = counts[0] + 1, counts[1] + len(ids)
                documents, tokens, size = documents + 1, tokens + len(ids), size + len(text.encode())
            report(document.size)
            if documents == job.limit or (job.limit_tokens is not None and tokens >= job.limit_tokens):
                break
        written = shards.close()
    finally:
        shards.abandon()
    settings = (part.number, job.limit, job.limit_tokens, job.validation, content)
    record = Record(*settings, documents, size, empty, short, bad, bad_example, hashes, files, written)
    entry = record._asdict() | {"shards": [shard._asdict() for shard in record.shards]}
    write_record(_record_file(job.out, part.number), entry)
    return record


def read_record(job: Job, part: Part, encoder: Encoder) -> Record | None:
    """The record of a part that is finished, with the files of now and whole shards; None for any other."""
    try:
        entry = read_json(_record_file(job.out, part.number))
        shards = tuple(Shard(**shard) for shard in entry.pop("shards"))
        record = Record(shards=shards, **entry)
        for shard in shards:
            check_shard(job.out, shard, id_type(encoder.vocab_size), encoder.sha256)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    is_same = record.validation == job.validation and record.content == content_of(part)
    # A run without --skip-bad must stop at bad documents that an earlier run left out.
    return record if is_same and (job.skip_bad or not record.bad) else None


def _record_file(out: Path, part: int) -> Path:
    return out / UNFINISHED / f"part-{part:06d}.json"


class _PartShards:
    """The shards of a part: at most one of each split is open."""

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


def encode_parts(parts: Iterable[Part], source: Source, job: Job, workers: int, bar: "tqdm[Any]") -> Iterator[Record]:
    """The records of parts, as they are finished. The next part is taken from `parts` when a worker is free."""
    if workers > 1:
        yield from _encode_in_parallel(parts, source, job, workers, bar)
        return
    encoder = Encoder.of(job.out)
    for part in parts:
        yield encode_part(source, encoder, part, job, _BarReport(bar))


class _BarReport:
    """Shows documents and bytes on a progress bar."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self.bar = bar
        self.documents = 0

    def __call__(self, size: int, documents: int = 1) -> None:
        self.documents += documents
        self.bar.set_postfix(documents=self.documents, refresh=False)
        self.bar.update(size)


def _encode_in_parallel(
    parts: Iterable[Part], source: Source, job: Job, workers: int, bar: "tqdm[Any]"
) -> Iterator[Record]:
    context = multiprocessing.get_context("spawn")
    # Documents and bytes, summed over all workers.
    counts, stop = context.Array("q", 2), context.Event()
    waiting = iter(parts)
    running: set[Future[Record]] = set()
    shown, report = [0, 0], _BarReport(bar)
    with WorkerPool(workers, _start_worker, (pickle.dumps(source), job, counts, stop)) as pool:
        try:
            while True:
                while len(running) < workers and (part := next(waiting, None)):
                    running.add(pool.submit(_encode_in_worker, part))
                if not running:
                    return
                done, running = wait(running, timeout=0.3, return_when=FIRST_COMPLETED)
                now = counts[:]
                report(now[1] - shown[1], now[0] - shown[0])
                shown = now
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker was killed, perhaps because memory ran out. Finished parts are kept: run the same command "
                "again, with fewer --workers"
            ) from error
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


# The arguments that `_start_worker` gave to this worker process.
_worker: dict[str, Any] = {}


def _start_worker(pickled_source: bytes, job: Job, counts: Any, stop: Any) -> None:
    _worker.update(pickled_source=pickled_source, job=job, counts=counts, stop=stop)


def _encode_in_worker(part: Part) -> Record:
    job, counts, stop = _worker["job"], _worker["counts"], _worker["stop"]
    if "source" not in _worker:
        # Not in `_start_worker`: an error there, such as an unreachable hub, would look like a killed worker.
        _worker.update(source=pickle.loads(_worker["pickled_source"]), encoder=Encoder.of(job.out))

    def report(size: int) -> None:
        if stop.is_set():
            raise Stopped
        with counts.get_lock():
            counts[0] += 1
            counts[1] += size

    return encode_part(_worker["source"], _worker["encoder"], part, job, report)
