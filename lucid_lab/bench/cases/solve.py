"""Full passes in float32 and bfloat16: torch's attention, ours, the dense solve and the paper's block algorithm."""

from dataclasses import dataclass
from functools import cache, partial

import torch

from .. import gate
from ..gate import Shape, evaluate
from ..harness import LONG_ROUNDS, Run, Spread, race, ratios
from ..report import fact, flop_ratio, limit, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import peers
from .peers import DENSE, OURS, PAPER, SDPA

# The limit is this multiple of the ratio that the count of operations gives.
SLACK = 1.05
# Longest sequence for the slow contestants, and for comparing gradients.
SLOW_LENGTH = 4096
GATE_LENGTH = 300
# The cost of a solve over that of torch's attention with the same heads, for estimates of duration.
COST = {SDPA: 0.0, OURS: 1.0, PAPER: 1.5, DENSE: 5.0}


SHAPES = (Shape(64, 8, 8), Shape(64, 32, 4), Shape(128, 12, 2), Shape(256, 4, 1))
BF16_SHAPES = (Shape(64, 8, 8), Shape(64, 32, 4))
BF16_FORWARD_LIMIT = {Shape(64, 32, 4): 1.5}


@dataclass(frozen=True)
class Setup:
    """One case: `shape` at length N in `dtype`, forward or forward and backward, on `threads` threads."""

    benchmark: str
    shape: Shape
    N: int
    backward: bool
    dtype: torch.dtype
    threads: int
    names: tuple[str, ...]
    limit: float | None

    @property
    def label(self) -> str:
        D, heads, kv_heads = self.shape
        return f"D={D} {heads}/{kv_heads} {self.what} N={self.N}"

    @property
    def what(self) -> str:
        return "forward+backward" if self.backward else "forward"

    def work(self, name: str) -> float:
        """Operations, as if all of them ran at the speed of torch's attention at D = 64."""
        attention = 2.0 * self.N**2 * self.shape.D * (3.5 if self.backward else 1)
        if self.backward and self.dtype == torch.bfloat16:
            attention *= 3  # holds for CPUs without 16-bit products
        if self.shape.D > 64:
            attention /= 1.2  # larger products are faster
        return attention * (self.shape.heads + COST[name] * self.shape.kv_heads)


@cache
def check_truth(benchmark: str, shape: Shape, backward: bool, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """Compare every contestant with the definition in float64. The length is several blocks and a part of one."""
    tensors = gate.inputs(*shape, GATE_LENGTH, dtype)
    where = f"{benchmark}, {shape}, N={GATE_LENGTH}"
    truths = [evaluate(partial(gate.true_attention, solves=solves), tensors, backward) for solves in (False, True)]
    gate.check_sharp(where, truths[1][0], truths[0][0], dtype)
    for name in names:
        peer = peers.ATTENTIONS[name]
        gate.check(where, name, evaluate(peer.run, tensors, backward), "the float64 truth", truths[peer.solves])


@cache
def check_length(benchmark: str, D: int, N: int, backward: bool, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """Compare the solvers with the paper's blocks on one head at length N; gradients only up to SLOW_LENGTH."""
    if backward:
        N = min(N, SLOW_LENGTH)
    tensors = gate.inputs(D, 1, 1, N, dtype)
    expected = evaluate(peers.ATTENTIONS[PAPER].run, [x.float() for x in tensors], backward)
    for name in names:
        if peers.ATTENTIONS[name].solves and name != PAPER:
            results = evaluate(peers.ATTENTIONS[name].run, tensors, backward)
            gate.check(f"{benchmark}, D={D}, one head, N={N}", name, results, repr(PAPER), expected)


def measure(setup: Setup, settings: Settings) -> Record:
    shape, N, dtype, names = setup.shape, setup.N, setup.dtype, setup.names
    check_truth(setup.benchmark, shape, setup.backward, torch.float32, (PAPER,))
    check_truth(setup.benchmark, shape, setup.backward, dtype, names)
    check_length(setup.benchmark, shape.D, N, setup.backward, dtype, names)
    tensors = gate.inputs(*shape, N, dtype)
    runs: dict[str, Run] = {
        name: partial(evaluate, peers.ATTENTIONS[name].run, tensors, setup.backward) for name in names
    }
    brief = {DENSE, PAPER} & set(names)
    times = race(runs, budget=settings.budget, seed=setup.label, brief=brief, least=settings.least)
    entries = {name: Entry(Spread.of(times[name]), ratios(times[name], times[SDPA])) for name in names}
    value = ratios(times[OURS], times[SDPA]).median
    checks = {} if setup.limit is None else {"ratio": Check(value, setup.limit)}
    facts: dict[str, int | str] = {**shape._asdict(), "pass": setup.what, "N": N}
    return Record(setup.benchmark, setup.threads, facts, entries, checks, flop_ratio=shape.flop_ratio)


def case(setup: Setup, settings: Settings) -> Case:
    slow = sum(setup.work(name) for name in setup.names if name in (DENSE, PAPER))
    checked = 30 * min(setup.N, SLOW_LENGTH) ** 2 if setup.backward else 5 * setup.N**2
    return Case(
        key=f"{setup.benchmark} {setup.threads} {setup.label}",
        label=setup.label,
        threads=setup.threads,
        run=partial(measure, setup, settings),
        work=sum(setup.work(name) for name in setup.names if name not in (DENSE, PAPER)),
        once=slow * LONG_ROUNDS + 2.0 * checked * setup.shape.D,
        fixed=0.2,
        budget=settings.budget,
    )


def _cases(settings: Settings) -> list[Case]:
    lengths = (300,) if settings.quick else (1024, 2048, 4096, 8192, 16384)
    cases = []
    for threads in settings.threads:
        for shape in SHAPES:
            for backward in (False, True):
                for N in lengths:
                    slow = N <= SLOW_LENGTH and threads == settings.threads[0]
                    names = (SDPA, OURS, DENSE, PAPER) if slow else (SDPA, OURS)
                    limit = SLACK * shape.flop_ratio
                    setup = Setup("solve", shape, N, backward, torch.float32, threads, names, limit)
                    cases.append(case(setup, settings))
    return cases


def _bf16_cases(settings: Settings) -> list[Case]:
    lengths, threads = (256,) if settings.quick else (1024, 2048, 4096), settings.threads[0]
    cases = []
    for shape in BF16_SHAPES:
        for backward in (False, True):
            limit = shape.flop_ratio if backward else BF16_FORWARD_LIMIT.get(shape)
            for N in lengths:
                setup = Setup("bf16", shape, N, backward, torch.bfloat16, threads, (SDPA, OURS), limit)
                cases.append(case(setup, settings))
    return cases


COLUMNS = (
    Column("D", fact("D")),
    Column("heads", lambda record: f"{record.facts['heads']}/{record.facts['kv_heads']}"),
    Column("pass", fact("pass")),
    Column("N", fact("N")),
    Column("SDPA, ms", milliseconds(SDPA)),
    Column("ours, ms", milliseconds(OURS)),
    Column("ours / SDPA", ratio(OURS)),
    Column("FLOP ratio", flop_ratio),
    Column("limit", limit("ratio")),
    Column("", verdict),
)

SOLVE = Benchmark(
    name="solve",
    about=(
        "Causal attention over a whole sequence in float32: forward (no gradients asked for) and forward+backward "
        "(gradients of q, k and v). The peer, ratio 1, is torch's "
        "scaled_dot_product_attention(is_causal=True, enable_gqa=True). "
        f"Up to N = {SLOW_LENGTH} two more ways to compute LUCID take part, with the first thread count: the dense "
        "triangular solve, and the paper's block algorithm written plainly. Their columns are ratios to SDPA too."
    ),
    limits=(
        "FLOP ratio = 1 + H_kv/H, by the count of operations: the solve is one more attention per key/value head. "
        f"limit = {SLACK} × FLOP ratio."
    ),
    cases=_cases,
    columns=(*COLUMNS, Column(DENSE, ratio(DENSE)), Column(PAPER, ratio(PAPER))),
)

BF16 = Benchmark(
    name="bf16",
    about=(
        "The passes of `solve` in bfloat16. The solve runs in float32 inside; torch's attention uses 16-bit matrix "
        "products if the CPU has them, so the ratio depends on the CPU more than in float32."
    ),
    limits=(
        "forward+backward: the FLOP ratio of float32, 1 + H_kv/H; forward: 1.5 for 32/4 heads, none for 8/8 (only "
        "reported)."
    ),
    cases=_bf16_cases,
    columns=COLUMNS,
)
