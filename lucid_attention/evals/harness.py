"""Tasks of lm-evaluation-harness: found, asked sample by sample, scored."""

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from .runs import EvalError, Record, Run

TASKS = Path(__file__).parent / "benchmarks" / "harness_tasks"
# Prompts have the length that they have: the harness would drop their beginning.
NO_LIMIT = 1 << 40


class Prompted(HFLM):
    """The harness's model, except that a prompt is never cut. length: of prompt and answer, at most; 0 for any."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 1) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, max_length=NO_LIMIT, batch_size=batch_size)
        self.length = 0

    def _model_generate(self, context: torch.Tensor, max_length: int, **kwargs: Any) -> torch.Tensor:
        if self.length and max_length > self.length:
            raise EvalError(
                f"a prompt has {context.shape[1]} tokens, which with {max_length - context.shape[1]} for the answer is "
                f"more than the {self.length} of its task: is --tokenizer the model's own?"
            )
        if self.model.generation_config.eos_token_id is None:
            # The harness would stop at the end token too, but only when all prompts of a batch have come to theirs.
            kwargs["eos_token_id"] = self.eot_token_id
        return super()._model_generate(context=context, max_length=max_length, **kwargs)


def load_task(run: Run) -> Any:
    """The task of a run, with its samples."""
    folders = [str(TASKS)]
    if run.folder:
        folders.append(str(Path(lm_eval.tasks.__file__).parent / run.folder))
    # Without the harness's other tasks, whose index takes it seconds to make.
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=run.metadata)
    task = manager.load([run.task])["tasks"][run.task]
    if task.OUTPUT_TYPE != "generate_until":
        raise EvalError(f"{run.task} must be a task of generation, got {task.OUTPUT_TYPE}")
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if run.answer_tokens:
        task.set_config(key="generation_kwargs", value={"max_gen_toks": run.answer_tokens}, update=True)
    task.set_fewshot_seed(seed=0)
    return task


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the harness's remarks on how it is used, and its bars: there is one of ours."""
    chatter = logging.getLogger("lm_eval")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        chatter.setLevel(level)


class Asked:
    """A run of a harness task. lm: a model of the harness."""

    def __init__(self, run: Run, lm: Any) -> None:
        self.run, self.lm = run, lm
        with quiet():
            self.task = load_task(run)
        self.samples = len(self.task.eval_docs)

    def __call__(self, indices: Sequence[int], batch_size: int) -> Iterator[Record]:
        """A record for every index, longest prompts first: where memory does not suffice, it shows at once."""
        # The harness takes samples in the order of the data, whatever the order of the indices.
        chosen = sorted(indices)
        with quiet():
            self.task.build_all_requests(samples=chosen)
        self.lm.length = self.run.length
        asked = sorted(self.task.instances, key=lambda each: -len(each.args[0]))
        for first in range(0, len(asked), batch_size):
            batch = asked[first : first + batch_size]
            with quiet():
                answers = self.lm.generate_until(batch)
            for instance, answer in zip(batch, answers, strict=True):
                yield self._scored(instance, answer, chosen[instance.doc_id])

    def _scored(self, instance: Any, answer: str, index: int) -> Record:
        instance.resps.append(answer)
        for each in self.task._filters:
            each.apply([instance])
        output = next(iter(instance.filtered_resps.values()))
        metrics = self.task.process_results(instance.doc, [output])
        return {
            "id": index,
            "score": float(metrics[self.run.metric]),
            "output": output,
            "target": self.task.doc_to_target(instance.doc),
            "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
            **{name: instance.doc[name] for name in self.run.keep},
        }
