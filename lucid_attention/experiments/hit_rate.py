"""§4.5: does more weight fall on the tokens that hold the answer?

The paper: on needle tasks "LUCID Attention achieves a hitrate of 0.2845 compared to 0.1817 for Standard Attention — a
relative improvement of 56.6%", the hit rate being the average attention weight placed on the needle tokens that contain
the answer.

For LUCID there is more than one such weight. Its softmax A weighs the corrected values; what the values themselves get
is W = A P⁻¹, which has signs and does not sum to one. All three are shown: A, signed W, and |W| over the sum of |W|.
They are compared where both attentions solve the task; where only one does, its hit rate says that it does.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..analysis.hit_rate import MEASURES, Query, average, hit_rates, synthetic_queries
from ..analysis.maps import attention_maps
from ..data.synthetic import Needles
from . import memory_update, needle_grid
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, bar, bars, heatmaps, spread, table
from .engine.steps import Step, train, tune
from .engine.study import Done
from .small.contestants import Contestant, mean_accuracy
from .small.training import SmallRun, load_small

CLAIM = Claim(
    title="More weight on the answer",
    section="4.5",
    says="The weight on the needle tokens that hold the answer is larger with LUCID than with standard attention.",
    paper="LUCID 0.2845, standard 0.1817 (+56.6 %)",
)
NAMES = {"softmax": "softmax", "lucid": "LUCID"}
TOLD = {"softmax": "A, softmax", "signed": "W, signed", "magnitude": "|W|, normalised"}
# Accuracy, in percent, of a model that solves its task.
SOLVED = 90.0
DIGITS = 3
# Settings of which attention maps are drawn.
MAPPED = ("needles", "overwrites")


@dataclass(frozen=True)
class Setting:
    """A run with both attentions."""

    name: str
    run: SmallRun

    def contestant(self, attention: str) -> Contestant:
        """One of the two."""
        return Contestant(f"{NAMES[attention]}, {self.name}", attention, self.run.but(attention=attention))

    def job(self, attention: str, seed: int, samples: int) -> Job:
        """Its hit rates."""
        contestant = self.contestant(attention)
        arguments = {"run": asdict(contestant.seed(seed)), "samples": samples}
        return Job("hit_rate:of_model", arguments, f"hit rate, {contestant.name}, seed {seed}", 5)

    def maps_job(self, seed: int, n: int) -> Job:
        """Maps of the LUCID model."""
        arguments = {"run": asdict(self.contestant("lucid").seed(seed)), "n": n}
        return Job("hit_rate:maps_of", arguments, f"maps, {self.name}", 3)


def settings(scale: str) -> list[Setting]:
    """Runs of `needle_grid` and `memory_update`: they are trained once."""
    needles, usual, _ = needle_grid.settings(scale)
    overwrites, with_mlp, _ = memory_update.settings(scale)
    return [
        Setting("needles", needles),
        Setting("needles, token shift", needles.but(token_shift=True)),
        Setting("needles, MLP", needles.but(mlp=2.0)),
        Setting("needles, as models are built", usual),
        Setting("overwrites", overwrites),
        Setting("overwrites, MLP, head of 64", with_mlp),
    ]


def extent(scale: str) -> tuple[tuple[int, ...], int, int]:
    """Seeds, sequences for every number of keys, and keys in the maps."""
    return ((0,), 1, 2) if scale == "smoke" else ((0, 1, 2), 16, 8)


def plan(scale: str, done: Done) -> list[Job]:
    """Training first, what is measured of it when it is done."""
    seeds, samples, n = extent(scale)
    jobs = []
    for setting in settings(scale):
        for seed in seeds:
            for attention in NAMES:
                training = setting.contestant(attention).job(seed)
                jobs.append(training)
                if training in done:
                    jobs.append(setting.job(attention, seed, samples))
        if setting.contestant("lucid").job(seeds[0]) in done and setting.name in MAPPED:
            jobs.append(setting.maps_job(seeds[0], n))
    return jobs


def of_model(work: Work, run: Mapping[str, Any], samples: int) -> Record:
    """The job: means over questions for every layer and head, and over all heads."""
    settings, records = SmallRun(**run), []
    model = load_small(work, settings)
    for n in settings.test_n:
        inputs, _ = settings.make_task().test(samples, n, settings.length)
        records += hit_rates(model, inputs, questions(settings, inputs))
    return {"heads": average(records), "mean": average(records, ())[0]}


def questions(run: SmallRun, inputs: Tensor) -> list[Query]:
    """Who asks in these inputs, and where the answer stands: key and value of a needle, or the latest write."""
    if run.task == "needles":
        return synthetic_queries(Needles(run.n, run.length + 1), inputs)
    return latest_writes(inputs)


def latest_writes(inputs: Tensor) -> list[Query]:
    """Of `data.synthetic.overwrites`: inputs [B, T, 2] of (key, value), where the largest value asks."""
    asking = inputs[..., 1].max()
    queries = []
    for row, tokens in enumerate(inputs):
        for at in (tokens[:, 1] == asking).nonzero()[:, 0].tolist():
            written = (tokens[:, 0] == tokens[at, 0]) & (tokens[:, 1] != asking) & (torch.arange(len(tokens)) < at)
            last = int(written.nonzero()[-1])
            queries.append(Query(at, ((last, last + 1),), row))
    return queries


def maps_of(work: Work, run: Mapping[str, Any], n: int) -> Record:
    """The job: A and W of the head of the last layer that reads the answers best, on one sequence."""
    settings = SmallRun(**run)
    model, last = load_small(work, settings), settings.layers - 1
    inputs, _ = settings.make_task().test(1, n, settings.length)
    found = average(hit_rates(model, inputs, questions(settings, inputs), layers=[last]))
    head = max(found, key=lambda each: each["signed"])["head"]
    (drawn,) = attention_maps(model, inputs, layers=[last], heads=[head])
    rounded = {
        name: [[round(value, DIGITS) for value in row] for row in drawn[name].tolist()]
        for name in ("softmax", "effective")
    }
    return {"layer": last, "head": head, **rounded}


@dataclass(frozen=True)
class Found:
    """One attention in one setting, over seeds. mean, best: of all heads, and the head with most, for every measure."""

    accuracy: Spread
    mean: Mapping[str, Spread]
    best: Mapping[str, Spread]


def found(setting: Setting, attention: str, scale: str, done: Done) -> Found:
    """Read the records of a setting."""
    seeds, samples, _ = extent(scale)
    records = [done[setting.job(attention, seed, samples)] for seed in seeds]
    return Found(
        mean_accuracy(done, setting.contestant(attention), seeds, setting.run.length),
        {name: spread((each["mean"][name] for each in records), DIGITS) for name in MEASURES},
        {name: spread((max(h[name] for h in each["heads"]) for each in records), DIGITS) for name in MEASURES},
    )


Pairs = Mapping[str, Mapping[str, Found]]


def conclude(scale: str, done: Done) -> Conclusion:
    """Hit rates beside accuracies, where these are comparable."""
    every = {each.name: {name: found(each, name, scale, done) for name in NAMES} for each in settings(scale)}
    seeds, _, n = extent(scale)
    fair = {name: pair for name, pair in every.items() if comparable(pair)}
    shown = fair or every
    ours = "; ".join(
        f"{name}: LUCID {pair['lucid'].mean['softmax']} (A), {pair['lucid'].mean['magnitude']} (|W|), "
        f"softmax {pair['softmax'].mean['softmax']}"
        for name, pair in list(shown.items())[:2]
    )
    maps = [each for each in settings(scale) if each.name in MAPPED]
    return Conclusion(
        ours=ours,
        verdict="too small to judge" if scale == "smoke" else judged(every),
        because=explained(every, fair),
        seeds=len(seeds),
        figures=[rates(every), *(map_figure(each, done[each.maps_job(seeds[0], n)], n) for each in maps)],
        tables=[numbers(every), best_heads(every)],
    )


def comparable(pair: Mapping[str, Found]) -> bool:
    """Whether both attentions solve the task."""
    return min(each.accuracy.mean for each in pair.values()) >= SOLVED


def higher(pair: Mapping[str, Found]) -> dict[str, bool]:
    """In which measures LUCID's hit rate is above that of softmax attention, by more than both spreads."""
    base = pair["softmax"].mean["softmax"]
    return {name: pair["lucid"].mean[name].mean - pair["lucid"].mean[name].std > base.mean + base.std for name in TOLD}


def judged(every: Pairs) -> str:
    """Every measure in every fair comparison; some; none. Without a fair one nothing can hold."""
    fair = [higher(pair) for pair in every.values() if comparable(pair)]
    if fair and all(all(each.values()) for each in fair):
        return "holds"
    some = any(any(each.values()) for each in fair or map(higher, every.values()))
    return "partly" if some else "does not hold"


def explained(every: Pairs, fair: Pairs) -> str:
    """Where it is higher, in which weight, and what LUCID does instead."""
    if not fair:
        return f"In no setting do both attentions reach {SOLVED:.0f} %, so a higher hit rate would be no news."
    said = []
    for name, pair in fair.items():
        above = [TOLD[each] for each, true in higher(pair).items() if true]
        said.append(f"{name}: {'higher in ' + ', '.join(above) if above else 'not higher'}")
    negative = spread((pair["lucid"].mean["negative"].mean for pair in every.values()), 2)
    unfair = [name for name in every if name not in fair]
    left = f" Left out, because not both solve it: {', '.join(unfair)}." if unfair else ""
    return (
        f"Where both attentions reach {SOLVED:.0f} %: {'; '.join(said)}. LUCID's W is negative in {negative} of its "
        f"weight: it cancels what it does not want instead of not looking.{left}"
    )


def rates(every: Pairs) -> Figure:
    """Mean over layers and heads, for every setting."""
    groups = {}
    for name, pair in every.items():
        accuracies = f"{pair['softmax'].accuracy.mean:.0f} / {pair['lucid'].accuracy.mean:.0f} %"
        groups[f"{name} ({accuracies})"] = [
            bar("softmax", "softmax", pair["softmax"].mean["softmax"]),
            bar("LUCID, A", "lucid", pair["lucid"].mean["softmax"]),
            bar("LUCID, W", "lucid_path", pair["lucid"].mean["signed"]),
            bar("LUCID, |W|", "path", pair["lucid"].mean["magnitude"]),
        ]
    note = "Mean over layers, heads and questions. In brackets: accuracy of softmax and of LUCID attention."
    references = {"paper, LUCID": 0.2845, "paper, standard": 0.1817}
    return bars("Weight on the answer", "hit rate", groups, references=references, note=note)


def map_figure(setting: Setting, record: Record, n: int) -> Figure:
    """Before and after preconditioning."""
    positions = range(len(record["softmax"]))
    panels = {
        title: (positions, positions, record[name])
        for title, name in (("A = softmax", "softmax"), ("W = A P⁻¹", "effective"))
    }
    note = (
        f"A LUCID model, layer {record['layer']}, head {record['head']}, one sequence, n = {n}; the last {n} rows ask. "
        "A row of W may be negative, and need not sum to one."
    )
    title = f"Weights before and after preconditioning: {setting.name}"
    return heatmaps(title, "query", "key", panels, range=(-1, 1), signed=True, numbers=False, note=note)


def numbers(every: Pairs) -> Table:
    """Accuracy and all measures."""
    rows = [
        [name, NAMES[attention], each.accuracy, *(each.mean[measure] for measure in MEASURES)]
        for name, pair in every.items()
        for attention, each in pair.items()
    ]
    columns = ["", "attention", "accuracy, %", *TOLD.values(), "negative share"]
    note = "Mean over layers, heads and questions ± std over seeds. Negative share: of the sum of |W|."
    return table("Weight on the tokens that hold the answer", columns, rows, note=note)


def best_heads(every: Pairs) -> Table:
    """Of the head that has most of each."""
    rows = [
        [name, NAMES[attention], *(each.best[measure] for measure in TOLD)]
        for name, pair in every.items()
        for attention, each in pair.items()
    ]
    return table("The best head, for each weight by itself", ["", "attention", *TOLD.values()], rows)


def paper() -> list[Step]:
    """§4.5: pretrain, tune at 64K, and look at what the last token of needle prompts reads of the answer."""
    steps = []
    for attention in NAMES:
        tuned = f"runs/paper/finetune_64k-{attention}"
        prompts = f"data/hit_rate-{attention}.jsonl"
        made = ("--tokenizer", f"{tuned}/model", "--lengths", "2048", "--samples", "500")
        out = f"results/paper/hit_rate-{attention}"
        steps += [
            train("pretrain_2k", attention),
            tune("finetune_64k", f"runs/paper/pretrain_2k-{attention}/model", tuned, "--parallel", "fsdp"),
            Step(("make-data", "needles", prompts, *made)),
            Step(("analyze", f"{tuned}/model", "--samples", prompts, "--limit", "500", "--out", out)),
        ]
    return steps
