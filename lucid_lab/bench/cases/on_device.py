"""Whole models on any device: a training step, and 100 new tokens, with and without LUCID (§2.3).

Every layer and the whole vocabulary run, in bfloat16 on an accelerator and in float32 on a CPU. Nothing is summed up
from parts, as `model_training` and `model_decode` do on machines that are too small.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lucid_attention.memory import gigabytes, machine_memory

from ..harness import Run, Spread, device_clock, race, ratios
from ..report import fact, milliseconds, ratio
from ..results import Benchmark, Case, Column, Entry, Record, Settings
from . import whole_models
from .model_decode import DYNAMIC, PAPER_CONTEXT, PAPER_RATIO, filled
from .model_training import percent, percents
from .peers import SDPA
from .whole_models import (
    FULL,
    GEMMA_1B,
    GEMMA_4B,
    LUCID,
    PAPER_1B,
    QWEN,
    SLIDING,
    ModelShape,
    check_decoding,
    check_training,
)

TRAINING_SHAPES, DECODING_SHAPES = (GEMMA_1B, GEMMA_4B, QWEN, PAPER_1B), (GEMMA_1B, QWEN, PAPER_1B)
LENGTHS, QUICK_LENGTH, QUICK_CONTEXT = (2048, 8192), 64, 96
# The paper's number of new tokens.
TOKENS, QUICK_TOKENS = 100, 4
# Untimed runs of every contestant before the first round: kernels are chosen and memory is taken there.
WARM_UP = 2
# Seconds of timing, and rounds: caches grow by TOKENS in every one.
BUDGET, LEAST, MOST = 60.0, 5, 20
# AdamW in the dtype of the weights: weights, gradients, two moments.
TRAINING_COPIES = 4


def layer_kinds(shape: ModelShape) -> list[str]:
    """The kinds of all layers: of Gemma's, every sixth one has full attention."""
    if not shape.window:
        return [FULL] * shape.layers
    return [FULL if layer % 6 == 5 else SLIDING for layer in range(shape.layers)]


def weight_count(shape: ModelShape) -> int:
    """About the number of weights, the matrix of the vocabulary included."""
    return shape.layers * shape.weights + shape.hidden * shape.vocab


def models(shape: ModelShape, device: torch.device, *, quick: bool) -> dict[str, Any]:
    """The whole model with softmax attention, and a twin with LUCID that shares its weights.

    quick: one layer of every kind instead of all.
    """
    from transformers import AutoModelForCausalLM

    kinds = list(dict.fromkeys(layer_kinds(shape))) if quick else layer_kinds(shape)
    torch.manual_seed(0)
    with _default(device, torch.float32 if device.type == "cpu" else torch.bfloat16):
        softmax = AutoModelForCausalLM.from_config(
            whole_models.config(shape, kinds, shape.vocab), attn_implementation="sdpa"
        )
    softmax = softmax.to(device)
    return {SDPA: softmax, LUCID: whole_models.with_lucid(softmax)}


@contextmanager
def _default(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Weights that are made inside are of this dtype, on this device: a copy on the CPU may not fit there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def training_step(model: Any, ids: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """One iteration: loss, gradients, AdamW."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def generate(model: Any, past: Any, token: Tensor, tokens: int) -> Tensor:
    """`tokens` new tokens after a filled cache, each the most probable one: [1, 1], the last."""
    for _ in range(tokens):
        token = model(input_ids=token, past_key_values=past, use_cache=True).logits[:, -1:].argmax(-1)
    return token


def _train(shape: ModelShape, T: int, threads: int, settings: Settings) -> Record:
    check_training(shape)
    device, measured = settings.torch_device, shape.small() if settings.quick else shape
    _check_memory(measured, device, TRAINING_COPIES)
    contestants = models(measured, device, quick=settings.quick)
    ids = torch.randint(measured.vocab, (1, T), device=device)
    # The contestants share weights, so one optimiser serves both; its rate is 0, so that both do the same work.
    optimizer = torch.optim.AdamW(contestants[SDPA].parameters(), lr=0.0)
    runs: dict[str, Run] = {
        name: partial(training_step, model.train(), ids, optimizer) for name, model in contestants.items()
    }
    times = _race(runs, f"{shape.name} {T}", device, settings)
    facts: dict[str, int | str] = {
        "model": shape.name,
        "device": str(device),
        "dtype": str(contestants[SDPA].dtype).removeprefix("torch."),
        "T": T,
        "predicted": percent(shape.predicted(T, head=True)),
        "paper": "" if shape.paper is None else percent(1 + shape.paper) if shape.paper else "~0 %",
    }
    return Record("whole_training", threads, facts, _entries(times))


def _decode(shape: ModelShape, context: int, threads: int, settings: Settings) -> Record:
    check_decoding(shape)
    device, measured = settings.torch_device, shape.small() if settings.quick else shape
    tokens = QUICK_TOKENS if settings.quick else TOKENS
    cache = 2 * 2 * context * measured.kv_heads * measured.head_dim * measured.full_layers
    _check_memory(measured, device, 1, cache)
    contestants = models(measured, device, quick=settings.quick)
    dtype = contestants[SDPA].dtype
    with torch.no_grad():
        k, v = (
            torch.randn(1, measured.kv_heads, context, measured.head_dim, device=device, dtype=dtype) for _ in range(2)
        )
        first = torch.ones(1, 1, dtype=torch.long, device=device)
        runs: dict[str, Run] = {
            name: partial(generate, model.eval(), filled(model, DYNAMIC, k, v), first, tokens)
            for name, model in contestants.items()
        }
        times = _race(runs, f"{shape.name} {context}", device, settings)
    facts: dict[str, int | str] = {
        "model": shape.name,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "tokens": tokens,
        "predicted": percent(shape.predicted_decoding(context)),
        "paper": percent(PAPER_RATIO) if context == PAPER_CONTEXT else "",
    }
    return Record("whole_decode", threads, facts, _entries(times))


def _race(runs: dict[str, Run], seed: str, device: torch.device, settings: Settings) -> dict[str, list[float]]:
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    budget, least = (settings.budget, settings.least) if settings.quick else (BUDGET, LEAST)
    return race(runs, budget=budget, seed=seed, least=least, most=MOST, clock=device_clock(device))


def _entries(times: dict[str, list[float]]) -> dict[str, Entry]:
    return {name: Entry(Spread.of(rounds), ratios(rounds, times[SDPA])) for name, rounds in times.items()}


def _check_memory(shape: ModelShape, device: torch.device, copies: int, more: int = 0) -> None:
    """Refuse a model that does not fit. more: numbers beside `copies` of the weights."""
    size = (4 if device.type == "cpu" else 2) * (copies * weight_count(shape) + more)
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine_memory()
    if size > memory:
        raise MemoryError(
            f"{shape.name} must fit in the {gigabytes(memory)} of memory of {device}, but needs at least "
            f"{gigabytes(size)}: choose another --device"
        )


def _cases(name: str, settings: Settings) -> list[Case]:
    training = name == "whole_training"
    measure, shapes = (_train, TRAINING_SHAPES) if training else (_decode, DECODING_SHAPES)
    sizes: tuple[int, ...] = LENGTHS if training else (PAPER_CONTEXT,)
    if settings.quick:
        sizes = (QUICK_LENGTH if training else QUICK_CONTEXT,)
    threads = max(settings.threads)
    return [
        Case(
            key=f"{name} {settings.device} {shape.name} {size}",
            label=f"{shape.name} {size} on {settings.device}",
            threads=threads,
            run=partial(measure, shape, size, threads, settings),
            fixed=1.0 if settings.quick else BUDGET + 30,
        )
        for shape in shapes
        for size in sizes
    ]


def _training_cases(settings: Settings) -> list[Case]:
    return _cases("whole_training", settings)


def _decoding_cases(settings: Settings) -> list[Case]:
    return _cases("whole_decode", settings)


ABOUT = (
    "{} All layers and the whole vocabulary of Transformers' models run, with random weights, batch 1, bfloat16 on an "
    f"accelerator and float32 on a CPU. Each contestant runs {WARM_UP} times untimed; times are those of events on a "
    "CUDA device, and of the clock around synchronised runs elsewhere."
)
TRAINING = Benchmark(
    name="whole_training",
    about=ABOUT.format("An iteration of training: loss, gradients and AdamW, with sdpa and with LUCID."),
    limits="No limit: the paper gives no lengths. Its percentages stand beside.",
    cases=_training_cases,
    columns=(
        Column("model", fact("model")),
        Column("device", fact("device")),
        Column("dtype", fact("dtype")),
        Column("T", fact("T")),
        Column("SDPA, ms", milliseconds(SDPA)),
        Column("LUCID, ms", milliseconds(LUCID)),
        Column("LUCID / SDPA", ratio(LUCID)),
        Column("LUCID adds", percents(LUCID)),
        Column("predicted", fact("predicted")),
        Column("paper", fact("paper")),
    ),
    page="",
)
DECODING = Benchmark(
    name="whole_decode",
    about=ABOUT.format(
        f"{TOKENS} new tokens, one after the other, after a cache of {PAPER_CONTEXT} tokens, with sdpa and with LUCID; "
        "the times are those of all new tokens."
    ),
    limits="No limit. The paper has 77 ms against 76 ms and does not say for which model.",
    cases=_decoding_cases,
    columns=(
        Column("model", fact("model")),
        Column("device", fact("device")),
        Column("dtype", fact("dtype")),
        Column("context", fact("context")),
        Column("tokens", fact("tokens")),
        Column("SDPA, ms", milliseconds(SDPA)),
        Column("LUCID, ms", milliseconds(LUCID)),
        Column("LUCID / SDPA", ratio(LUCID)),
        Column("LUCID adds", percents(LUCID)),
        Column("predicted", fact("predicted")),
        Column("paper", fact("paper")),
    ),
    page="",
)
