"""A training step of whole models with and without LUCID, summed up from one layer of each kind."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..harness import Run, Spread, race, ratios
from ..report import Cell, fact, limit, ratio, seconds, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import whole_models
from .peers import SDPA
from .whole_models import (
    FULL,
    GEMMA_1B,
    GEMMA_4B,
    LUCID,
    QWEN,
    SLIDING,
    ModelShape,
    check_training,
    hidden_states,
    training_step,
)

SHAPES = (GEMMA_1B, GEMMA_4B, QWEN)
WINDOW, HEAD = "sliding layer", "vocabulary"
LAYERS, MODEL = "LUCID, all layers", "LUCID, whole model"
LENGTHS, QUICK_LENGTH = (2048, 8192), 64
# The head is timed for a chunk of tokens; the time of all T tokens is in proportion.
CHUNK, QUICK_CHUNK = 512, 32
# Seconds of timing, and the fewest rounds: at 8192 tokens a round takes up to two minutes.
BUDGET, ROUNDS = 90.0, 3
# The limit for the paper's "~0 %". The paper's table has steps of half a percent.
ABOUT_ZERO = 0.005
# Speed of matrix products over that of attention, for estimates of duration.
PRODUCT_SPEED = 1.5


def compose(shape: ModelShape, seconds: Mapping[str, list[float]], full: str, head: float = 0.0) -> list[float]:
    """Seconds of the whole model, round by round. full: the contestant for layers with full attention."""
    windows = seconds.get(WINDOW, [0.0] * len(seconds[full]))
    return [
        shape.sliding_layers * window + shape.full_layers * layer + head
        for window, layer in zip(windows, seconds[full], strict=True)
    ]


def head_step(x: Tensor, weight: Tensor, gradient: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over the vocabulary, forward and backward, as trainers compute it: for a chunk of the tokens.

    Returns the gradient of x: [T, hidden]; adds that of weight: [V, hidden] to `gradient`.
    """
    p = torch.mm(x, weight.T)
    torch.softmax(p, 1, out=p)
    p[torch.arange(len(targets)), targets] -= 1
    gradient.addmm_(p.T, x)
    return torch.mm(p, weight)


def random_weight(shape: ModelShape) -> Tensor:
    """The matrix of the vocabulary: [V, hidden]. 1024 random rows, repeated: V random ones take longer than a step."""
    rows = torch.randn(1024, shape.hidden) * shape.hidden**-0.5
    return rows.repeat(shape.vocab // 1024 + 1, 1)[: shape.vocab]


def _head(shape: ModelShape, chunk: int) -> Run:
    x, targets = torch.randn(chunk, shape.hidden), torch.randint(shape.vocab, (chunk,))
    weight = random_weight(shape)
    return partial(head_step, x, weight, torch.zeros_like(weight), targets)


def _step(model: object, x: Tensor, dx: Tensor) -> None:
    training_step(model, x, dx)


def _contestants(shape: ModelShape, T: int, chunk: int) -> dict[str, Run]:
    softmax = whole_models.with_softmax(shape, [FULL])
    models = {SDPA: softmax, LUCID: whole_models.with_lucid(softmax)}
    if shape.sliding_layers:
        models[WINDOW] = whole_models.with_softmax(shape, [SLIDING])
    x, dx = hidden_states(shape, T), torch.randn(1, T, shape.hidden)
    for model in models.values():
        _step(model, x[:, :QUICK_LENGTH], dx[:, :QUICK_LENGTH])  # Libraries set up on the first call.
    runs: dict[str, Run] = {name: partial(_step, model, x, dx) for name, model in models.items()}
    return runs | {HEAD: _head(shape, chunk)}


def _measure(shape: ModelShape, T: int, threads: int, settings: Settings) -> Record:
    check_training(shape)
    measured, chunk = (shape.small(), QUICK_CHUNK) if settings.quick else (shape, CHUNK)
    runs = _contestants(measured, T, chunk)
    # The head is the same for both contestants: three rounds of it are enough.
    times = race(runs, budget=_budget(settings), seed=f"{shape.name} {T}", least=ROUNDS, brief={HEAD})
    times[HEAD] = [seconds * T / chunk for seconds in times[HEAD]]
    head = Spread.of(times[HEAD]).median
    layers = {name: compose(shape, times, name) for name in (SDPA, LUCID)}
    whole = {name: compose(shape, times, name, head) for name in (SDPA, LUCID)}
    entries = {name: Entry(Spread.of(rounds)) for name, rounds in times.items()}
    entries[LUCID] = Entry(Spread.of(times[LUCID]), ratios(times[LUCID], times[SDPA]))
    entries[LAYERS] = Entry(Spread.of(layers[LUCID]), ratios(layers[LUCID], layers[SDPA]))
    entries[MODEL] = Entry(Spread.of(whole[LUCID]), ratios(whole[LUCID], whole[SDPA]))
    assert shape.paper is not None
    value = ratios(whole[LUCID], whole[SDPA]).median
    facts: dict[str, int | str] = {
        "model": shape.name,
        "layers": f"{shape.sliding_layers} + {shape.full_layers}",
        "T": T,
        "predicted, layers": percent(shape.predicted(T, head=False)),
        "predicted, model": percent(shape.predicted(T, head=True)),
        "paper": percent(1 + shape.paper) if shape.paper else "~0 %",
    }
    checks = {"whole model": Check(value, 1 + (shape.paper or ABOUT_ZERO))}
    return Record("model_training", threads, facts, entries, checks)


def percent(value: float) -> str:
    return f"{100 * (value - 1):+.1f} %"


def percents(name: str) -> Cell:
    """The ratio of a contestant as the percentage that it adds."""

    def cell(record: Record) -> str:
        ratio = record.entries[name].ratio
        assert ratio is not None
        return f"{percent(ratio.median)} ({100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f})"

    return cell


def _budget(settings: Settings) -> float:
    return settings.budget if settings.quick else BUDGET


def _work(shape: ModelShape, T: int) -> float:
    """Operations of the layers in one round. Torch's attention computes every pair, also outside of a window."""
    solve = shape.solve_operations(T)
    if not shape.sliding_layers:
        return 2 * shape.layer_operations(FULL, T) + solve
    return 3 * shape.layer_operations(FULL, T) + solve + solve * shape.heads / shape.kv_heads


def _cases(settings: Settings) -> list[Case]:
    # Only the largest thread count runs: one thread takes half an hour.
    threads = max(settings.threads)
    return [
        Case(
            key=f"model_training {threads} {shape.name} {T}",
            label=f"{shape.name} T={T}",
            threads=threads,
            run=partial(_measure, shape, T, threads, settings),
            # `estimate` counts two rounds of this length, but three run.
            work=0.0 if settings.quick else ROUNDS / 2 * _work(shape, T) / PRODUCT_SPEED,
            once=0.0 if settings.quick else 3 * shape.head_operations(CHUNK) / PRODUCT_SPEED,
            fixed=2.0 if settings.quick else 5.0,
            budget=_budget(settings),
        )
        for shape in SHAPES
        for T in ((QUICK_LENGTH,) if settings.quick else LENGTHS)
    ]


BENCHMARK = Benchmark(
    name="model_training",
    about=(
        "A training step, forward and backward to the input and to all weights, of Transformers' Gemma 3 and Qwen 2 in "
        "their true widths, in float32, batch 1: with sdpa, and with LUCID in the layers with full attention. Each "
        "kind of layer is timed as a model of one layer, the kinds taking turns. The time of all layers is the sum "
        "over the true number of each kind (with a window + with full attention). The whole model adds the matrix of "
        f"the vocabulary and cross-entropy, timed for {CHUNK} tokens and scaled to T. The optimiser and the embedding "
        "are left out; both would make LUCID's share smaller. With the mask of a window, torch's attention on a CPU "
        "computes all T × T pairs, which makes LUCID's share smaller than with kernels that know windows. The "
        "prediction is by the count of operations, without the pairs outside of a window; the solve is one more "
        "attention per key/value head. First, small models with these heads have to agree with the defining equation "
        "in float64 in their output and all gradients, and LUCID of strength 0 with sdpa."
    ),
    limits=(
        "limit: the percentage of the paper's table of training overhead, which gives no lengths or batches, for the "
        f"whole model. For its ~0 % the limit is {100 * ABOUT_ZERO:.1f} %."
    ),
    cases=_cases,
    columns=(
        Column("model", fact("model")),
        Column("layers", fact("layers")),
        Column("T", fact("T")),
        Column("sliding layer, s", seconds(WINDOW)),
        Column("full layer, s", seconds(SDPA)),
        Column("LUCID layer, s", seconds(LUCID)),
        Column("LUCID / full", ratio(LUCID)),
        Column("vocabulary, s", seconds(HEAD)),
        Column("all layers", percents(LAYERS)),
        Column("layers, predicted", fact("predicted, layers")),
        Column("whole model", percents(MODEL)),
        Column("model, predicted", fact("predicted, model")),
        Column("paper", fact("paper")),
        Column("limit", limit("whole model")),
        Column("", verdict),
    ),
    page="models",
)
