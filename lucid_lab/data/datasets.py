"""Training sets read from files: documents packed from a folder of tokens, and prompts with answers."""

import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from torch.utils.data import Dataset

from lucid_attention.files import parse_json, read_text

from ..labels import IGNORED
from . import DataError
from .tokenize import SPLITS, hash_share, read_manifest

Array = np.ndarray[Any, np.dtype[Any]]


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """Documents in shuffled order, joined to one stream that is cut into sequences of T tokens.

    folder: written by `lucid tokenize`.
    sequence_length: T.
    split: "train" or "validation".
    seed: of the order of the documents. All items together hold every token once, except for fewer than T at the end.
    separate_documents: keep documents apart. Positions then start at 0 with every document and every item, which is how
        models see where a document begins, and the first token of a document has no label. Otherwise an item is one
        run of text.

    Item i is {"input_ids", "labels", "position_ids"}, each int64 [T]. Labels are not shifted (Transformers models
    shift them). An item depends on the arguments and on i alone. Tokens stay on disk (memory-mapped); the index in
    memory takes 24 bytes per document.
    """

    def __init__(
        self,
        folder: str | Path,
        sequence_length: int,
        *,
        split: str = "train",
        seed: int = 0,
        separate_documents: bool = True,
    ) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {sequence_length}")
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        manifest = read_manifest(Path(folder))
        self.vocab_size = int(manifest["vocab_size"])
        self.sequence_length, self.separate_documents = sequence_length, separate_documents
        self._arguments = (folder, sequence_length, split, seed, separate_documents)
        self._chunks = token_chunks(folder, split)
        lengths = [np.diff(offsets) for _, offsets in self._chunks]
        length = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
        tokens = manifest["splits"][split]["tokens"]
        if int(length.sum()) != tokens:
            raise DataError(f"{folder}: split {split!r} must have {tokens} tokens, got {length.sum()}: tokenize again")
        # RandomState never changes between versions of numpy, so a run resumes with the same order.
        self._order = np.random.RandomState(seed % 2**32).permutation(length.size)
        # The first document of every chunk, and the end of every document in the shuffled stream.
        self._first_documents = np.cumsum([0, *(part.size for part in lengths)])
        self._ends = np.cumsum(length[self._order])
        if not len(self):
            way_out = "a larger --validation" if split == "validation" else "more text"
            raise DataError(
                f"{folder}: split {split!r} must have at least {sequence_length} tokens, got {tokens}: "
                f"tokenize again with {way_out}, or choose a smaller sequence_length"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process opens the folder again: cheaper than sending the index.
        return _reopened, self._arguments

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.sequence_length if self._ends.size else 0

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
            size = min(int(self._ends[document]), item_end) - (item_start + filled)
            start = item_start + filled - document_start
            ids[filled : filled + size] = self._document(int(self._order[document]))[start : start + size]
            if self.separate_documents:
                positions[filled : filled + size] = np.arange(size)
            filled, document = filled + size, document + 1
        if ids.max() >= self.vocab_size or ids.min() < 0:
            raise DataError(f"{self._arguments[0]} is damaged: a token is not below {self.vocab_size}: tokenize again")
        labels = np.where(positions == 0, IGNORED, ids) if self.separate_documents else ids.copy()
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _document(self, number: int) -> Array:
        chunk = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        values, offsets = self._chunks[chunk]
        row = number - int(self._first_documents[chunk])
        return values[offsets[row] : offsets[row + 1]]


def _reopened(folder: str | Path, length: int, split: str, seed: int, separate_documents: bool) -> PackedTokens:
    return PackedTokens(folder, length, split=split, seed=seed, separate_documents=separate_documents)


def token_chunks(folder: str | Path, split: str = "train") -> list[tuple[Array, Array]]:
    """The tokens of a folder: for every chunk of documents their ids, and offsets [documents + 1] into these.

    The arrays are views of the files.
    """
    try:
        parts = load_from_disk(str(folder))
        if split not in parts:
            return []
        column = parts[split].data.column("input_ids")
        pairs = [(chunk.flatten().to_numpy(), chunk.offsets.to_numpy().astype(np.int64)) for chunk in column.chunks]
    # pyarrow's errors for a damaged file have no common base class.
    except Exception as error:
        raise DataError(f"{folder}: the tokens cannot be read ({error}): tokenize again") from error
    # `flatten` begins with the first document of a slice, `offsets` with that of the whole.
    return [(values, offsets - offsets[0]) for values, offsets in pairs if offsets.size]


class PromptAnswers(Dataset[dict[str, torch.Tensor]]):
    """Prompts with answers, for fine-tuning. Only the answers have labels.

    path: a .jsonl file with one {"prompt": ..., "answer": ...} per line.
    tokenizer: of the model; it must have an end-of-sequence token.
    sequence_length: T. A prompt that is too long loses its middle, so that its beginning and its question stay.
    split: "train" or "validation".
    validation: share of the lines that "validation" holds, chosen by a hash of their content.
    seed: of the order.

    Item i is {"input_ids", "labels", "attention_mask"}, each int64 [T], padded at the end. Labels are −100 everywhere
    except at the answer and the end-of-sequence token after it.
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
        chosen = [
            line
            for line in lines
            if (hash_share(json.dumps([line["prompt"], line["answer"]])) < validation) == (split == "validation")
        ]
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
        raise DataError(f"{path}: there is no such file of prompts with answers")
    lines = []
    # Not splitlines, which also splits at characters such as U+2028 that a JSON string may hold.
    for number, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        line = parse_json(text, f"{path}, line {number}")
        for key in ("prompt", "answer"):
            if not isinstance(line.get(key), str):
                raise DataError(f'{path}, line {number}: expected {{"prompt": text, "answer": text}}, got no {key!r}')
        lines.append({"prompt": line["prompt"], "answer": line["answer"]})
    if not lines:
        raise DataError(f"{path}: holds no lines")
    return lines
