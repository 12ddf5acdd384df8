"""The jobs of `language_model`: a sweep for each side, every setting with the tuned values, measurements."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.models.decoder import presets
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from ...training.loss import use_chunked_loss
from ..engine.jobs import Job, Record, Work
from ..engine.scale import Scale
from ..engine.study import Done
from ..small.training import SmallRun, load_small, time_job

SIDES = ("softmax", "lucid")
# The sweep has its own seed, so that nothing is tuned on the runs that are compared.
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
    """How much is run at a scale.

    base: the shape of every run. steps, sweep_steps: of the runs that are compared, and of the runs of the sweep.
    rates, stds: learning rates and sizes of embeddings in the sweep.
    long: the longer context, with the same number of tokens in a step. wide: the head size of the run with one head.
    decoder: arguments of `time_decoders`.
    """

    base: SmallRun
    steps: int
    sweep_steps: int
    rates: Sequence[float]
    stds: Sequence[float]
    long: int
    wide: int
    decoder: dict[str, Any]


def extent(scale: Scale) -> Extent:
    """The extent at a scale."""
    if scale.tiny:
        base = BASE.but(length=16, layers=1, width=16, heads=4, head_dim=4, batch=2, test_lengths=(16,), test_batch=4)
        sizes = {**DECODER["sizes"], "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        decoder = {"sizes": sizes, "vocab_size": 64, "length": 16, "batch": 1, "rounds": 1}
        return Extent(base, 4, 2, rates=(1e-2,), stds=(0.02, 1.0), long=32, wide=16, decoder=decoder)
    rates, stds = (3e-3, 1e-2, 3e-2), (0.02, 0.3, 1.0)
    return Extent(BASE, 500, 250, rates, stds, long=1024, wide=64, decoder=DECODER)


def sweep_run(scale: Scale, side: str, rate: float, std: float) -> SmallRun:
    """A point of the sweep."""
    size = extent(scale)
    changes = {"attention": side, "rate": rate, "embedding_std": std, "steps": size.sweep_steps, "seed": SWEEP_SEED}
    return size.base.but(**changes)


def sweep_losses(scale: Scale, side: str, done: Done) -> dict[tuple[float, float], float]:
    """(rate, embedding std) → loss on the unseen text."""
    size = extent(scale)
    points = [(rate, std) for rate in size.rates for std in size.stds]
    return {point: loss_of(done[sweep_run(scale, side, *point).job()]) for point in points}


def tuned(scale: Scale, side: str, done: Done) -> dict[str, float]:
    """The learning rate and the size of the embeddings with the lowest loss in the sweep of a side."""
    losses = sweep_losses(scale, side, done)
    rate, std = min(losses, key=lambda point: losses[point])
    return {"rate": rate, "embedding_std": std}


def loss_of(record: dict[str, Any]) -> float:
    """The loss of a run on the unseen text, in nats a character."""
    return finite_loss(record["tests"][-1]["loss"])


def finite_loss(loss: float | None) -> float:
    """The loss; for a diverged model (None) that of a uniform guess among the 256 characters."""
    return math.log(256) if loss is None else loss


def timing(scale: Scale) -> Job:
    """The time of a step of LUCID over that of softmax attention."""
    base = extent(scale).base
    return time_job(base.but(attention="lucid"), base.but(attention="softmax"), "language model, time of a step")


def decoder_timing(scale: Scale) -> Job:
    """The time of a step of `LucidForCausalLM`, wider and with more tokens."""
    arguments = extent(scale).decoder
    rounds = arguments["rounds"] + 1
    return Job("language_model.runs:time_decoders", arguments, "decoder, time of a step", 5.0 * rounds, alone=True)


@dataclass(frozen=True)
class Choice:
    """The settings that the first jobs decide.

    tuned: learning rate and embeddings of each side. late: steps of softmax attention in LUCID's training time.
    """

    scale: Scale
    tuned: Mapping[str, dict[str, float]]
    late: int


def choose(scale: Scale, done: Done) -> Choice:
    """Choose from the records of the sweep and the times."""
    late = max(1, round(extent(scale).steps * done[timing(scale)]["ratio"]))
    return Choice(scale, {side: tuned(scale, side, done) for side in SIDES}, late)


SETTINGS = ("tuned", "equal_time", "untuned", "no_positions", "one_wide_head", "long_context")


def setting_run(choice: Choice, setting: str, side: str, seed: int) -> SmallRun:
    """A run of one of SETTINGS. At equal time softmax attention gets more steps."""
    size = extent(choice.scale)
    optimizer = UNTUNED if setting == "untuned" else choice.tuned[side]
    run = size.base.but(attention=side, steps=size.steps, seed=seed, **optimizer)
    if setting == "equal_time" and side == "softmax":
        return run.but(steps=choice.late)
    if setting == "no_positions":
        return run.but(rope=False)
    if setting == "one_wide_head":
        return run.but(heads=1, head_dim=size.wide)
    if setting == "long_context":
        # Fewer sequences, so that a step has the same number of tokens.
        batch = max(1, size.base.batch * size.base.length // size.long)
        return run.but(length=size.long, batch=batch, test_lengths=(size.long,), test_batch=size.base.test_batch // 4)
    return run


def sweep_jobs(scale: Scale) -> list[Job]:
    """The first jobs: the sweep, and the times on which equal time depends."""
    size = extent(scale)
    runs = [sweep_run(scale, side, rate, std) for side in SIDES for rate in size.rates for std in size.stds]
    return [*(training_job(run, "sweep") for run in runs), timing(scale), decoder_timing(scale)]


def setting_jobs(choice: Choice) -> list[Job]:
    """Every setting, both sides, every seed."""
    runs = [
        (setting, setting_run(choice, setting, side, seed))
        for setting in SETTINGS
        for side in SIDES
        for seed in choice.scale.seeds
    ]
    return [training_job(run, setting) for setting, run in runs]


def training_job(run: SmallRun, setting: str) -> Job:
    """The training of a run, with about the time that a step takes."""
    tokens = run.length * run.batch / (BASE.length * BASE.batch)
    length = 1 + run.length / 1024
    milliseconds = tokens * length * (55 if run.attention == "lucid" else 34)
    return run.job(f"language model, {setting.replace('_', ' ')}, {run.attention}, seed {run.seed}", milliseconds)


def position_job(run: SmallRun) -> Job:
    """The loss of a trained model by position."""
    return Job("language_model.runs:loss_by_position", {"run": asdict(run)}, "loss by position", 8)


def position_jobs(choice: Choice) -> list[Job]:
    """The loss by position of the tuned models, with the short and the long context."""
    return [
        position_job(setting_run(choice, setting, side, seed))
        for setting in ("tuned", "long_context")
        for side in SIDES
        for seed in choice.scale.seeds
    ]


def loss_by_position(work: Work, run: dict[str, Any]) -> Record:
    """The job: mean loss of a trained model on unseen text in ranges of positions, each as long as all before it.

    In the record, `ends` holds one past the last position of each range.
    """
    settings = SmallRun(**run)
    inputs, labels = settings.make_task().test(2 * settings.test_batch, 0, settings.length)
    losses = token_losses(load_small(work, settings), inputs, labels).mean(0)
    if not losses.isfinite().all():
        losses = torch.full_like(losses, finite_loss(None))
    ends = range_ends(settings.length)
    starts = [0, *ends[:-1]]
    return {"ends": ends, "losses": [float(losses[a:b].mean()) for a, b in zip(starts, ends, strict=True)]}


def range_ends(length: int, first: int = 8) -> list[int]:
    """8, 16, 32, … and the length."""
    ends = []
    while first < length:
        ends.append(first)
        first *= 2
    return [*ends, length]


@torch.no_grad()
def token_losses(model: Any, inputs: Tensor, labels: Tensor, at_once: int = 16) -> Tensor:
    """The loss of every token, [B, T]."""
    parts = zip(inputs.split(at_once), labels.split(at_once), strict=True)
    return torch.cat([F.cross_entropy(model(x).transpose(1, 2), answers, reduction="none") for x, answers in parts])


def time_decoders(work: Work, sizes: dict[str, Any], vocab_size: int, length: int, batch: int, rounds: int) -> Record:
    """The job: training steps of `LucidForCausalLM` with LUCID and with softmax attention in turn, medians.

    sizes: changes of the preset `tiny`.
    """
    ids = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    models = []
    for attention in ("lucid", "softmax"):
        torch.manual_seed(0)
        model: Any = LucidForCausalLM(presets.tiny(attention, vocab_size=vocab_size, **sizes))
        use_chunked_loss(model)
        models.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    times: list[list[float]] = [[], []]
    # The first round warms up.
    for _ in range(rounds + 1):
        for seconds, (model, optimizer) in zip(times, models, strict=True):
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
    lucid, softmax = (seconds[1:] for seconds in times)
    return {
        "milliseconds": [1000 * statistics.median(seconds) for seconds in (lucid, softmax)],
        "ratio": statistics.median(a / b for a, b in zip(lucid, softmax, strict=True)),
    }
