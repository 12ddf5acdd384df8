"""A quick look at the cost of LUCID on this machine: a few cases of `solve` and `decode`."""

from dataclasses import replace
from functools import partial

import torch

from ..gate import Shape
from ..report import fact, milliseconds, ratio
from ..results import Benchmark, Case, Column, Record, Settings
from . import decode, solve
from .peers import DECODE_STEP, OURS, SDPA

SHAPES = (Shape(64, 32, 4), Shape(64, 8, 8))
LENGTHS, CONTEXTS = (512, 2048), (4096, 32768)
SOFTMAX, LUCID = "softmax", "LUCID"
LEGEND = (
    "Medians and quartiles over rounds. heads: query/key-value heads. tokens: the length; for decoding, the tokens "
    "in the cache. softmax: torch's scaled_dot_product_attention; for decoding, the faster of SDPA and two matrix "
    "products. counted: the expected ratio, from the count of operations (the solve is one more attention per "
    "key/value head); for decoding, from the numbers read. Attention is a part of a model: `lucid bench model_training "
    "model_decode` measures whole models. `lucid bench memory` measures memory, `lucid bench --help` lists the rest."
)


def _row(what: str, tokens: int, shape: Shape, record: Record, softmax: str, lucid: str) -> Record:
    """A record of `solve` or `decode` in the columns of this table."""
    entries = {SOFTMAX: record.entries[softmax], LUCID: record.entries[lucid]}
    # A decoding step reads one number more for each key and value of D numbers.
    counted = record.flop_ratio or 1 + 1 / (2 * shape.D)
    facts: dict[str, int | str] = {
        "what": what,
        "heads": f"{shape.heads}/{shape.kv_heads}",
        "tokens": tokens,
        "counted": f"{counted:.2f}",
    }
    return Record("quick_look", record.threads, facts, entries)


def _measure_pass(setup: solve.Setup, settings: Settings) -> Record:
    what = "training: forward + backward" if setup.backward else "prefill: forward"
    return _row(what, setup.N, setup.shape, solve.measure(setup, settings), SDPA, OURS)


def _measure_step(shape: Shape, context: int, threads: int, settings: Settings) -> Record:
    record = decode.measure(shape, context, threads, settings)
    return _row("decoding: one new token", context, shape, record, str(record.facts["fastest"]), DECODE_STEP)


def _cases(settings: Settings) -> list[Case]:
    (threads,) = settings.threads
    cases = []
    for shape in SHAPES:
        for backward in (True, False):
            for N in LENGTHS:
                setup = solve.Setup("quick_look", shape, N, backward, torch.float32, threads, (SDPA, OURS), limit=None)
                case = solve.case(setup, settings)
                cases.append(replace(case, run=partial(_measure_pass, setup, settings)))
        for context in CONTEXTS:
            cases.append(
                Case(
                    key=f"quick_look {threads} {shape} {context}",
                    label=f"D={shape.D} {shape.heads}/{shape.kv_heads} context={context}",
                    threads=threads,
                    run=partial(_measure_step, shape, context, threads, settings),
                    fixed=1.5,
                    budget=settings.budget,
                )
            )
    return cases


BENCHMARK = Benchmark(
    name="quick_look",
    about="Attention with LUCID next to torch's softmax attention: float32, batch 1, heads of 64.",
    limits="",
    cases=_cases,
    columns=(
        Column("", fact("what")),
        Column("heads", fact("heads")),
        Column("tokens", fact("tokens")),
        Column("softmax, ms", milliseconds(SOFTMAX)),
        Column("LUCID, ms", milliseconds(LUCID)),
        Column("LUCID / softmax", ratio(LUCID)),
        Column("counted", fact("counted")),
    ),
)
