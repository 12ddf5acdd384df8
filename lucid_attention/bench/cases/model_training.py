"""A training step of whole models with and without LUCID, put together from their kinds of layers."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..harness import Run, Spread, race, ratios
from ..report import Cell, fact, limit, ratio, seconds, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import model_shapes
from .model_gate import LUCID, check_training
from .model_shapes import FULL, GEMMA_1B, GEMMA_4B, QWEN, SLIDING, ModelShape, hidden_states, training_step
from .peers import SDPA

SHAPES = (GEMMA_1B, GEMMA_4B, QWEN)
WINDOW, HEAD = "sliding layer", "vocabulary"
LAYERS, MODEL = "LUCID, all layers", "LUCID, whole model"
LENGTHS, QUICK_LENGTH = (2048, 8192), 64
# Tokens of the vocabulary's matrix timed together; the time of all T follows in proportion.
CHUNK, QUICK_CHUNK = 512, 32
# Seconds of rounds, and how many there are at least: at 8192 tokens one takes up to two minutes.
BUDGET, ROUNDS = 90.0, 3
# "~0 %" is what rounds to it in the paper's table, whose steps are half percents.
ABOUT_ZERO = 0.005
# Matrix products run faster than attention, in whose speed estimates of duration are.
PRODUCT_SPEED = 1.5


def compose(shape: ModelShape, seconds: Mapping[str, list[float]], full: str, head: float = 0.0) -> list[float]:
    """Seconds of all layers, round by round, where those with full attention are `full`, and of the head."""
    windows = seconds.get(WINDOW, [0.0] * len(seconds[full]))
    return [
        shape.sliding_layers * window + shape.full_layers * one + head
        for window, one in zip(windows, seconds[full], strict=True)
    ]


def head_step(x: Tensor, weight: Tensor, gradient: Tensor, targets: Tensor) -> Tensor:
    """Scores over the vocabulary, their cross-entropy, and backward: gradients of x, and of weight added to `gradient`.

    x: [T, hidden]; weight: [V, hidden]. As trainers do it for large vocabularies, a part of the tokens at a time.
    """
    p = torch.mm(x, weight.T)
    torch.softmax(p, 1, out=p)
    p[torch.arange(len(targets)), targets] -= 1
    gradient.addmm_(p.T, x)
    return torch.mm(p, weight)


def random_weight(shape: ModelShape) -> Tensor:
    """The vocabulary's matrix: [V, hidden]. A part of it repeated: random numbers would take longer than the step."""
    rows = torch.randn(1024, shape.hidden) * shape.hidden**-0.5
    return rows.repeat(shape.vocab // 1024 + 1, 1)[: shape.vocab]


def _head(shape: ModelShape, chunk: int) -> Run:
    x, targets = torch.randn(chunk, shape.hidden), torch.randint(shape.vocab, (chunk,))
    weight = random_weight(shape)
    return partial(head_step, x, weight, torch.zeros_like(weight), targets)


def _step(model: object, x: Tensor, dx: Tensor) -> None:
    training_step(model, x, dx)


def _contestants(shape: ModelShape, T: int, chunk: int) -> dict[str, Run]:
    softmax = model_shapes.with_softmax(shape, [FULL])
    models = {SDPA: softmax, LUCID: model_shapes.with_lucid(softmax)}
    if shape.sliding_layers:
        models[WINDOW] = model_shapes.with_softmax(shape, [SLIDING])
    x, dx = hidden_states(shape, T), torch.randn(1, T, shape.hidden)
    for model in models.values():
        _step(model, x[:, :QUICK_LENGTH], dx[:, :QUICK_LENGTH])  # libraries set up
    runs: dict[str, Run] = {name: partial(_step, model, x, dx) for name, model in models.items()}
    return runs | {HEAD: _head(shape, chunk)}


def _measure(shape: ModelShape, T: int, threads: int, settings: Settings) -> Record:
    check_training(shape)
    measured, chunk = (shape.small(), QUICK_CHUNK) if settings.quick else (shape, CHUNK)
    runs = _contestants(measured, T, chunk)
    # The vocabulary has nobody to compare with: three rounds of it are enough.
    times = race(runs, budget=_budget(settings), seed=f"{shape.name} {T}", least=ROUNDS, brief={HEAD})
    times[HEAD] = [seconds * T / chunk for seconds in times[HEAD]]
    head = Spread.of(times[HEAD]).median
    layers = {name: compose(shape, times, name) for name in (SDPA, LUCID)}
    whole = {name: compose(shape, times, name, head) for name in (SDPA, LUCID)}
    entries = {name: Entry(Spread.of(found)) for name, found in times.items()}
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
    """A contestant's ratio as what it costs more."""

    def cell(record: Record) -> str:
        found = record.entries[name].ratio
        assert found is not None
        return f"{percent(found.median)} ({100 * (found.low - 1):+.1f} to {100 * (found.high - 1):+.1f})"

    return cell


def _budget(settings: Settings) -> float:
    return settings.budget if settings.quick else BUDGET


def _work(shape: ModelShape, T: int) -> float:
    """Operations of the layers in one round. Torch's attention with a window's mask computes every pair."""
    solve = shape.solve_operations(T)
    if not shape.sliding_layers:
        return 2 * shape.layer_operations(FULL, T) + solve
    return 3 * shape.layer_operations(FULL, T) + solve + solve * shape.heads / shape.kv_heads


def _cases(settings: Settings) -> list[Case]:
    # One thread would take half an hour: the largest count alone.
    threads = max(settings.threads)
    return [
        Case(
            key=f"model_training {threads} {shape.name} {T}",
            label=f"{shape.name} T={T}",
            threads=threads,
            run=partial(_measure, shape, T, threads, settings),
            # Half as much again: of rounds so long the estimate expects two.
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
        "the true widths, in float32, batch 1: with sdpa, and with LUCID in the layers with full attention. Each kind "
        "of layer is timed as a model of one layer, the kinds taking turns, and the time of all layers is the sum over "
        "the true number of each (with a window + with full attention). The whole model has the vocabulary's matrix "
        f"and cross-entropy besides, timed for {CHUNK} tokens and counted for T. The optimiser is left out; so is the "
        "embedding, which costs nothing to speak of. Both would make LUCID's share smaller. With a window's mask "
        "torch's attention computes all T × T pairs on a CPU, which makes it smaller here than with kernels that know "
        "windows. That is not so in the prediction: by the count of operations, where a window is not paid beyond its "
        "size and the solve is one more attention per key/value head. Before, small models with these heads have to "
        "agree with the defining equation in float64 in their output and all gradients, and LUCID of strength 0 with "
        "sdpa."
    ),
    limits=(
        "limit: what the paper reports (table of training overhead; for which lengths and batches it does not say), "
        f"for the whole model. For its ~0 % the limit is {100 * ABOUT_ZERO:.1f} %."
    ),
    minutes="about 15 minutes with two threads. Runs with the largest thread count alone",
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
