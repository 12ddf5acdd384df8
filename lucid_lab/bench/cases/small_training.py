"""A training step of our own small decoders at 512 tokens: LUCID next to softmax attention.

Transformers is imported when a model is made: the other benchmarks do not need it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..gate import WrongAnswer
from ..harness import Run, Spread, race, ratios
from ..report import fact, limit, milliseconds, ratio, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings

SOFTMAX, LUCID = "softmax", "lucid"
T, BATCH, VOCABULARY = 512, 8, 4096


class Decoder(NamedTuple):
    """A shape, and the limit on the time of a step over that with softmax attention."""

    name: str
    limit: float
    sizes: Callable[[], dict[str, Any]]


def _tiny_lm() -> dict[str, Any]:
    from ...training.recipes import RECIPES

    return RECIPES["tiny_lm"]().model


def _wide() -> dict[str, Any]:
    return {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_key_value_heads": 4}


# The limit of tiny_lm is 0.9 times the tokens per second.
DECODERS = (Decoder("tiny_lm", 1 / 0.9, _tiny_lm), Decoder("width 256, 4/4 heads of 64", 1.25, _wide))


def _model(attention: str, sizes: dict[str, Any], **options: Any) -> Any:
    from lucid_attention.models.decoder import presets
    from lucid_attention.models.decoder.modeling import LucidForCausalLM

    torch.manual_seed(0)
    return LucidForCausalLM(presets.tiny(attention, vocab_size=VOCABULARY, attention_options=options, **sizes))


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _check(decoder: Decoder) -> None:
    """Refuse a LUCID whose loss is not that of the dense equation, or is that of softmax attention."""
    ids = torch.randint(VOCABULARY, (2, 96))
    losses = {}
    for name, attention, options in (
        ("lucid", LUCID, {}),
        ("reference", LUCID, {"impl": "reference"}),
        ("softmax", SOFTMAX, {}),
    ):
        with torch.no_grad():
            losses[name] = _model(attention, decoder.sizes(), **options).double()(input_ids=ids, labels=ids).loss.item()
    if abs(losses["lucid"] - losses["reference"]) > 1e-9 or losses["lucid"] == losses["softmax"]:
        raise WrongAnswer(f"small_training, {decoder.name}: losses {losses}")


def _measure(decoder: Decoder, threads: int, settings: Settings) -> Record:
    from ...training.loss import use_chunked_loss

    _check(decoder)
    ids = torch.randint(VOCABULARY, (1 if settings.quick else BATCH, T))
    sizes = decoder.sizes() | ({"num_hidden_layers": 1} if settings.quick else {})
    runs: dict[str, Run] = {}
    for name in (SOFTMAX, LUCID):
        model = _model(name, sizes)
        use_chunked_loss(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        runs[name] = partial(_step, model, optimizer, ids)
    times = race(runs, budget=4 * settings.budget, seed=decoder.name, least=settings.least)
    step_ratio = ratios(times[LUCID], times[SOFTMAX])
    entries = {SOFTMAX: Entry(Spread.of(times[SOFTMAX])), LUCID: Entry(Spread.of(times[LUCID]), step_ratio)}
    facts: dict[str, int | str] = {"decoder": decoder.name, "tokens": f"{ids.shape[0]} × {T}"}
    return Record("small_training", threads, facts, entries, {"step": Check(step_ratio.median, decoder.limit)})


def _cases(settings: Settings) -> list[Case]:
    return [
        Case(
            key=f"small_training {threads} {decoder.name}",
            label=decoder.name,
            threads=threads,
            run=partial(_measure, decoder, threads, settings),
            fixed=1.0 if settings.quick else 15.0,
        )
        for threads in settings.threads
        for decoder in DECODERS
    ]


BENCHMARK = Benchmark(
    name="small_training",
    about=(
        f"A training step (forward, backward, AdamW) of our own decoder on {BATCH} sequences of {T} tokens, vocabulary "
        f"{VOCABULARY}, float32: the model of the recipe tiny_lm, and a wider one with a key/value head per query head."
    ),
    limits="Limits: 1.11 for tiny_lm (0.9 times the tokens per second), 1.25 for width 256.",
    cases=_cases,
    columns=(
        Column("threads", lambda record: str(record.threads)),
        Column("decoder", fact("decoder")),
        Column("tokens", fact("tokens")),
        Column("softmax, ms", milliseconds(SOFTMAX)),
        Column("LUCID, ms", milliseconds(LUCID)),
        Column("LUCID / softmax", ratio(LUCID)),
        Column("limit", limit("step")),
        Column("", verdict),
    ),
    page="models",
)
