"""The runs of `language_model`: a sweep for each side, then every setting with what the sweep found."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.jobs import Job
from ..engine.study import Done
from ..small.training import SmallRun, time_job

SIDES = ("softmax", "lucid")
# A seed of its own for the sweep: nothing is tuned on the runs that are compared.
SWEEP_SEED = 9
UNTUNED = {"rate": 3e-3, "embedding_std": 0.02}

BASE = SmallRun(
    task="characters",
    n=(0,),
    length=256,
    layers=2,
    width=64,
    heads=4,
    head_dim=16,
    mlp=2.0,
    batch=8,
    test_n=(0,),
    test_lengths=(256,),
    test_batch=128,
)
# The decoder of `lucid bench small_training`, for the time of a step at 512 tokens.
DECODER: dict[str, Any] = {
    "sizes": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_key_value_heads": 4},
    "vocab_size": 4096,
    "length": 512,
    "batch": 8,
    "rounds": 8,
}


@dataclass(frozen=True)
class Extent:
    """How much of it is run at a scale.

    base: the shape of every run. steps, sweep_steps: of the runs that are compared, and of those of the sweep.
    long: the longer context, with as many tokens in a step. wide: the head size of the run with one head.
    """

    base: SmallRun
    steps: int
    sweep_steps: int
    seeds: Sequence[int]
    rates: Sequence[float]
    stds: Sequence[float]
    long: int
    wide: int
    decoder: dict[str, Any]


def extent(scale: str) -> Extent:
    """Of "smoke" or "small"."""
    if scale == "smoke":
        base = BASE.but(length=16, layers=1, width=16, heads=4, head_dim=4, batch=2, test_lengths=(16,), test_batch=4)
        sizes = {**DECODER["sizes"], "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        decoder = {"sizes": sizes, "vocab_size": 64, "length": 16, "batch": 1, "rounds": 1}
        return Extent(base, 4, 2, (0,), (1e-2,), (0.02, 1.0), 32, 16, decoder)
    return Extent(BASE, 500, 250, (0, 1, 2), (3e-3, 1e-2, 3e-2), (0.02, 0.3, 1.0), 1024, 64, DECODER)


def sweep_run(scale: str, side: str, rate: float, std: float) -> SmallRun:
    """A point of the sweep."""
    size = extent(scale)
    changes = {"attention": side, "rate": rate, "embedding_std": std, "steps": size.sweep_steps, "seed": SWEEP_SEED}
    return size.base.but(**changes)


def sweep_losses(scale: str, side: str, done: Done) -> dict[tuple[float, float], float]:
    """(rate, embedding std) → loss on the unseen text."""
    size = extent(scale)
    points = [(rate, std) for rate in size.rates for std in size.stds]
    return {point: loss_of(done[sweep_run(scale, side, *point).job()]) for point in points}


def tuned(scale: str, side: str, done: Done) -> dict[str, float]:
    """The learning rate and the embeddings that are best for a side."""
    losses = sweep_losses(scale, side, done)
    rate, std = min(losses, key=lambda point: losses[point])
    return {"rate": rate, "embedding_std": std}


def loss_of(record: dict[str, Any]) -> float:
    """The loss of a run on the unseen text, in nats a character."""
    return known(record["tests"][-1]["loss"])


def known(loss: float | None) -> float:
    """A model that has diverged counts as one that knows nothing of the 256 characters."""
    return math.log(256) if loss is None else loss


def timing(scale: str) -> Job:
    """How many times as long as softmax attention's a step of LUCID takes."""
    base = extent(scale).base
    return time_job(base.but(attention="lucid"), base.but(attention="softmax"), "language model, time of a step")


def decoder_timing(scale: str) -> Job:
    """The same for a decoder of the package, wider and with more tokens."""
    arguments = extent(scale).decoder
    rounds = arguments["rounds"] + 1
    return Job("language_model.jobs:time_decoders", arguments, "decoder, time of a step", 5.0 * rounds, alone=True)


@dataclass(frozen=True)
class Choice:
    """What the first jobs decide. tuned: settings of each side. late: steps of softmax attention in LUCID's time."""

    scale: str
    tuned: Mapping[str, dict[str, float]]
    late: int


def choose(scale: str, done: Done) -> Choice:
    """From the sweep and the times."""
    late = max(1, round(extent(scale).steps * done[timing(scale)]["ratio"]))
    return Choice(scale, {side: tuned(scale, side, done) for side in SIDES}, late)


# What each setting changes beside the learning rate and the embeddings, which are the tuned ones.
SETTINGS = ("tuned", "equal time", "untuned", "no positions", "one wide head", "long context")


def setting_run(choice: Choice, setting: str, side: str, seed: int) -> SmallRun:
    """A run of a setting. At equal time it is softmax attention that gets more steps."""
    size = extent(choice.scale)
    chosen = UNTUNED if setting == "untuned" else choice.tuned[side]
    run = size.base.but(attention=side, steps=size.steps, seed=seed, **chosen)
    if setting == "equal time" and side == "softmax":
        return run.but(steps=choice.late)
    if setting == "no positions":
        return run.but(rope=False)
    if setting == "one wide head":
        return run.but(heads=1, head_dim=size.wide)
    if setting == "long context":
        # As many tokens in a step.
        batch = max(1, size.base.batch * size.base.length // size.long)
        return run.but(length=size.long, batch=batch, test_lengths=(size.long,), test_batch=size.base.test_batch // 4)
    return run


def sweep_jobs(scale: str) -> list[Job]:
    """What is done first: the sweep, and the times on which equal time depends."""
    size = extent(scale)
    runs = [sweep_run(scale, side, rate, std) for side in SIDES for rate in size.rates for std in size.stds]
    return [*(training_job(run, "sweep") for run in runs), timing(scale), decoder_timing(scale)]


def setting_jobs(choice: Choice) -> list[Job]:
    """Every setting, both sides, every seed."""
    runs = [
        (setting, setting_run(choice, setting, side, seed))
        for setting in SETTINGS
        for side in SIDES
        for seed in extent(choice.scale).seeds
    ]
    return [training_job(run, setting) for setting, run in runs]


def training_job(run: SmallRun, setting: str) -> Job:
    """Its job, with about the time that a step takes."""
    tokens = run.length * run.batch / (BASE.length * BASE.batch)
    length = 1 + run.length / 1024
    milliseconds = tokens * length * (55 if run.attention == "lucid" else 34)
    return run.job(f"language model, {setting}, {run.attention}, seed {run.seed}", milliseconds)


def position_job(run: SmallRun) -> Job:
    """The loss of a trained model by position."""
    return Job("language_model.jobs:loss_by_position", {"run": asdict(run)}, "loss by position", 8)


def position_jobs(choice: Choice) -> list[Job]:
    """Of the tuned models, with the short and the long context."""
    return [
        position_job(setting_run(choice, setting, side, seed))
        for setting in ("tuned", "long context")
        for side in SIDES
        for seed in extent(choice.scale).seeds
    ]
