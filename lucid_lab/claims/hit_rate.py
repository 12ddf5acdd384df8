"""§4.5: does more weight fall on the tokens that hold the answer?

The paper: on needle tasks "LUCID Attention achieves a hitrate of 0.2845 compared to 0.1817 for Standard Attention — a
relative improvement of 56.6%", the hit rate being the average attention weight placed on the needle tokens that contain
the answer.

LUCID has more than one attention weight. Its softmax A weighs the corrected values; the weights of the values
themselves are W = A P⁻¹, which has signs and does not sum to one. Three weights are shown: A, signed W, and |W| over
its sum. The experiment compares them in two ways: as the paper does, over all needle tasks whether they are solved or
not; and where both attentions solve the task, because a higher hit rate of the only one that solves it is no news.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lucid_attention.nn.attention import ATTENTIONS

from ..analysis.hit_rate import MEASURES, Query, attention_maps, average, hit_rates, synthetic_queries
from ..data.synthetic import Needles
from . import memory_update, needle_grid
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, bar, bars, heatmaps, spread, table
from .engine.scale import Scale
from .engine.steps import Step, tuned, unique
from .engine.study import Done
from .engine.verdict import Measured, PaperNumber, Place, Verdict, judge_leads, lead
from .small.contestants import Contestant, mean_accuracy
from .small.training import SmallRun, load_small

CLAIM = Claim(
    title="More weight on the answer",
    section="4.5",
    says="The weight on the needle tokens that hold the answer is larger with LUCID than with standard attention.",
    paper="LUCID 0.2845, standard 0.1817 (+56.6 %)",
)
COMPARED = ("softmax", "lucid")
# The weights that are compared, by their names in MEASURES.
WEIGHTS = {"softmax": "A, softmax", "signed": "W, signed", "magnitude": "|W|, normalised"}
# Accuracy, in percent, of a model that solves its task.
SOLVED = 90.0
DIGITS = 3


@dataclass(frozen=True)
class Setting:
    """A run with both attentions. mapped: attention maps of it are drawn."""

    title: str
    run: SmallRun
    mapped: bool = False

    def contestant(self, attention: str) -> Contestant:
        """The run with one of the attentions."""
        title = ATTENTIONS[attention].title
        return Contestant(attention, title, attention, self.run.but(attention=attention), self.title)

    def job(self, attention: str, seed: int, samples: int) -> Job:
        """The job that measures hit rates."""
        contestant = self.contestant(attention)
        arguments = {"run": asdict(contestant.seed(seed)), "samples": samples}
        return Job("hit_rate:of_model", arguments, f"hit rate, {contestant.label}, seed {seed}", 5)

    def maps_job(self, seed: int, n: int) -> Job:
        """Maps of the LUCID model."""
        arguments = {"run": asdict(self.contestant("lucid").seed(seed)), "n": n}
        return Job("hit_rate:maps_of", arguments, f"maps, {self.title}", 3)


def settings(scale: Scale) -> list[Setting]:
    """Runs of `needle_grid` and `memory_update`, which are trained once for all experiments."""
    needles, usual = needle_grid.settings(scale)
    overwrites, with_mlp = memory_update.settings(scale)
    return [
        Setting("needles", needles, mapped=True),
        Setting("needles, token shift", needles.but(token_shift=True)),
        Setting("needles, MLP", needles.but(mlp=2.0)),
        Setting("needles, as models are built", usual),
        Setting("overwrites", overwrites, mapped=True),
        Setting("overwrites, MLP, head of 64", with_mlp),
    ]


@dataclass(frozen=True)
class Extent:
    """samples: sequences for every number of keys. map_keys: keys in the sequence of the maps."""

    samples: int
    map_keys: int


def extent(scale: Scale) -> Extent:
    """The extent at a scale."""
    return Extent(samples=1, map_keys=2) if scale.tiny else Extent(samples=16, map_keys=8)


def plan(scale: Scale, done: Done) -> list[Job]:
    """Training first; a model is measured when it is trained."""
    seeds, size = scale.seeds, extent(scale)
    jobs = []
    for setting in settings(scale):
        for seed in seeds:
            for attention in COMPARED:
                training = setting.contestant(attention).job(seed)
                jobs.append(training)
                if training in done:
                    jobs.append(setting.job(attention, seed, size.samples))
        if setting.mapped and setting.contestant("lucid").job(seeds[0]) in done:
            jobs.append(setting.maps_job(seeds[0], size.map_keys))
    return jobs


def of_model(work: Work, run: Mapping[str, Any], samples: int) -> Record:
    """The job: hit rates as means over questions, for every layer and head and for all heads."""
    settings, records = SmallRun(**run), []
    model = load_small(work, settings)
    for n in settings.test_n:
        inputs, _ = settings.make_task().test(samples, n, settings.length)
        records += hit_rates(model, inputs, questions(settings, inputs))
    return {"heads": average(records), "mean": average(records, ())[0]}


def questions(run: SmallRun, inputs: Tensor) -> list[Query]:
    """The questions in these inputs, and the places of their answers: a needle's key and value, or the latest write."""
    if run.task == "needles":
        return synthetic_queries(Needles(run.n, run.length + 1), inputs)
    return latest_writes(inputs)


def latest_writes(inputs: Tensor) -> list[Query]:
    """The questions of `overwrites`. inputs: [B, T, 2] of (key, value); the largest value marks a question."""
    question_value = inputs[..., 1].max()
    queries = []
    for row, tokens in enumerate(inputs):
        for position in (tokens[:, 1] == question_value).nonzero()[:, 0].tolist():
            before = torch.arange(len(tokens)) < position
            is_write = (tokens[:, 0] == tokens[position, 0]) & (tokens[:, 1] != question_value) & before
            last = int(is_write.nonzero()[-1])
            queries.append(Query(position, ((last, last + 1),), row))
    return queries


def maps_of(work: Work, run: Mapping[str, Any], n: int) -> Record:
    """The job: A and W on one sequence, for the head of the last layer with the most weight on the answers."""
    settings = SmallRun(**run)
    model, last = load_small(work, settings), settings.layers - 1
    inputs, _ = settings.make_task().test(1, n, settings.length)
    rates = average(hit_rates(model, inputs, questions(settings, inputs), layers=[last]))
    head = max(rates, key=lambda rate: rate["signed"])["head"]
    (head_maps,) = attention_maps(model, inputs, layers=[last], heads=[head])
    rounded = {
        name: [[round(value, DIGITS) for value in row] for row in head_maps[name].tolist()]
        for name in ("softmax", "effective")
    }
    return {"layer": last, "head": head, **rounded}


@dataclass(frozen=True)
class HitRates:
    """One attention in one setting, over seeds. mean: over all heads, by measure. best: of the best head."""

    accuracy: Spread
    mean: Mapping[str, Spread]
    best: Mapping[str, Spread]


def read_rates(setting: Setting, attention: str, scale: Scale, done: Done) -> HitRates:
    """The hit rates in the records of a setting."""
    seeds = scale.seeds
    records = [done[setting.job(attention, seed, extent(scale).samples)] for seed in seeds]
    return HitRates(
        mean_accuracy(done, setting.contestant(attention), seeds, setting.run.length),
        {name: spread((record["mean"][name] for record in records), DIGITS) for name in MEASURES},
        {name: spread((max(h[name] for h in record["heads"]) for record in records), DIGITS) for name in MEASURES},
    )


# By the title of the setting, then by attention.
Pairs = Mapping[str, Mapping[str, HitRates]]


def judge(pairs: Pairs, unfiltered: Mapping[str, HitRates]) -> str:
    """The verdict: LUCID's hit rate must be higher in every weight, in every setting that both attentions solve.

    It must also be higher as the paper takes it. Where only some of this is so, the verdict is "partly".
    unfiltered: the mean over all needle tasks, solved or not.
    """
    solved = [higher(pair) for pair in pairs.values() if comparable(pair)]
    whole = higher(unfiltered)
    if solved and all(all(weights.values()) for weights in (*solved, whole)):
        return "holds"
    return "partly" if any(any(weights.values()) for weights in (*solved, whole)) else "does not hold"


def pooled(pairs: Pairs) -> dict[str, HitRates]:
    """The mean over settings, by attention: the paper's measure, which does not ask whether a task is solved."""
    found = {}
    for name in COMPARED:
        rates = [pair[name] for pair in pairs.values()]
        means = {measure: _mean([rate.mean[measure] for rate in rates]) for measure in MEASURES}
        best = {measure: _mean([rate.best[measure] for rate in rates]) for measure in MEASURES}
        found[name] = HitRates(_mean([rate.accuracy for rate in rates]), means, best)
    return found


def _mean(spreads: Sequence[Spread]) -> Spread:
    """The mean, with the mean deviation: the largest that it can have, however the numbers go together."""
    n, first = len(spreads), spreads[0]
    mean, std = (math.fsum(values) / n for values in zip(*((one.mean, one.std) for one in spreads), strict=True))
    return Spread(mean, std, first.count, first.digits)


def comparable(pair: Mapping[str, HitRates]) -> bool:
    """Whether both attentions solve the task."""
    return min(rates.accuracy.mean for rates in pair.values()) >= SOLVED


def higher(pair: Mapping[str, HitRates]) -> dict[str, bool]:
    """In which weights LUCID's hit rate is above that of softmax attention, by more than both spreads."""
    softmax, lucid = pair["softmax"].mean["softmax"], pair["lucid"].mean
    return {name: lucid[name].mean - lucid[name].std > softmax.mean + softmax.std for name in WEIGHTS}


def conclude(scale: Scale, done: Done) -> Conclusion:
    """Hit rates beside accuracies."""
    seeds, n = scale.seeds, extent(scale).map_keys
    pairs = {
        setting.title: {name: read_rates(setting, name, scale, done) for name in COMPARED}
        for setting in settings(scale)
    }
    solved = {title: pair for title, pair in pairs.items() if comparable(pair)}
    unfiltered = pooled({s.title: pairs[s.title] for s in settings(scale) if s.run.task == "needles"})
    ours = "; ".join(
        f"{title}: LUCID {pair['lucid'].mean['softmax']} (A), {pair['lucid'].mean['magnitude']} (|W|), "
        f"softmax {pair['softmax'].mean['softmax']}"
        for title, pair in list((solved or pairs).items())[:2]
    )
    mapped = [setting for setting in settings(scale) if setting.mapped]
    return Conclusion(
        ours=ours,
        verdict=judge(pairs, unfiltered),
        because=f"{explain_unfiltered(unfiltered)} {explain(pairs, solved)}",
        seeds=len(seeds),
        figures=[rates(pairs), *(map_figure(setting, done[setting.maps_job(seeds[0], n)], n) for setting in mapped)],
        tables=[numbers(pairs | {"all needle tasks": unfiltered}), best_heads(pairs)],
    )


def explain_unfiltered(pair: Mapping[str, HitRates]) -> str:
    """The paper's measure here: the mean over all needle tasks, solved or not."""
    softmax, lucid = pair["softmax"].mean["softmax"], pair["lucid"].mean
    above = [WEIGHTS[name] for name, is_higher in higher(pair).items() if is_higher]
    return (
        f"As the paper takes it, over all needle tasks, solved or not: LUCID {lucid['softmax']} (A), "
        f"{lucid['magnitude']} (|W|), softmax {softmax}; {'higher in ' + ', '.join(above) if above else 'not higher'}."
    )


def explain(pairs: Pairs, solved: Pairs) -> str:
    """The reason for the verdict: where LUCID's hit rate is higher, in which weight, and how W is used."""
    if not solved:
        return f"In no setting do both attentions reach {SOLVED:.0f} %, so a higher hit rate would be no news."
    sentences = []
    for title, pair in solved.items():
        weights_above = [WEIGHTS[name] for name, is_higher in higher(pair).items() if is_higher]
        sentences.append(f"{title}: {'higher in ' + ', '.join(weights_above) if weights_above else 'not higher'}")
    negative = spread((pair["lucid"].mean["negative"].mean for pair in pairs.values()), 2)
    unsolved = [title for title in pairs if title not in solved]
    left_out = f" Left out, because not both solve it: {', '.join(unsolved)}." if unsolved else ""
    return (
        f"Where both attentions reach {SOLVED:.0f} %: {'; '.join(sentences)}. LUCID's W is negative in {negative} of "
        f"its weight: it cancels what it does not want instead of not looking.{left_out}"
    )


def rates(pairs: Pairs) -> Figure:
    """Hit rates as means over layers and heads, for every setting."""
    groups = {}
    for title, pair in pairs.items():
        accuracies = f"{pair['softmax'].accuracy.mean:.0f} / {pair['lucid'].accuracy.mean:.0f} %"
        groups[f"{title} ({accuracies})"] = [
            bar("softmax", "softmax", pair["softmax"].mean["softmax"]),
            bar("LUCID, A", "lucid", pair["lucid"].mean["softmax"]),
            bar("LUCID, W", "lucid_path", pair["lucid"].mean["signed"]),
            bar("LUCID, |W|", "path", pair["lucid"].mean["magnitude"]),
        ]
    note = "Mean over layers, heads and questions. In brackets: accuracy of softmax and of LUCID attention."
    references = {"paper, LUCID": 0.2845, "paper, standard": 0.1817}
    return bars("Weight on the answer", "hit rate", groups, references=references, note=note)


def map_figure(setting: Setting, record: Record, n: int) -> Figure:
    """A and W: the weights before and after preconditioning."""
    positions = range(len(record["softmax"]))
    panels = {
        title: (positions, positions, record[name])
        for title, name in (("A = softmax", "softmax"), ("W = A P⁻¹", "effective"))
    }
    note = (
        f"A LUCID model, layer {record['layer']}, head {record['head']}, one sequence, n = {n}; the last {n} rows ask. "
        "A row of W may be negative, and need not sum to one."
    )
    title = f"Weights before and after preconditioning: {setting.title}"
    return heatmaps(title, "query", "key", panels, range=(-1, 1), signed=True, numbers=False, note=note)


def numbers(pairs: Pairs) -> Table:
    """The accuracy and all measures, as means over heads."""
    rows = [
        [title, ATTENTIONS[name].title, rates.accuracy, *(rates.mean[measure] for measure in MEASURES)]
        for title, pair in pairs.items()
        for name, rates in pair.items()
    ]
    columns = ["", "attention", "accuracy, %", *WEIGHTS.values(), "negative share"]
    note = "Mean over layers, heads and questions ± std over seeds. Negative share: of the sum of |W|."
    return table("Weight on the tokens that hold the answer", columns, rows, note=note)


def best_heads(pairs: Pairs) -> Table:
    """For every weight, the head with the highest hit rate."""
    rows = [
        [title, ATTENTIONS[name].title, *(rates.best[weight] for weight in WEIGHTS)]
        for title, pair in pairs.items()
        for name, rates in pair.items()
    ]
    return table("The best head, for each weight by itself", ["", "attention", *WEIGHTS.values()], rows)


def paper() -> list[Step]:
    """§4.5: pretrain, tune at 64K, and measure the weight of the last token of needle prompts on the answer."""
    steps = []
    for attention in COMPARED:
        model = f"runs/paper/finetune_64k-{attention}/model"
        steps += tuned(attention)
        for length, samples in ((2048, 500), (65_536, 50)):
            prompts = f"data/hit_rate-{attention}-{length}.jsonl"
            options = ("--tokenizer", model, "--lengths", str(length), "--haystack", "essays")
            out = f"results/paper/hit_rate-{attention}-{length}"
            steps += [
                Step(("make-data", "needles", prompts, *options, "--samples", str(samples))),
                Step(("analyze", model, "--samples", prompts, "--limit", str(samples), "--out", out)),
            ]
    return unique(steps)


# §4.5 gives no length: judged at 2048 tokens. Its weight may be A or |W|, see the top of this file: both must lead.
PAPER_RATES = {"softmax": 0.1817, "lucid": 0.2845}
RATES = {
    (attention, weight): PaperNumber(
        "§4.5",
        f"{ATTENTIONS[attention].title}, weight on the answer, {WEIGHTS[weight]}",
        PAPER_RATES[attention],
        Place(f"hit_rate-{attention}-2048", f"hit rate, {weight}"),
    )
    for attention, weight in (("softmax", "softmax"), ("lucid", "softmax"), ("lucid", "magnitude"))
}
PAPER_NUMBERS = tuple(RATES.values())


def judge_paper(measured: Measured) -> Verdict:
    """LUCID's weight on the answer is higher in both readings of it, in percent of that of standard attention."""
    standard = [RATES["softmax", "softmax"]]
    return judge_leads(
        [
            lead(f"LUCID − Standard, {WEIGHTS[weight]}", [RATES["lucid", weight]], standard, measured, relative=True)
            for weight in ("softmax", "magnitude")
        ]
    )
