"""Tokenizers: trained on a sample of the source, or loaded. Saved beside the tokens in the files of Hugging Face."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lucid_attention.files import parse_json
from lucid_attention.messages import first_line

from .readers import Bad, DataError, Part, require
from .sources import Source

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# Tokens that may end a document, tried in this order for a tokenizer.json without a tokenizer_config.json.
KNOWN_ENDS = (EOS, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
# All bytes and BOS, EOS, PAD.
SMALLEST_VOCABULARY = 256 + 3
LARGEST_VOCABULARY = 1_000_000
SAMPLE_BYTES = 100_000_000
# In characters. Encoding needs some hundred bytes of memory per token: a longer document is encoded in pieces.
LONGEST = 1 << 22

Files = dict[str, bytes]


def hash_of(content: bytes) -> str:
    """The hash of a tokenizer, from the bytes of its tokenizer.json. Shards carry it."""
    return hashlib.sha256(content).hexdigest()


def tokenizer_hash(folder: str | Path) -> str:
    """The hash of the tokenizer in a folder."""
    file = Path(folder) / "tokenizer.json"
    try:
        return hash_of(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def requested_size(name: str) -> int | None:
    """32000 for "train:32000"; None for the name of an existing tokenizer."""
    if not name.startswith("train:"):
        return None
    digits = name.removeprefix("train:").replace("_", "")
    # The number of digits first: Python refuses to read a very long number.
    is_number = digits.isdecimal() and len(digits) < 20
    if not is_number or not SMALLEST_VOCABULARY <= int(digits) <= LARGEST_VOCABULARY:
        raise DataError(
            f"--tokenizer train:N needs a number N from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}, got {name!r}"
        )
    return int(digits)


def sample(source: Source, parts: Sequence[Part], bad: Bad, size: int = SAMPLE_BYTES) -> Iterator[str]:
    """About `size` bytes of text: the beginnings of at most 64 parts, spread evenly over the source; not random."""
    sampled_parts = [parts[i * len(parts) // 64] for i in range(64)] if len(parts) > 64 else parts
    share = size // len(sampled_parts)
    for part in sampled_parts:
        bytes_left = share
        for document in source.documents(part, bad):
            text = document.text[:bytes_left]
            yield text
            bytes_left -= len(text.encode())
            if bytes_left <= 0:
                break


def train(texts: Iterable[str], vocab_size: int) -> Files:
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
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _config(bos_token=BOS, eos_token=EOS, pad_token=PAD),
    }


def load(name: str) -> Files:
    """The files of a tokenizer. name: a tokenizer.json, a folder with one, or a name that Transformers knows."""
    path = Path(name)
    if path.is_file():
        return _with_end(name, {"tokenizer.json": path.read_bytes()})
    if (path / "tokenizer.json").is_file():
        extras = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
        present = [file for file in ("tokenizer.json", *extras) if (path / file).is_file()]
        return _with_end(name, {file: (path / file).read_bytes() for file in present})
    transformers = require("transformers", f"--tokenizer {name!r}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(folder)
        except Exception as error:
            raise DataError(
                f"--tokenizer {name!r} cannot be loaded: {first_line(error)} "
                "Without the hub, give a folder with a tokenizer.json, or train:32000"
            ) from error
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
    if "tokenizer.json" not in files:
        raise DataError(f"--tokenizer {name!r} must have a fast form (tokenizer.json), got none")
    return _with_end(name, files)


def _config(**tokens: str) -> bytes:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    return json.dumps(config, indent=2).encode() + b"\n"


def _with_end(name: str, files: Files) -> Files:
    """The files, with a tokenizer_config.json that names the token that ends a document."""
    tokenizer = _parse(files["tokenizer.json"], name)
    if "tokenizer_config.json" not in files:
        ends = [token for token in KNOWN_ENDS if tokenizer.token_to_id(token) is not None]
        if not ends:
            raise DataError(
                f"--tokenizer {name!r} does not say which token ends a document: put a tokenizer_config.json with an "
                "'eos_token' beside it"
            )
        files = files | {"tokenizer_config.json": _config(eos_token=ends[0])}
    # The constructor refuses files that cannot be used.
    Encoder(files, name)
    return files


def _parse(content: bytes, name: str) -> Any:
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:
        raise DataError(f"{name!r} is not a tokenizer that `tokenizers` can read: {error}") from error


class Encoder:
    """Turns texts into token ids. Equal texts give equal ids."""

    def __init__(self, files: Files, name: str = "tokenizer.json") -> None:
        self._tokenizer = _parse(files["tokenizer.json"], name)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "<|eos|>" in a text is text: only `__call__` ends a document.
        self._tokenizer.encode_special_tokens = True
        self.sha256 = hash_of(files["tokenizer.json"])
        # Not the number of entries: ids may have gaps.
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        try:
            eos = parse_json(files["tokenizer_config.json"], f"{name!r}: tokenizer_config.json").get("eos_token")
        except ValueError as error:
            raise DataError(str(error)) from error
        self.eos_token = eos.get("content") if isinstance(eos, dict) else eos
        eos_id = self._tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        if eos_id is None:
            raise DataError(f"{name!r} must have an 'eos_token' in its vocabulary, got {self.eos_token!r}")
        self.eos_id: int = eos_id

    @classmethod
    def of(cls, folder: Path) -> "Encoder":
        """The tokenizer that is saved in a folder."""
        names = ("tokenizer.json", "tokenizer_config.json")
        return cls({name: (folder / name).read_bytes() for name in names}, str(folder))

    def __call__(self, text: str) -> list[int]:
        """The ids of a document, with the end-of-document token."""
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids)
        ids.append(self.eos_id)
        return ids


def _pieces(text: str) -> Iterator[str]:
    """Pieces of at most LONGEST characters, cut after a line where possible."""
    start = 0
    while len(text) - start > LONGEST:
        line = text.rfind("\n", start, start + LONGEST) + 1
        stop = line if line > start else start + LONGEST
        yield text[start:stop]
        start = stop
    yield text[start:]
