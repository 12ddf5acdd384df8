"""Full passes of PaTH and LUCID-PaTH next to torch's attention, with their inputs and their gate.

Shapes as in `peers`: q [1, H·G, N, D]; k, v, w [1, H, N, D]; beta [1, H, N].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.path.api import lucid_path_attention, path_attention

from .. import gate
from ..gate import Shape
from ..harness import Run, Spread, race, ratios
from ..report import Cell, fact, milliseconds, ratio
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import peers
from .peers import SDPA

SHAPES = (Shape(64, 4, 4), Shape(64, 8, 2))
GATE_LENGTH = 300
# Up to this length the dense formula checks one head at the benchmark's own length.
DENSE_LENGTH = 2048
PATH, LUCID_PATH = "path_attention", "lucid_path_attention"
NAMES = (SDPA, PATH, LUCID_PATH)
PARTS = (*gate.ATTENTION_PARTS, "the gradient of w", "the gradient of β")
LEAF = 64
# The limit is this multiple of the ratio that the count of operations gives.
SLACK = 1.4
# At length AT there are fixed limits too: for PaTH, and for LUCID-PaTH with grouped heads.
AT, PATH_LIMIT, GROUPED_LIMIT = 4096, 1.6, 1.8

PathAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, PathAttention] = {PATH: path_attention, LUCID_PATH: lucid_path_attention}


def inputs(shape: Shape, N: int, far: bool = False) -> list[Tensor]:
    """q, k, v, w, beta and the gradient of the output. Keys are correlated, β is uniform in [0, 2].

    Uniform β forgets a key, and an error in it, after some hundred tokens. With `far`, the heads 0, 2, 4, … forget
    nothing: their β is either 2 (a reflection) or near 0.
    """
    q, k, v, do = gate.inputs(*shape, N)
    random = torch.Generator().manual_seed(N + 1)
    w = F.normalize(torch.randn(k.shape, generator=random), dim=-1)
    beta = 2 * torch.rand(k.shape[:3], generator=random)
    if far:
        reflects = torch.rand(k.shape[:3], generator=random) < 0.5
        beta[:, ::2] = torch.where(reflects, 2.0, 0.01 * beta)[:, ::2]
    return [q, k, v, w, beta, do]


def evaluate(name: str, tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output and, if `backward`, the gradients of q, k, v, w, β; of q, k, v for torch's attention."""
    if name == SDPA:
        return gate.evaluate(peers.sdpa, [*tensors[:3], tensors[-1]], backward)
    return gate.evaluate(ATTENTIONS[name], tensors, backward)


def _met_keys(k: Tensor, w: Tensor, beta: Tensor) -> list[Tensor]:
    """For each token t, the keys up to t, multiplied by the factors after them: N × [1, H, t + 1, D]."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    keys, keys_by_token = k[:, :, :0], []
    for t in range(k.shape[2]):
        factor = identity - beta[:, :, t, None, None] * w[:, :, t, :, None] * w[:, :, t, None, :]
        keys = torch.cat([keys @ factor, k[:, :, t : t + 1]], 2)
        keys_by_token.append(keys)
    return keys_by_token


def true_values(k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Y = P⁻¹ V with P_ij = exp(√D (k̂_jᵀ H_{j+1} … H_i k̂_i − 1)), row after row, in float64."""
    k, v, w, beta = (x.double() for x in (k, v, w, beta))
    unit, root = k / k.norm(dim=-1, keepdim=True), math.sqrt(k.shape[-1])
    y = v[:, :, :0]
    for t, keys in enumerate(_met_keys(unit, w, beta)):
        row = torch.exp(root * (keys[:, :, :t] @ unit[:, :, t, :, None] - 1))
        y = torch.cat([y, v[:, :, t : t + 1] - row.mT @ y], 2)
    return y


def true_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Softmax over q_iᵀ H_i … H_{j+1} k_j / √D applied to v, with every factor written out, in float64."""
    q, k, v, w, beta = (x.double() for x in (q, k, v, w, beta))
    H, root = k.shape[1], math.sqrt(k.shape[-1])
    grouped, rows = q.unflatten(1, (H, -1)), []
    for t, keys in enumerate(_met_keys(k, w, beta)):
        weights = torch.softmax(grouped[:, :, :, t] @ keys.mT / root, -1)
        rows.append((weights @ v[:, :, : t + 1]).flatten(1, 2))
    return torch.stack(rows, 2)


def true_lucid_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return true_attention(q, k, true_values(k, v, w, beta), w, beta)


TRUTHS: dict[str, PathAttention] = {PATH: true_attention, LUCID_PATH: true_lucid_attention}
DENSE: dict[str, PathAttention] = {
    PATH: partial(path_attention, impl="reference"),
    LUCID_PATH: partial(lucid_path_attention, impl="reference"),
}


@cache
def check_truth(benchmark: str, shape: Shape, backward: bool) -> None:
    """Compare both operators and torch's attention with the definitions in float64.

    The length is several leaves of the tree and a part of one.
    """
    tensors = inputs(shape, GATE_LENGTH, far=True)
    where = f"{benchmark}, {shape}, N={GATE_LENGTH}"
    plain = [*tensors[:3], tensors[-1]]
    softmax = gate.evaluate(partial(gate.true_attention, solves=False), plain, backward)
    truths = {name: gate.evaluate(truth, tensors, backward) for name, truth in TRUTHS.items()}
    gate.check_sharp(where, truths[PATH][0], softmax[0], torch.float32)
    gate.check_sharp(where, truths[LUCID_PATH][0], truths[PATH][0], torch.float32)
    for name, truth in {SDPA: softmax, **truths}.items():
        gate.check(where, name, evaluate(name, tensors, backward), "the float64 truth", truth, PARTS)


@cache
def check_length(benchmark: str, D: int, N: int, backward: bool) -> None:
    """Compare one head that forgets nothing, at the length of the benchmark, with the dense formula in float64."""
    tensors = inputs(Shape(D, 1, 1), N, far=True)
    wide = [x.double() for x in tensors]
    for name, dense in DENSE.items():
        expected = gate.evaluate(dense, wide, backward)
        results = evaluate(name, tensors, backward)
        gate.check(
            f"{benchmark}, D={D}, one head, N={N}", name, results, "the dense formula in float64", expected, PARTS
        )


def flop_ratio(name: str, shape: Shape, N: int, backward: bool) -> float:
    """The cost over that of torch's attention, by the count of operations.

    For a key/value head with G query heads, torch's attention takes 2 G, with its backward 7 G. A tree of L levels over
    leaves of D tokens moves G + 1 sets of rows per level. A share r = D/N of the triangle lies in the leaves.
    """
    G, r, levels = shape.heads / shape.kv_heads, shape.D / N, math.log2(N / LEAF) - 1
    if backward:
        attention, path = 7 * G, 7 * G * (1 - r) + (38 * G + 50 + 4 * (G + 1) * levels) * r
        solve = 7 * (1 - r) + (32 + 4 * levels) * r
    else:
        attention, path = 2 * G, 2 * G * (1 - r) + (10 * G + 12 + (G + 1) * levels) * r
        solve = 2 * (1 - r) + (7 + levels) * r
    return (path + solve if name == LUCID_PATH else path) / attention


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
        """The limits of a contestant, by the names of its checks."""
        limits = {name: SLACK * flop_ratio(name, self.shape, self.N, self.backward)}
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
    facts |= {f"FLOP ratio of {name}": f"{flop_ratio(name, shape, N, backward):.3f}" for name in (PATH, LUCID_PATH)}
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
        work=attention * (1 + 1.2 * sum(flop_ratio(name, shape, N, backward) for name in (PATH, LUCID_PATH))),
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
    """The verdict on one contestant."""
    return lambda record: "ok" if all(check.value <= check.limit for check in _own_checks(record, name)) else "over"


def _columns(name: str, short: str) -> tuple[Column, ...]:
    return (
        Column(f"{short}, ms", milliseconds(name)),
        Column(f"{short} / SDPA", ratio(name)),
        Column("FLOP ratio", fact(f"FLOP ratio of {name}")),
        Column("limits", _limits(name)),
        Column("", _verdict(name)),
    )


BENCHMARK = Benchmark(
    name="path",
    about=(
        "PaTH (path_attention) and LUCID-PaTH (lucid_path_attention) over a whole sequence in float32, w of length 1 "
        "and β uniform in [0, 2]: forward (no gradients asked for) and forward+backward (gradients of q, k, v, w and "
        "β; of q, k and v for the peer). The peer, ratio 1, is torch's "
        "scaled_dot_product_attention(is_causal=True, enable_gqa=True). First, both have to agree in float64 with the "
        "explicit product of Householder factors, and one head at the length itself, up to "
        f"N = {DENSE_LENGTH}, with the dense formula."
    ),
    limits=(
        "FLOP ratio: by the count of operations of the tree, its re-basing and leaves included. "
        f"limits = {SLACK} × FLOP ratio, and at N = {AT} at most {PATH_LIMIT} for PaTH and {GROUPED_LIMIT} for "
        "LUCID-PaTH with 8/2 heads."
    ),
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
