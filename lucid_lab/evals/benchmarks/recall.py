"""Recall of bare tokens: the accuracy of checkpoints that were trained on the tasks in `data/synthetic.py`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...data.synthetic import MemoryUpdate, Needles
from ...labels import IGNORED
from ..cells import Cell, EvalError, Options, Record

# Training draws items from seeds near the recipe's; evaluation draws from seeds far from them.
FAR = 7_000_000_019
# Commands whose checkpoints have the vocabulary and the length of a task.
TRAINED_BY: dict[Any, str] = {
    Needles: "lucid train tiny_needle",
    MemoryUpdate: "lucid train tiny_needle --data memory_update",
}


def needles(options: Options) -> list[Cell]:
    """`Needles`: pairs of key and value among fillers."""
    return _cells(Needles, options)


def memory_update(options: Options) -> list[Cell]:
    """`MemoryUpdate`: the latest value of a key wins."""
    return _cells(MemoryUpdate, options)


def _cells(kind: Any, options: Options) -> list[Cell]:
    """A cell for every number of keys and length. kind: the class of the task."""
    cells = []
    for n in options.needles or (2, 4, 8, 16):
        for length in options.lengths or (65,):
            task = kind(n, length, size=options.samples, seed=FAR + options.seed)
            metadata = {"task": kind.__name__, "needles": n, "length": length, "seed": options.seed}
            cells.append(
                Cell(
                    {"needles": n, "length": length},
                    "accuracy",
                    metadata=metadata | {"samples": options.samples},
                    length=length,
                    evaluate=partial(_evaluate, task),
                    samples=options.samples,
                )
            )
    return cells


@torch.inference_mode()
def _evaluate(task: Any, model: Any, tokenizer: Any, indices: Sequence[int], batch_size: int) -> Iterator[Record]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if vocabulary != task.vocab_size:
        raise EvalError(
            f"the checkpoint must have the vocabulary of {type(task).__name__}, {task.vocab_size} tokens, as those of "
            f"`{TRAINED_BY[type(task)]}` have, got {vocabulary}"
        )
    for first in range(0, len(indices), batch_size):
        batch = indices[first : first + batch_size]
        items = [task[index] for index in batch]
        ids = torch.stack([item["input_ids"] for item in items]).to(model.device)
        predictions = model(input_ids=ids).logits.argmax(-1).cpu()
        for index, item, predicted in zip(batch, items, predictions, strict=True):
            asked = item["labels"] != IGNORED
            # The logits at position i predict token i + 1.
            answers, output = item["labels"][asked], predicted[asked.roll(-1)]
            yield {
                "id": index,
                "output": output.tolist(),
                "target": answers.tolist(),
                "score": (output == answers).double().mean().item(),
            }
