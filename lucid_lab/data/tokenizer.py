"""Tokenizers: a byte-level BPE trained on text, or one that exists."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lucid_attention.messages import first_line

from . import DataError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# Tokens that may end a document, tried in this order for a tokenizer.json without a tokenizer_config.json.
KNOWN_ENDS = (EOS, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
# All bytes and BOS, EOS, PAD.
SMALLEST_VOCABULARY = 256 + 3
LARGEST_VOCABULARY = 1_000_000
# In characters. Encoding needs some hundred bytes of memory per token: a longer document is encoded in pieces.
LONGEST = 1 << 22


def requested_size(name: str) -> int | None:
    """32000 for "train:32000"; None for the name of an existing tokenizer."""
    if not name.startswith("train:"):
        return None
    digits = name.removeprefix("train:").replace("_", "")
    if not (digits.isdecimal() and len(digits) < 9 and SMALLEST_VOCABULARY <= int(digits) <= LARGEST_VOCABULARY):
        raise DataError(
            f"--tokenizer train:N needs a number N from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}, got {name!r}"
        )
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
