"""`lucid tokenize`: text to token shards, in parallel. A run killed at any moment is resumed by the same command.

OUT/unfinished/ holds the settings and a record of every finished part. The files of a part are written under temporary
names and renamed; the record is written last. A part without a record is encoded again, with the same result. At the
end OUT/manifest.json is written and OUT/unfinished/ is removed.
"""

import argparse
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lucid_attention.files import PARTIAL, read_json, write_record, write_whole

from ..locks import locked
from ..processes import available_cores
from .arguments import SMALLEST_SHARD
from .encoding import Job, Record, encode_part, encode_parts, read_record
from .readers import Bad, DataError, Part, stop_at
from .shards import FORMAT, MANIFEST, SPLITS, UNFINISHED, VERSION, id_type, open_folder, read_manifest, shard_files
from .shuffling import ShuffledSource
from .sources import Source, open_source
from .tokenizer import SAMPLE_BYTES, Encoder, hash_of, load, requested_size, sample, train

SETTINGS = "settings.json"
# Files that `lucid tokenize` writes. Earlier releases ended the names of unfinished files in .tmp.
SHARDS_AND_LEFTOVERS = re.compile(
    rf"(train|validation)-\d{{6,}}-\d{{3,}}\.(bin|ends\.npy)|.+({re.escape(PARTIAL)}|\.tmp)"
)
# A token is about four bytes of text.
BYTES_PER_TOKEN = 4
# Errors of bad documents that the manifest lists, at most one per part.
BAD_EXAMPLES = 5
# Files that the manifest lists with their counts. Of a source with more, it lists the folders.
LISTED_FILES = 10_000


def tokenize(
    source: str,
    out: str | Path,
    *,
    tokenizer: str,
    workers: int | None = None,
    validation: float = 0.01,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    shard_tokens: int = 50_000_000,
    limit: int | None = None,
    limit_tokens: int | None = None,
    min_document_tokens: int = 0,
    seed: int | None = None,
    skip_bad: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Write the tokens of a source to a folder, or resume a run that was killed.

    source, field, split, config: as in `open_source`.
    tokenizer: "train:32000", a folder with a tokenizer.json, or a name that Transformers knows.
    workers: number of processes, by default that of the cores. The result does not depend on it.
    validation: share of the documents that are held out, chosen by a hash of their content.
    shard_tokens: largest number of tokens in a shard. A document that has more is a shard of its own.
    limit, limit_tokens: stop once the first documents of the source are this many, or have this many tokens together;
        None for all.
    min_document_tokens: leave out and count documents with fewer tokens, the end token included.
    seed: take files and documents in a random order, as in `ShuffledSource`; None for the order of the source.
    skip_bad: leave out and count documents that cannot be read, instead of stopping at the first.

    Returns the manifest, and whether anything was written: False if the folder was finished before.
    """
    workers = available_cores() if workers is None else workers
    _check_arguments(workers, validation, shard_tokens, limit, limit_tokens, min_document_tokens)
    target = Path(out)
    if Path(source).is_dir() and target.resolve().is_relative_to(Path(source).resolve()):
        raise DataError(f"OUT must not lie inside SOURCE, got {str(target)!r} in {source!r}")
    vocab_size = requested_size(tokenizer)
    loaded = load(tokenizer) if vocab_size is None else None
    opened = open_source(source, field=field, split=split, config=config)
    opened = opened if seed is None else ShuffledSource(opened, seed)
    settings = {
        "source": opened.describe(),
        "tokenizer": tokenizer,
        "tokenizer_sha256": hash_of(loaded["tokenizer.json"]) if loaded else None,
        "validation": validation,
        "field": field,
        "split": split,
        "shard_tokens": shard_tokens,
        "limit": limit,
        # None as in folders of earlier releases, which do not have these settings.
        "limit_tokens": limit_tokens,
        "min_document_tokens": min_document_tokens or None,
        "seed": seed,
        "skip_bad": skip_bad,
    }
    if manifest := _finished(target, opened, settings):
        return manifest, False
    job = Job(target, validation, shard_tokens, skip_bad, limit, limit_tokens, min_document_tokens)
    with _begun(target, settings):
        if manifest := _finished(target, opened, settings):
            return manifest, False
        parts = opened.parts(shard_tokens * BYTES_PER_TOKEN, _skip if skip_bad else stop_at)
        if loaded or not (target / "tokenizer.json").is_file():
            files = loaded or _train_tokenizer(opened, parts, vocab_size or 0, _skip if skip_bad else stop_at)
            # tokenizer.json is written last: if it exists, the other files do.
            for name in sorted(files, key="tokenizer.json".__eq__):
                write_whole(target / name, files[name])
        records = _encode(opened, parts, job, workers)
        if validation and not any(shard.split == "validation" for record in records for shard in record.shards):
            records = _hold_one_out(opened, parts, job, records)
        return _finish(target, settings, records), True


def _skip(_: DataError) -> None:
    """The `bad` callback that continues. `encode_part` counts what is left out."""


def _check_arguments(
    workers: int,
    validation: float,
    shard_tokens: int,
    limit: int | None,
    limit_tokens: int | None,
    min_document_tokens: int,
) -> None:
    if workers < 1:
        raise DataError(f"--workers must be at least 1, got {workers}")
    if not 0 <= validation < 1:
        raise DataError(f"--validation must be a share from 0 to below 1, got {validation}")
    if shard_tokens < 1:
        raise DataError(f"--shard-tokens must be at least 1, got {shard_tokens}")
    if limit is not None and limit < 1:
        raise DataError(f"--limit must be at least 1, got {limit}")
    if limit_tokens is not None and limit_tokens < 1:
        raise DataError(f"--limit-tokens must be at least 1, got {limit_tokens}")
    if min_document_tokens < 0:
        raise DataError(f"--min-document-tokens must be at least 0, got {min_document_tokens}")


def _finished(out: Path, source: Source, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder that was finished with the same settings; None for an unfinished folder."""
    if not (out / MANIFEST).is_file():
        return None
    manifest = read_manifest(out)
    _check_same(out, manifest["settings"], settings)
    open_folder(out, verify=True)
    if changed := source.changed_after((out / MANIFEST).stat().st_mtime_ns):
        raise DataError(f"{changed} of SOURCE changed after OUT {str(out)!r} was finished: choose another OUT")
    # A kill between writing the manifest and removing this folder leaves the folder behind.
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    return manifest


def _check_same(
    out: Path, first_settings: dict[str, Any], settings: dict[str, Any], may_differ: Sequence[str] = ("source.name",)
) -> None:
    """Refuse to mix two runs in one folder. The source's name may differ: two names can mean the same files."""
    before, now = _flat(first_settings), _flat(settings)
    names = [name for name in {**before, **now} if name not in may_differ and before.get(name) != now.get(name)]
    if names:
        differences = "; ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in names)
        raise DataError(f"OUT {str(out)!r} was begun with other settings ({differences}): choose another OUT")


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    source = {f"source.{name}": value for name, value in settings["source"].items()}
    return source | {name: value for name, value in settings.items() if name != "source"}


@contextmanager
def _begun(out: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Lock OUT against other runs, and begin it or resume it with these settings."""
    unfinished = out / UNFINISHED
    if out.exists() and not unfinished.is_dir() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"OUT must be new, an empty folder, or one of `lucid tokenize`, got {str(out)!r}")
    # In the subfolder, which is removed at the end: a finished folder holds no lock.
    with locked(unfinished, "lucid tokenize"):
        file = unfinished / SETTINGS
        first_settings = _read_settings(file) or settings
        # A part that has a record of the same files and of no bad document is the same with and without --skip-bad.
        may_differ = ["source.name", "skip_bad"]
        if first_settings["source"]["name"] == settings["source"]["name"]:
            # Files were mended. Each record tells which files it is of.
            may_differ += [f"source.{name}" for name in ("files", "bytes", "listing_sha256")]
        _check_same(out, first_settings, settings, may_differ)
        if first_settings["source"] != settings["source"] and settings["tokenizer_sha256"] is None:
            # Train the tokenizer again. If it becomes another one, no earlier shard is used.
            (out / "tokenizer.json").unlink(missing_ok=True)
        write_record(file, settings)
        yield


def _read_settings(file: Path) -> dict[str, Any] | None:
    """The settings that OUT was begun with; None if it has none, or damaged ones: then its records decide."""
    try:
        settings = read_json(file)
        _flat(settings), settings["source"]["name"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return dict(settings)


def _train_tokenizer(source: Source, parts: Sequence[Part], vocab_size: int, bad: Bad) -> dict[str, bytes]:
    size = min(sum(part.size for part in parts) or SAMPLE_BYTES, SAMPLE_BYTES)
    with tqdm(desc="Training the tokenizer", total=size, unit="B", unit_scale=True, disable=None) as bar:

        def texts() -> Iterator[str]:
            for text in sample(source, parts, bad):
                yield text
                bar.update(len(text))

        return train(texts(), vocab_size)


def _encode(source: Source, parts: Sequence[Part], job: Job, workers: int) -> list[Record]:
    """The records of all parts, or of the first parts that together reach a limit of the job."""
    encoder = Encoder.of(job.out)
    earlier = (read_record(job, part, encoder) for part in parts)
    records = {record.part: record for record in earlier if record}

    def missing() -> Iterator[Part]:
        for part in parts:
            if _is_enough(job, records):
                return
            if part.number not in records:
                yield part

    total, done = sum(part.size for part in parts), sum(part.size for part in parts if part.number in records)
    bar = tqdm(desc="Tokenizing", total=total or None, initial=done, unit="B", unit_scale=True, disable=None)
    with bar:
        for record in encode_parts(missing(), source, job, min(workers, len(parts)), bar):
            records[record.part] = record
    limited_records: list[Record] = []
    # `job` with the documents and tokens that are left for the parts to come.
    left = job
    for part in parts:
        if left.limit == 0 or (left.limit_tokens is not None and left.limit_tokens <= 0):
            break
        record = records[part.number]
        is_cut_elsewhere = record.is_cut and (record.limit, record.limit_tokens) != (left.limit, left.limit_tokens)
        is_too_long = _is_above(record.documents, left.limit) or _is_above(record.tokens, left.limit_tokens)
        if is_cut_elsewhere or (is_too_long and not record.is_cut):
            # This part stops in its middle. The place is known once all earlier parts are counted.
            record = encode_part(source, encoder, part, left, lambda _: None)
        left = left._replace(
            limit=None if left.limit is None else left.limit - record.documents,
            limit_tokens=None if left.limit_tokens is None else left.limit_tokens - record.tokens,
        )
        limited_records.append(record)
    return limited_records


def _is_above(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def _hold_one_out(source: Source, parts: Sequence[Part], job: Job, records: list[Record]) -> list[Record]:
    """The records with the document of the smallest hash, and its equals, moved to the validation split.

    A small corpus has no document whose hash is below the share. A corpus of one document stays as it is.
    """
    smallest = min((record.hashes[0] for record in records if record.hashes), default=0)
    if all(record.hashes is None or tuple(record.hashes) == (smallest, smallest) for record in records):
        return records
    # The next float: division may have rounded down.
    share = math.nextafter(smallest / 2**64, 1)
    encoder = Encoder.of(job.out)
    for index, record in enumerate(records):
        if record.hashes and record.hashes[0] == smallest:
            job_of_record = job._replace(validation=share, limit=record.limit, limit_tokens=record.limit_tokens)
            records[index] = encode_part(source, encoder, parts[record.part], job_of_record, lambda _: None)
    return records


def _is_enough(job: Job, records: dict[int, Record]) -> bool:
    """Whether the finished parts before the first unfinished one reach a limit of the job."""
    documents = tokens = index = 0
    while index in records:
        documents, tokens, index = documents + records[index].documents, tokens + records[index].tokens, index + 1
    return _is_above(documents + 1, job.limit) or _is_above(tokens + 1, job.limit_tokens)


def _counts_by_file(records: list[Record]) -> dict[str, dict[str, int]]:
    """Documents and tokens of each file, in the order in which they were taken; of each folder if files are many."""
    names = {name for record in records for name in record.files}
    of_files: dict[str, dict[str, int]] = {}
    for record in records:
        for name, (documents, tokens) in record.files.items():
            key = name if len(names) <= LISTED_FILES else name.rpartition("/")[0] + "/"
            counts = of_files.setdefault(key, {"documents": 0, "tokens": 0})
            counts["documents"] += documents
            counts["tokens"] += tokens
    return of_files


def _finish(out: Path, settings: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    encoder = Encoder.of(out)
    shards = sorted(shard for record in records for shard in record.shards)
    empty, bad = sum(record.empty for record in records), sum(record.bad for record in records)
    if not shards:
        raise DataError(f"SOURCE {settings['source']['name']!r} has no text: {empty} empty documents, {bad} bad ones")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {
            "sha256": encoder.sha256,
            "vocab_size": encoder.vocab_size,
            "eos_token": encoder.eos_token,
            "eos_id": encoder.eos_id,
        },
        "dtype": id_type(encoder.vocab_size),
        "splits": {
            split: {
                "documents": sum(shard.documents for shard in shards if shard.split == split),
                "tokens": sum(shard.tokens for shard in shards if shard.split == split),
            }
            for split in SPLITS
        },
        "text_bytes": sum(record.bytes for record in records),
        "skipped": {"empty": empty, "bad": bad, "short": sum(record.short for record in records)},
        "bad_examples": [record.bad_example for record in records if record.bad_example][:BAD_EXAMPLES],
        "settings": settings,
        "files": _counts_by_file(records),
        "shards": [shard._asdict() for shard in shards],
    }
    listed = {file.name for shard in shards for file in shard_files(out, shard.name)}
    for file in out.iterdir():
        if SHARDS_AND_LEFTOVERS.fullmatch(file.name) and file.name not in listed:
            file.unlink()
    write_record(out / MANIFEST, manifest)
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    return manifest


def run(args: argparse.Namespace) -> int:
    """`lucid tokenize`: write the folder, then print what it holds."""
    try:
        if args.shard_tokens < SMALLEST_SHARD:
            raise DataError(f"--shard-tokens must be at least {SMALLEST_SHARD:_}, got {args.shard_tokens}")
        manifest, written = tokenize(**vars(args))
    except DataError as error:
        print(f"lucid tokenize: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {'written' if written else 'finished before, nothing to do'}")
    for split, counts in manifest["splits"].items():
        print(f"  {split:<10} {counts['tokens']:>14,} tokens in {counts['documents']:,} documents")
    print(f"  vocabulary {manifest['tokenizer']['vocab_size']:>14,} tokens, {manifest['dtype']} on disk")
    skipped = manifest["skipped"]
    if any(skipped.values()):
        short = f", {skipped['short']:,} short ones" if skipped.get("short") else ""
        print(f"  left out   {skipped['empty']:,} empty and {skipped['bad']:,} bad documents{short}")
    for example in manifest.get("bad_examples", ()):
        print(f"             such as {example}")
    if not manifest["splits"]["validation"]["documents"]:
        print("  No document is held out: `lucid train` needs some. Tokenize into another OUT with --validation 0.1")
    return 0
