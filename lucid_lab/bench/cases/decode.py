"""One new token against a cache."""

from functools import cache, partial

import torch

from .. import gate
from ..gate import Shape
from ..harness import Run, Spread, race, ratios
from ..report import entry_ratio, fact, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import peers
from .peers import DECODE_STEP, PRODUCTS, SDPA, TWO_PASSES, Cache
from .solve import SHAPES

STANDARD = (PRODUCTS, SDPA)
LONG_CONTEXT = 32768
# By context: the largest ratio to the fastest standard decoder.
LIMITS = {4096: 1.15, LONG_CONTEXT: 1.05}
# The same step with caches of 16 bits, whose peer is the step with a cache of float32.
NARROW = {f"{DECODE_STEP}, {dtype}": dtype for dtype in ("bfloat16", "float16")}
GATE_CONTEXT = 150


@cache
def check_truth(shape: Shape) -> None:
    """Compare every contestant with the definition over the whole sequence, in float64."""
    q, k, v, _ = gate.inputs(*shape, GATE_CONTEXT + 1)
    y = gate.true_values(k, v)
    where = f"decode, {shape}, context {GATE_CONTEXT}"
    truths = {}
    for solves, values in ((False, v.double()), (True, y)):
        truths[solves] = (gate.true_attention(q, k, v, solves)[:, :, -1:], values[:, :, -1:])
    gate.check_sharp(where, truths[True][0], truths[False][0], torch.float32)
    for name, peer in peers.DECODERS.items():
        earlier = (y.float() if peer.solves else v)[:, :, :-1]
        results = peer.run(Cache.of(q, k, v, earlier))
        gate.check(where, name, results, "the float64 truth", truths[peer.solves], gate.DECODER_PARTS)
    for name, dtype in NARROW.items():
        narrow = Cache.of(q, k, v, y.float()[:, :, :-1]).to(getattr(torch, dtype))
        results = peers.decode_ours(narrow)
        gate.check(where, name, results, "the float64 truth", truths[True], gate.DECODER_PARTS)


def measure(shape: Shape, context: int, threads: int, settings: Settings) -> Record:
    check_truth(shape)
    q, k, v, _ = gate.inputs(*shape, context + 1)
    # v stands for y in the cache: the time of a step does not depend on the values, and a real solve would take longer
    # than the benchmark.
    filled = Cache.of(q, k, v, v[:, :, :-1])
    del q, k, v
    runs: dict[str, Run] = {name: partial(peer.run, filled) for name, peer in peers.DECODERS.items()}
    narrow = {name: filled.to(getattr(torch, dtype)) for name, dtype in NARROW.items()}
    runs |= {name: partial(peers.decode_ours, cache) for name, cache in narrow.items()}
    with torch.no_grad():
        results = {name: (peer.solves, peer.run(filled)) for name, peer in peers.DECODERS.items()}
        gate.check_agreement(f"decode, {shape}, context {context}", results)
        times = race(runs, budget=settings.budget, seed=f"{shape} {context}", least=settings.least)
    medians = {name: Spread.of(times[name]) for name in times}
    fastest = min(STANDARD, key=lambda name: medians[name].median)
    entries = {
        name: Entry(medians[name], ratios(times[name], times[DECODE_STEP if name in NARROW else fastest]))
        for name in times
    }
    to_sdpa = ratios(times[DECODE_STEP], times[SDPA]).median
    checks = {
        f"{dtype} to float32": Check(ratios(times[name], times[DECODE_STEP]).median, 1.0)
        for name, dtype in NARROW.items()
    }
    if context in LIMITS:
        checks["to the fastest"] = Check(ratios(times[DECODE_STEP], times[fastest]).median, LIMITS[context])
    if shape.heads > shape.kv_heads:
        checks["to SDPA"] = Check(to_sdpa, 1.0)
    facts: dict[str, int | str] = {**shape._asdict(), "context": context, "fastest": fastest}
    return Record("decode", threads, facts, entries, checks)


def _cases(settings: Settings) -> list[Case]:
    contexts = (512, 2048) if settings.quick else (4096, LONG_CONTEXT)
    return [
        Case(
            key=f"decode {threads} {shape} {context}",
            label=f"D={shape.D} {shape.heads}/{shape.kv_heads} context={context}",
            threads=threads,
            run=partial(measure, shape, context, threads, settings),
            fixed=0.2 if settings.quick else 1.5,
            budget=settings.budget,
        )
        for threads in settings.threads
        for shape in SHAPES
        for context in contexts
    ]


BENCHMARK = Benchmark(
    name="decode",
    about=(
        "One step of decoding in float32, batch 1: append the new token to a preallocated cache and read. Two standard "
        "decoders (two matrix products around a softmax; torch's SDPA with "
        "enable_gqa=True) and two of LUCID (lucid_decode, which also computes 1/‖k‖ of the new key; the paper's two "
        "passes, with normalised keys cached). lucid_decode also runs with caches of bfloat16 and float16."
    ),
    limits=(
        "Ratios are to the faster standard decoder, those of 16-bit caches to lucid_decode with float32. Limits: "
        + ", ".join(f"{limit:.2f} at context {context}" for context, limit in LIMITS.items())
        + ", the time of SDPA for grouped heads, and 1 for 16-bit caches."
    ),
    cases=_cases,
    columns=(
        Column("D", fact("D")),
        Column("heads", lambda record: f"{record.facts['heads']}/{record.facts['kv_heads']}"),
        Column("context", fact("context")),
        Column("bmm, ms", milliseconds(PRODUCTS)),
        Column("SDPA, ms", milliseconds(SDPA)),
        Column("lucid_decode, ms", milliseconds(DECODE_STEP)),
        Column("lucid_decode / fastest", ratio(DECODE_STEP)),
        Column("lucid_decode / SDPA", entry_ratio(DECODE_STEP, SDPA)),
        Column(TWO_PASSES, ratio(TWO_PASSES)),
        *(Column(f"{dtype} / float32", ratio(name)) for name, dtype in NARROW.items()),
        Column("", verdict),
    ),
)
