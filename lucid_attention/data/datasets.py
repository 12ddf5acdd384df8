"""Sequences for training, packed from token shards."""

import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .errors import DataError
from .shards import SPLITS, open_folder, read_ends, read_ids

IGNORED = -100

Array = np.ndarray[Any, np.dtype[np.int64]]


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """Documents, shuffled with a seed and laid one behind another, cut into sequences of T tokens.

    folder: written by `lucid tokenize`.
    sequence_length: T.
    split: "train" or "validation".
    seed: of the order of the documents. A pass over the items sees every token once, but for a remainder of less
        than T at the end; another pass in another order is another seed.
    separate_documents: keep documents apart. Positions start at 0 with every document (and with every item, where a
        document goes on), which is how Transformers models and ours are told about packing; and no label asks for
        the first token of a document, which nothing before it tells. Otherwise an item is one run of text.
    verify, expect_tokenizer_hash: as in `open_folder`.

    Item i is {"input_ids", "labels", "position_ids"}, each int64 [T]. Labels are not shifted (Transformers models
    shift them). Items depend on the arguments and on i alone: a run is resumed by its index. Tokens are read when an
    item is asked for; what stays in memory is 16 bytes a document.
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
            raise DataError(f"{folder}: split {split!r} has {tokens} tokens, too few for one of {sequence_length}")

    def _index_documents(self) -> None:
        ends = [read_ends(self.folder, shard) for shard in self._shards]
        lengths = [np.diff(each, prepend=0) for each in ends]
        # Of every shard, the first document and the first token, counted over all shards.
        self._first_documents = np.cumsum([0, *(each.size for each in ends)])
        self._first_tokens = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        length = np.concatenate([np.zeros(0, np.int64), *lengths])
        start = np.cumsum(length) - length
        order = _order(length.size, self.seed)
        # In the order of the items: where each document starts on disk, and where it ends in the stream.
        self._starts: Array = start[order]
        self._ends: Array = np.cumsum(length[order])

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process opens the folder again: cheaper than to send the index.
        options = (self.split, self.seed, self.separate_documents, self.tokenizer_hash)
        return _reopened, (self.folder, self.sequence_length, *options)

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.sequence_length if self._ends.size else 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = operator.index(index)
        item += len(self) if item < 0 else 0
        if not 0 <= item < len(self):
            raise IndexError(f"index must be below {len(self)}, got {index}")
        T = self.sequence_length
        here, stop = item * T, (item + 1) * T
        ids, positions = np.empty(T, np.int64), np.arange(T)
        document = int(np.searchsorted(self._ends, here, side="right"))
        filled = 0
        while filled < T:
            begin = int(self._ends[document - 1]) if document else 0
            end = min(int(self._ends[document]), stop)
            size = end - (here + filled)
            start = int(self._starts[document]) + here + filled - begin
            ids[filled : filled + size] = self._read(start, size)
            if self.separate_documents:
                positions[filled : filled + size] = np.arange(size)
            filled, document = filled + size, document + 1
        labels = np.where(positions == 0, IGNORED, ids) if self.separate_documents else ids.copy()
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _read(self, start: int, size: int) -> Array:
        """Ids from a place counted over all shards; a document lies in one shard."""
        shard = int(np.searchsorted(self._first_tokens, start, side="right")) - 1
        first = start - int(self._first_tokens[shard])
        return read_ids(self.folder, self._shards[shard], self._dtype, first, first + size)


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
    """A permutation by SplitMix64 of (seed, i): numpy's own may change with its version, and an order must not."""
    with np.errstate(over="ignore"):
        x = np.arange(size, dtype=np.uint64) + _mixed(np.array([seed % 2**64], np.uint64))
        return np.argsort(_mixed(x), kind="stable")


def _mixed(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
