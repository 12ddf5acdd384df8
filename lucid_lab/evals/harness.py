"""Tasks of lm-evaluation-harness: load them, ask a model their samples, score the answers."""

import contextlib
import hashlib
import io
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import GenerationConfig

from .cells import Cell, EvalError, Record

TASK_FOLDER = Path(__file__).parent / "benchmarks" / "harness_tasks"
# The harness drops the beginning of a prompt above the model's limit: report no limit.
NO_LIMIT = 1 << 40


class HarnessModel(HFLM):
    """The harness's model, except that it never cuts a prompt, and that answers are always the most probable tokens.

    length: most tokens of prompt and answer; 0 for any.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 1) -> None:
        with quiet():
            super().__init__(pretrained=model, tokenizer=tokenizer, max_length=NO_LIMIT, batch_size=batch_size)
        # A checkpoint's own limits, beams and penalties would change its answers: only its special tokens count.
        of_checkpoint = model.generation_config
        model.generation_config = GenerationConfig(
            **{name: getattr(of_checkpoint, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        )
        self.length = 0

    def _model_generate(self, context: torch.Tensor, max_length: int, **kwargs: Any) -> torch.Tensor:
        if self.length and max_length > self.length:
            raise EvalError(
                f"a prompt has {context.shape[1]} tokens, which with {max_length - context.shape[1]} for the answer is "
                f"more than the {self.length} of its task: is --tokenizer the model's own?"
            )
        if self.model.generation_config.eos_token_id is None:
            # Without this, the harness generates until every answer of the batch has an end token.
            kwargs["eos_token_id"] = self.eot_token_id
        return super()._model_generate(context=context, max_length=max_length, **kwargs)


@cache
def task_version() -> str:
    """The version of the harness, which scores answers, and a hash of the definitions of our tasks."""
    digest = hashlib.sha256()
    for file in sorted(TASK_FOLDER.rglob("*.yaml")):
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return f"{version('lm_eval')} {digest.hexdigest()[:16]}"


def load_task(cell: Cell) -> Any:
    """The harness task of a cell, with its samples."""
    # The index of the harness's own tasks would take seconds to make.
    manager = TaskManager(include_path=[str(TASK_FOLDER)], include_defaults=False, metadata=cell.metadata)
    task = manager.load([cell.task])["tasks"][cell.task]
    if task.OUTPUT_TYPE != "generate_until":
        raise EvalError(f"{cell.task} must be a task of generation, got {task.OUTPUT_TYPE}")
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if cell.answer_tokens:
        task.set_config(key="generation_kwargs", value={"max_gen_toks": cell.answer_tokens}, update=True)
    task.set_fewshot_seed(seed=0)
    return task


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the harness's warnings and progress bars; the runner draws its own bar."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


class HarnessCell:
    """A cell with its harness task loaded. lm: a model of the harness."""

    def __init__(self, cell: Cell, lm: Any) -> None:
        self.cell, self.lm = cell, lm
        with quiet():
            self.task = load_task(cell)
        self.samples = len(self.task.eval_docs)

    def __call__(self, indices: Sequence[int], batch_size: int) -> Iterator[Record]:
        """One record for every index. The longest prompts come first, so that a lack of memory shows at once."""
        # The harness keeps the order of the data, not the order of the indices.
        ordered = sorted(indices)
        with quiet():
            self.task.build_all_requests(samples=ordered)
        self.lm.length = self.cell.length
        instances = sorted(self.task.instances, key=lambda instance: -len(instance.args[0]))
        for first in range(0, len(instances), batch_size):
            batch = instances[first : first + batch_size]
            with quiet():
                answers = self.lm.generate_until(batch)
            for instance, answer in zip(batch, answers, strict=True):
                yield self._record(instance, answer, ordered[instance.doc_id])

    def _record(self, instance: Any, answer: str, index: int) -> Record:
        instance.resps.append(answer)
        for answer_filter in self.task._filters:
            answer_filter.apply([instance])
        output = next(iter(instance.filtered_resps.values()))
        metrics = self.task.process_results(instance.doc, [output])
        return {
            "id": index,
            "score": float(metrics[self.cell.metric]),
            "output": output,
            "target": self.task.doc_to_target(instance.doc),
            "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
            **{name: instance.doc[name] for name in self.cell.keep},
        }
