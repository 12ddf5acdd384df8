"""Answers to prompts, for fine-tuning: the prompt is read, the answer is learned."""

import json
import operator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .errors import DataError

IGNORED = -100


class PromptAnswers(Dataset[dict[str, torch.Tensor]]):
    """A .jsonl file of {"prompt": ..., "answer": ...}, one item a line.

    path: of the file.
    tokenizer: of the model, with `encode` and an end-of-sequence token.
    sequence_length: T. A prompt that is too long loses its middle, so that its question and its beginning stay.
    split, validation: the share of the lines, chosen by their content, that is not in "train".
    seed: of the order.

    Item i is {"input_ids", "labels", "attention_mask"}, each int64 [T]; labels are −100 except at the answer and its
    end. What is left of T is padding, at the end.
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
            raise DataError(f"{self.path}: answers need a tokenizer with an end-of-sequence token")
        lines = _read(self.path)
        # By content: the same line is on the same side in every run and every file.
        chosen = [line for line in lines if (_share(line) < validation) == (split == "validation")]
        if not chosen:
            raise DataError(f"{self.path}: no line of its {len(lines)} is in split {split!r}")
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed)).tolist()
        self.lines = [chosen[i] for i in order]
        self.vocab_size = len(tokenizer)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[operator.index(index)]
        T, end = self.sequence_length, self.tokenizer.eos_token_id
        prompt = self.tokenizer.encode(line["prompt"])
        answer = [*self.tokenizer.encode(line["answer"], add_special_tokens=False), end][: T - 1]
        room = T - len(answer)
        if len(prompt) > room:
            prompt = prompt[: room // 2] + prompt[len(prompt) - (room - room // 2) :]
        ids = prompt + answer
        padding = T - len(ids)
        return {
            "input_ids": torch.tensor(ids + [end] * padding),
            "labels": torch.tensor([IGNORED] * len(prompt) + answer + [IGNORED] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
        }


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        # Not splitlines: a text may hold other characters that it takes for ends of lines.
        content = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8, byte {error.start}") from error
    lines = []
    for number, text in enumerate(content, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: no JSON: {error}") from error
        for key in ("prompt", "answer"):
            if not isinstance(line, dict) or not isinstance(line.get(key), str):
                raise DataError(f'{path}, line {number}: expected {{"prompt": text, "answer": text}}, got no {key!r}')
        lines.append({"prompt": line["prompt"], "answer": line["answer"]})
    if not lines:
        raise DataError(f"{path}: holds no lines")
    return lines


def _share(line: dict[str, str]) -> float:
    """A number in [0, 1) that belongs to the content."""
    digest = sha256(json.dumps([line["prompt"], line["answer"]]).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
