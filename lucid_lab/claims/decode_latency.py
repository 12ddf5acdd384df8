"""Decoding latency (section 2.3): the time that LUCID adds to one new token.

The paper: "For a 32K context length with batch size 1 and 100 new tokens generated, LUCID achieves 77ms compared to
76ms for Standard Attention---an overhead of only ∼1.3%." The paper does not say whether this is the time per token or
of all tokens, nor for which model; here all ratios are per token.

There are two comparisons, because the obvious one flatters LUCID. The first compares with the same models with sdpa
(the benchmark `model_decode`). On a CPU torch's attention is slow for one query with grouped heads, so LUCID's own step
is faster, which is no merit of LUCID. The second compares with the fastest standard step (the benchmark `decode`). It
adds the extra time of LUCID's step to the time of the whole model.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench import decode
from ..bench.harness import Shape
from ..bench.models import DYNAMIC, FULL, GEMMA_1B, PAPER_1B, QWEN, RATIO, STATIC, measure_decoding
from ..bench.records import Result, Settings
from ..bench.solve import LUCID
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Table, bar, bars, table
from .training_overhead import added, percent

CLAIM = Claim(
    title="LUCID adds next to nothing to decoding",
    section="2.3",
    says="At a context of 32K, batch size 1, 100 new tokens, LUCID's overhead is negligible.",
    paper="77 ms against 76 ms, ∼1.3 %",
)
# Percent.
PAPER = 1.3
# A model may be this many points above the paper: the quartiles of a token's time are a few percent apart.
SLACK = 3.0
SHAPES = {shape.name: shape for shape in (GEMMA_1B, QWEN, PAPER_1B)}
# The heads of a step alone. The paper's own model has heads of 68, for which heads of 64 are measured.
HEADS = {
    name: Shape(64 if shape == PAPER_1B else shape.head_dim, shape.heads, shape.kv_heads)
    for name, shape in SHAPES.items()
}
# Tokens in the cache; the last number is the paper's context.
CONTEXTS, TINY_CONTEXTS = (2048, 8192, 32_768), (96,)
# The context of a step alone.
TINY_STEP = 512

# (model, kind of cache, context) -> the time of a token.
Tokens = Mapping[tuple[str, str, int], Result]


def time_token(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map(..., alone=True)`: a `Result` of the benchmark `model_decode`, on one thread.

    settings: model, a name in SHAPES; cache, "dynamic" or "static"; context; quick, a small model and few rounds.
    """
    shape, quick = SHAPES[settings["model"]], Settings(quick=settings["quick"])
    return asdict(measure_decoding(shape, settings["cache"], settings["context"], quick))


def time_attention_step(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map(..., alone=True)`: a `Result` of the benchmark `decode`. settings: model, context, quick."""
    return asdict(decode.measure(HEADS[settings["model"]], settings["context"], Settings(quick=settings["quick"])))


def judge(worst: Mapping[str, float]) -> tuple[str, str]:
    """The verdict and its reason. worst: percent that LUCID adds to a token, by model, the larger of both comparisons.

    Holds: every model is at most 3 points above the paper's 1.3 %. Partly: some models are.
    """
    above = [name for name, value in worst.items() if value > PAPER + SLACK]
    verdict = "holds" if not above else "partly" if len(above) < len(worst) else "does not hold"
    named = f"above it: {', '.join(above)}" if above else "no model is above it"
    return verdict, (
        f"Allowed were {SLACK:g} points above the paper's {PAPER} %; {named}. Where LUCID is faster than Transformers' "
        "sdpa, it is no merit of LUCID: torch is slow for one query with grouped heads, and the stock cache is copied."
    )


def against_fastest(layers: int, token: Result, step: Result) -> float:
    """Percent that LUCID adds to a token of a model with the fastest standard attention.

    layers: with full attention. token, step: of `time_token` and `time_attention_step`.
    """
    name, ratio = decode.fastest_standard(step)
    # The ratio is taken round by round: a slow spell of the machine cancels.
    added_seconds = layers * step.seconds[name].median * (ratio.median - 1)
    seconds = token.seconds[LUCID].median
    return percent(seconds / (seconds - added_seconds))


def run(lab: Lab) -> Conclusion:
    """The dynamic cache at every context, the static one at the paper's, and steps alone."""
    names, contexts = ([QWEN.name], TINY_CONTEXTS) if lab.tiny else (list(SHAPES), CONTEXTS)
    last = contexts[-1]
    caches = [*((DYNAMIC, context) for context in contexts), (STATIC, last)]
    wanted = [(name, cache, context) for name in names for cache, context in caches]
    settings = [
        {"model": name, "cache": cache, "context": context, "quick": lab.tiny} for name, cache, context in wanted
    ]
    records = lab.map(time_token, settings, title="tokens", alone=True)
    tokens = {key: Result.from_json(record) for key, record in zip(wanted, records, strict=True)}
    settings = [{"model": name, "context": TINY_STEP if lab.tiny else last, "quick": lab.tiny} for name in names]
    records = lab.map(time_attention_step, settings, title="steps", alone=True)
    steps = {name: Result.from_json(record) for name, record in zip(names, records, strict=True)}

    fastest = {
        name: against_fastest(SHAPES[name].kinds.count(FULL), tokens[name, DYNAMIC, last], steps[name])
        for name in names
    }
    stock = {(name, cache): tokens[name, cache, last].ratios[RATIO] for name in names for cache in (DYNAMIC, STATIC)}
    worst = {
        name: max(fastest[name], *(percent(stock[name, cache].median) for cache in (DYNAMIC, STATIC))) for name in names
    }
    verdict, because = judge(worst)
    return Conclusion(
        ours="against the fastest standard attention "
        + ", ".join(f"{name} {value:+.1f} %" for name, value in fastest.items()),
        verdict=verdict,
        because=because,
        seeds=min(ratio.rounds for ratio in stock.values()),
        figures=[added_figure(fastest, last)],
        tables=[token_table(tokens), step_table(steps, fastest, last)],
    )


def added_figure(fastest: Mapping[str, float], context: int) -> Figure:
    """The percentage that LUCID adds to a token, with the paper's as a line."""
    groups = {name: [bar("LUCID", "lucid", value)] for name, value in fastest.items()}
    note = f"Whole models, one token more at a context of {context}, float32, one thread, batch 1."
    title = "What LUCID adds to a token, against the fastest standard attention"
    return bars(title, "percent", groups, references={"paper": PAPER}, note=note)


def token_table(tokens: Tokens) -> Table:
    """Whole models in Transformers, with LUCID against sdpa."""
    rows = [
        [*key, round(1000 * result.seconds[LUCID].median, 1), added(result.ratios[RATIO])]
        for key, result in tokens.items()
    ]
    columns = ["model", "cache", "context", "LUCID, ms a token", "against sdpa"]
    note = f"Median and quartiles. Paper: +{PAPER} % at 32K. Below zero because torch is slow here, see above."
    return table("One token of whole models", columns, rows, note=note)


def step_table(steps: Mapping[str, Result], fastest: Mapping[str, float], context: int) -> Table:
    """One step of attention alone."""
    rows = []
    for name, result in steps.items():
        standard, ratio = decode.fastest_standard(result)
        milliseconds = (round(1000 * result.seconds[key].median, 3) for key in (standard, LUCID))
        layers = SHAPES[name].kinds.count(FULL)
        rows.append([name, layers, standard, *milliseconds, added(ratio), f"{fastest[name]:+.1f} %"])
    columns = ["model", "layers", "fastest standard", "ms", "LUCID, ms", "LUCID adds to the step", "to the whole token"]
    note = (
        "Fastest standard: of SDPA, two products around a softmax, and our own step of softmax attention. Layers: "
        "those with full attention."
    )
    return table(f"One step of attention alone at a context of {context}", columns, rows, note=note)
