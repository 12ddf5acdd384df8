"""Part (d): what LUCID costs in the model. Softmax attention and LUCID in turn, on one thread, nothing beside them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lucid_attention import enable_lucid

from ..engine.jobs import Job, Record, Work
from .given import TEST, Given, open_model, read_tokens

SOFTMAX, LUCID = "softmax", "lucid"


def cost_job(source: Given, corpus: Job, what: str, length: int, rounds: int, layers: list[int] | None) -> Job:
    """`cost` as a job. what: "training" or "decoding"."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "what": what}
    arguments |= {"length": length, "rounds": rounds, "layers": layers}
    which = "all layers" if layers is None else f"{len(layers)} layers"
    seconds = 10 + 2 * rounds * length / (110 if what == "training" else 400) if source.model else 1.0
    return Job("real.costs:cost", arguments, f"cost of {what}, {length} tokens, {which}", seconds, alone=True)


def cost(
    work: Work,
    source: dict[str, str],
    corpus: dict[str, Any],
    what: str,
    length: int,
    rounds: int,
    layers: list[int] | None,
) -> Record:
    """The job: {"softmax", "lucid"} seconds of every round, and the median of their ratios, round by round.

    training: a forward and a backward pass of one sequence, as in `tuning`. decoding: 16 tokens after a context, in
    float32, without the context itself. layers: those with LUCID, None for all. Seconds are of the core: what runs
    beside it on the machine does not count.
    """
    origin = Given(**source)
    models = {SOFTMAX: open_model(work, origin), LUCID: open_model(work, origin)}
    enable_lucid(models[LUCID], layers=layers)
    ids = read_tokens(work, Job("real.given:corpus", corpus))[TEST][:1, :length]
    measure = {"training": _training, "decoding": _decoding}[what]
    runs = {name: measure(model, ids) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    # The first round warms up.
    seconds = {name: taken[1:] for name, taken in seconds.items()}
    ratios = [lucid / softmax for lucid, softmax in zip(seconds[LUCID], seconds[SOFTMAX], strict=True)]
    return {**seconds, "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def _training(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    model.train()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _decoding(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    token = ids[:, -1:]

    def steps() -> None:
        with torch.no_grad():
            for _ in range(16):
                model(token, past_key_values=cache)
        cache.crop(-16)

    return steps
