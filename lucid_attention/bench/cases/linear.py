"""The members with a state of fixed size: time has to grow like the length; the picture is `report.plot_linear`."""

from functools import partial

import torch

from .. import gate
from ..harness import Run, Spread, race, ratios
from ..report import LINEAR_PICTURE, fact, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import linear_peers, peers
from .linear_peers import GATE_LENGTH, MEMBERS, RECURRENT_LENGTH, SHAPE, check_steps, check_truth
from .peers import SDPA, Cache
from .solve import Shape
from .solve import evaluate as evaluate_attention

# Of the time at half the length, where that half is at least so long.
LIMIT, FROM = 2.2, 2048
# Torch's attention with its backward takes part up to this length: beyond, one call takes many seconds.
PEER_LENGTH = 16384
DECODE_CONTEXT = 4096
DECODING = "one token"


def half(name: str) -> str:
    """The entry of a member at half the length; its ratio is the growth from there."""
    return f"{name} at N/2"


def _what(backward: bool) -> str:
    return "forward+backward" if backward else "forward"


def _measure(N: int, backward: bool, grows: bool, threads: int, settings: Settings) -> Record:
    check_truth(SHAPE, GATE_LENGTH, backward)
    check_truth(Shape(SHAPE.D, 1, 1), min(N, RECURRENT_LENGTH), backward)
    runs: dict[str, Run] = {}
    for name, member in MEMBERS.items():
        runs[name] = partial(linear_peers.evaluate, member.run, linear_peers.inputs(name, SHAPE, N), backward)
        if grows:
            tensors = linear_peers.inputs(name, SHAPE, N // 2)
            runs[half(name)] = partial(linear_peers.evaluate, member.run, tensors, backward)
    if not backward or N <= PEER_LENGTH:
        runs[SDPA] = partial(evaluate_attention, peers.sdpa, gate.inputs(*SHAPE, N), backward)
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
    """One token: members go on from a state, torch's attention reads a cache."""
    check_steps(SHAPE)
    q, k, v, _ = gate.inputs(*SHAPE, context + 1)
    one = Cache.of(q, k, v, v[:, :, :-1])
    runs: dict[str, Run] = {SDPA: partial(peers.decode_sdpa, one)}
    with torch.no_grad():
        for name, member in MEMBERS.items():
            *given, _ = linear_peers.inputs(name, SHAPE, GATE_LENGTH)
            state = member.run(*(x[:, :, :-1] for x in given))[1]
            runs[name] = partial(member.run, *(x[:, :, -1:].clone() for x in given), state=state)
        times = race(runs, budget=settings.budget, seed="linear decode", least=settings.least)
    entries = {name: Entry(Spread.of(times[name]), ratios(times[name], times[SDPA])) for name in MEMBERS}
    entries[SDPA] = Entry(Spread.of(times[SDPA]))
    return Record("linear", threads, {**SHAPE._asdict(), "pass": DECODING, "N": context}, entries)


def _budget(settings: Settings) -> float:
    """Many contestants share it, and the limit is close to what is expected, 2."""
    return 2 * settings.budget


def _case(N: int, backward: bool, grows: bool, threads: int, settings: Settings) -> Case:
    peer = 2.0 * N**2 * SHAPE.D * SHAPE.heads * (3.5 if backward else 1)
    # A member costs about as much as torch's attention over so many tokens for each of its tokens.
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
    lengths = (512,) if settings.quick else (1024, 2048, 4096, 8192, 16384, 32768)
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
        "one token of decoding: members go on from a state of fixed size, so the context does not matter, and SDPA "
        "reads a cache of N tokens. N over N/2 is the ratio of the times at this length and at half of it, taken in "
        "turns in the same run. Before, all have to agree with their token-by-token recurrence in float64. "
        f"Draws {LINEAR_PICTURE}."
    ),
    limits=f"Asked for: N over N/2 at most {LIMIT} from N/2 = {FROM} on.",
    minutes="about 5 minutes",
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
