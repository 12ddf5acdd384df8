"""Training sets read from files: documents packed from token shards, and prompts with answers."""

import hashlib
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lucid_attention.files import UnreadableFile, parse_json, read_text

from ..labels import IGNORED
from .readers import DataError
from .shards import SPLITS, open_folder, read_ends, read_ids, shard_files

# Items that `document_pieces` measures. Documents are shuffled, so the first ones stand for all.
SAMPLED = 100_000

Array = np.ndarray[Any, np.dtype[np.int64]]


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """Documents in shuffled order, joined to one stream that is cut into sequences of T tokens.

    folder: written by `lucid tokenize`.
    sequence_length: T.
    split: "train" or "validation".
    seed: of the order of the documents. One pass over the items sees every token once, except for fewer than T tokens
        at the end. A pass in another order is a data set with another seed.
    separate_documents: keep documents apart. Positions then start at 0 with every document and every item, which is how
        models see where a document begins, and the first token of a document has no label. Otherwise an item is one
        run of text.
    verify, expect_tokenizer_hash: as in `open_folder`.

    Item i is {"input_ids", "labels", "position_ids"}, each int64 [T]. Labels are not shifted (Transformers models
    shift them). An item depends on the arguments and on i alone, so a run resumes by its index. Tokens are read when
    an item is asked for; the index in memory takes 16 bytes per document.
    """

    def __init__(
        self,
        folder: str | Path,
        sequence_length: int,
        *,
        split: str = "train",
        seed: int = 0,
        separate_documents: bool = True,
        verify: bool = False,
        expect_tokenizer_hash: str | None = None,
    ) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {sequence_length}")
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self.folder = Path(folder)
        self.sequence_length = sequence_length
        self.split = split
        self.seed = seed
        self.separate_documents = separate_documents
        opened = open_folder(folder, verify=verify, expect_tokenizer_hash=expect_tokenizer_hash)
        self.vocab_size = opened.vocab_size
        self.tokenizer_hash = opened.tokenizer_hash
        self._dtype = opened.dtype
        self._shards = [shard for shard in opened.shards if shard.split == split]
        self._index_documents()
        if not len(self):
            tokens = int(self._ends[-1]) if self._ends.size else 0
            way_out = "a larger --validation" if split == "validation" else "more text"
            raise DataError(
                f"{folder}: split {split!r} must have at least {sequence_length} tokens, got {tokens}: "
                f"tokenize again with {way_out}, or choose a smaller sequence_length"
            )

    def _index_documents(self) -> None:
        lengths = [np.diff(read_ends(self.folder, shard), prepend=0) for shard in self._shards]
        for shard, of_shard in zip(self._shards, lengths, strict=True):
            if of_shard.size and of_shard.min() < 1:
                raise DataError(f"{shard_files(self.folder, shard.name)[1]} was altered: its ends must rise")
        # The first token of every shard, counted over all shards.
        self._first_tokens = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        length = np.concatenate([np.zeros(0, np.int64), *lengths])
        start = np.cumsum(length) - length
        order = _order(length.size, self.seed)
        # For every document, in shuffled order: its start on disk and its end in the stream.
        self._starts: Array = start[order]
        self._ends: Array = np.cumsum(length[order])

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process opens the folder again: cheaper than sending the index.
        options = (self.split, self.seed, self.separate_documents, self.tokenizer_hash)
        return _reopened, (self.folder, self.sequence_length, *options)

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.sequence_length if self._ends.size else 0

    def document_pieces(self) -> Array:
        """The lengths of the pieces of documents that items hold, from the first SAMPLED items."""
        stop = min(len(self), SAMPLED) * self.sequence_length
        ends = self._ends[: int(np.searchsorted(self._ends, stop))]
        borders = np.arange(0, stop + 1, self.sequence_length)
        cuts: Array = np.union1d(ends, borders)
        return cuts[1:] - cuts[:-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = operator.index(index)
        item += len(self) if item < 0 else 0
        if not 0 <= item < len(self):
            raise IndexError(f"index must be below {len(self)}, got {index}")
        T = self.sequence_length
        item_start, item_end = item * T, (item + 1) * T
        ids, positions = np.empty(T, np.int64), np.arange(T)
        document = int(np.searchsorted(self._ends, item_start, side="right"))
        filled = 0
        while filled < T:
            document_start = int(self._ends[document - 1]) if document else 0
            document_end = min(int(self._ends[document]), item_end)
            size = document_end - (item_start + filled)
            start = int(self._starts[document]) + item_start + filled - document_start
            ids[filled : filled + size] = self._read(start, size)
            if self.separate_documents:
                positions[filled : filled + size] = np.arange(size)
            filled, document = filled + size, document + 1
        labels = np.where(positions == 0, IGNORED, ids) if self.separate_documents else ids.copy()
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _read(self, start: int, size: int) -> Array:
        """`size` ids from `start`, counted over all shards. They lie in one shard, as every document does."""
        shard = int(np.searchsorted(self._first_tokens, start, side="right")) - 1
        first = start - int(self._first_tokens[shard])
        return read_ids(self.folder, self._shards[shard], self._dtype, first, first + size, self.vocab_size)


def _reopened(
    folder: Path, sequence_length: int, split: str, seed: int, separate_documents: bool, tokenizer_hash: str
) -> PackedTokens:
    return PackedTokens(
        folder,
        sequence_length,
        split=split,
        seed=seed,
        separate_documents=separate_documents,
        expect_tokenizer_hash=tokenizer_hash,
    )


def _order(size: int, seed: int) -> Array:
    """A permutation by SplitMix64 of (seed, i). numpy's own may change between versions, which would break resuming."""
    with np.errstate(over="ignore"):
        x = np.arange(size, dtype=np.uint64) + _mixed(np.array([seed % 2**64], np.uint64))
        return np.argsort(_mixed(x), kind="stable")


def _mixed(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class PromptAnswers(Dataset[dict[str, torch.Tensor]]):
    """Prompts with answers, for fine-tuning. Only the answers have labels.

    path: a .jsonl file with one {"prompt": ..., "answer": ...} per line.
    tokenizer: of the model; it must have an end-of-sequence token.
    sequence_length: T. A prompt that is too long loses its middle, so that its beginning and its question stay.
    split: "train" or "validation".
    validation: share of the lines that "validation" holds, chosen by a hash of their content.
    seed: of the order.

    Item i is {"input_ids", "labels", "attention_mask"}, each int64 [T], padded at the end. Labels are −100 everywhere
    except at the answer and the end-of-sequence token behind it.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        sequence_length: int,
        *,
        split: str = "train",
        validation: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.path, self.tokenizer, self.sequence_length = Path(path), tokenizer, sequence_length
        if tokenizer.eos_token_id is None:
            raise DataError(f"{self.path}: the tokenizer must have an end-of-sequence token to end answers, got none")
        lines = _read_prompts(self.path)
        chosen = [line for line in lines if (_hash_share(line) < validation) == (split == "validation")]
        if not chosen:
            raise DataError(f"{self.path}: none of its {len(lines)} lines is in split {split!r}")
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed)).tolist()
        self.lines = [chosen[i] for i in order]
        self.vocab_size = len(tokenizer)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[operator.index(index)]
        T, eos = self.sequence_length, self.tokenizer.eos_token_id
        prompt = self.tokenizer.encode(line["prompt"])
        answer = [*self.tokenizer.encode(line["answer"], add_special_tokens=False), eos][: T - 1]
        room = T - len(answer)
        if len(prompt) > room:
            prompt = prompt[: room // 2] + prompt[len(prompt) - (room - room // 2) :]
        ids = prompt + answer
        padding = T - len(ids)
        return {
            "input_ids": torch.tensor(ids + [eos] * padding),
            "labels": torch.tensor([IGNORED] * len(prompt) + answer + [IGNORED] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
        }


def _read_prompts(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        # Not splitlines, which also splits at characters such as U+2028 that a JSON string may hold.
        texts = read_text(path).split("\n")
    except UnreadableFile as error:
        raise DataError(str(error)) from error
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = parse_json(text, f"{path}, line {number}")
        except UnreadableFile as error:
            raise DataError(str(error)) from error
        for key in ("prompt", "answer"):
            if not isinstance(line.get(key), str):
                raise DataError(f'{path}, line {number}: expected {{"prompt": text, "answer": text}}, got no {key!r}')
        lines.append({"prompt": line["prompt"], "answer": line["answer"]})
    if not lines:
        raise DataError(f"{path}: holds no lines")
    return lines


def _hash_share(line: dict[str, str]) -> float:
    """A hash of the line as a number in [0, 1)."""
    digest = hashlib.sha256(json.dumps([line["prompt"], line["answer"]]).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
