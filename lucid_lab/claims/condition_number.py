"""§2.1: the condition number of P grows with the sequence.

The paper: "the condition number grows with sequence length, empirically validating that LUCID's advantage increases for
longer sequences where key correlations accumulate", on 1B models tuned from 2K to 65K tokens. It gives a figure, no
numbers.

Two facts hold before anything is measured. P of a prefix is the leading block of P, and its inverse is the leading
block of P⁻¹, because both are triangular: so κ = ‖P‖ ‖P⁻¹‖ of a longer prefix is never smaller, for any keys. And ‖P⁻¹‖
≤ 2 for normalised keys, so ‖P‖ ≤ κ ≤ 2 ‖P‖: κ grows as ‖P‖ does, up to a factor of two, and the solve stays stable. The
experiment measures how much κ grows: by head size, with and without RoPE, before and after training. Because κ grows
for any keys, the claim is read as growth beyond that of the same model before its training.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lucid_attention.nn.rotary import Rotary

from ..analysis.conditioning import condition_numbers, key_condition_numbers
from ..toys.arms import Arm, train_arms
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Spread, Table, lines, outcome, series, spread, table
from ..toys.training import CHARACTER_MODEL, TINY_CHARACTER_MODEL, load_model
from . import needle_grid

CLAIM = Claim(
    title="κ(P) grows with the length, beyond what any keys do",
    section="2.1",
    says="The condition number of the preconditioner grows with the sequence: there is more to correct in longer ones. "
    "As printed this holds for any keys; judged is the stronger reading, that it grows more than before training.",
    paper="a figure without numbers: κ grows from 2K to 65K tokens",
)
# κ of a longer prefix may be this fraction smaller: κ of long prefixes is an estimate, good to about 1e-4.
SLACK = 1e-3
UNTRAINED = "+untrained"
HEAD_SIZES = (16, 32, 64, 256)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)


def arms(lab: Lab) -> list[Arm]:
    """Language models and needle models, with and without RoPE; softmax attention for comparison.

    The demonstration measures the model that it trains for `needle_grid`.
    """
    needles = needle_grid.TOY.but(**needle_grid.TINY) if lab.tiny else needle_grid.TOY
    text = TINY_CHARACTER_MODEL if lab.tiny else CHARACTER_MODEL
    of_needles = Arm("needles", "needles, LUCID", "lucid_path", needles)
    if lab.scale.demo:
        return [of_needles]
    return [
        Arm("text", "text, LUCID", "lucid", text),
        Arm("text+no_rope", "text, LUCID, no RoPE", "lucid", text.but(rope=False)),
        of_needles,
        Arm("needles+no_rope", "needles, LUCID, no RoPE", "lucid_path", needles.but(rope=False)),
        Arm("text+softmax", "text, softmax", "softmax", text.but(attention="softmax")),
    ]


def of_model(folder: Path, settings: Mapping[str, Any]) -> Record:
    """κ of every layer and head on one unseen sequence with the most needles, of prefixes of these lengths.

    settings: toy; trained, the folder of its weights, or None for the model before its training; lengths.
    """
    toy, trained, lengths = (settings[name] for name in ("toy", "trained", "lengths"))
    model = toy.make_model() if trained is None else load_model(folder.parent / trained, toy)
    inputs, _ = toy.make_task().test(1, max(toy.n), max(lengths))
    return {"heads": condition_numbers(model, inputs, lengths)}


def of_random_keys(folder: Path, settings: Mapping[str, Any]) -> Record:
    """κ of independent normal keys [max(lengths), size]. settings: size, rope, seed, lengths."""
    size, rope, seed, lengths = (settings[name] for name in ("size", "rope", "seed", "lengths"))
    N = max(lengths)
    k = torch.randn(N, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if rope:
        k = Rotary(size, 10_000.0)(k[None, None], torch.arange(N))[0, 0]
    return {"heads": [{"layer": 0, "head": 0, **row} for row in key_condition_numbers(k, lengths)]}


@dataclass(frozen=True)
class Growth:
    """κ of one source of keys. heads: (seed, layer, head) → κ at every length. inverse: the largest ‖P⁻¹‖."""

    lengths: tuple[int, ...]
    heads: Mapping[tuple[int, int, int], Sequence[float]]
    inverse: float

    def __post_init__(self) -> None:
        assert all(len(kappas) == len(self.lengths) for kappas in self.heads.values())

    @property
    def monotone(self) -> bool:
        """Whether κ never falls as the prefix grows, in any head, up to SLACK."""
        return all(b >= a * (1 - SLACK) for kappas in self.heads.values() for a, b in pairwise(kappas))

    def mean(self, index: int) -> Spread:
        """The geometric mean over layers and heads at lengths[index], over seeds."""
        return self._over_heads(lambda kappas: kappas[index])

    def factor(self) -> Spread:
        """By how much κ grows from the shortest to the longest prefix, over seeds."""
        return self._over_heads(lambda kappas: kappas[-1] / kappas[0])

    def _over_heads(self, value: Callable[[Sequence[float]], float]) -> Spread:
        by_seed: dict[int, list[float]] = {}
        for (seed, _, _), kappas in self.heads.items():
            by_seed.setdefault(seed, []).append(value(kappas))
        return spread((statistics.geometric_mean(by_seed[seed]) for seed in sorted(by_seed)), 2)

    def exponent(self) -> float:
        """e in κ ~ Nᵉ, from the shortest to the longest prefix."""
        return math.log(self.mean(-1).mean / self.mean(0).mean) / math.log(self.lengths[-1] / self.lengths[0])


def growth(records: Sequence[Record], seeds: Sequence[int], lengths: tuple[int, ...]) -> Growth:
    """The growth of κ, from one record per seed."""
    heads: dict[tuple[int, int, int], dict[int, float]] = {}
    inverse = 0.0
    for seed, record in zip(seeds, records, strict=True):
        for row in record["heads"]:
            heads.setdefault((seed, row["layer"], row["head"]), {})[row["length"]] = row["kappa"]
            inverse = max(inverse, row["inverse_norm"])
    return Growth(lengths, {head: [kappas[n] for n in lengths] for head, kappas in heads.items()}, inverse)


def judge(growths: Sequence[Growth], pairs: Sequence[tuple[Growth, Growth]]) -> str:
    """The verdict: κ must fall nowhere, and must grow more in trained models than in the same models untrained.

    pairs: (trained, untrained). More: by more than both deviations over seeds.
    """
    if not all(growth.monotone for growth in growths):
        return "does not hold"
    beyond = [outcome(trained.factor(), untrained.factor()) == "ahead" for trained, untrained in pairs]
    return "holds" if all(beyond) else "partly" if any(beyond) else "does not hold"


def run(lab: Lab) -> Conclusion:
    """Whether κ grows, and how much for each kind of keys."""
    lengths = (8, 16, 64) if lab.tiny else LENGTHS[:5] if lab.scale.demo else LENGTHS
    seeds = needle_grid.seeds(lab)
    keys = {
        (d, rope): [{"size": d, "rope": rope, "seed": seed, "lengths": lengths} for seed in seeds]
        for d in ((16, 64) if lab.tiny else HEAD_SIZES)
        for rope in (False, True)
    }
    of_keys = lab.map_groups(of_random_keys, keys, title="κ of random keys")
    random = {cell: growth(records, seeds, lengths) for cell, records in of_keys.items()}

    members, settings = {}, {}
    for key, one in train_arms(lab, {"": arms(lab)}, seeds)[""].items():
        members[key] = one.arm
        settings[key] = [
            {"toy": one.arm.toy.but(seed=seed), "trained": record["folder"], "lengths": lengths}
            for seed, record in zip(seeds, one.records, strict=True)
        ]
    for key in [key for key, member in members.items() if member.toy.attention == "lucid"]:
        title = members[key].title.replace("LUCID", "untrained")
        members[key + UNTRAINED] = Arm(key + UNTRAINED, title, "control", members[key].toy)
        settings[key + UNTRAINED] = [item | {"trained": None} for item in settings[key]]
    of_models = lab.map_groups(of_model, settings, title="κ of models")
    models = {key: growth(records, seeds, lengths) for key, records in of_models.items()}

    growths = [*random.values(), *models.values()]
    pairs = {
        member.title: (models[key], models[key + UNTRAINED])
        for key, member in members.items()
        if key + UNTRAINED in models
    }
    ours = ", ".join(
        f"{title} {grown.factor()} times, untrained {before.factor()}" for title, (grown, before) in pairs.items()
    )
    return Conclusion(
        ours=f"κ grows from N = {lengths[0]} to {lengths[-1]}: {ours}",
        verdict=judge(growths, list(pairs.values())),
        because=explain(random, growths, pairs),
        seeds=len(seeds),
        figures=[model_figure(members, models, lengths)],
        tables=[summary(random, {member.title: models[key] for key, member in members.items()})],
    )


def explain(
    random: Mapping[tuple[int, bool], Growth],
    growths: Sequence[Growth],
    pairs: Mapping[str, tuple[Growth, Growth]],
) -> str:
    """The reason for the verdict, with the bound on ‖P⁻¹‖."""
    trend = "κ never falls" if all(growth.monotone for growth in growths) else "κ falls somewhere"
    largest = max(random)[0]
    words = {"ahead": "beyond", "level": "within noise of", "behind": "below"}
    compared = "; ".join(
        f"{title} {grown.factor()} times, {words[outcome(grown.factor(), before.factor())]} {before.factor()} times"
        for title, (grown, before) in pairs.items()
    )
    return (
        f"{trend} with the length, which is so for prefixes of any keys. Growth compared with the same model "
        f"untrained: {compared}. How much depends on the head size: independent keys of {largest} stay at "
        f"{random[largest, False].mean(-1)}. "
        f"‖P⁻¹‖ is at most {max(growth.inverse for growth in growths):.3f} (the bound is 2), so κ grows as ‖P‖ "
        "does, up to a factor of two."
    )


def model_figure(members: Mapping[str, Arm], models: Mapping[str, Growth], lengths: Sequence[int]) -> Figure:
    """κ of the keys of models against the length."""
    curves = []
    for key, member in members.items():
        means = [models[key].mean(index) for index in range(len(lengths))]
        curves.append(series(member.title, member.role, lengths, means, dashed="no_rope" in key))
    trained = sorted({member.toy.length for member in members.values()})
    note = (
        f"Geometric mean over layers and heads. Trained at {' and '.join(map(str, trained))} tokens (needles, text): "
        "longer prefixes are beyond what a model has seen. For softmax: the P that LUCID would have."
    )
    return lines("κ of small models", "length N", "κ(P)", curves, log="xy", note=note)


def summary(random: Mapping[tuple[int, bool], Growth], models: Mapping[str, Growth]) -> Table:
    """κ of short and long prefixes, the exponent, the largest κ and ‖P⁻¹‖. models: by title."""
    random_by_title = {
        f"independent keys, D = {d}{', RoPE' if rope else ''}": growth for (d, rope), growth in random.items()
    }
    growths = {**random_by_title, **models}
    lengths = next(iter(growths.values())).lengths
    middle = len(lengths) // 2
    rows = [
        [
            title,
            *(growth.mean(index) for index in (0, middle, -1)),
            round(growth.exponent(), 2),
            round(max(kappas[-1] for kappas in growth.heads.values()), 2),
            round(growth.inverse, 3),
            "yes" if growth.monotone else "no",
        ]
        for title, growth in growths.items()
    ]
    kappas = (f"κ, N = {lengths[index]}" for index in (0, middle, -1))
    columns = ["keys", *kappas, "exponent", "largest κ", "‖P⁻¹‖", "monotone"]
    note = "Geometric mean over layers and heads ± std over seeds; exponent e of κ ~ Nᵉ; largest over heads and seeds."
    return table("Condition numbers", columns, rows, note=note)
