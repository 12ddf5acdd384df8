"""The members with a state of fixed size, whose time has to grow like the length: inputs, gate and benchmark."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.linear.delta import delta_attention
from lucid_attention.ops.linear.gla import gla_attention
from lucid_attention.ops.linear.gsa import gsa_attention

from .. import gate
from ..gate import Shape
from ..harness import Run, Spread, race, ratios
from ..report import LINEAR_PICTURE, fact, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import peers
from .peers import SDPA, Cache

SHAPE = Shape(64, 4, 4)
GATE_LENGTH = 300
# Up to this length the recurrence checks one head at the benchmark's own length.
RECURRENT_LENGTH = 2048
# Divisors of the log-decays, per head, and per channel or slot: larger ones decay more slowly.
DECAY, CHANNEL_DECAY = 4.0, 8.0
# Limit on time(N) / time(N/2), for N/2 >= FROM.
LIMIT, FROM = 2.2, 2048
# Longest backward pass of torch's attention. Beyond, one call takes many seconds.
PEER_LENGTH = 16384
DECODE_CONTEXT = 4096
DECODING = "one token"


def gated_delta_attention(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, **options: Any) -> Any:
    return delta_attention(q, k, v, beta, log_decay=log_decay, **options)


class Member(NamedTuple):
    run: Callable[..., Any]
    """Returns the output and the state."""
    gates: Callable[[Tensor, torch.Generator], list[Tensor]]
    """Makes the inputs beside q, k, v, for keys of this shape."""
    names: tuple[str, ...]
    """The names of these inputs."""


def _strengths(k: Tensor, random: torch.Generator) -> list[Tensor]:
    return [torch.rand(k.shape[:3], generator=random)]


def _decays(shape: Sequence[int], random: torch.Generator, slowness: float) -> Tensor:
    """Logarithms of decays like those of trained models: a log-sigmoid over `slowness`."""
    return F.logsigmoid(torch.randn(*shape, generator=random)) / slowness


def _strengths_and_decays(k: Tensor, random: torch.Generator) -> list[Tensor]:
    return [*_strengths(k, random), _decays(k.shape[:3], random, DECAY)]


def _channel_decays(k: Tensor, random: torch.Generator) -> list[Tensor]:
    return [_decays(k.shape, random, CHANNEL_DECAY)]


def _slots(k: Tensor, random: torch.Generator) -> list[Tensor]:
    """One slot for each channel of a key."""
    log_decay = _decays(k.shape, random, CHANNEL_DECAY)
    return [1 - log_decay.exp(), log_decay]


DELTA, GATED_DELTA, GLA, GSA = "delta", "gated_delta", "gla", "gsa"
MEMBERS = {
    DELTA: Member(delta_attention, _strengths, ("β",)),
    GATED_DELTA: Member(gated_delta_attention, _strengths_and_decays, ("β", "log_decay")),
    GLA: Member(gla_attention, _channel_decays, ("log_decay",)),
    GSA: Member(gsa_attention, _slots, ("s", "log_decay")),
}
# The recurrences, token by token.
TRUTHS = {name: partial(member.run, impl="reference") for name, member in MEMBERS.items()}


def inputs(name: str, shape: Shape, N: int) -> list[Tensor]:
    """q, k, v, the member's other inputs, and the gradient of the output. Keys have length 1 and are correlated."""
    q, k, v, do = gate.inputs(*shape, N)
    k = F.normalize(k, dim=-1)
    return [q, k, v, *MEMBERS[name].gates(k, torch.Generator().manual_seed(N + 2)), do]


def evaluate(run: Callable[..., Any], tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output of a member and, if `backward`, the gradients of all its inputs."""
    return gate.evaluate(lambda *given: run(*given)[0], tensors, backward)


@cache
def check_truth(shape: Shape, N: int, backward: bool) -> None:
    """Compare every member with its recurrence in float64."""
    where = f"linear, {shape}, N={N}"
    for name, member in MEMBERS.items():
        tensors = inputs(name, shape, N)
        truth = evaluate(TRUTHS[name], [x.double() for x in tensors], backward)
        parts = (*gate.ATTENTION_PARTS, *(f"the gradient of {extra}" for extra in member.names))
        gate.check(where, name, evaluate(member.run, tensors, backward), "the recurrence in float64", truth, parts)


@cache
def check_steps(shape: Shape) -> None:
    """Compare every member, run token by token from state to state, with its recurrence in float64."""
    for name, member in MEMBERS.items():
        *member_inputs, _ = inputs(name, shape, GATE_LENGTH)
        outputs, state = [], None
        with torch.no_grad():
            truth = TRUTHS[name](*(x.double() for x in member_inputs))[0]
            for token in zip(*(x.split(1, 2) for x in member_inputs), strict=True):
                o, state = member.run(*token, state=state)
                outputs.append(o)
        where = f"linear, {shape}, {GATE_LENGTH} single tokens"
        gate.check(where, name, (torch.cat(outputs, 2),), "the recurrence in float64", (truth,))


def half(name: str) -> str:
    """The name of a member's entry at half the length. The entry's ratio is the growth from there."""
    return f"{name} at N/2"


def _what(backward: bool) -> str:
    return "forward+backward" if backward else "forward"


def _measure(N: int, backward: bool, grows: bool, threads: int, settings: Settings) -> Record:
    check_truth(SHAPE, GATE_LENGTH, backward)
    check_truth(Shape(SHAPE.D, 1, 1), min(N, RECURRENT_LENGTH), backward)
    runs: dict[str, Run] = {}
    for name, member in MEMBERS.items():
        runs[name] = partial(evaluate, member.run, inputs(name, SHAPE, N), backward)
        if grows:
            tensors = inputs(name, SHAPE, N // 2)
            runs[half(name)] = partial(evaluate, member.run, tensors, backward)
    if not backward or N <= PEER_LENGTH:
        runs[SDPA] = partial(gate.evaluate, peers.sdpa, gate.inputs(*SHAPE, N), backward)
    label = f"linear {N} {_what(backward)}"
    times = race(runs, budget=_budget(settings), seed=label, brief={SDPA}, least=settings.least)
    entries, checks = {}, {}
    for name in MEMBERS:
        to_peer = ratios(times[name], times[SDPA]) if SDPA in times else None
        entries[name] = Entry(Spread.of(times[name]), to_peer)
        if grows:
            growth = ratios(times[name], times[half(name)])
            entries[half(name)] = Entry(Spread.of(times[half(name)]), growth)
            if N >= 2 * FROM:
                checks[f"{name}, N over N/2"] = Check(growth.median, LIMIT)
    if SDPA in times:
        entries[SDPA] = Entry(Spread.of(times[SDPA]))
    return Record("linear", threads, {**SHAPE._asdict(), "pass": _what(backward), "N": N}, entries, checks)


def _decode(context: int, threads: int, settings: Settings) -> Record:
    """One token: members continue from a state, torch's attention reads a cache."""
    check_steps(SHAPE)
    q, k, v, _ = gate.inputs(*SHAPE, context + 1)
    runs: dict[str, Run] = {SDPA: partial(peers.decode_sdpa, Cache.of(q, k, v, v[:, :, :-1]))}
    with torch.no_grad():
        for name, member in MEMBERS.items():
            *member_inputs, _ = inputs(name, SHAPE, GATE_LENGTH)
            state = member.run(*(x[:, :, :-1] for x in member_inputs))[1]
            runs[name] = partial(member.run, *(x[:, :, -1:].clone() for x in member_inputs), state=state)
        times = race(runs, budget=settings.budget, seed="linear decode", least=settings.least)
    entries = {name: Entry(Spread.of(times[name]), ratios(times[name], times[SDPA])) for name in MEMBERS}
    entries[SDPA] = Entry(Spread.of(times[SDPA]))
    return Record("linear", threads, {**SHAPE._asdict(), "pass": DECODING, "N": context}, entries)


def _budget(settings: Settings) -> float:
    """Twice the usual budget: many contestants share it, and the limit is close to the expected ratio of 2."""
    return 2 * settings.budget


def _case(N: int, backward: bool, grows: bool, threads: int, settings: Settings) -> Case:
    peer = 2.0 * N**2 * SHAPE.D * SHAPE.heads * (3.5 if backward else 1)
    # A member's token costs about the same as a token of torch's attention at 4096 tokens.
    member = 2.0 * N * 4096 * SHAPE.D * SHAPE.heads * (2.5 if backward else 1)
    return Case(
        key=f"linear {threads} {N} {_what(backward)}",
        label=f"D={SHAPE.D} {SHAPE.heads}/{SHAPE.kv_heads} {_what(backward)} N={N}",
        threads=threads,
        run=partial(_measure, N, backward, grows, threads, settings),
        work=len(MEMBERS) * member * (1.5 if grows else 1),
        once=4 * peer if not backward or N <= PEER_LENGTH else 0.0,
        fixed=1.0 if settings.quick else 3.0,
        budget=_budget(settings),
    )


def _cases(settings: Settings) -> list[Case]:
    lengths = (256,) if settings.quick else (1024, 2048, 4096, 8192, 16384, 32768)
    threads, context = settings.threads[0], 512 if settings.quick else DECODE_CONTEXT
    cases = [
        _case(N, backward, settings.quick or lengths[0] < N, threads, settings)
        for backward in (False, True)
        for N in lengths
    ]
    decode = Case(
        key=f"linear {threads} {DECODING}",
        label=f"D={SHAPE.D} {SHAPE.heads}/{SHAPE.kv_heads} {DECODING}",
        threads=threads,
        run=partial(_decode, context, threads, settings),
        fixed=1.0,
        budget=settings.budget,
    )
    return [*cases, decode]


BENCHMARK = Benchmark(
    name="linear",
    about=(
        "DeltaNet (delta), Gated DeltaNet (gated_delta), GLA (gla) and GSA (gsa, 64 slots), chunk-wise, next to "
        f"torch's causal attention: float32, D = {SHAPE.D}, {SHAPE.heads} heads; forward, forward+backward (gradients "
        f"of all inputs; torch's attention only up to N = {PEER_LENGTH}, beyond which a call takes many seconds), and "
        "one token of decoding: members continue from a state of fixed size, so the context does not matter; SDPA "
        "reads a cache of N tokens. N over N/2 is the ratio of the times at this length and at half of it, taken in "
        "turns in the same run. First, all have to agree with their token-by-token recurrence in float64. "
        f"Draws {LINEAR_PICTURE}."
    ),
    limits=f"Limit: {LIMIT} for N over N/2 from N/2 = {FROM} on.",
    cases=_cases,
    columns=(
        Column("pass", fact("pass")),
        Column("N", fact("N")),
        Column("SDPA, ms", milliseconds(SDPA)),
        *(Column(f"{name}, ms", milliseconds(name)) for name in MEMBERS),
        *(Column(f"{name}, N over N/2", ratio(half(name))) for name in MEMBERS),
        Column("", verdict),
    ),
    page="family",
)
