"""Decoding of PaTH and LUCID-PaTH, token by token, moves of all keys included."""

import functools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.api import lucid_path_attention, path_attention
from lucid_attention.ops.path.decode import APPLY_EVERY, apply_factors, identity_factors, keys_at_end, path_decode

from .. import gate
from ..gate import Shape
from ..harness import Run, Spread, race, ratios
from ..report import fact, limit, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import path, peers
from .decode import LONG_CONTEXT, STANDARD
from .path import LUCID_PATH, PATH, SHAPES
from .peers import PRODUCTS, SDPA, Cache, Decoded

STEP, LUCID_STEP = "path_decode", "path_decode with inverse_norms"
LIMITS = {STEP: 1.15, LUCID_STEP: 1.25}
GATE_CONTEXT, GATE_CYCLES = 150, 2

# q, k, v, w, beta of one new token: [1, *, 1, D], beta [1, H, 1].
Token = tuple[Tensor, ...]
# Decodes tokens one after the other. Returns their outputs and their stored values: [1, *, tokens, D].
Cycle = Callable[[Cache, Sequence[Token]], Decoded]


def standard_cycle(decode: Callable[[Cache], Decoded], cache: Cache, tokens: Sequence[Token]) -> Decoded:
    """A standard decoder, token by token."""
    outputs = []
    for q, k, v, *_ in tokens:
        cache.new_q, cache.new_k, cache.new_v = q, k, v
        outputs.append(decode(cache)[0])
        cache.length += 1
    return torch.cat(outputs, 2), cache.values[:, :, cache.length - len(tokens) : cache.length]


def path_cycle(cache: Cache, tokens: Sequence[Token], lucid: bool) -> Decoded:
    """Our steps with the writes into the cache, and the move of all keys at the end."""
    pending, product, inverse_norms, outputs = cache.length, identity_factors(cache.k), None, []
    for q, k, v, w, beta in tokens:
        n = cache.length
        cache.k[:, :, n] = k[:, :, 0]
        if lucid:
            cache.inverse_norms[:, :, n] = inverse_key_norms(k)[:, :, 0]
            inverse_norms = cache.inverse_norms[:, :, : n + 1]
        past = cache.values[:, :, :n]
        step = path_decode(q, cache.k[:, :, : n + 1], v, w, beta, past, product, pending, inverse_norms=inverse_norms)
        cache.k[:, :, pending : n + 1] = step.live
        cache.values[:, :, n] = step.y[:, :, 0]
        product = step.product
        outputs.append(step.o)
        cache.length += 1
    old_keys = cache.k[:, :, :pending]
    apply_factors(old_keys, product, out=old_keys)
    return torch.cat(outputs, 2), cache.values[:, :, pending : cache.length]


CYCLES: dict[str, Cycle] = {
    PRODUCTS: partial(standard_cycle, peers.decode_products),
    SDPA: partial(standard_cycle, peers.decode_sdpa),
    STEP: partial(path_cycle, lucid=False),
    LUCID_STEP: partial(path_cycle, lucid=True),
}


def split(tensors: Sequence[Tensor]) -> list[Token]:
    return list(zip(*(x.split(1, 2) for x in tensors), strict=True))


def filled(context: int, tensors: Sequence[Tensor], keys: Tensor, values: Tensor) -> Cache:
    """A cache of the first tokens: `keys`, `values`, and 1/‖k‖ of the keys before any factor. It has room for more."""
    q, k, v = (x[:, :, : context + 1] for x in tensors[:3])
    cache = Cache.of(q, k, v, values, spare=GATE_CYCLES * APPLY_EVERY)
    cache.k[:, :, :context] = keys
    return cache


@functools.cache
def check_truth(shape: Shape) -> None:
    """Compare GATE_CYCLES cycles of every contestant, moves of all keys included, with the definition in float64."""
    N = GATE_CONTEXT + GATE_CYCLES * APPLY_EVERY
    *tensors, _ = path.inputs(shape, N, far=True)
    q, k, v, w, beta = tensors
    where = f"path_decode, {shape}, context {GATE_CONTEXT}"
    old = slice(0, GATE_CONTEXT)
    moved = keys_at_end(k[:, :, old], w[:, :, old], beta[:, :, old])
    y = path.true_values(k, v, w, beta)
    standard = (gate.true_attention(q, k, v, False), v.double(), k[:, :, old])
    truths = {PRODUCTS: standard, SDPA: standard}
    truths[STEP] = (path.true_attention(q, k, v, w, beta), v.double(), moved)
    truths[LUCID_STEP] = (path.true_attention(q, k, y, w, beta), y, moved)
    gate.check_sharp(where, truths[STEP][0], standard[0], torch.float32)
    gate.check_sharp(where, truths[LUCID_STEP][0], truths[STEP][0], torch.float32)
    for name, (o, values, keys) in truths.items():
        cache = filled(GATE_CONTEXT, tensors, keys, values[:, :, old].float())
        tokens = split(tensors)[GATE_CONTEXT:]
        for n in range(GATE_CYCLES):
            start = GATE_CONTEXT + n * APPLY_EVERY
            new = slice(start, start + APPLY_EVERY)
            results = CYCLES[name](cache, tokens[n * APPLY_EVERY : (n + 1) * APPLY_EVERY])
            gate.check(where, name, results, "the float64 truth", (o[:, :, new], values[:, :, new]), gate.DECODER_PARTS)


def _check_context(shape: Shape, context: int, cache: Cache, new: Sequence[Tensor]) -> None:
    """At the context of the benchmark, compare the steps with the operators that get the cache as their past."""
    q, k, v, w, beta = new
    keys, values, inverse_norms = (x[:, :, :context].clone() for x in (cache.k, cache.values, cache.inverse_norms))
    where = f"path_decode, {shape}, context {context}"
    expected = {
        STEP: (PATH, path_attention(q, k, v, w, beta, past=(keys, values))),
        LUCID_STEP: (LUCID_PATH, lucid_path_attention(q, k, v, w, beta, past=(keys, values, inverse_norms))),
    }
    for name, (operator, o) in expected.items():
        cache.k[:, :, :context] = keys
        results = _again(CYCLES[name], cache, split(new))
        gate.check(where, name, results, repr(operator), (o,), gate.DECODER_PARTS)


def _again(cycle: Cycle, cache: Cache, tokens: Sequence[Token]) -> Decoded:
    """Run a cycle, then reset the length of the cache."""
    start = cache.length
    result = cycle(cache, tokens)
    cache.length = start
    return result


def _measure(shape: Shape, context: int, threads: int, settings: Settings) -> Record:
    check_truth(shape)
    *tensors, _ = path.inputs(shape, context + APPLY_EVERY)
    # Every cycle multiplies the cached keys by its factors. Reflections keep the keys from shrinking to zero.
    tensors[4] = torch.full_like(tensors[4], 2.0)
    cache = filled(context, tensors, tensors[1][:, :, :context], tensors[2][:, :, :context])
    new = [x[:, :, context:].clone() for x in tensors]
    del tensors
    with torch.no_grad():
        _check_context(shape, context, cache, new)
        runs: dict[str, Run] = {name: partial(_again, cycle, cache, split(new)) for name, cycle in CYCLES.items()}
        cycles = race(runs, budget=_budget(settings), seed=f"{shape} {context}", least=settings.least)
    times = {name: [seconds / APPLY_EVERY for seconds in rounds] for name, rounds in cycles.items()}
    medians = {name: Spread.of(times[name]) for name in times}
    fastest = min(STANDARD, key=lambda name: medians[name].median)
    entries = {name: Entry(medians[name], ratios(times[name], times[fastest])) for name in times}
    checks = {}
    if context == LONG_CONTEXT:
        checks = {
            name: Check(ratios(times[name], times[fastest]).median, path_limit) for name, path_limit in LIMITS.items()
        }
    facts: dict[str, int | str] = {**shape._asdict(), "context": context, "fastest": fastest}
    return Record("path_decode", threads, facts, entries, checks)


def _budget(settings: Settings) -> float:
    """More than the usual budget: a cycle is long, and the limits are tight."""
    return 4 * settings.budget


def _cases(settings: Settings) -> list[Case]:
    contexts = (512,) if settings.quick else (4096, LONG_CONTEXT)
    return [
        Case(
            key=f"path_decode {threads} {shape} {context}",
            label=f"D={shape.D} {shape.heads}/{shape.kv_heads} context={context}",
            threads=threads,
            run=partial(_measure, shape, context, threads, settings),
            fixed=1.0 + 5e-5 * context,
            budget=_budget(settings),
        )
        for threads in settings.threads
        for shape in SHAPES
        for context in contexts
    ]


BENCHMARK = Benchmark(
    name="path_decode",
    about=(
        f"Decoding in float32, batch 1, preallocated cache: {APPLY_EVERY} tokens one by one from this context on, and "
        "the time of one of them. Two standard decoders (two matrix products around a softmax; torch's SDPA with "
        "enable_gqa=True) and path_decode, for PaTH and, with 1/‖k‖ of the keys, for LUCID-PaTH. Ours includes "
        "writing the new key, its value or y, 1/‖k‖ and the live keys into the cache, and one move of all keys, "
        "which multiplies all cached keys in place. First, two such rounds have to agree with the explicit product "
        "of Householder factors over the whole sequence in float64."
    ),
    limits=(
        f"Ratios are to the faster standard decoder. Limits at context {LONG_CONTEXT}: {LIMITS[STEP]:.2f} for PaTH "
        f"and {LIMITS[LUCID_STEP]:.2f} for LUCID-PaTH."
    ),
    cases=_cases,
    columns=(
        Column("heads", lambda record: f"{record.facts['heads']}/{record.facts['kv_heads']}"),
        Column("context", fact("context")),
        Column("bmm, ms", milliseconds(PRODUCTS)),
        Column("SDPA, ms", milliseconds(SDPA)),
        Column("PaTH, ms", milliseconds(STEP)),
        Column("PaTH / fastest", ratio(STEP)),
        Column("limit", limit(STEP)),
        Column("LUCID-PaTH, ms", milliseconds(LUCID_STEP)),
        Column("LUCID-PaTH / fastest", ratio(LUCID_STEP)),
        Column("limit", limit(LUCID_STEP)),
        Column("", verdict),
    ),
    page="family",
)
