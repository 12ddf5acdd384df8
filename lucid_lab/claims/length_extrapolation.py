"""Beyond the training length (§4.3, A.3): what LUCID and PaTH keep of what was learned.

The paper: tuned models are asked at lengths up to 128K, where standard attention falls "to near zero" and LUCID-PaTH
stays between 0.21 and 0.25; PaTH is taken because it "extrapolates". It gives no experiment of its own for lengths that
were never trained.

Here one layer learns the overwrites of `memory_update`, and two layers learn the needles of `needle_grid`, both with 64
tokens. They are tested with up to 1024: with rotary positions, without positions, and with PaTH's, each with softmax
attention and with LUCID. Judged is LUCID-PaTH, which the paper claims it of, against PaTH, also at equal time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lucid_attention.nn.attention import ATTENTIONS

from ..toys.arms import EQUAL_TIME, Arm, Group, train_arms
from ..toys.contest import late_arm
from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, Figure, Spread, Table, lead, lines, mean_of, outcome, series, table
from ..toys.training import Toy

CLAIM = Claim(
    title="LUCID-PaTH keeps its accuracy beyond the training length",
    section="4.3",
    says="As the context grows, standard attention loses the facts, while LUCID with PaTH positions keeps its "
    "accuracy.",
    paper="no experiment of its own; BABILong from 32K to 128K: standard ~0.14 to near zero, LUCID-PaTH 0.21–0.25",
)
# Accuracy in percent at the length of training from which on a model has learned its task.
LEARNED = 80.0
# Points that a model which keeps its accuracy may lose up to the longest test.
KEPT = 5.0
# The test lengths over the length of training.
FACTORS = (1, 2, 4, 8, 16)
TOYS = {
    "memory update": Toy(task="overwrites", test_n=(4, 16), test_batch=64),
    "needles": Toy(task="needles", layers=2, steps=1000, test_n=(4, 16), test_batch=64),
}
TINY = {"steps": 2, "batch": 2, "test_batch": 2, "test_n": (4,)}
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
        """The mean over all lengths beyond that of training."""
        return mean_of(getattr(self, side)[1:])

    @property
    def outcome(self) -> str:
        """ "ahead", "behind" or "level": LUCID beyond the training length, by more than both spreads."""
        return outcome(self.beyond("lucid"), self.beyond("softmax"))


def judge(pairs: Sequence[tuple[Pair, Pair]]) -> str:
    """The verdict, from LUCID-PaTH and PaTH on every task that both have learned: at equal steps, and at equal time.

    "holds": LUCID-PaTH loses at most KEPT points up to the longest test, on every task, and is ahead of PaTH beyond the
    training length at equal steps and at equal time, on one task or more, and behind on none. "partly": it keeps its
    accuracy, and so does PaTH. Otherwise "does not hold". Without a task that both have learned, nothing is judged.
    """
    learned = [(steps, time) for steps, time in pairs if steps.comparable]
    if not learned:
        return "too small to judge"
    if any(steps.lucid[0].mean - min(score.mean for score in steps.lucid) > KEPT for steps, _ in learned):
        return "does not hold"
    leads = [lead(steps.outcome, time.outcome) for steps, time in learned]
    behind = any("behind" in (steps.outcome, time.outcome) for steps, time in learned)
    return "holds" if "holds" in leads and not behind else "partly"


def arms(toy: Toy) -> list[Arm]:
    """Softmax attention and LUCID with all positions."""
    return [
        Arm(
            f"{attention}+{positions}",
            ATTENTIONS[attention].title,
            attention,
            toy.but(attention=attention, rope=rope),
            positions if positions == "no positions" else "",
        )
        for positions, sides in POSITIONS.items()
        for attention, rope in sides
    ]


def run(lab: Lab) -> Conclusion:
    """LUCID and softmax attention beyond the length of training, and the best positions."""
    factors = FACTORS[:2] if lab.tiny else FACTORS
    toys = {
        task: toy.but(test_lengths=tuple(factor * toy.length for factor in factors), **(TINY if lab.tiny else {}))
        for task, toy in TOYS.items()
    }
    groups = train_arms(lab, {task: arms(toy) for task, toy in toys.items()})
    late = {task: [late_arm(group["path+PaTH"], group["lucid_path+PaTH"])] for task, group in groups.items()}
    groups = {task: groups[task] | more for task, more in train_arms(lab, late).items()}
    pairs, at_equal_time = {}, {}
    for task, toy in toys.items():
        for positions, sides in POSITIONS.items():
            trained = [groups[task][f"{attention}+{positions}"] for attention, _ in sides]
            pairs[task, positions] = Pair(*([one.mean_accuracy(n) for n in toy.test_lengths] for one in trained))
        path = [groups[task][f"path+PaTH+{EQUAL_TIME}"].mean_accuracy(n) for n in toy.test_lengths]
        at_equal_time[task] = Pair(path, pairs[task, "PaTH"].lucid)
    judged = {key: pair for key, pair in pairs.items() if pair.comparable}
    ours = "; ".join(
        f"{task}, {positions}, beyond {toys[task].length}: LUCID {pair.beyond('lucid')} %, softmax "
        f"{pair.beyond('softmax')} %"
        for (task, positions), pair in (judged or pairs).items()
    )
    return Conclusion(
        ours=ours,
        verdict=judge([(pairs[task, "PaTH"], at_equal_time[task]) for task in toys]),
        because=explain(pairs, at_equal_time),
        seeds=len(lab.seeds),
        figures=[figure(task, toy, groups[task]) for task, toy in toys.items()],
        tables=[numbers(task, toy, groups[task]) for task, toy in toys.items()],
    )


def explain(pairs: Mapping[tuple[str, str], Pair], at_equal_time: Mapping[str, Pair]) -> str:
    """The reason for the verdict."""
    words = {"ahead": "LUCID is ahead", "behind": "LUCID is behind", "level": "no clear difference"}
    sentences = []
    for (task, positions), pair in pairs.items():
        if pair.comparable:
            scores = f"{pair.beyond('lucid')} against {pair.beyond('softmax')} %"
            sentences.append(f"{task}, {positions}: {words[pair.outcome]} ({scores})")
        else:
            scores = f"LUCID has {pair.lucid[0]} % and softmax {pair.softmax[0]} %"
            sentences.append(f"{task}, {positions}: not compared, because at the training length {scores}")
    late = "; ".join(
        f"{task}: {words[pair.outcome]} ({pair.beyond('lucid')} against {pair.beyond('softmax')} %)"
        for task, pair in at_equal_time.items()
        if pair.comparable
    )
    return (
        f"Mean accuracy over 2 to 16 times the training length, where both reach {LEARNED:.0f} % at the training "
        f"length. {'; '.join(sentences)}. With PaTH's positions, softmax is PaTH and LUCID is LUCID-PaTH, which is "
        f"what is judged. Against PaTH at equal time: {late or 'not compared'}."
    )


def figure(task: str, toy: Toy, group: Group) -> Figure:
    """Accuracy against length."""
    curves = []
    for one in group.values():
        values = [one.mean_accuracy(length) for length in toy.test_lengths]
        curves.append(series(one.arm.label, one.arm.role, toy.test_lengths, values, dashed=bool(one.arm.change)))
    title = f"{task.capitalize()}: trained with {toy.length} tokens"
    return lines(title, "tokens", "accuracy, %", curves, log="x", range=(0, 100))


def numbers(task: str, toy: Toy, group: Group) -> Table:
    """Accuracy by length."""
    rows = [[one.arm.label, *(one.mean_accuracy(length) for length in toy.test_lengths)] for one in group.values()]
    columns = ["", *(f"{length} tokens" for length in toy.test_lengths)]
    note = f"Mean over n = {' and '.join(map(str, toy.test_n))}. {toy.steps} steps with {toy.length} tokens."
    return table(f"{task.capitalize()}, accuracy %", columns, rows, note=note)
