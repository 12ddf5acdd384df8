"""One new token of whole models with and without LUCID, with the caches of Transformers."""

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import gate
from ..harness import Run, Spread, race, ratios
from ..report import fact, limit, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import whole_models
from .model_training import HEAD, MODEL, percent, percents, random_weight
from .peers import SDPA
from .whole_models import FULL, GEMMA_1B, GEMMA_4B, LUCID, PAPER_1B, QWEN, ModelShape, check_decoding

SHAPES = (GEMMA_1B, GEMMA_4B, QWEN, PAPER_1B)
DYNAMIC, STATIC = "dynamic", "static"
GROWTH = "growth"
CONTEXTS, QUICK_CONTEXTS = (2048, 8192, 32768), (96,)
AT, LIMIT = 8192, 1.15
# The paper: 77 ms against 76 ms for 100 tokens at a context of 32K.
PAPER_CONTEXT, PAPER_RATIO = 32768, 77 / 76
# Tokens of one run, and the largest number of rounds.
TOKENS, MOST_ROUNDS = 8, 16
# Tokens for which a static cache has room. Doubled, because each round may have a rehearsal.
ROOM = TOKENS * (2 * MOST_ROUNDS + 3)
BUDGET = 12.0


def filled(model: Any, kind: str, k: Tensor, v: Tensor) -> Any:
    """A cache of Transformers with k and v in every layer. The time of a step does not depend on the values."""
    from transformers import DynamicCache, StaticCache

    static = kind == STATIC
    past = StaticCache(model.config, k.shape[2] + ROOM) if static else DynamicCache(config=model.config)
    if hasattr(model, "adopt_cache"):
        model.adopt_cache(past)
    for layer in past.layers:
        layer.update(k, v)
        if hasattr(layer, "store"):
            layer.store(v)
    return past


def decode(model: Any, past: Any, tokens: Sequence[Tensor]) -> Tensor:
    """Run new tokens one after the other. Returns the hidden state of the last one."""
    for x in tokens:
        o = model(inputs_embeds=x, past_key_values=past, use_cache=True).last_hidden_state
    return o


def _grow(past: Any, layer: int) -> None:
    """Copy a layer of LUCID's cache into larger buffers, as the cache does when it is full."""
    from lucid_attention.models.cache import GrowingTensor

    cache_layer = past.layers[layer]
    for x in (cache_layer.keys, cache_layer.values, cache_layer.inverse_norms):
        GrowingTensor().append(x, x[:, :, :1])


def with_growth(per_token: list[float], growth: float, context: int, layers: int) -> list[float]:
    """Add to each token its share of the growth of `layers` layers, which happens every context/4 tokens."""
    return [seconds + layers * growth / (context // 4) for seconds in per_token]


@lru_cache(maxsize=1)
def _models(shape: ModelShape) -> dict[str, Any]:
    """The models of a shape. Cases share them, because making random weights takes longer than the timed tokens."""
    softmax = whole_models.with_softmax(shape, shape.mix).eval()
    return {SDPA: softmax, LUCID: whole_models.with_lucid(softmax)}


def _caches(shape: ModelShape, kind: str, context: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(context)
    k, v = (torch.randn(1, shape.kv_heads, context, shape.head_dim, generator=random) for _ in range(2))
    return {name: filled(model, kind, k, v) for name, model in _models(shape).items()}


def _check_context(shape: ModelShape, kind: str, models: dict[str, Any], caches: dict[str, Any], x: Tensor) -> None:
    """At the context of the benchmark, compare a twin of strength 0 that reads LUCID's cache with softmax attention."""
    strength_0 = whole_models.with_lucid(models[SDPA], strength=0.0)
    where = f"model_decode, {shape.name}, {kind} cache"
    # A cache belongs to one strength, so the twin gets a copy. Both measured caches get the token too.
    output, expected = decode(strength_0, copy.deepcopy(caches[LUCID]), [x]), decode(models[SDPA], caches[SDPA], [x])
    decode(models[LUCID], caches[LUCID], [x])
    gate.check(where, f"{LUCID} of strength 0", (output,), repr(SDPA), (expected,), gate.DECODER_PARTS)


def _measure(shape: ModelShape, kind: str, context: int, threads: int, settings: Settings) -> Record:
    check_decoding(shape)
    measured = shape.small() if settings.quick else shape
    with torch.no_grad():
        models, caches = _models(measured), _caches(measured, kind, context)
        tokens = [torch.randn(1, 1, measured.hidden) for _ in range(TOKENS)]
        _check_context(measured, kind, models, caches, tokens[0])
        runs: dict[str, Run] = {name: partial(decode, models[name], caches[name], tokens) for name in models}
        seed = f"{shape.name} {kind} {context}"
        budget = settings.budget if settings.quick else BUDGET
        times = race(runs, budget=budget, seed=seed, least=settings.least, most=MOST_ROUNDS)
        # Head and growth are timed apart: softmax attention has the same head, and its cache does not grow in steps.
        weight = random_weight(measured)
        parts: dict[str, Run] = {HEAD: partial(F.linear, tokens[0], weight)}
        if kind == DYNAMIC:
            parts[GROWTH] = partial(_grow, caches[LUCID], shape.mix.index(FULL))
        times |= race(parts, budget=budget / 20, seed=seed)
    return _record(shape, kind, context, threads, times)


def _record(shape: ModelShape, kind: str, context: int, threads: int, times: dict[str, list[float]]) -> Record:
    per_token = {name: [seconds / TOKENS for seconds in times[name]] for name in (SDPA, LUCID)}
    entries = {name: Entry(Spread.of(times[name])) for name in times if name not in per_token}
    if kind == DYNAMIC:
        full = shape.mix.count(FULL)
        per_token[LUCID] = with_growth(per_token[LUCID], _median(entries[GROWTH]), context, full)
    head, repeats = _median(entries[HEAD]), shape.layers / len(shape.mix)
    whole = {name: [repeats * seconds + head for seconds in rounds] for name, rounds in per_token.items()}
    entries |= {name: Entry(Spread.of(rounds), ratios(rounds, per_token[SDPA])) for name, rounds in per_token.items()}
    entries[MODEL] = Entry(Spread.of(whole[LUCID]), ratios(whole[LUCID], whole[SDPA]))
    value = ratios(per_token[LUCID], per_token[SDPA]).median
    facts: dict[str, int | str] = {
        "model": shape.name,
        "layers": f"{len(shape.mix)} of {shape.layers}",
        "cache": kind,
        "context": context,
        "predicted": percent(shape.predicted_decoding(context)),
        "paper": percent(PAPER_RATIO) if context == PAPER_CONTEXT else "",
    }
    checks = {"per token": Check(value, LIMIT)} if context == AT else {}
    return Record("model_decode", threads, facts, entries, checks)


def _median(entry: Entry) -> float:
    assert entry.seconds is not None
    return entry.seconds.median


def _cases(settings: Settings) -> list[Case]:
    return [
        Case(
            key=f"model_decode {threads} {shape.name} {kind} {context}",
            label=f"{shape.name} {kind} context={context}",
            threads=threads,
            run=partial(_measure, shape, kind, context, threads, settings),
            fixed=0.7 if settings.quick else BUDGET + 5,
        )
        for threads in settings.threads
        for shape in SHAPES
        for kind in (DYNAMIC, STATIC)
        for context in (QUICK_CONTEXTS if settings.quick else CONTEXTS)
    ]


BENCHMARK = Benchmark(
    name="model_decode",
    about=(
        "One new token for the models of model_training and the paper's own, in float32, batch 1: sdpa with "
        "Transformers' cache against LUCID with its own, updates included, for the dynamic cache (the default of "
        "generate()) and the static one. context: tokens in the cache. A few layers of the true widths and mix are "
        f"timed, {TOKENS} tokens at a time. LUCID's dynamic cache grows in steps; a token's time includes its share of "
        "the copies. For the whole model the time is scaled to all layers, and the product with the matrix of the "
        "vocabulary is added. The prediction for the layers is by the numbers read from memory: LUCID reads one more "
        "for each cached key. A ratio below 1 is no merit of LUCID: for one query torch's attention is slower than the "
        "two products of LUCID's step, above all with grouped heads (see decode in benchmarks.md), and the stock "
        "dynamic cache is copied for every token. First, small models with these heads have to give, token by token, "
        "what the defining equation gives in float64 for all tokens at once."
    ),
    limits=f"limit: {LIMIT} for the layers at context {AT}. The paper has 77 ms against 76 ms at {PAPER_CONTEXT}.",
    cases=_cases,
    columns=(
        Column("model", fact("model")),
        Column("layers", fact("layers")),
        Column("cache", fact("cache")),
        Column("context", fact("context")),
        Column("SDPA, ms", milliseconds(SDPA)),
        Column("LUCID, ms", milliseconds(LUCID)),
        Column("LUCID / SDPA", ratio(LUCID)),
        Column("limit", limit("per token")),
        Column("", verdict),
        Column("predicted", fact("predicted")),
        Column("vocabulary, ms", milliseconds(HEAD)),
        Column("whole model", percents(MODEL)),
        Column("paper", fact("paper")),
    ),
    page="models",
)
