"""Beyond the training length (§4.3, A.3): what LUCID and PaTH keep of what was learned.

The paper: tuned models are asked at lengths up to 128K, where standard attention falls "to near zero" and LUCID-PaTH
stays between 0.21 and 0.25; PaTH is taken because it "extrapolates". It gives no experiment of its own for lengths that
were never trained.

Here one layer learns the overwrites of `memory_update`, and two layers learn the needles of `needle_grid`, both with 64
tokens. They are tested with up to 1024: with rotary positions, without positions, and with PaTH's, each with softmax
attention and with LUCID.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lucid_attention.nn.attention import ATTENTIONS

from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Figure, Spread, Table, lines, series, table
from .engine.scale import Scale
from .engine.steps import Step, at_small_scale
from .engine.study import Done
from .engine.verdict import as_at_small_scale
from .small.contestants import Contestant, mean_accuracy, training
from .small.training import SmallRun

CLAIM = Claim(
    title="LUCID keeps its accuracy beyond the training length",
    section="4.3",
    says="As the context grows, standard attention loses the facts, while LUCID with PaTH positions keeps its "
    "accuracy.",
    paper="no experiment of its own; BABILong from 32K to 128K: standard ~0.14 to near zero, LUCID-PaTH 0.21–0.25",
)
PAPER_NUMBERS, judge_paper = as_at_small_scale("length_extrapolation")
# Accuracy in percent at the length of training from which on a model has learned its task.
LEARNED = 80.0
# The test lengths over the length of training.
FACTORS = (1, 2, 4, 8, 16)
TASKS = {
    "memory update": SmallRun(task="overwrites", test_n=(4, 16), test_batch=64),
    "needles": SmallRun(task="needles", layers=2, steps=1000, test_n=(4, 16), test_batch=64),
}
# Positions → softmax attention and LUCID: (name in ATTENTIONS, RoPE).
POSITIONS = {
    "RoPE": (("softmax", True), ("lucid", True)),
    "no positions": (("softmax", False), ("lucid", False)),
    "PaTH": (("path", True), ("lucid_path", True)),
}


@dataclass(frozen=True)
class Pair:
    """Softmax attention and LUCID with the same positions on one task, at every factor of FACTORS, over seeds."""

    softmax: Sequence[Spread]
    lucid: Sequence[Spread]

    @property
    def comparable(self) -> bool:
        """Whether both have learned the task at the length of training."""
        return min(self.softmax[0].mean, self.lucid[0].mean) >= LEARNED

    def beyond(self, side: str) -> Spread:
        """The mean over all lengths beyond that of training. The spread is the mean spread."""
        values = getattr(self, side)[1:]
        count = len(values)
        return Spread(
            sum(value.mean for value in values) / count, sum(value.std for value in values) / count, values[0].count
        )

    @property
    def outcome(self) -> str:
        """ "ahead", "behind" or "level": LUCID beyond the training length, by more than both spreads."""
        lucid, softmax = self.beyond("lucid"), self.beyond("softmax")
        if abs(lucid.mean - softmax.mean) <= lucid.std + softmax.std:
            return "level"
        return "ahead" if lucid.mean > softmax.mean else "behind"


def judge(pairs: Sequence[Pair]) -> str:
    """The verdict, from the pairs of which both sides have learned their task.

    "holds": LUCID is ahead in some and behind in none. "partly": ahead in some, behind in others. Without a pair that
    can be compared, nothing is judged.
    """
    outcomes = [pair.outcome for pair in pairs if pair.comparable]
    if not outcomes:
        return "too small to judge"
    if "ahead" not in outcomes:
        return "does not hold"
    return "partly" if "behind" in outcomes else "holds"


def runs(scale: Scale) -> dict[str, SmallRun]:
    """The run of every task."""
    made = {}
    for task, run in TASKS.items():
        small = {"steps": 2, "batch": 2, "test_batch": 2, "test_n": (4,)} if scale.tiny else {}
        factors = FACTORS[:2] if scale.tiny else FACTORS
        made[task] = run.but(test_lengths=tuple(factor * run.length for factor in factors), **small)
    return made


def contestants(run: SmallRun) -> dict[str, tuple[Contestant, Contestant]]:
    """Softmax attention and LUCID, by positions."""

    def member(positions: str, attention: str, rope: bool) -> Contestant:
        change = positions if positions == "no positions" else ""
        title = ATTENTIONS[attention].title
        return Contestant(f"{attention}+{positions}", title, attention, run.but(attention=attention, rope=rope), change)

    return {
        positions: (member(positions, *softmax), member(positions, *lucid))
        for positions, (softmax, lucid) in POSITIONS.items()
    }


def plan(scale: Scale, done: Done) -> list[Job]:
    """Every task with all positions, with softmax attention and with LUCID."""
    members = [member for run in runs(scale).values() for pair in contestants(run).values() for member in pair]
    return training(members, scale.seeds)


def pairs_of(scale: Scale, done: Done) -> dict[tuple[str, str], Pair]:
    """The accuracies, as means over numbers of keys, by task and positions."""
    pairs = {}
    for task, run in runs(scale).items():
        for positions, members in contestants(run).items():
            sides = [
                [mean_accuracy(done, member, scale.seeds, length) for length in run.test_lengths] for member in members
            ]
            pairs[task, positions] = Pair(*sides)
    return pairs


def conclude(scale: Scale, done: Done) -> Conclusion:
    """LUCID beside softmax attention beyond the length of training, and the best positions."""
    pairs = pairs_of(scale, done)
    judged = {key: pair for key, pair in pairs.items() if pair.comparable}
    ours = "; ".join(
        f"{task}, {positions}, beyond {runs(scale)[task].length}: LUCID {pair.beyond('lucid')} %, softmax "
        f"{pair.beyond('softmax')} %"
        for (task, positions), pair in (judged or pairs).items()
    )
    return Conclusion(
        ours=ours,
        verdict=judge(list(pairs.values())),
        because=explain(pairs),
        seeds=len(scale.seeds),
        figures=[figure(task, run, scale, done) for task, run in runs(scale).items()],
        tables=[numbers(task, run, scale, done) for task, run in runs(scale).items()],
    )


def explain(pairs: Mapping[tuple[str, str], Pair]) -> str:
    """The reason for the verdict."""
    sentences = []
    for (task, positions), pair in pairs.items():
        if pair.comparable:
            words = {"ahead": "LUCID is ahead", "behind": "LUCID is behind", "level": "no clear difference"}
            sentences.append(
                f"{task}, {positions}: {words[pair.outcome]} ({pair.beyond('lucid')} against "
                f"{pair.beyond('softmax')} %)"
            )
        else:
            sentences.append(
                f"{task}, {positions}: not compared, because at the training length LUCID has {pair.lucid[0]} % and "
                f"softmax {pair.softmax[0]} %"
            )
    return (
        f"Mean accuracy over 2 to 16 times the training length, where both reach {LEARNED:.0f} % at the training "
        f"length. {'; '.join(sentences)}. With PaTH's positions, softmax is PaTH and LUCID is LUCID-PaTH."
    )


def figure(task: str, run: SmallRun, scale: Scale, done: Done) -> Figure:
    """Accuracy against length."""
    curves = []
    for pair in contestants(run).values():
        for member in pair:
            values = [mean_accuracy(done, member, scale.seeds, length) for length in run.test_lengths]
            means, deviations = [value.mean for value in values], [value.std for value in values]
            curves.append(
                series(
                    member.label, member.role, run.test_lengths, means, spread=deviations, dashed=bool(member.change)
                )
            )
    title = f"{task.capitalize()}: trained with {run.length} tokens"
    return lines(title, "tokens", "accuracy, %", curves, log="x", range=(0, 100))


def numbers(task: str, run: SmallRun, scale: Scale, done: Done) -> Table:
    """Accuracy by length."""
    rows = [
        [member.label, *(mean_accuracy(done, member, scale.seeds, length) for length in run.test_lengths)]
        for pair in contestants(run).values()
        for member in pair
    ]
    columns = ["", *(f"{length} tokens" for length in run.test_lengths)]
    note = f"Mean over n = {' and '.join(map(str, run.test_n))}. {run.steps} steps with {run.length} tokens."
    return table(f"{task.capitalize()}, accuracy %", columns, rows, note=note)


def paper() -> list[Step]:
    """The paper has no such experiment, so the full scale is the small one."""
    return [at_small_scale("length_extrapolation")]
