"""The case `linear`: the members with a state of fixed size, whose time has to grow like the length."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.linear.delta import delta_attention
from lucid_attention.ops.linear.gated import gla_attention, gsa_attention

from . import gate
from .gate import Shape
from .harness import Run, Spread, race, ratios
from .records import Case, Point, Result, Settings
from .solve import PASSES, SDPA, sdpa

SHAPE = Shape(64, 4, 4)
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (256,)
GATE_LENGTH = 300
# Up to this length the recurrence checks one head at the length of the point.
RECURRENT_LENGTH = 2048
# Divisors of the log-decays, per head, and per channel or slot: larger ones decay more slowly.
DECAY, CHANNEL_DECAY = 4.0, 8.0
# Limit on time(N) / time(N/2), for N/2 >= FROM.
LIMIT, FROM = 2.2, 2048
# Longest backward pass of torch's attention. Beyond, one call takes many seconds.
PEER_LENGTH = 16384


def gated_delta_attention(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, **options: Any) -> Any:
    return delta_attention(q, k, v, beta, log_decay=log_decay, **options)


# From q, k, v and the inputs of `inputs` to the output and the state.
MEMBERS: dict[str, Callable[..., Any]] = {
    "delta": delta_attention,
    "gated_delta": gated_delta_attention,
    "gla": gla_attention,
    "gsa": gsa_attention,
}
# The recurrences, token by token.
REFERENCES = {name: partial(run, impl="reference") for name, run in MEMBERS.items()}


def inputs(name: str, shape: Shape, N: int) -> list[Tensor]:
    """q, k, v, the member's other inputs, and the gradient of the output. Keys have length 1 and are correlated.

    Decays are like those of trained models: log-sigmoids, made slower.
    """
    q, k, v, do = gate.inputs(*shape, N)
    k, random = F.normalize(k, dim=-1), torch.Generator().manual_seed(N + 2)
    beta = torch.rand(k.shape[:3], generator=random)
    decay = F.logsigmoid(torch.randn(k.shape[:3], generator=random)) / DECAY
    channel_decay = F.logsigmoid(torch.randn(k.shape, generator=random)) / CHANNEL_DECAY
    others = {
        "delta": [beta],
        "gated_delta": [beta, decay],
        "gla": [channel_decay],
        "gsa": [1 - channel_decay.exp(), channel_decay],  # one slot for each channel of a key
    }
    return [q, k, v, *others[name], do]


def evaluate(run: Callable[..., Any], tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output of a member and, if `backward`, the gradients of all its inputs."""
    return gate.evaluate(lambda *arguments: run(*arguments)[0], tensors, backward)


@cache
def check_truth(shape: Shape, N: int, backward: bool) -> None:
    """Compare every member with its token-by-token recurrence in float64."""
    parts = (*gate.ATTENTION_PARTS, *["the gradient of a gate"] * 2)
    for name, run in MEMBERS.items():
        tensors = inputs(name, shape, N)
        truth = evaluate(REFERENCES[name], [x.double() for x in tensors], backward)
        gate.check(f"linear, {shape}, N={N}", name, evaluate(run, tensors, backward), truth, parts)


def measure(N: int, *, backward: bool, grows: bool, settings: Settings) -> Result:
    """Race a pass over N tokens; with `grows`, also over N/2 tokens."""
    check_truth(SHAPE, GATE_LENGTH, backward)
    check_truth(Shape(SHAPE.D, 1, 1), min(N, RECURRENT_LENGTH), backward)
    runs: dict[str, Run] = {}
    for name, run in MEMBERS.items():
        runs[name] = partial(evaluate, run, inputs(name, SHAPE, N), backward)
        if grows:
            runs[f"{name} at N/2"] = partial(evaluate, run, inputs(name, SHAPE, N // 2), backward)
    if not backward or N <= PEER_LENGTH:
        runs[SDPA] = partial(gate.evaluate, sdpa, gate.inputs(*SHAPE, N), backward)
    # Twice the usual budget: many contestants share it, and the limit is close to the expected ratio of 2.
    times = race(runs, budget=2 * settings.budget, seed=f"linear {N}", brief={SDPA}, least=settings.least)
    measured: dict[str, Spread] = {}
    limits: dict[str, float] = {}
    for name in MEMBERS:
        if SDPA in times:
            measured[f"{name} / {SDPA}"] = ratios(times[name], times[SDPA])
        if grows:
            measured[f"{name}, N over N/2"] = ratios(times[name], times[f"{name} at N/2"])
            limits |= {f"{name}, N over N/2": LIMIT} if N >= 2 * FROM else {}
    return Result({name: Spread.of(rounds) for name, rounds in times.items()}, measured, limits=limits)


def _points(settings: Settings) -> list[Point]:
    lengths, threads = QUICK_LENGTHS if settings.quick else LENGTHS, settings.threads[0]
    points = []
    for backward, what in PASSES.items():
        for N in lengths:
            grows = settings.quick or lengths[0] < N
            run = partial(measure, N, backward=backward, grows=grows, settings=settings)
            points.append(Point({"threads": threads, "pass": what, "N": N}, run))
    return points


CASE = Case(
    "linear",
    "DeltaNet (delta), Gated DeltaNet, GLA and GSA (64 slots), chunk-wise, in float32 with 4 heads of 64, against "
    f"causal SDPA (backward up to N = {PEER_LENGTH}). N over N/2: the times at both lengths, in turns in the same run. "
    f"Limit: {LIMIT} for this growth from N/2 = {FROM} on.",
    _points,
)
