"""`lucid tokenize`: text to a folder of tokens, which `datasets.load_from_disk` opens.

The text is streamed. Encoded documents are saved in blocks, each with the position in the stream: a stopped run resumes
after its last block.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets, load_from_disk
from datasets.utils.logging import disable_progress_bar
from tqdm.auto import tqdm

from lucid_attention.files import read_json, write_whole

from ..locks import LOCK, locked
from . import DataError
from .text import Text, documents
from .tokenizer import Encoder, load, requested_size, train

MANIFEST, UNFINISHED = "tokens.json", "unfinished"
SPLITS = ("train", "validation")
# Tokens of a block: what a stopped run loses at most.
BLOCK = 10_000_000
# A batch that is encoded at once: documents, or characters.
BATCH, BATCH_CHARACTERS = 1000, 1 << 24
# Text that a tokenizer is trained on, and the number of files that it comes from.
SAMPLE_CHARACTERS, SAMPLE_FILES = 100_000_000, 64


def tokenize(
    source: str,
    out: str | Path,
    *,
    tokenizer: str = "train:32000",
    validation: float = 0.01,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    limit: int | None = None,
    limit_tokens: int | None = None,
    min_document_tokens: int = 0,
    seed: int | None = None,
    skip_bad: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Write a folder of tokens. Returns its manifest, and whether anything had to be written.

    source, field, split, config, seed, skip_bad: as in `Text`.
    tokenizer: "train:N" (a BPE of N tokens, trained on the source), a folder with a tokenizer.json, or a hub name.
    validation: share of the documents that are held out, chosen by a hash of their text; at least one, unless 0.
    limit, limit_tokens: stop after as many documents, or after the document with this token.
    min_document_tokens: leave out shorter documents.
    """
    if not 0 <= validation < 1:
        raise DataError(f"--validation must be from 0 to below 1, got {validation}")
    for name, value in (("--limit", limit), ("--limit-tokens", limit_tokens)):
        if value is not None and value < 1:
            raise DataError(f"{name} must be at least 1, got {value}")
    requested_size(tokenizer)
    folder = Path(out)
    settings = {
        "source": source,
        "tokenizer": tokenizer,
        "validation": validation,
        "field": field,
        "split": split,
        "config": config,
        "limit": limit,
        "limit_tokens": limit_tokens,
        "min_document_tokens": min_document_tokens,
        "seed": seed,
    }
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest["settings"] == settings:
            return manifest, False
        raise DataError(f"{folder} holds tokens of other settings, {manifest['settings']}: choose another OUT")
    if folder.exists() and not (folder / UNFINISHED).exists() and _other_files(folder):
        raise DataError(f"{folder} must be new or empty, or hold tokens, got a folder with other files")
    text = Text(source, field=field, split=split, config=config, seed=seed, skip_bad=skip_bad)
    disable_progress_bar()
    with locked(folder, "lucid tokenize"):
        work = folder / UNFINISHED
        _begin(work, settings | {"files": [[name, _size(name)] for name in text.files]})
        loaded = _tokenizer(tokenizer, text, work)
        _encode(text, Encoder(loaded), work, settings)
        return _finish(folder, loaded, settings), True


def _other_files(folder: Path) -> bool:
    return any(not path.name.startswith(LOCK) for path in folder.iterdir())


def _begin(work: Path, settings: dict[str, Any]) -> None:
    """Keep the blocks of a stopped run with the same settings and files; remove others."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    file = work / "settings.txt"
    if file.is_file() and file.read_text() == digest:
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_whole(file, digest)


def _size(name: str) -> int:
    """Bytes of a local file; 0 for an address, whose server is not asked."""
    return Path(name).stat().st_size if Path(name).is_file() else 0


def _tokenizer(name: str, text: Text, work: Path) -> Any:
    """The tokenizer, loaded, or trained once: a resumed run takes the one that it began with."""
    size = requested_size(name)
    if size is None:
        return load(name)
    if not (work / "tokenizer").exists():
        partial = work / "tokenizer.partial"
        train(_sample(text), size).save_pretrained(partial)
        partial.rename(work / "tokenizer")
    return load(work / "tokenizer")


def _sample(text: Text) -> Iterator[str]:
    """Text to train a tokenizer on: all of a small source, or beginnings of files spread evenly over a large one."""
    is_small = sum(map(_size, text.files)) <= SAMPLE_CHARACTERS and all(map(_size, text.files))
    if len(text.files) <= 1 or is_small:
        return _beginning(document for document in text if document)
    count = min(SAMPLE_FILES, len(text.files))
    names = [text.files[i * len(text.files) // count] for i in range(count)]
    return (
        piece for name in names for piece in _beginning(documents(name, field=text.field), SAMPLE_CHARACTERS // count)
    )


def _beginning(texts: Iterator[str], characters: int = SAMPLE_CHARACTERS) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _encode(text: Text, encoder: Encoder, work: Path, settings: dict[str, Any]) -> None:
    """Encode from the last saved position to the end or the limit."""
    limit, limit_tokens = settings["limit"] or float("inf"), settings["limit_tokens"] or float("inf")
    counts = {"blocks": 0, "documents": 0, "tokens": 0, "empty": 0, "bad": 0, "short": 0}
    if (work / "state.json").exists():
        saved = read_json(work / "state.json")
        counts = saved["counts"]
        if saved["done"]:
            return
        text.load_state_dict(saved["position"])
    block: dict[str, list[list[int]]] = {split: [] for split in SPLITS}
    block_tokens = 0

    def save(done: bool) -> None:
        _save_block(block, work / f"block-{counts['blocks']:06}", encoder.vocab_size)
        counts["blocks"] += 1
        state = {"done": done, "counts": counts, "position": text.state_dict()}
        write_whole(work / "state.json", json.dumps(state))

    total = None if limit_tokens == float("inf") else limit_tokens
    with tqdm(
        desc="Tokenizing", total=total, initial=counts["tokens"], unit="tok", unit_scale=True, disable=None
    ) as bar:
        for batch in _batches(text):
            texts = [document for document in batch if document]
            counts["bad"] += sum(document is None for document in batch)
            counts["empty"] += sum(document == "" for document in batch)
            for document, ids in zip(texts, encoder(texts), strict=True):
                if counts["documents"] >= limit or counts["tokens"] >= limit_tokens:
                    break
                if len(ids) < settings["min_document_tokens"]:
                    counts["short"] += 1
                    continue
                held_out = hash_share(document) < settings["validation"]
                block["validation" if held_out else "train"].append(ids)
                counts["documents"] += 1
                counts["tokens"] += len(ids)
                block_tokens += len(ids)
                bar.update(len(ids))
            if counts["documents"] >= limit or counts["tokens"] >= limit_tokens:
                break
            if block_tokens >= BLOCK:
                save(done=False)
                block, block_tokens = {split: [] for split in SPLITS}, 0
    save(done=True)


def _batches(text: Text) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    characters = 0
    for document in text:
        batch.append(document)
        characters += len(document or "")
        if len(batch) >= BATCH or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def hash_share(text: str) -> float:
    """A hash of the text as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def _save_block(block: dict[str, list[list[int]]], folder: Path, vocab_size: int) -> None:
    kind = Features({"input_ids": List(Value("uint16" if vocab_size <= 1 << 16 else "int32"))})
    # `datasets` cannot load an empty split.
    parts = {split: Dataset.from_dict({"input_ids": rows}, features=kind) for split, rows in block.items() if rows}
    # What a kill left of an earlier attempt.
    shutil.rmtree(folder, ignore_errors=True)
    DatasetDict(parts).save_to_disk(folder)


def _finish(folder: Path, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Join the blocks, and write the manifest last: it makes the folder complete."""
    work = folder / UNFINISHED
    counts = read_json(work / "state.json")["counts"]
    if not counts["documents"]:
        left_out = ", ".join(f"{counts[name]} {name}" for name in ("empty", "bad", "short"))
        raise DataError(f"SOURCE {settings['source']!r} has no text: {left_out} documents")
    blocks = [load_from_disk(work / f"block-{number:06}") for number in range(counts["blocks"])]
    found = {split: [block[split] for block in blocks if split in block] for split in SPLITS}
    parts = {split: concatenate_datasets(of_split) for split, of_split in found.items() if of_split}
    if settings["validation"] and "validation" not in parts and len(parts["train"]) > 1:
        # A small corpus has no document whose hash is below the share: hold the last one out.
        last = len(parts["train"]) - 1
        parts = {"train": parts["train"].select(range(last)), "validation": parts["train"].select([last])}
    for split in SPLITS:
        shutil.rmtree(folder / split, ignore_errors=True)
    DatasetDict(parts).save_to_disk(folder)
    tokenizer.save_pretrained(folder)
    saved = load_from_disk(folder)
    files = sorted(path for split in SPLITS for path in (folder / split).glob("*.arrow"))
    manifest = {
        "vocab_size": Encoder(tokenizer).vocab_size,
        "splits": {split: _count(saved.get(split)) for split in SPLITS},
        "left_out": {name: counts[name] for name in ("empty", "bad", "short")},
        "settings": settings,
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def _count(part: Dataset | None) -> dict[str, int]:
    if part is None:
        return {"documents": 0, "tokens": 0}
    tokens = sum(len(chunk.flatten()) for chunk in part.data.column("input_ids").chunks)
    return {"documents": len(part), "tokens": tokens}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of tokens. A folder that is unfinished, cut or damaged is refused."""
    file = folder / MANIFEST
    if not file.is_file():
        is_unfinished = (folder / UNFINISHED).exists()
        reason = "is not finished: run the same `lucid tokenize` again" if is_unfinished else f"has no {MANIFEST}"
        raise DataError(f"{folder} must be a folder written by `lucid tokenize`, and {reason}")
    manifest: dict[str, Any] = read_json(file)
    if not {"vocab_size", "splits", "settings", "files"} <= manifest.keys():
        raise DataError(f"{file} is not a manifest of `lucid tokenize`, or one of an earlier release: tokenize again")
    for name, size in manifest["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            got = "it is missing" if found is None else f"got {found}"
            raise DataError(
                f"{folder / name} must have {size} bytes, {got}: the file is cut or damaged, tokenize again"
            )
    return manifest
