"""Recall of bare tokens: accuracy of checkpoints that were trained on the tasks in `data/synthetic.py`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...base.labels import IGNORED
from ...data.synthetic import MemoryUpdate, Needles
from ..runs import EvalError, Options, Record, Run

# Training draws items from seeds near the recipe's: these are far from them.
FAR = 7_000_000_019


def needles(options: Options) -> list[Run]:
    """`Needles`: pairs among fillers."""
    return _runs(Needles, options)


def memory_update(options: Options) -> list[Run]:
    """`MemoryUpdate`: the latest value of a key wins."""
    return _runs(MemoryUpdate, options)


def _runs(kind: Any, options: Options) -> list[Run]:
    cells = []
    for n in options.needles or (2, 4, 8, 16):
        for length in options.lengths or (65,):
            task = kind(n, length, size=options.samples, seed=FAR + options.seed)
            metadata = {"task": kind.__name__, "needles": n, "length": length, "seed": options.seed}
            cells.append(
                Run(
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
        name = type(task).__name__
        raise EvalError(
            f"the checkpoint must have the vocabulary of {name}, {task.vocab_size} tokens, as those of `lucid train "
            f"tiny_needle` have, got {vocabulary}"
        )
    for first in range(0, len(indices), batch_size):
        chosen = indices[first : first + batch_size]
        items = [task[index] for index in chosen]
        ids = torch.stack([item["input_ids"] for item in items]).to(model.device)
        likely = model(input_ids=ids).logits.argmax(-1).cpu()
        for index, item, said in zip(chosen, items, likely, strict=True):
            asked = item["labels"] != IGNORED
            answers, given = item["labels"][asked], said[asked.roll(-1)]
            yield {
                "id": index,
                "output": given.tolist(),
                "target": answers.tolist(),
                "score": (given == answers).double().mean().item(),
            }
