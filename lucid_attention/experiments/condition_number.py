"""§2.1: the condition number of P grows with the sequence.

The paper: "the condition number grows with sequence length, empirically validating that LUCID's advantage increases for
longer sequences where key correlations accumulate", on 1B models tuned from 2K to 65K tokens. It gives a figure, no
numbers.

Two things are known before anything is measured. P of a prefix is the leading block of P, and P⁻¹ of a prefix that of
P⁻¹, because both are triangular: so κ = ‖P‖ ‖P⁻¹‖ of a longer prefix is never smaller, whatever the keys are. And
‖P⁻¹‖ ≤ 2 for normalised keys, so κ ≤ 2 ‖P‖: all growth is that of ‖P‖, and the solve stays stable. What has to be
measured is how much of this growth there is: at which head size, with and without RoPE, before and after training.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from ..analysis.conditioning import condition_numbers, key_condition_numbers
from ..nn.rotary import Rotary
from . import needle_grid
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, heatmaps, lines, series, spread, table
from .engine.steps import Step, train, tune
from .engine.study import Done
from .language_model.runs import UNTUNED, extent
from .small.contestants import Contestant
from .small.training import SmallRun, load_small

CLAIM = Claim(
    title="κ(P) grows with the length",
    section="2.1",
    says="The condition number of the preconditioner grows with the sequence: there is more to correct in longer ones.",
    paper="a figure without numbers: κ grows from 2K to 65K tokens",
)
# Known better than this, κ of a longer prefix is not smaller: long ones are estimated to about 1e-4.
SLACK = 1e-3
# Less growth than this, from the shortest to the longest prefix, is none.
GROWN = 1.1
HEAD_SIZES = (16, 32, 64, 256)


@dataclass(frozen=True)
class Extent:
    """lengths: of prefixes. head_sizes: of keys without a model. seeds: of everything."""

    lengths: tuple[int, ...]
    head_sizes: tuple[int, ...]
    seeds: tuple[int, ...]


def measured(scale: str) -> Extent:
    """Of a scale; the demonstration measures the models that it has."""
    if scale == "smoke":
        return Extent((8, 16, 64), (16, 64), (0,))
    if scale in ("quick", "demo"):
        return Extent((32, 64, 128, 256, 512), HEAD_SIZES, tuple(needle_grid.settings(scale)[2]))
    return Extent((32, 64, 128, 256, 512, 1024, 2048), HEAD_SIZES, (0, 1, 2))


@dataclass(frozen=True)
class Source:
    """Keys of a model: a run that is trained, or left as it begins. n: keys or needles in what it reads."""

    contestant: Contestant
    dashed: bool = False
    trained: bool = True
    n: int = 0

    @property
    def name(self) -> str:
        """In figures and tables."""
        return self.contestant.name

    def job(self, seed: int, lengths: Sequence[int]) -> Job:
        """What is measured of it."""
        run = asdict(self.contestant.seed(seed))
        arguments = {"run": run, "trained": self.trained, "n": self.n, "lengths": list(lengths)}
        return Job("condition_number:of_model", arguments, f"κ, {self.name}, seed {seed}", 12)


def sources(scale: str) -> list[Source]:
    """Language models and needle models, with and without RoPE; softmax and an untrained one beside them."""
    needles = needle_grid.settings(scale)[0].but(attention="lucid")
    n = max(needles.n)
    found = [
        Source(Contestant("needles, LUCID", "lucid_path", needles), n=n),
        Source(Contestant("needles, untrained", "control", needles), trained=False, n=n),
    ]
    if scale in ("quick", "demo"):
        return found
    size = extent(scale)
    text = size.base.but(attention="lucid", steps=size.steps, **UNTUNED)
    return [
        Source(Contestant("text, LUCID", "lucid", text)),
        Source(Contestant("text, LUCID, no RoPE", "lucid", text.but(rope=False)), dashed=True),
        Source(Contestant("text, softmax", "softmax", text.but(attention="softmax"))),
        Source(Contestant("text, untrained", "control", text), trained=False),
        Source(Contestant("text, untrained, no RoPE", "control", text.but(rope=False)), dashed=True, trained=False),
        found[0],
        Source(Contestant("needles, LUCID, no RoPE", "lucid_path", needles.but(rope=False)), dashed=True, n=n),
    ]


def of_model(work: Work, run: Mapping[str, Any], trained: bool, n: int, lengths: Sequence[int]) -> Record:
    """The job: κ of every layer and head on one unseen sequence, of prefixes of these lengths."""
    settings = SmallRun(**run)
    model = load_small(work, settings) if trained else settings.make_model()
    inputs, _ = settings.make_task().test(1, n, max(lengths))
    return {"heads": condition_numbers(model, inputs, lengths)}


def keys_job(size: int, rope: bool, seed: int, lengths: Sequence[int]) -> Job:
    """What is measured of keys without a model."""
    arguments = {"size": size, "rope": rope, "seed": seed, "lengths": list(lengths)}
    return Job("condition_number:of_random_keys", arguments, f"κ, random keys of {size}, seed {seed}", 2)


def of_random_keys(work: Work, size: int, rope: bool, seed: int, lengths: Sequence[int]) -> Record:
    """The job: κ of independent normal keys [max(lengths), size]."""
    N = max(lengths)
    k = torch.randn(N, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if rope:
        k = Rotary(size, 10_000.0)(k[None, None], torch.arange(N))[0, 0]
    return {"heads": [{"layer": 0, "head": 0, **each} for each in key_condition_numbers(k, lengths)]}


def plan(scale: str, done: Done) -> list[Job]:
    """Training first, what is measured of it when it is done."""
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
    """κ of one kind of keys. heads: (seed, layer, head) → κ at every length; inverse: the largest ‖P⁻¹‖."""

    lengths: tuple[int, ...]
    heads: Mapping[tuple[int, int, int], Sequence[float]]
    inverse: float

    def __post_init__(self) -> None:
        assert all(len(each) == len(self.lengths) for each in self.heads.values())

    @property
    def monotone(self) -> bool:
        """Whether no longer prefix has a smaller κ, in any head."""
        return all(b >= a * (1 - SLACK) for each in self.heads.values() for a, b in pairwise(each))

    @property
    def growing(self) -> float:
        """The share of heads in which κ grows at all."""
        return statistics.fmean(each[-1] >= GROWN * each[0] for each in self.heads.values())

    def mean(self, at: int) -> Spread:
        """The geometric mean over layers and heads, at a place in lengths, over seeds."""
        seeds = sorted({seed for seed, _, _ in self.heads})
        values = [
            statistics.geometric_mean(each[at] for (seed, _, _), each in self.heads.items() if seed == one)
            for one in seeds
        ]
        return spread(values, 2)

    def exponent(self) -> float:
        """e in κ ~ Nᵉ, between the two ends."""
        return math.log(self.mean(-1).mean / self.mean(0).mean) / math.log(self.lengths[-1] / self.lengths[0])


def growth(records: Sequence[Record], seeds: Sequence[int], lengths: tuple[int, ...]) -> Growth:
    """From the records of some seeds."""
    heads: dict[tuple[int, int, int], dict[int, float]] = {}
    inverse = 0.0
    for seed, record in zip(seeds, records, strict=True):
        for each in record["heads"]:
            heads.setdefault((seed, each["layer"], each["head"]), {})[each["length"]] = each["kappa"]
            inverse = max(inverse, each["inverse_norm"])
    return Growth(lengths, {key: [found[n] for n in lengths] for key, found in heads.items()}, inverse)


def conclude(scale: str, done: Done) -> Conclusion:
    """Whether κ grows, and how much of it there is where."""
    size = measured(scale)
    random = {
        (d, rope): growth(
            [done[keys_job(d, rope, seed, size.lengths)] for seed in size.seeds], size.seeds, size.lengths
        )
        for d in size.head_sizes
        for rope in (False, True)
    }
    models = {
        source.name: growth([done[source.job(seed, size.lengths)] for seed in size.seeds], size.seeds, size.lengths)
        for source in sources(scale)
    }
    trained = {source.name: models[source.name] for source in sources(scale) if source.trained}
    verdict = judged([*random.values(), *models.values()], list(trained.values()))
    a, b = size.lengths[0], size.lengths[-1]
    ours = ", ".join(f"{name} {trained[name].mean(0)} → {trained[name].mean(-1)}" for name in list(trained)[:2])
    return Conclusion(
        ours=f"N = {a} → {b}: {ours}",
        verdict="too small to judge" if scale == "smoke" else verdict,
        because=explained(random, models, trained),
        seeds=len(size.seeds),
        figures=[
            random_figure(random, size.lengths),
            model_figure(sources(scale), models, size.lengths),
            head_maps(sources(scale), models, size),
        ],
        tables=[summary(random, models)],
    )


def judged(everything: Sequence[Growth], trained: Sequence[Growth]) -> str:
    """Monotone everywhere, and in every trained head some growth."""
    if not all(each.monotone for each in everything):
        return "does not hold"
    share = [each.growing for each in trained]
    return "holds" if min(share) == 1 else "partly" if max(share) > 0 else "does not hold"


def explained(
    random: Mapping[tuple[int, bool], Growth], models: Mapping[str, Growth], trained: Mapping[str, Growth]
) -> str:
    """What was to be expected, and what was not."""
    every = [*random.values(), *models.values()]
    falls = "κ never falls" if all(each.monotone for each in every) else "κ falls somewhere"
    share = statistics.fmean(each.growing for each in trained.values())
    largest = max(random)[0]
    return (
        f"{falls} with the length, which is so for prefixes of any keys; it grows by {100 * (GROWN - 1):.0f} % or more "
        f"in {100 * share:.0f} % of the trained heads. How much depends on the head size: independent keys of "
        f"{largest} stay at {random[largest, False].mean(-1)}. "
        f"‖P⁻¹‖ is at most {max(each.inverse for each in every):.3f} (the bound is 2), so growth is that of ‖P‖."
    )


def random_figure(random: Mapping[tuple[int, bool], Growth], lengths: Sequence[int]) -> Figure:
    """Independent keys."""
    roles = dict(zip(sorted({d for d, _ in random}), ("lucid", "softmax", "path", "delta"), strict=False))
    drawn = [
        series(
            f"D = {d}{', RoPE' if rope else ''}",
            roles[d],
            lengths,
            [each.mean(at).mean for at in range(len(lengths))],
            dashed=rope,
        )
        for (d, rope), each in random.items()
    ]
    note = "Normal keys without a model. RoPE turns independent keys into independent keys: both lines agree."
    return lines("κ of independent keys", "length N", "κ(P)", drawn, log="xy", note=note)


def model_figure(shown: Sequence[Source], models: Mapping[str, Growth], lengths: Sequence[int]) -> Figure:
    """Keys of models."""
    drawn = []
    for source in shown:
        found = [models[source.name].mean(at) for at in range(len(lengths))]
        y, around = [each.mean for each in found], [each.std for each in found]
        drawn.append(series(source.name, source.contestant.role, lengths, y, spread=around, dashed=source.dashed))
    trained = sorted({source.contestant.run.length for source in shown})
    note = (
        f"Geometric mean over layers and heads. Trained at {' and '.join(map(str, trained))} tokens (needles, text): "
        "longer prefixes are beyond what a model has seen. For softmax: of the P that LUCID would have."
    )
    return lines("κ of small models", "length N", "κ(P)", drawn, log="xy", note=note)


def head_maps(shown: Sequence[Source], models: Mapping[str, Growth], size: Extent) -> Figure:
    """Layer against head, at the longest prefix, of the first seed."""
    panels = {}
    for source in shown:
        heads = {key[1:]: each[-1] for key, each in models[source.name].heads.items() if key[0] == size.seeds[0]}
        layers, columns = (sorted({key[i] for key in heads}) for i in (0, 1))
        panels[source.name] = (layers, columns, [[heads.get((row, c)) for c in columns] for row in layers])
    top = max(value for _, _, rows in panels.values() for row in rows for value in row if value is not None)
    title = f"κ by layer and head, N = {size.lengths[-1]}"
    return heatmaps(title, "layer", "head", panels, range=(1, top), note=f"Seed {size.seeds[0]}.")


def summary(random: Mapping[tuple[int, bool], Growth], models: Mapping[str, Growth]) -> Table:
    """Both ends, the exponent and the bound."""
    named = {f"independent keys, D = {d}{', RoPE' if rope else ''}": each for (d, rope), each in random.items()}
    shown = {**named, **models}
    lengths = next(iter(shown.values())).lengths
    middle = len(lengths) // 2
    rows = [
        [
            name,
            *(each.mean(at) for at in (0, middle, -1)),
            round(each.exponent(), 2),
            round(max(found[-1] for found in each.heads.values()), 2),
            round(each.inverse, 3),
            "yes" if each.monotone else "no",
        ]
        for name, each in shown.items()
    ]
    columns = [
        "keys",
        *(f"κ, N = {lengths[at]}" for at in (0, middle, -1)),
        "exponent",
        "largest κ",
        "‖P⁻¹‖",
        "monotone",
    ]
    note = "Geometric mean over layers and heads ± std over seeds; exponent e of κ ~ Nᵉ; largest over heads and seeds."
    return table("Condition numbers", columns, rows, note=note)


PREFIXES = (2048, 4096, 8192, 16_384, 32_768, 65_536)


def paper() -> list[Step]:
    """§2.1: pretrain at 2K, tune at 64K, and measure both on Dolma."""
    pretrained, tuned = "runs/paper/pretrain_2k-lucid", "runs/paper/finetune_64k-lucid"
    text = ("--what", "conditioning", "--tokens-from", "hf:allenai/dolma", "--length", str(PREFIXES[-1]))
    lengths = ("--lengths", ",".join(map(str, PREFIXES)))
    return [
        train("pretrain_2k", "lucid"),
        tune("finetune_64k", f"{pretrained}/model", tuned, "--parallel", "fsdp"),
        *(
            Step(("analyze", f"{run}/model", *text, *lengths, "--out", f"results/paper/condition_number-{name}"))
            for name, run in (("pretrained", pretrained), ("tuned", tuned))
        ),
    ]
