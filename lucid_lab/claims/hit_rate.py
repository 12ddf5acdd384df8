"""§4.5: does more weight fall on the tokens that hold the answer?

The hit rate is the average attention weight on the needle tokens that contain the answer.

LUCID has more than one attention weight. Its softmax A weighs the corrected values; the weights of the values
themselves are W = A P⁻¹, which has signs and does not sum to one. Three weights are shown: A, signed W, and |W| over
its sum. The experiment compares them in two ways: as the paper does, over all needle tasks whether they are solved or
not; and where both attentions solve the task, because a higher hit rate of the only one that solves it is no news.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lucid_attention.nn.attention import ATTENTIONS

from ..analysis.hit_rate import MEASURES, Query, average, hit_rates, synthetic_queries
from ..data.synthetic import Needles
from ..toys.arms import Trained, arm, train_arms
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Spread, Table, bar, bars, mean_of, spread, table
from ..toys.training import Toy, load_model
from . import memory_update, needle_grid

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
# Toys of `needle_grid` and `memory_update`, which are trained once for all claims.
TOYS = {
    "needles": needle_grid.TOY,
    "needles, token shift": needle_grid.TOY.but(token_shift=True),
    "needles, MLP": needle_grid.TOY.but(mlp=2.0),
    "needles, as models are built": needle_grid.USUAL,
    "overwrites": memory_update.TOY,
    "overwrites, MLP, head of 64": memory_update.WITH_MLP,
}


def of_model(folder: Path, settings: Mapping[str, Any]) -> Record:
    """Hit rates as means over questions, layers and heads.

    settings: toy; trained, the folder of its weights; samples, sequences for every number of keys.
    """
    toy, records = settings["toy"], []
    model = load_model(folder.parent / settings["trained"], toy)
    for n in toy.test_n:
        inputs, _ = toy.make_task().test(settings["samples"], n, toy.length)
        records += hit_rates(model, inputs, questions(toy, inputs))
    return {"mean": average(records, ())[0]}


def questions(toy: Toy, inputs: Tensor) -> list[Query]:
    """The questions in these inputs, and the places of their answers: a needle's key and value, or the latest write."""
    if toy.task == "needles":
        return synthetic_queries(Needles(toy.n, toy.length + 1), inputs)
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


@dataclass(frozen=True)
class HitRates:
    """One attention in one setting, over seeds. mean: over all heads, by measure."""

    accuracy: Spread
    mean: Mapping[str, Spread]


def read_rates(trained: Trained, records: Sequence[Record]) -> HitRates:
    """The hit rates in the records of an arm, one for every seed."""
    return HitRates(
        trained.mean_accuracy(trained.arm.toy.length),
        {name: spread((record["mean"][name] for record in records), DIGITS) for name in MEASURES},
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
        means = {measure: mean_of([rate.mean[measure] for rate in rates]) for measure in MEASURES}
        found[name] = HitRates(mean_of([rate.accuracy for rate in rates]), means)
    return found


def comparable(pair: Mapping[str, HitRates]) -> bool:
    """Whether both attentions solve the task."""
    return min(rates.accuracy.mean for rates in pair.values()) >= SOLVED


def higher(pair: Mapping[str, HitRates]) -> dict[str, bool]:
    """In which weights LUCID's hit rate is above that of softmax attention, by more than both spreads."""
    softmax, lucid = pair["softmax"].mean["softmax"], pair["lucid"].mean
    return {name: lucid[name].mean - lucid[name].std > softmax.mean + softmax.std for name in WEIGHTS}


def run(lab: Lab) -> Conclusion:
    """Hit rates next to accuracies."""
    samples = 1 if lab.tiny else 16
    toys = {
        title: toy.but(**(needle_grid.TINY if toy.task == "needles" else memory_update.TINY)) if lab.tiny else toy
        for title, toy in TOYS.items()
    }
    groups = train_arms(
        lab, {title: [arm(toy.but(attention=name)) for name in COMPARED] for title, toy in toys.items()}
    )
    settings = {
        (title, name): [{"toy": one.arm.toy, "trained": record["folder"], "samples": samples} for record in one.records]
        for title, group in groups.items()
        for name, one in group.items()
    }
    records = lab.map_groups(of_model, settings, title="hit rates")
    pairs = {
        title: {name: read_rates(one, records[title, name]) for name, one in group.items()}
        for title, group in groups.items()
    }

    solved = {title: pair for title, pair in pairs.items() if comparable(pair)}
    unfiltered = pooled({title: pairs[title] for title, toy in toys.items() if toy.task == "needles"})
    ours = "; ".join(
        f"{title}: LUCID {pair['lucid'].mean['softmax']} (A), {pair['lucid'].mean['magnitude']} (|W|), "
        f"softmax {pair['softmax'].mean['softmax']}"
        for title, pair in list((solved or pairs).items())[:2]
    )
    return Conclusion(
        ours=ours,
        verdict=judge(pairs, unfiltered),
        because=f"{explain_unfiltered(unfiltered)} {explain(pairs, solved)}",
        seeds=len(lab.seeds),
        figures=[rates(pairs)],
        tables=[numbers(pairs | {"all needle tasks": unfiltered})],
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
