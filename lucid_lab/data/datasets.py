"""Training sets read from files: documents packed from a folder of tokens, and prompts with answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lucid_attention.files import parse_json, read_text

from . import IGNORED, DataError
from .tokenize import check_files, document_lengths, hash_share, load_tokens, read_manifest


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
    memory takes 16 bytes per document.
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
        manifest = read_manifest(Path(folder))
        self.vocab_size = int(manifest["vocab_size"])
        self.sequence_length, self.separate_documents = sequence_length, separate_documents
        tokens = manifest["splits"][split]["tokens"]
        if tokens < sequence_length:
            way_out = "a larger --validation" if split == "validation" else "more text"
            raise DataError(
                f"{folder}: split {split!r} must have at least {sequence_length} tokens, got {tokens}: "
                f"tokenize again with {way_out}, or choose a smaller sequence_length"
            )
        check_files(Path(folder), split)
        self._documents = load_tokens(folder)[split].with_format("numpy")
        lengths = document_lengths(self._documents)
        # RandomState never changes between versions of numpy, so a run resumes with the same order.
        self._order = np.random.RandomState(seed % 2**32).permutation(lengths.size)
        # The end of every document in the shuffled stream.
        self._ends = np.cumsum(lengths[self._order])

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be 0 to {len(self) - 1}, got {index}")
        T = self.sequence_length
        item_start, item_end = index * T, (index + 1) * T
        ids, positions = np.empty(T, np.int64), np.arange(T)
        document = int(np.searchsorted(self._ends, item_start, side="right"))
        filled = 0
        while filled < T:
            document_start = int(self._ends[document - 1]) if document else 0
            size = min(int(self._ends[document]), item_end) - (item_start + filled)
            start = item_start + filled - document_start
            row = self._documents[int(self._order[document])]["input_ids"]
            ids[filled : filled + size] = row[start : start + size]
            if self.separate_documents:
                positions[filled : filled + size] = np.arange(size)
            filled, document = filled + size, document + 1
        labels = np.where(positions == 0, IGNORED, ids) if self.separate_documents else ids.copy()
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


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
        self.tokenizer, self.sequence_length = tokenizer, sequence_length
        if tokenizer.eos_token_id is None:
            raise DataError(f"{path}: the tokenizer must have an end-of-sequence token to end answers, got none")
        lines = _read_prompts(Path(path))
        chosen = [
            line
            for line in lines
            if (hash_share(json.dumps([line["prompt"], line["answer"]])) < validation) == (split == "validation")
        ]
        if not chosen:
            raise DataError(f"{path}: none of its {len(lines)} lines is in split {split!r}")
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed)).tolist()
        self.lines = [chosen[i] for i in order]
        self.vocab_size = len(tokenizer)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[index]
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
