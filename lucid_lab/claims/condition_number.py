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
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from lucid_attention.nn.rotary import Rotary

from ..analysis.conditioning import condition_numbers, key_condition_numbers
from ..data.text import DOLMA
from . import needle_grid
from .engine.against import outcome
from .engine.full_scale import KAPPA, cell_text
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, heatmaps, lines, series, spread, table
from .engine.scale import Scale
from .engine.steps import Step, tuned
from .engine.study import Done
from .engine.verdict import Measured, PaperNumber, Place, Verdict
from .language_model.runs import UNTUNED, extent
from .small.contestants import Contestant
from .small.training import SmallRun, load_small

CLAIM = Claim(
    title="κ(P) grows with the length",
    section="2.1",
    says="The condition number of the preconditioner grows with the sequence: there is more to correct in longer ones.",
    paper="a figure without numbers: κ grows from 2K to 65K tokens",
)
# κ of a longer prefix may be this fraction smaller: κ of long prefixes is an estimate, good to about 1e-4.
SLACK = 1e-3
# κ of the full recipe has grown if κ(longest prefix) / κ(shortest prefix) is at least this.
GROWN = 1.1
UNTRAINED = "+untrained"
HEAD_SIZES = (16, 32, 64, 256)


@dataclass(frozen=True)
class Extent:
    """lengths: of prefixes. head_sizes: of random keys. seeds: of random keys and of models."""

    lengths: tuple[int, ...]
    head_sizes: tuple[int, ...]
    seeds: tuple[int, ...]


def measured(scale: Scale) -> Extent:
    """The extent at a scale. The models have the seeds of `needle_grid`."""
    seeds = needle_grid.seeds(scale)
    if scale.tiny:
        return Extent((8, 16, 64), (16, 64), seeds)
    if scale.demo:
        return Extent((32, 64, 128, 256, 512), HEAD_SIZES, seeds)
    return Extent((32, 64, 128, 256, 512, 1024, 2048), HEAD_SIZES, seeds)


@dataclass(frozen=True)
class Source:
    """The keys of a model. trained: after its training, otherwise before. n: needles in the sequence that it reads."""

    contestant: Contestant
    dashed: bool = False
    trained: bool = True
    n: int = 0

    @property
    def key(self) -> str:
        """The name by which the experiment looks the source up."""
        return self.contestant.key

    @property
    def title(self) -> str:
        """The name in figures and tables."""
        return self.contestant.label

    def job(self, seed: int, lengths: Sequence[int]) -> Job:
        """The job that measures κ of these keys."""
        run = asdict(self.contestant.seed(seed))
        arguments = {"run": run, "trained": self.trained, "n": self.n, "lengths": list(lengths)}
        return Job("condition_number:of_model", arguments, f"κ, {self.title}, seed {seed}", 12)


def sources(scale: Scale) -> list[Source]:
    """Language models and needle models, with and without RoPE; softmax attention and untrained models for comparison.

    The demonstration measures the models that it trains for `needle_grid`.
    """
    needles = needle_grid.settings(scale)[0].but(attention="lucid")
    n = max(needles.n)
    trained = Source(Contestant("needles", "needles, LUCID", "lucid_path", needles), n=n)
    if scale.demo:
        return [trained, untrained(trained)]
    size = extent(scale)
    text = size.base.but(attention="lucid", steps=size.steps, **UNTUNED)
    plain, softmax = text.but(rope=False), text.but(attention="softmax")
    needles_plain = Contestant("needles+no_rope", "needles, LUCID, no RoPE", "lucid_path", needles.but(rope=False))
    of_lucid = [
        Source(Contestant("text", "text, LUCID", "lucid", text)),
        Source(Contestant("text+no_rope", "text, LUCID, no RoPE", "lucid", plain), dashed=True),
        trained,
        Source(needles_plain, dashed=True, n=n),
    ]
    of_softmax = Source(Contestant("text+softmax", "text, softmax", "softmax", softmax))
    return [*of_lucid, of_softmax, *map(untrained, of_lucid)]


def untrained(source: Source) -> Source:
    """The same model before its training."""
    member = source.contestant
    title = member.title.replace("LUCID", "untrained")
    return replace(
        source, contestant=Contestant(f"{member.key}{UNTRAINED}", title, "control", member.run), trained=False
    )


def of_model(work: Work, run: Mapping[str, Any], trained: bool, n: int, lengths: Sequence[int]) -> Record:
    """The job: κ of every layer and head on one unseen sequence, of prefixes of these lengths."""
    settings = SmallRun(**run)
    model = load_small(work, settings) if trained else settings.make_model()
    inputs, _ = settings.make_task().test(1, n, max(lengths))
    return {"heads": condition_numbers(model, inputs, lengths)}


def keys_job(size: int, rope: bool, seed: int, lengths: Sequence[int]) -> Job:
    """The job that measures κ of random keys."""
    arguments = {"size": size, "rope": rope, "seed": seed, "lengths": list(lengths)}
    return Job("condition_number:of_random_keys", arguments, f"κ, random keys of {size}, seed {seed}", 2)


def of_random_keys(work: Work, size: int, rope: bool, seed: int, lengths: Sequence[int]) -> Record:
    """The job: κ of independent normal keys [max(lengths), size]."""
    N = max(lengths)
    k = torch.randn(N, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if rope:
        k = Rotary(size, 10_000.0)(k[None, None], torch.arange(N))[0, 0]
    return {"heads": [{"layer": 0, "head": 0, **row} for row in key_condition_numbers(k, lengths)]}


def plan(scale: Scale, done: Done) -> list[Job]:
    """Random keys and training; a model is measured when it is trained."""
    size = measured(scale)
    jobs = [
        keys_job(d, rope, seed, size.lengths) for d in size.head_sizes for rope in (True, False) for seed in size.seeds
    ]
    for source in sources(scale):
        for seed in size.seeds:
            training = source.contestant.job(seed)
            if source.trained:
                jobs.append(training)
            if not source.trained or training in done:
                jobs.append(source.job(seed, size.lengths))
    return jobs


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


def conclude(scale: Scale, done: Done) -> Conclusion:
    """Whether κ grows, and how much for each source of keys."""
    size, all_sources = measured(scale), sources(scale)
    random = {
        (d, rope): growth(
            [done[keys_job(d, rope, seed, size.lengths)] for seed in size.seeds], size.seeds, size.lengths
        )
        for d in size.head_sizes
        for rope in (False, True)
    }
    models = {
        source.key: growth([done[source.job(seed, size.lengths)] for seed in size.seeds], size.seeds, size.lengths)
        for source in all_sources
    }
    growths = [*random.values(), *models.values()]
    trained = [source for source in all_sources if f"{source.key}{UNTRAINED}" in models]
    pairs = {source.title: (models[source.key], models[f"{source.key}{UNTRAINED}"]) for source in trained}
    a, b = size.lengths[0], size.lengths[-1]
    ours = ", ".join(
        f"{title} {grown.factor()} times, untrained {before.factor()}" for title, (grown, before) in pairs.items()
    )
    return Conclusion(
        ours=f"κ grows from N = {a} to {b}: {ours}",
        verdict=judge(growths, list(pairs.values())),
        because=explain(random, growths, pairs),
        seeds=len(size.seeds),
        figures=[
            random_figure(random, size.lengths),
            model_figure(all_sources, models, size.lengths),
            head_maps(all_sources, models, size),
        ],
        tables=[summary(random, {source.title: models[source.key] for source in all_sources})],
    )


def explain(
    random: Mapping[tuple[int, bool], Growth],
    growths: Sequence[Growth],
    pairs: Mapping[str, tuple[Growth, Growth]],
) -> str:
    """The reason for the verdict, with the bound on ‖P⁻¹‖."""
    trend = "κ never falls" if all(growth.monotone for growth in growths) else "κ falls somewhere"
    largest = max(random)[0]
    words = {"ahead": "beyond", "level": "not told apart from", "behind": "below"}
    compared = "; ".join(
        f"{title} {grown.factor()} times, {words[outcome(grown.factor(), before.factor())]} {before.factor()} times"
        for title, (grown, before) in pairs.items()
    )
    return (
        f"{trend} with the length, which is so for prefixes of any keys. Growth beside that of the same model "
        f"untrained: {compared}. How much depends on the head size: independent keys of {largest} stay at "
        f"{random[largest, False].mean(-1)}. "
        f"‖P⁻¹‖ is at most {max(growth.inverse for growth in growths):.3f} (the bound is 2), so κ grows as ‖P‖ "
        "does, up to a factor of two."
    )


def random_figure(random: Mapping[tuple[int, bool], Growth], lengths: Sequence[int]) -> Figure:
    """κ of independent keys against the length."""
    roles = dict(zip(sorted({d for d, _ in random}), ("lucid", "softmax", "path", "delta"), strict=False))
    curves = [
        series(
            f"D = {d}{', RoPE' if rope else ''}",
            roles[d],
            lengths,
            [growth.mean(index).mean for index in range(len(lengths))],
            dashed=rope,
        )
        for (d, rope), growth in random.items()
    ]
    note = "Normal keys without a model. RoPE turns independent keys into independent keys: both lines agree."
    return lines("κ of independent keys", "length N", "κ(P)", curves, log="xy", note=note)


def model_figure(shown: Sequence[Source], models: Mapping[str, Growth], lengths: Sequence[int]) -> Figure:
    """κ of the keys of models against the length."""
    curves = []
    for source in shown:
        means = [models[source.key].mean(index) for index in range(len(lengths))]
        y, deviations = [kappa.mean for kappa in means], [kappa.std for kappa in means]
        curves.append(series(source.title, source.contestant.role, lengths, y, spread=deviations, dashed=source.dashed))
    trained = sorted({source.contestant.run.length for source in shown})
    note = (
        f"Geometric mean over layers and heads. Trained at {' and '.join(map(str, trained))} tokens (needles, text): "
        "longer prefixes are beyond what a model has seen. For softmax: the P that LUCID would have."
    )
    return lines("κ of small models", "length N", "κ(P)", curves, log="xy", note=note)


def head_maps(shown: Sequence[Source], models: Mapping[str, Growth], size: Extent) -> Figure:
    """κ by layer and head at the longest prefix, for the first seed."""
    panels = {}
    for source in shown:
        every_head = models[source.key].heads
        heads = {
            (layer, head): kappas[-1] for (seed, layer, head), kappas in every_head.items() if seed == size.seeds[0]
        }
        layers, columns = (sorted({layer_head[i] for layer_head in heads}) for i in (0, 1))
        panels[source.title] = (layers, columns, [[heads.get((row, c)) for c in columns] for row in layers])
    top = max(value for _, _, rows in panels.values() for row in rows for value in row if value is not None)
    title = f"κ by layer and head, N = {size.lengths[-1]}"
    return heatmaps(title, "layer", "head", panels, range=(1, top), note=f"Seed {size.seeds[0]}.")


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


PREFIXES = (2048, 4096, 8192, 16_384, 32_768, 65_536)


def paper() -> list[Step]:
    """§2.1: pretrain at 2K, tune at 64K, and measure both on Dolma."""
    runs = {"pretrained": "runs/paper/pretrain_2k-lucid", "tuned": "runs/paper/finetune_64k-lucid"}
    text = ("--what", "conditioning", "--tokens-from", DOLMA, "--length", str(PREFIXES[-1]))
    lengths = ("--lengths", ",".join(map(str, PREFIXES)))
    return [
        *tuned("lucid"),
        *(
            Step(("analyze", f"{run}/model", *text, *lengths, "--out", f"results/paper/condition_number-{name}"))
            for name, run in runs.items()
        ),
    ]


KAPPAS = {
    length: PaperNumber(
        "Figure 2",
        f"κ(P) of the tuned model, {length} tokens, median of all heads",
        None,
        Place("condition_number-tuned", KAPPA, cell_text(length=length)),
        about="grows; no numbers",
    )
    for length in PREFIXES
}
PAPER_NUMBERS = tuple(KAPPAS.values())


def judge_paper(measured: Measured) -> Verdict:
    """κ of the longest text is GROWN times that of the shortest, and never falls on the way.

    The recipe has no untrained model, so this is the weaker reading of the claim, and the reason says so.
    """
    kappas = [measured[number.place].value for number in KAPPAS.values()]
    growth = kappas[-1] / kappas[0]
    falls = [
        length for length, (one, two) in zip(PREFIXES[1:], pairwise(kappas), strict=True) if two < one * (1 - SLACK)
    ]
    verdict = "does not hold" if growth < GROWN else "partly" if falls else "holds"
    ours = f"κ {kappas[0]:.3g} at {PREFIXES[0]} tokens, {kappas[-1]:.3g} at {PREFIXES[-1]}: {growth:.2f} times"
    because = f"Median of all heads: {ours}. It has grown from {GROWN} times on, and must not fall on the way. "
    because += "Untrained keys, whose κ grows as well, are compared at the small scale only."
    return Verdict(verdict, ours, because + (f" It falls at {', '.join(map(str, falls))}." if falls else ""))
