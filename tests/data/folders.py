"""Small corpora and folders of tokens for the tests of `data`."""

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from lucid_lab.data import tokenizer as tokenizers
from lucid_lab.data.shards import FORMAT, MANIFEST, SPLITS, VERSION, ShardWriter, id_type

WORDS = [
    "the",
    "key",
    "value",
    "writes",
    "reads",
    "last",
    "é",
    "漢字",
    "def",
    "return",
    "0",
    "12",
    "(",
    ":",
    "\n\n",
    "\t",
]


def text(seed: int, words: int = 200) -> str:
    """Random words that look like text, from a seed."""
    chooser = random.Random(seed)
    return f"document {seed}\n" + " ".join(chooser.choices(WORDS, k=words)) + "\n"


def write_texts(folder: Path, count: int, words: int = 200) -> list[str]:
    """Files a000.txt, a001.txt, ... of about 900 bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text(seed, words) for seed in range(count)]
    for number, content in enumerate(texts):
        (folder / f"a{number:03d}.txt").write_text(content, newline="")
    return texts


@functools.cache
def trained(size: int = 300) -> dict[str, bytes]:
    """The files of a small tokenizer."""
    return tokenizers.train([text(seed) for seed in range(20)], size)


def write_tokenizer(folder: Path, size: int = 300) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in trained(size).items():
        (folder / name).write_bytes(content)
    return folder


def write_tokens(folder: Path, shards: dict[str, Sequence[Sequence[Sequence[int]]]], vocab_size: int = 1 << 16) -> Path:
    """A finished folder with the given ids. shards: for each split, a list of shards, each a list of documents."""
    write_tokenizer(folder)
    own, dtype = tokenizers.tokenizer_hash(folder), id_type(vocab_size)
    written = []
    for split, contents in shards.items():
        for number, documents in enumerate(contents):
            writer = ShardWriter(folder, f"{split}-000000-{number:03d}", split, dtype, own)
            for document in documents:
                writer.add(document)
            written.append(writer.close())
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"sha256": own, "vocab_size": vocab_size},
        "dtype": dtype,
        "shards": [shard._asdict() for shard in written],
    }
    assert {shard.split for shard in written} <= set(SPLITS)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The content of every file in a folder, by its relative path."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }
