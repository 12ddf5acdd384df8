"""`lucid tokenize`: text to a folder of tokens, which `datasets.load_from_disk` opens.

The text is streamed. Encoded documents are saved in blocks, each with the position in the stream: a stopped run resumes
after its last block.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets, load_from_disk
from datasets.utils.logging import disable_progress_bar
from pyarrow import compute
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lucid_attention.files import read_json, write_whole
from lucid_attention.messages import first_line

from ..locks import LOCK, locked
from . import DataError
from .text import explained, find_files, open_text

MANIFEST, UNFINISHED = "tokens.json", "unfinished"
SPLITS = ("train", "validation")
# Tokens of a block: what a stopped run loses at most.
BLOCK = 10_000_000
# Documents that are encoded at once.
BATCH = 256
# Text that a tokenizer is trained on.
SAMPLE_CHARACTERS = 100_000_000
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# Tokens that may end a document, tried in this order for a tokenizer.json without a tokenizer_config.json.
KNOWN_ENDS = (EOS, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
# All bytes and BOS, EOS, PAD.
SMALLEST_VOCABULARY = 256 + 3
# In characters. Encoding needs some hundred bytes of memory per token: a longer document is encoded in pieces.
LONGEST = 1 << 22


def tokenize(
    source: str,
    out: str | Path,
    *,
    tokenizer: str = "train:32000",
    validation: float = 0.01,
    share: float = 1.0,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    limit_tokens: int | None = None,
    min_document_tokens: int = 0,
    seed: int | None = None,
    skip_bad: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Write a folder of tokens. Returns its manifest, and whether anything had to be written.

    source, field, split, config, seed, skip_bad: as in `open_text`.
    tokenizer: "train:N" (a BPE of N tokens, trained on the beginning of the source: give a seed if its files are of
        several kinds), a folder with a tokenizer.json, or a hub name.
    validation: share of the documents that are held out, chosen by a hash of their text; at least one, unless 0.
    share: of the documents that are read, chosen by another hash of their text; the tokenizer is trained on all.
    limit_tokens: stop after the document with this token.
    min_document_tokens: leave out shorter documents.
    """
    settings = {name: value for name, value in locals().items() if name not in ("out", "skip_bad")}
    if not 0 <= validation < 1:
        raise DataError(f"--validation must be from 0 to below 1, got {validation}")
    if not 0 < share <= 1:
        raise DataError(f"--share must be above 0 and at most 1, got {share}")
    if limit_tokens is not None and limit_tokens < 1:
        raise DataError(f"--limit-tokens must be at least 1, got {limit_tokens}")
    requested_size(tokenizer)
    folder = Path(out)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest["settings"] == settings:
            return manifest, False
        raise DataError(f"{folder} holds tokens of other settings, {manifest['settings']}: choose another OUT")
    files = folder.iterdir() if folder.exists() and not (folder / UNFINISHED).exists() else ()
    if any(path.name != LOCK for path in files):
        raise DataError(f"{folder} must be new or empty, or hold tokens, got a folder with other files")
    disable_progress_bar()
    with locked(folder):
        text = open_text(source, field=field, split=split, config=config, seed=seed, skip_bad=skip_bad)
        work, names = folder / UNFINISHED, [] if source.startswith("hf:") else find_files(source)
        states = [Path(name).stat() for name in names if Path(name).is_file()]
        _begin(work, settings | {"files": names, "states": [(state.st_size, state.st_mtime_ns) for state in states]})
        loaded = _tokenizer(tokenizer, explained(source, text), work)
        _encode(text, Encoder(loaded), work, settings)
        return _finish(folder, loaded, settings), True


def _begin(work: Path, settings: dict[str, Any]) -> None:
    """Keep the blocks of a stopped run with the same settings and files; remove others."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    file = work / "settings.txt"
    if file.is_file() and file.read_text() == digest:
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_whole(file, digest)


def _tokenizer(name: str, text: Iterator[Any], work: Path) -> Any:
    """The tokenizer, loaded, or trained once: a resumed run takes the one that it began with."""
    size = requested_size(name)
    if size is None:
        return load(name)
    if not (work / "tokenizer").exists():
        partial = work / "tokenizer.partial"
        train(_sample(text), size).save_pretrained(partial)
        partial.rename(work / "tokenizer")
    return load(work / "tokenizer")


def _sample(text: Iterator[Any]) -> Iterator[str]:
    """Text to train a tokenizer on: the beginning of the stream."""
    characters = SAMPLE_CHARACTERS
    for row in text:
        document = row["text"] or ""
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def _encode(text: Any, encoder: "Encoder", work: Path, settings: dict[str, Any]) -> None:
    """Encode from the last saved position to the end or the limit."""
    limit = settings["limit_tokens"] or float("inf")
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

    known = {"total": settings["limit_tokens"], "initial": counts["tokens"]}
    with tqdm(desc="Tokenizing", unit="tok", unit_scale=True, disable=None, **known) as bar:
        for rows in explained(settings["source"], text.iter(BATCH)):
            batch = rows["text"]
            texts = [document for document in batch if document and hash_share(document, "read") < settings["share"]]
            counts["bad"] += sum(document is None for document in batch)
            counts["empty"] += sum(document == "" for document in batch)
            for document, ids in zip(texts, encoder(texts), strict=True):
                if counts["tokens"] >= limit:
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
            if counts["tokens"] >= limit:
                break
            if block_tokens >= BLOCK:
                save(done=False)
                block, block_tokens = {split: [] for split in SPLITS}, 0
    save(done=True)


def hash_share(text: str, salt: str = "") -> float:
    """A hash of the text as a number in [0, 1). Another salt gives an independent one."""
    return int.from_bytes(hashlib.sha256((salt + text).encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


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
    DatasetDict(parts).save_to_disk(folder)
    tokenizer.save_pretrained(folder)
    saved = load_tokens(folder)
    counts_of = {split: document_lengths(saved[split]) if split in saved else np.zeros(0, int) for split in SPLITS}
    manifest = {
        "vocab_size": Encoder(tokenizer).vocab_size,
        "splits": {split: {"documents": n.size, "tokens": int(n.sum())} for split, n in counts_of.items()},
        "left_out": {name: counts[name] for name in ("empty", "bad", "short")},
        "settings": settings,
        "sha256": {path.relative_to(folder).as_posix(): _sha256(path) for path in folder.glob("*/data-*.arrow")},
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def load_tokens(folder: str | Path) -> DatasetDict:
    """The documents of a folder of tokens by split: rows of {"input_ids"}."""
    try:
        return load_from_disk(str(folder))
    # pyarrow's errors for a damaged file have no common base class.
    except Exception as error:
        raise DataError(f"{folder}: the tokens cannot be read ({error}): tokenize again") from error


def document_lengths(documents: Dataset) -> np.ndarray:
    """Tokens of every document: [documents], int64."""
    return compute.list_value_length(documents.data.column("input_ids")).to_numpy().astype(np.int64)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of tokens. A folder that is unfinished is refused."""
    file = folder / MANIFEST
    if not file.is_file():
        is_unfinished = (folder / UNFINISHED).exists()
        reason = "is not finished: run the same `lucid tokenize` again" if is_unfinished else f"has no {MANIFEST}"
        raise DataError(f"{folder} must be a folder written by `lucid tokenize`, and {reason}")
    manifest: dict[str, Any] = read_json(file)
    if not {"vocab_size", "splits", "settings", "sha256"} <= manifest.keys():
        raise DataError(f"{file} is not a manifest of `lucid tokenize`, or one of an earlier release: tokenize again")
    return manifest


def check_files(folder: Path, split: str) -> None:
    """Refuse a split whose files are not those that `lucid tokenize` wrote."""
    for name, expected in read_manifest(folder)["sha256"].items():
        if name.startswith(f"{split}/") and ((folder / name).is_file() and _sha256(folder / name)) != expected:
            raise DataError(f"{folder / name} is missing, cut or altered since it was written: tokenize again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The tokenizer: a byte-level BPE trained on text, or one that exists.


def requested_size(name: str) -> int | None:
    """32000 for "train:32000"; None for the name of an existing tokenizer."""
    if not name.startswith("train:"):
        return None
    digits = name.removeprefix("train:").replace("_", "")
    if not (digits.isdecimal() and int(digits) >= SMALLEST_VOCABULARY):
        raise DataError(f"--tokenizer train:N needs a number N from {SMALLEST_VOCABULARY} on, got {name!r}")
    return int(digits)


def train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE. It can encode every text, so it has no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load(name: str | Path) -> Any:
    """A tokenizer in its fast form. name: a tokenizer.json, a folder with one, or a name of the hub."""
    path = Path(name)
    file = path if path.is_file() else path / "tokenizer.json"
    try:
        if file.is_file() and not (file.parent / "tokenizer_config.json").is_file():
            backend = Tokenizer.from_file(str(file))
            ends = [token for token in KNOWN_ENDS if backend.token_to_id(token) is not None]
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0] if ends else None)
        else:
            tokenizer = AutoTokenizer.from_pretrained(file.parent if file.is_file() else name, trust_remote_code=False)
    # Transformers passes on errors of the libraries that read the files, which have no common base class.
    except Exception as error:
        raise DataError(
            f"--tokenizer {str(name)!r} cannot be loaded: {first_line(error)} "
            "Without the hub, give a folder with a tokenizer.json, or train:32000"
        ) from error
    if not tokenizer.is_fast:
        raise DataError(f"--tokenizer {str(name)!r} must have a fast form (tokenizer.json), got none")
    if tokenizer.eos_token_id is None:
        raise DataError(f"--tokenizer {str(name)!r} must have an eos_token, which ends a document, got none")
    return tokenizer


class Encoder:
    """Turns documents into token ids, with the end-of-document token after each. `tokenizers` uses all cores."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        # "<|eos|>" in a text is text: only `__call__` ends a document.
        self._backend.encode_special_tokens = True
        self.eos_id: int = tokenizer.eos_token_id
        # Not the number of entries: ids may have gaps.
        self.vocab_size = max(self._backend.get_vocab().values()) + 1

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """The ids of documents."""
        pieces = [(index, piece) for index, text in enumerate(texts) for piece in _pieces(text)]
        ids: list[list[int]] = [[] for _ in texts]
        encoded = self._backend.encode_batch_fast([piece for _, piece in pieces], add_special_tokens=False)
        for (index, _), encoding in zip(pieces, encoded, strict=True):
            ids[index].extend(encoding.ids)
        return [[*document, self.eos_id] for document in ids]


def _pieces(text: str) -> Iterator[str]:
    """Pieces of at most LONGEST characters, cut after a line where possible."""
    start = 0
    while len(text) - start > LONGEST:
        line = text.rfind("\n", start, start + LONGEST) + 1
        stop = line if line > start else start + LONGEST
        yield text[start:stop]
        start = stop
    yield text[start:]
