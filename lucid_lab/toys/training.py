"""One training loop for all toys: settings, the model that they describe, its training and its tests.

The model learns in seconds. It is smaller than `LucidForCausalLM` and has the settings that controls need: no MLP, a
token shift, embeddings of any size, a sliding window in some layers.
"""

import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lucid_attention.nn.attention import ATTENTIONS, LucidAttention
from lucid_attention.ops.keys import calibrated_key_map

from .tasks import IGNORED, SENTENCE_TASKS, TASKS, Batch, Stage, Task

WEIGHTS = "model.safetensors"
# Points of a learning curve.
POINTS = 20
# Untimed steps at the start.
WARM_UP = 5

Record = dict[str, Any]


@dataclass(frozen=True)
class Toy:
    """Everything that the training of a small model depends on.

    task: a name in TASKS. n: numbers of keys or needles. length: tokens of a sequence.
    stages: of a task in SENTENCE_TASKS, (length, n) instead of n and length, with equally many steps each.
    attention: a name in ATTENTIONS. options: more arguments of its constructor.
    local: windows of layers that have sliding-window attention instead, by the number of the layer as text.
    mlp: inner size of the MLPs over width, 0 for no MLP. token_shift: keys and values also see the token before.
    embedding_std: standard deviation of the embeddings at the start.
    steps, batch, rate, seed: AdamW (0.9, 0.99), a gradient norm of at most 1, warm-up over 50 steps, then a cosine.
    muon: the matrices of the layers are trained by Muon, with updates as large as those of AdamW.
    test_n, test_lengths: every pair of them is tested at the end. test_batch: sequences of a test.
    start: "folder" of the training whose weights this one starts from.
    """

    task: str = "overwrites"
    n: tuple[int, ...] = (2, 4, 8, 16)
    length: int = 64
    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    attention: str = "lucid"
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 1
    width: int = 64
    heads: int = 2
    head_dim: int = 16
    local: Mapping[str, int] = field(default_factory=dict)
    rope: bool = True
    mlp: float = 0.0
    token_shift: bool = False
    embedding_std: float = 0.02
    steps: int = 500
    batch: int = 16
    rate: float = 3e-3
    muon: bool = False
    seed: int = 0
    test_n: tuple[int, ...] = (2, 4, 8, 16)
    test_lengths: tuple[int, ...] = (64,)
    test_batch: int = 256
    start: str = ""

    def but(self, **changes: Any) -> "Toy":
        """The same settings with changes."""
        return replace(self, **changes)

    def make_task(self) -> Task:
        """The task of these settings."""
        if self.stages:
            return SENTENCE_TASKS[self.task]([Stage(*stage) for stage in self.stages], self.steps)
        return TASKS[self.task](self.n, self.length)

    def make_model(self) -> "ToyModel":
        """The model before training, initialised from the seed."""
        torch.manual_seed(self.seed)
        return ToyModel(self, self.make_task())


# The character model of `language_model`, `variants` and `condition_number`, before any tuning.
CHARACTER_MODEL = Toy(
    task="characters",
    n=(0,),
    length=256,
    layers=2,
    heads=4,
    mlp=2.0,
    batch=8,
    test_n=(0,),
    test_lengths=(256,),
    test_batch=128,
)
TINY_CHARACTER_MODEL = CHARACTER_MODEL.but(
    length=16, layers=1, width=16, heads=4, head_dim=4, steps=4, batch=2, test_lengths=(16,), test_batch=4
)


class Shifted(nn.Module):
    """A projection that also sees the token before: y_t + s·y_{t−1}, with a learned s for every channel."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection = projection
        self.before = nn.Parameter(torch.zeros(projection.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, width] -> [B, T, out]."""
        y: Tensor = self.projection(x)
        return y + self.before * F.pad(y, (0, 0, 1, -1))


class ToyLayer(nn.Module):
    """Attention and, if mlp > 0, an MLP, each after a norm and next to a residual."""

    def __init__(self, attention: nn.Module, width: int, mlp: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), attention
        inner = round(mlp * width)
        self.mlp = (
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            if inner
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, width]."""
        o, _ = self.attention(self.norm(x))
        x = x + o
        return x if self.mlp is None else x + self.mlp(x)


class ToyModel(nn.Module):
    """Embeddings, layers, an output."""

    def __init__(self, toy: Toy, task: Task) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(size, toy.width) for size in task.tables])
        for table in self.embeddings:
            nn.init.normal_(table.weight, std=toy.embedding_std)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(
            [ToyLayer(_attention(toy, index), toy.width, toy.mlp) for index in range(toy.layers)]
        )
        self.norm = nn.RMSNorm(toy.width)
        self.out = nn.Linear(toy.width, task.answers)
        # Last, so that the other layers have the same weights with and without a window.
        for index, window in toy.local.items():
            sliding = toy.but(attention="sliding", options={"window": window})
            self.layers[int(index)].attention = _attention(sliding, int(index))

    def hidden(self, inputs: Tensor) -> Tensor:
        """inputs: [B, T], or [B, T, tables] -> [B, T, width], normalised."""
        columns = inputs[..., None] if inputs.ndim == 2 else inputs
        x = sum(table(columns[..., i]) for i, table in enumerate(self.embeddings))
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: [B, T], or [B, T, tables] -> logits [B, T, answers]."""
        logits: Tensor = self.out(self.hidden(inputs))
        return logits


class FollowingLucid(LucidAttention):
    """LUCID whose centre and map follow mean and covariance of its keys: a pass in training moves them by a tenth.

    For toys alone: activation checkpointing would move them twice a step.
    """

    def values(self, x: Tensor, k: Tensor, *others: Any) -> Tensor:
        if self.training:
            with torch.no_grad():
                maps: Any = self.key_map(), calibrated_key_map(k)
                old, new = (torch.linalg.inv(one.matrix.double() @ one.matrix.double()) for one in maps)
                values, vectors = torch.linalg.eigh(old.lerp(new, 0.1))
                # New tensors: a graph may hold the old ones.
                self.key_matrix = ((vectors * values.rsqrt()[:, None]) @ vectors.mT).float()
                self.key_center = maps[0].center.lerp(maps[1].center, 0.1)
        return super().values(x, k, *others)


def _attention(toy: Toy, index: int) -> nn.Module:
    """The attention of a layer."""
    arguments = dict(toy.options)
    variant = FollowingLucid if arguments.pop("following", False) else ATTENTIONS[toy.attention]
    if variant.takes_rotary:
        arguments["rope_base"] = 10_000.0 if toy.rope else None
    if "layer_index" in inspect.signature(variant).parameters:
        arguments["layer_index"] = index
    module = variant(toy.width, toy.heads, head_dim=toy.head_dim, **arguments)
    if toy.token_shift:
        for name in ("k_proj", "v_proj"):
            setattr(module, name, Shifted(getattr(module, name)))
    return module


def training_loop(
    steps: int,
    loss: Callable[[int], Tensor],
    *optimizers: torch.optim.Optimizer,
    rate: Callable[[int], float] = lambda step: 1.0,
    clip: Iterable[Tensor] = (),
) -> Iterator[Tensor]:
    """The training loop of every toy. Yields the loss of each step, after the step.

    loss: of a step, with a graph. rate: of a step, over the optimizers' own. clip: the weights whose gradient norm is
    clipped to 1.
    """
    clipped = list(clip)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    for step in range(steps):
        value = loss(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        yield value.detach()


def train_steps(toy: Toy, model: ToyModel) -> Iterator[Tensor]:
    """Train the model, yielding the loss of every step."""
    task, weights = toy.make_task(), list(model.parameters())
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2] if toy.muon else []
    others = [weight for weight in weights if not any(weight is one for one in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=toy.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=toy.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return training_loop(
        toy.steps,
        lambda step: loss_of(model, task.batch(toy.batch, toy.seed, step)),
        *optimizers,
        rate=partial(cosine_rate, steps=toy.steps),
        clip=weights,
    )


def cosine_rate(step: int, steps: int) -> float:
    """The learning rate of a step over its largest: a warm-up over 50 steps at most, then half a cosine."""
    warmup = min(50, steps // 4 + 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - warmup) / max(1, steps - warmup)))))


def loss_of(model: ToyModel, batch: Batch) -> Tensor:
    """Mean cross entropy of the answers. Other positions get no logits."""
    inputs, labels = batch
    has_answer = labels != IGNORED
    loss: Tensor = F.cross_entropy(model.out(model.hidden(inputs)[has_answer]), labels[has_answer])
    return loss


def train(folder: Path, toy: Toy) -> Record:
    """For `lab.map`: train, keep the weights, test.

    curve: the mean loss between two points. tests: {"n", "length", "accuracy" in percent, "loss" in nats}.
    seconds: processor time of the training, so that other processes do not count.
    """
    model = toy.make_model()
    if toy.start:
        model.load_state_dict(load_file(folder.parent / toy.start / WEIGHTS))
    curve: dict[str, list[Any]] = {"step": [], "loss": []}
    losses: list[float] = []
    start = time.process_time()
    for step, loss in enumerate(train_steps(toy, model), 1):
        losses.append(float(loss))
        if step % max(1, toy.steps // POINTS) == 0 or step == toy.steps:
            curve["step"].append(step)
            curve["loss"].append(_json(statistics.fmean(losses)))
            losses.clear()
    seconds = time.process_time() - start
    save_file(model.state_dict(), folder / WEIGHTS)
    tests = [
        {"n": n, "length": length, **score(model, toy.make_task().test(toy.test_batch, n, length))}
        for length in toy.test_lengths
        for n in toy.test_n
    ]
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"curve": curve, "tests": tests, "seconds": round(seconds, 2), "parameters": parameters}


@torch.no_grad()
def score(model: ToyModel, batch: Batch) -> dict[str, float | None]:
    """Accuracy in percent and loss in nats, over the answers of a batch. A diverged model has no finite loss: None."""
    # Some attentions have quadratic memory.
    at_once = max(1, min(64, 2**15 // batch[0].shape[1]))
    correct, loss, count = 0, 0.0, 0
    for inputs, labels in zip(*(part.split(at_once) for part in batch), strict=True):
        has_answer = labels != IGNORED
        logits, answers = model.out(model.hidden(inputs)[has_answer]), labels[has_answer]
        correct += int((logits.argmax(-1) == answers).sum())
        loss += float(F.cross_entropy(logits, answers, reduction="sum"))
        count += len(answers)
    return {"accuracy": 100 * correct / count, "loss": _json(loss / count)}


def _json(loss: float) -> float | None:
    """A loss, or None if it diverged: JSON has no NaN."""
    return loss if math.isfinite(loss) else None


def load_model(folder: Path, toy: Toy) -> ToyModel:
    """The model that `train` has kept in `folder`."""
    model = toy.make_model()
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval()


def uniform_loss(loss: float | None) -> float:
    """A loss of the character model; for a diverged one (None) that of a uniform guess among the 256 characters."""
    return math.log(256) if loss is None else loss


def time_steps(folder: Path, pair: Mapping[str, Toy]) -> Record:
    """For `lab.map(..., alone=True)`: steps of pair["slow"] and pair["fast"] in turn, the medians of their times."""
    toys = [pair[name].but(seed=0, start="") for name in ("slow", "fast")]
    return time_in_turn([train_steps(toy.but(steps=40 + WARM_UP), toy.make_model()) for toy in toys])


def time_in_turn(trainings: Sequence[Iterator[Tensor]], warm_up: int = WARM_UP) -> Record:
    """Milliseconds of a step of each training, medians, and the ratio of the first to the second.

    The steps of all trainings alternate, so that other load on the machine affects them equally.
    """
    times: list[list[float]] = [[] for _ in trainings]
    while True:
        for seconds, steps in zip(times, trainings, strict=True):
            start = time.perf_counter()
            if next(steps, None) is None:
                medians = [statistics.median(one[warm_up:]) for one in times]
                return {"milliseconds": [1000 * median for median in medians], "ratio": medians[0] / medians[1]}
            seconds.append(time.perf_counter() - start)
