"""Jobs that train a small model: from settings to curves, accuracies and weights."""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...labels import IGNORED
from ..engine.jobs import Job, Record, Work
from ..engine.result import finite
from .model import SmallModel
from .tasks import TASKS, Batch, Task

WEIGHTS = "model.safetensors"
# Points of a learning curve.
POINTS = 20
# Untimed steps at the start.
WARM_UP = 5


@dataclass(frozen=True)
class SmallRun:
    """Everything that a small training run depends on.

    task: a name in TASKS. n: numbers of keys or needles. length: tokens of a sequence.
    attention to embedding_std: as in `SmallModel`.
    steps, batch, rate, seed: AdamW (0.9, 0.99), a gradient norm of at most 1, warm-up over 50 steps, then a cosine.
    test_n, test_lengths: every pair of them is tested at the end. test_batch: sequences of a test.
    start: the settings of the run whose weights this one starts from.
    """

    task: str = "overwrites"
    n: tuple[int, ...] = (2, 4, 8, 16)
    length: int = 64
    attention: str = "lucid"
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 1
    width: int = 64
    heads: int = 2
    head_dim: int = 16
    rope: bool = True
    mlp: float = 0.0
    token_shift: bool = False
    embedding_std: float = 0.02
    steps: int = 500
    batch: int = 16
    rate: float = 3e-3
    seed: int = 0
    test_n: tuple[int, ...] = (2, 4, 8, 16)
    test_lengths: tuple[int, ...] = (64,)
    test_batch: int = 256
    start: Mapping[str, Any] | None = None

    def job(self, label: str = "", milliseconds: float = 20.0) -> Job:
        """The job that trains this run. milliseconds: about the time of a step."""
        seconds = self.steps * milliseconds / 1000 + 1
        return Job("small.training:train_small", asdict(self), label or f"{self.task} {self.attention}", seconds)

    def but(self, **changes: Any) -> "SmallRun":
        """The same run with changes."""
        return replace(self, **changes)

    def make_task(self) -> Task:
        """The task of the run."""
        return TASKS[self.task](self.n, self.length)

    def make_model(self) -> SmallModel:
        """The model before training, initialised from the seed."""
        task = self.make_task()
        torch.manual_seed(self.seed)
        return SmallModel(
            task.tables,
            task.answers,
            attention=self.attention,
            options=dict(self.options),
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            head_dim=self.head_dim,
            rope=self.rope,
            mlp=self.mlp,
            token_shift=self.token_shift,
            embedding_std=self.embedding_std,
        )


def train_small(work: Work, **settings: Any) -> Record:
    """The job: train, test, keep the weights."""
    run = SmallRun(**settings)
    model = run.make_model()
    if run.start is not None:
        model.load_state_dict(load_file(work.folder_of(SmallRun(**run.start).job()) / WEIGHTS))
    curve: dict[str, list[float]] = {"step": [], "loss": [], "seconds": []}
    start, total, counted = time.perf_counter(), 0.0, 0
    for step, loss in enumerate(train_steps(run, model), 1):
        total, counted = total + float(loss), counted + 1
        if step % max(1, run.steps // POINTS) == 0 or step == run.steps:
            curve["step"].append(step)
            curve["loss"].append(total / counted)
            curve["seconds"].append(round(time.perf_counter() - start, 2))
            total, counted = 0.0, 0
    save_file(model.state_dict(), work.folder / WEIGHTS)
    tests = [
        {"n": n, "length": length, **score(model, run.make_task().test(run.test_batch, n, length))}
        for length in run.test_lengths
        for n in run.test_n
    ]
    curve["loss"] = finite(curve["loss"])  # type: ignore[assignment]
    return {"curve": curve, "tests": tests, "parameters": sum(weight.numel() for weight in model.parameters())}


def train_steps(run: SmallRun, model: SmallModel) -> Iterator[Tensor]:
    """Train the model, yielding the loss of every step."""
    task = run.make_task()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=run.rate, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, steps=run.steps))
    for step in range(run.steps):
        loss = loss_of(model, task.batch(run.batch, run.seed, step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        yield loss.detach()


def _rate(step: int, steps: int) -> float:
    warmup = min(50, steps // 4 + 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - warmup) / max(1, steps - warmup)))))


def loss_of(model: SmallModel, batch: Batch) -> Tensor:
    """Mean cross entropy of the answers. Other positions get no logits."""
    inputs, labels = batch
    has_answer = labels != IGNORED
    loss: Tensor = F.cross_entropy(model.out(model.hidden(inputs)[has_answer]), labels[has_answer])
    return loss


@torch.no_grad()
def score(model: SmallModel, batch: Batch, at_once: int = 64) -> dict[str, float | None]:
    """Accuracy in percent and loss in nats, over the answers of a batch."""
    correct, loss, count = 0, 0.0, 0
    for inputs, labels in zip(*(part.split(at_once) for part in batch), strict=True):
        has_answer = labels != IGNORED
        logits, answers = model.out(model.hidden(inputs)[has_answer]), labels[has_answer]
        correct += int((logits.argmax(-1) == answers).sum())
        loss += float(F.cross_entropy(logits, answers, reduction="sum"))
        count += len(answers)
    # A diverged model has no finite loss: None.
    return {"accuracy": 100 * correct / count, "loss": finite([loss / count])[0]}


def load_small(work: Work, run: SmallRun) -> SmallModel:
    """The trained model of a finished run."""
    model = run.make_model()
    model.load_state_dict(load_file(Path(work.folder_of(run.job())) / WEIGHTS))
    return model.eval()


def time_job(run: SmallRun, against: SmallRun, label: str = "") -> Job:
    """The job that measures the time of a step of one run over that of another."""
    arguments = {"run": asdict(run.but(seed=0, start=None)), "against": asdict(against.but(seed=0, start=None))}
    return Job("small.training:time_steps", arguments, label or "time of a step", 8, alone=True)


def time_steps(work: Work, run: dict[str, Any], against: dict[str, Any], rounds: int = 40) -> Record:
    """The job: steps of both runs in turn on one thread, and their medians."""
    runs = [SmallRun(**settings) for settings in (run, against)]
    training = [train_steps(small_run.but(steps=rounds + WARM_UP), small_run.make_model()) for small_run in runs]
    times: list[list[float]] = [[], []]
    for _ in range(rounds + WARM_UP):
        for seconds, steps in zip(times, training, strict=True):
            start = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - start)
    medians = [statistics.median(seconds[WARM_UP:]) for seconds in times]
    return {"milliseconds": [1000 * median for median in medians], "ratio": medians[0] / medians[1]}
