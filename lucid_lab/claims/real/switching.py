"""Part (b): what LUCID does to the loss of the model without training, by strength, sharpness and layer; in float32."""

from collections.abc import Sequence
from typing import Any

from lucid_attention import enable_lucid

from ...analysis.disturbance import disturbances, mean_loss
from ..engine.jobs import Job, Record, Work
from .given import TEST, Given, open_model, read_tokens


def switch_job(source: Given, corpus: Job, text: int, length: int, sharpnesses: Sequence[float]) -> Job:
    """`switch` as a job."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "text": text}
    arguments |= {"length": length, "sharpnesses": list(sharpnesses)}
    seconds = 40 * length / 220 if source.model else 1.0
    return Job("real.switching:switch", arguments, f"disturbance, text {text}", seconds)


def switch(
    work: Work, source: dict[str, str], corpus: dict[str, Any], text: int, length: int, sharpnesses: list[float]
) -> Record:
    """The job: {"records": of `disturbances`}, on the beginning of a long test text."""
    model = open_model(work, Given(**source))
    ids = read_tokens(work, Job("real.given:corpus", corpus))[TEST][text : text + 1, :length]
    return {"records": disturbances(model, ids, sharpnesses=sharpnesses)}


def together_job(source: Given, corpus: Job, text: int, length: int, sets: Sequence[Sequence[int]]) -> Job:
    """`together` as a job."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "text": text}
    arguments |= {"length": length, "sets": [sorted(layers) for layers in sets]}
    seconds = 5 + (len(sets) + 1) * length / 220 if source.model else 0.5
    return Job("real.switching:together", arguments, f"layers together, text {text}", seconds)


def together(
    work: Work, source: dict[str, str], corpus: dict[str, Any], text: int, length: int, sets: list[list[int]]
) -> Record:
    """The job: {"changes"}: by how much the loss rises when a set of layers becomes LUCID, for every set."""
    model = open_model(work, Given(**source))
    ids = read_tokens(work, Job("real.given:corpus", corpus))[TEST][text : text + 1, :length]
    base = mean_loss(model, ids)
    changes = []
    for layers in sets:
        enable_lucid(model, layers=layers)
        changes.append(mean_loss(model, ids) - base)
    return {"changes": changes}


def cheapest(records: Sequence[Sequence[Record]], counts: Sequence[int]) -> list[list[int]]:
    """Sets of layers with the smallest disturbance one by one: one set for each of `counts`. records: of each text."""
    costs: dict[int, float] = {}
    for text in records:
        for record in text:
            if len(record["layers"]) == 1:
                costs[record["layers"][0]] = costs.get(record["layers"][0], 0.0) + record["change"] / len(records)
    order = sorted(costs, key=lambda layer: costs[layer])
    return [sorted(order[:count]) for count in counts]


def choose(sets: Sequence[Sequence[int]], changes: Sequence[Sequence[float]], allowed: float) -> list[int]:
    """The largest set whose mean change is at most `allowed`; the smallest set if none is. changes: by text and set."""
    means = [sum(text[number] for text in changes) / len(changes) for number in range(len(sets))]
    fitting = [number for number, change in enumerate(means) if change <= allowed]
    by_size = sorted(fitting or range(len(sets)), key=lambda number: len(sets[number]))
    return list(sets[by_size[-1] if fitting else by_size[0]])
