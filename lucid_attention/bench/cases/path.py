"""Full passes of PaTH and LUCID-PaTH next to torch's attention."""

import math
from dataclasses import dataclass
from functools import partial

from ..harness import Run, Spread, race, ratios
from ..report import Cell, fact, milliseconds, ratio
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from .path_peers import DENSE_LENGTH, LUCID_PATH, PATH, SHAPES, check_length, check_truth, evaluate, inputs
from .peers import SDPA
from .solve import Shape

NAMES = (SDPA, PATH, LUCID_PATH)
LEAF = 64
# The limit is this much above what the count of operations allows.
SLACK = 1.4
# Asked for at this length: of PaTH always, of LUCID-PaTH with grouped heads.
AT, PATH_LIMIT, GROUPED_LIMIT = 4096, 1.6, 1.8


def bound(name: str, shape: Shape, N: int, backward: bool) -> float:
    """Cost over that of torch's attention by the count of operations.

    Per key/value head, G query heads: torch's attention takes 2 G, with its backward 7 G. A tree of L levels over
    leaves of D tokens re-bases G + 1 sets of rows per level; a share r = D/N of the triangle lies in the leaves.
    """
    G, r, levels = shape.heads / shape.kv_heads, shape.D / N, math.log2(N / LEAF) - 1
    if backward:
        attention, read = 7 * G, 7 * G * (1 - r) + (38 * G + 50 + 4 * (G + 1) * levels) * r
        solve = 7 * (1 - r) + (32 + 4 * levels) * r
    else:
        attention, read = 2 * G, 2 * G * (1 - r) + (10 * G + 12 + (G + 1) * levels) * r
        solve = 2 * (1 - r) + (7 + levels) * r
    return (read + solve if name == LUCID_PATH else read) / attention


@dataclass(frozen=True)
class Setup:
    shape: Shape
    N: int
    backward: bool
    threads: int

    @property
    def what(self) -> str:
        return "forward+backward" if self.backward else "forward"

    @property
    def label(self) -> str:
        D, heads, kv_heads = self.shape
        return f"D={D} {heads}/{kv_heads} {self.what} N={self.N}"

    def limits(self, name: str) -> dict[str, float]:
        """What is asked of a contestant, under the names of its checks."""
        limits = {name: SLACK * bound(name, self.shape, self.N, self.backward)}
        grouped = self.shape.heads > self.shape.kv_heads
        if self.N == AT and name == PATH:
            limits[f"{name} at {AT}"] = PATH_LIMIT
        if self.N == AT and name == LUCID_PATH and grouped:
            limits[f"{name} at {AT}"] = GROUPED_LIMIT
        return limits


def _measure(setup: Setup, settings: Settings) -> Record:
    shape, N, backward = setup.shape, setup.N, setup.backward
    check_truth("path", shape, backward)
    check_length("path", shape.D, min(N, DENSE_LENGTH), backward)
    tensors = inputs(shape, N)
    runs: dict[str, Run] = {name: partial(evaluate, name, tensors, backward) for name in NAMES}
    times = race(runs, budget=settings.budget, seed=setup.label, least=settings.least)
    entries = {name: Entry(Spread.of(times[name]), ratios(times[name], times[SDPA])) for name in NAMES}
    checks: dict[str, Check] = {}
    for name in (PATH, LUCID_PATH):
        value = ratios(times[name], times[SDPA]).median
        checks |= {check: Check(value, limit) for check, limit in setup.limits(name).items()}
    facts: dict[str, int | str] = {**shape._asdict(), "pass": setup.what, "N": N}
    facts |= {f"bound of {name}": f"{bound(name, shape, N, backward):.3f}" for name in (PATH, LUCID_PATH)}
    return Record("path", setup.threads, facts, entries, checks)


def _case(setup: Setup, settings: Settings) -> Case:
    shape, N, backward = setup.shape, setup.N, setup.backward
    attention = 2.0 * N**2 * shape.D * (3.5 if backward else 1) * shape.heads
    compared = min(N, DENSE_LENGTH)
    return Case(
        key=f"path {setup.threads} {setup.label}",
        label=setup.label,
        threads=setup.threads,
        run=partial(_measure, setup, settings),
        work=attention * (1 + 1.2 * sum(bound(name, shape, N, backward) for name in (PATH, LUCID_PATH))),
        once=(12.0 if backward else 4.0) * compared**3,
        fixed=1.0,
        budget=settings.budget,
    )


def _cases(settings: Settings) -> list[Case]:
    lengths = (300,) if settings.quick else (1024, 2048, 4096, 8192)
    return [
        _case(Setup(shape, N, backward, threads), settings)
        for threads in settings.threads
        for shape in SHAPES
        for backward in (False, True)
        for N in lengths
    ]


def _own_checks(record: Record, name: str) -> list[Check]:
    return [check for what, check in record.checks.items() if what.split(" ")[0] == name]


def _limits(name: str) -> Cell:
    return lambda record: ", ".join(f"{check.limit:.3g}" for check in _own_checks(record, name))


def _verdict(name: str) -> Cell:
    """Of one contestant alone."""
    return lambda record: "ok" if all(check.value <= check.limit for check in _own_checks(record, name)) else "over"


def _columns(name: str, short: str) -> tuple[Column, ...]:
    return (
        Column(f"{short}, ms", milliseconds(name)),
        Column(f"{short} / SDPA", ratio(name)),
        Column("bound", fact(f"bound of {name}")),
        Column("limits", _limits(name)),
        Column("", _verdict(name)),
    )


BENCHMARK = Benchmark(
    name="path",
    about=(
        "PaTH (path_attention) and LUCID-PaTH (lucid_path_attention) over a whole sequence in float32, w of length 1 "
        "and β uniform in [0, 2]: forward (no gradients asked for) and forward+backward (gradients of q, k, v, w and "
        "β; of q, k and v for the peer). The peer, ratio 1, is torch's "
        "scaled_dot_product_attention(is_causal=True, enable_gqa=True). Before, both have to agree with the explicit "
        "product of Householder factors in float64, and one head at the length itself, up to "
        f"N = {DENSE_LENGTH}, with the dense formula."
    ),
    limits=(
        "bound: by the count of operations of the tree, its re-basing and leaves included. "
        f"limits = {SLACK} × bound, and at N = {AT} at most {PATH_LIMIT} for PaTH and {GROUPED_LIMIT} for LUCID-PaTH "
        "with 8/2 heads."
    ),
    minutes="about 3 minutes for each thread count",
    cases=_cases,
    columns=(
        Column("heads", lambda record: f"{record.facts['heads']}/{record.facts['kv_heads']}"),
        Column("pass", fact("pass")),
        Column("N", fact("N")),
        Column("SDPA, ms", milliseconds(SDPA)),
        *_columns(PATH, "PaTH"),
        *_columns(LUCID_PATH, "LUCID-PaTH"),
    ),
    page="family",
)
