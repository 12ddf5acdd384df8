"""Jobs that train a small model in stages, or with layers that differ."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lucid_attention.nn.attention import ATTENTIONS

from ..engine.jobs import Job, Record, Work
from ..engine.result import finite
from ..small.model import Shifted, SmallModel
from ..small.tasks import Task
from ..small.training import POINTS, SmallRun, score, train_steps
from .tasks import STAGED_TASKS, Stage


@dataclass(frozen=True)
class StagedRun(SmallRun):
    """A small run in stages, or with layers that differ.

    stages: of a task in STAGED_TASKS, with equally many steps each; n and length of `SmallRun` are not used then.
    local: windows of layers that have sliding-window attention instead, by the number of the layer as text.
    """

    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    local: Mapping[str, int] = field(default_factory=dict)

    def job(self, label: str = "", milliseconds: float = 20.0) -> Job:
        """The job that trains this run. milliseconds: about the time of a step."""
        seconds = self.steps * milliseconds / 1000 + 5
        return Job("staged.training:train_staged", asdict(self), label or f"{self.task} {self.attention}", seconds)

    def but(self, **changes: Any) -> "StagedRun":
        """The same run with changes."""
        return replace(self, **changes)

    def make_task(self) -> Task:
        """The task of the run."""
        if self.task in STAGED_TASKS:
            return STAGED_TASKS[self.task]([Stage(*stage) for stage in self.stages], self.steps)
        return super().make_task()

    def make_model(self) -> SmallModel:
        """The model before training, initialised from the seed."""
        model = super().make_model()
        for layer, window in self.local.items():
            options: dict[str, Any] = {"rope_base": 10_000.0 if self.rope else None, "window": window}
            sliding = ATTENTIONS["sliding"](self.width, self.heads, head_dim=self.head_dim, **options)
            if self.token_shift:
                for name in ("k_proj", "v_proj"):
                    setattr(sliding, name, Shifted(getattr(sliding, name)))
            model.layers[int(layer)].attention = sliding
        return model


def train_staged(work: Work, **settings: Any) -> Record:
    """The job: train and test. The seconds are those of the processor, so that other jobs beside it do not count."""
    run = StagedRun(**settings)
    model = run.make_model()
    every, losses, curve = max(1, run.steps // POINTS), [], {"step": [], "loss": []}  # type: ignore[var-annotated]
    start = time.process_time()
    for step, loss in enumerate(train_steps(run, model), 1):
        losses.append(float(loss))
        if step % every == 0 or step == run.steps:
            curve["step"].append(step)
            curve["loss"] += finite([sum(losses) / len(losses)])
            losses.clear()
    seconds = time.process_time() - start
    tests = [
        {"n": n, "length": length, **score(model, run.make_task().test(run.test_batch, n, length), at_once=16)}
        for length in run.test_lengths
        for n in run.test_n
    ]
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"curve": curve, "tests": tests, "seconds": round(seconds, 2), "parameters": parameters}
