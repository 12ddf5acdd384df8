"""Part (a): P of the keys that a trained model makes of real text, by layer and length; others beside them.

Recorded for each key/value head: κ(P), ‖P⁻¹‖, ‖P⁻¹V‖/‖V‖ (Frobenius), and the off-diagonal mass of P, which is the mean
sum of a row left of the diagonal. Hit rates: the share of the softmax that the last token before the value of an answer
gives to the tokens of the value in the text, by layer.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ...analysis.capture import visit_layers
from ...analysis.conditioning import key_condition_numbers
from ...analysis.hit_rate import Query, hit_rates
from ...analysis.layer import KeyMatrix, Layer, LikeKeys
from ..engine.jobs import Job, Record, Work
from .given import TEST, Given, open_model, read_tokens
from .questions import Haystacks, needle_prompts

TRAINED, UNTRAINED, RANDOM = "trained", "untrained", "random"
# Longest prefix whose singular values are computed exactly.
EXACT = 512


def keys_job(
    source: Given, corpus: Job, kind: str, layers: Sequence[int], lengths: Sequence[int], text: int, head_dim: int
) -> Job:
    """`measure_keys` as a job. kind: TRAINED, UNTRAINED or RANDOM."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "kind": kind}
    arguments |= {"layers": list(layers), "lengths": list(lengths), "text": text, "head_dim": head_dim}
    longest = max(lengths)
    seconds = longest / 150 + len(layers) * (longest / 1024) ** 2 / 2 if source.model else 1.0
    label = f"keys, {kind}, layers {layers[0]} to {layers[-1]}, text {text}, {longest} tokens"
    return Job("real.keys:measure_keys", arguments, label, seconds)


def measure_keys(
    work: Work,
    source: dict[str, str],
    corpus: dict[str, Any],
    kind: str,
    layers: list[int],
    lengths: list[int],
    text: int,
    head_dim: int,
) -> Record:
    """The job: {"heads": records of `head_records`}, for prefixes of one long text.

    kind: RANDOM for independent Gaussian keys of size `head_dim`; its `layers` are draws.
    """
    records: list[Record] = []

    def measure(layer: Layer) -> None:
        for head in layer.heads(range(0, layer.query_heads, layer.query_heads // layer.k.shape[1])):
            found = head_records(head.k, head.v, lengths)
            records.extend({"layer": layer.index, "head": head.head, **record} for record in found)

    if kind == RANDOM:
        for draw in layers:
            random = torch.Generator().manual_seed(draw)
            k, v = (torch.randn(max(lengths), head_dim, generator=random, dtype=torch.float64) for _ in range(2))
            records.extend({"layer": draw, "head": 0, **record} for record in head_records(k, v, lengths))
        return {"heads": records}
    model = open_model(work, Given(**source))
    tokens = read_tokens(work, Job("real.given:corpus", corpus))[TEST]
    ids = tokens[text : text + 1, : max(lengths)]
    visit_layers(_untrained(model) if kind == UNTRAINED else model, ids, measure, layers=layers)
    return {"heads": records}


def _untrained(model: Any) -> Any:
    """A model of the same configuration with new weights."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(0)
    return AutoModelForCausalLM.from_config(model.config, trust_remote_code=False).eval()


def head_records(k: Tensor, v: Tensor, lengths: Sequence[int]) -> list[Record]:
    """{"length", "kappa", "inverse_norm", "value_ratio", "mass"} of the prefixes of one head. k, v: [N, D], float64."""
    P = KeyMatrix(LikeKeys(k), len(k))
    longest = max(lengths)
    y = P.solve(v[:longest])
    mass = torch.cat([rows.sum(-1) - 1 for _, _, rows in P._blocks(longest)])
    conditions = {record["length"]: record for record in key_condition_numbers(k, lengths, exact_up_to=EXACT)}
    return [
        {
            "length": length,
            "kappa": conditions[length]["kappa"],
            "inverse_norm": conditions[length]["inverse_norm"],
            "value_ratio": (y[:length].norm() / v[:length].norm()).item(),
            "mass": mass[:length].mean().item(),
        }
        for length in lengths
    ]


def hits_job(source: Given, corpus: Job, model: dict[str, Any] | None, length: int, needles: int, samples: int) -> Job:
    """`measure_hits` as a job. model: as in `questions.ask`."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "model": model}
    arguments |= {"length": length, "needles": needles, "samples": samples}
    name = "as given" if model is None else model["label"]
    seconds = samples * length / 100 if source.model else 1.0
    return Job("real.keys:measure_hits", arguments, f"hit rates, {name}, {length} tokens", seconds)


def measure_hits(
    work: Work,
    source: dict[str, str],
    corpus: dict[str, Any],
    model: dict[str, Any] | None,
    length: int,
    needles: int,
    samples: int,
) -> Record:
    """The job: {"layers": {"layer", "softmax", "magnitude", "best"} of each layer}, means over heads and samples.

    best: of the head with the largest share.
    """
    from .questions import open_asked

    origin = Given(**source)
    loaded, tokenizer = open_asked(work, origin, model)
    hay = Haystacks(work, Job("real.given:corpus", corpus))
    records: list[Record] = []
    for index in range(samples):
        context = needle_prompts(tokenizer, hay.file(TEST), length, needles, index, asked=1)
        question = context.questions[0]
        # Some tokenizers have a token for the space before a number. What follows it is the first of the value.
        spaces = list(takewhile(lambda token: not tokenizer.decode([token]).strip(), question.answer))
        ids = torch.tensor([[*context.ids, *question.ids, *spaces]])
        records += hit_rates(loaded, ids, [Query(ids.shape[1] - 1, (question.span,))])
    layers = sorted({record["layer"] for record in records})
    return {"layers": [_layer_mean(layer, [one for one in records if one["layer"] == layer]) for layer in layers]}


def _layer_mean(layer: int, records: list[Record]) -> Record:
    heads = sorted({record["head"] for record in records})
    by_head = [[one for one in records if one["head"] == head] for head in heads]
    mean = {
        name: sum(one[name] for one in records) / len(records)
        for name in ("softmax", "signed", "magnitude", "negative")
    }
    best = max(sum(one["softmax"] for one in group) / len(group) for group in by_head)
    return {"layer": layer, **mean, "best": best}
