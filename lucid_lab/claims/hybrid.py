"""Hybrids (A.4): LUCID on the global layers only.

The paper: "In hybrid architectures that combine efficient layers (e.g., sliding window, SSMs) with global attention
layers, LUCID improves the precision of the global layers where retrieval quality is paramount." It gives no number.

Here two layers: a sliding window, then global attention, which is softmax attention or LUCID, compared with two
global layers of either. Needles and overwrites are those of `needle_grid` and `memory_update`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..toys.arms import EQUAL_TIME, Arm, Group, accuracy_table, train_arms
from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, Spread, bar, bars
from ..toys.tasks import IGNORED
from ..toys.training import Toy

CLAIM = Claim(
    title="LUCID on the global layers of a hybrid",
    section="A.4",
    says="In hybrids of efficient layers, such as sliding windows, with global ones, LUCID improves the precision of "
    "the global layers.",
    paper="no number given",
)
WINDOW = 16
# Points that LUCID must be ahead of softmax attention, at equal steps and at equal time.
GAP = 5.0
NEEDLES = Toy(task="needles", layers=2, steps=1000, local={"0": WINDOW}, test_lengths=(64, 256), test_batch=64)
TOYS = {
    "needles": NEEDLES,
    "needles, MLP": NEEDLES.but(mlp=2.0),
    "overwrites": NEEDLES.but(task="overwrites", steps=500),
}
TINY = {"steps": 2, "batch": 2, "test_batch": 2, "test_n": (2, 4), "test_lengths": (64,)}
TITLES = {"softmax": "softmax", "lucid": "LUCID"}


@dataclass(frozen=True)
class Scores:
    """Accuracies of hybrids at the length of training: softmax, softmax with the time of LUCID, LUCID.

    everywhere: two global layers of LUCID. floor: what needs no global layer that retrieves: the questions whose answer
    is in the window, or what softmax attention has in both layers.
    """

    softmax: Spread
    equal_time: Spread
    lucid: Spread
    everywhere: Spread
    floor: float

    @property
    def shows(self) -> bool:
        """Whether a lead of GAP points was possible: the global layer retrieves something, and softmax leaves room."""
        best = max(self.softmax.mean, self.equal_time.mean)
        return max(best, self.lucid.mean) >= self.floor + GAP and best <= 100 - GAP

    @property
    def lead(self) -> float:
        """Points by which LUCID is ahead, at equal steps and at equal time."""
        return self.lucid.mean - max(self.softmax.mean, self.equal_time.mean)


def judge(scores: Mapping[str, Scores]) -> str:
    """The verdict: LUCID must be GAP points ahead in every setting that can show it; in some, it is "partly".

    A setting can show it if a hybrid is GAP points above what needs no global layer, and softmax attention leaves GAP
    points to 100 %. Without such a setting nothing is judged.
    """
    leads = [setting.lead >= GAP for setting in scores.values() if setting.shows]
    if not leads:
        return "too small to judge"
    return "holds" if all(leads) else "partly" if any(leads) else "does not hold"


def arms(toy: Toy) -> list[Arm]:
    """A sliding window, then global attention; and two global layers of either attention."""
    hybrids = [
        Arm(f"hybrid+{name}", f"sliding, then {title}", name, toy.but(attention=name)) for name, title in TITLES.items()
    ]
    everywhere = [
        Arm(f"both+{name}", f"{title} in both layers", "control", toy.but(attention=name, local={}))
        for name, title in TITLES.items()
    ]
    return [*hybrids, *everywhere]


def late_arm(group: Group) -> Arm:
    """The hybrid of softmax attention with the processor time of that of LUCID."""
    softmax, lucid = group["hybrid+softmax"], group["hybrid+lucid"]
    steps = round(softmax.arm.toy.steps * max(1.0, lucid.seconds / max(softmax.seconds, 1e-9)))
    return replace(softmax.arm, key=f"hybrid+{EQUAL_TIME}", toy=softmax.arm.toy.but(steps=steps), change="equal time")


def run(lab: Lab) -> Conclusion:
    """LUCID's lead in hybrids, and whether it needs LUCID in every layer."""
    toys = {title: toy.but(**TINY) if lab.tiny else toy for title, toy in TOYS.items()}
    groups = train_arms(lab, {title: arms(toy) for title, toy in toys.items()})
    late = train_arms(lab, {title: [late_arm(group)] for title, group in groups.items()})
    groups = {title: group | late[title] for title, group in groups.items()}
    scores, tables = {}, []
    for title, toy in toys.items():
        at_length = {key: one.mean_accuracy(toy.length) for key, one in groups[title].items()}
        hybrids = [at_length[f"hybrid+{key}"] for key in ("softmax", EQUAL_TIME, "lucid")]
        held = [share_in_window(toy, n) for n in toy.test_n] if toy.task == "overwrites" else []
        floor = 100 * sum(held) / len(held) if held else at_length["both+softmax"].mean
        scores[title] = Scores(hybrids[0], hybrids[1], hybrids[2], at_length["both+lucid"], floor)
        for length in toy.test_lengths:
            tables.append(accuracy_table(f"{title}: {length} tokens, accuracy %", groups[title], length))
    ours = "; ".join(
        f"{title}: sliding + LUCID {score.lucid} %, sliding + softmax {score.softmax} %, at equal time "
        f"{score.equal_time} %, LUCID in both layers {score.everywhere} %"
        for title, score in scores.items()
    )
    cannot = [title for title, score in scores.items() if not score.shows]
    none = f" No lead was possible in: {', '.join(cannot)}." if cannot else ""
    because = (
        f"Mean over numbers of keys at the length of training. {ours}. A lead counts from {GAP:g} points on. A window "
        f"of {WINDOW} tokens holds the answers of {scores['overwrites'].floor:.1f} % of the questions of overwrites: "
        f"what is not above that needs no global layer.{none}"
    )
    drawn = {
        title: [bar(one.arm.label, one.arm.role, one.mean_accuracy(toy.length)) for one in groups[title].values()]
        for title, toy in toys.items()
    }
    note = f"Two layers, a window of {WINDOW} tokens, heads of 16; mean over numbers of keys."
    return Conclusion(
        ours=ours,
        verdict=judge(scores),
        because=because,
        seeds=len(lab.seeds),
        figures=[bars("A sliding window, then global attention", "accuracy, %", drawn, range=(0, 100), note=note)],
        tables=tables,
    )


def share_in_window(toy: Toy, n: int) -> float:
    """The share of questions of overwrites whose key is written within the window, so that the answer is in it."""
    inputs, labels = toy.make_task().test(toy.test_batch, n, toy.length)
    keys, asked = inputs[..., 0], labels != IGNORED
    # before[b, i, j]: token j is a write, and within the window of token i.
    distance = torch.arange(toy.length)[:, None] - torch.arange(toy.length)
    before = ((distance > 0) & (distance < WINDOW)) & ~asked[:, None, :]
    held = (before & (keys[:, :, None] == keys[:, None, :])).any(-1)
    return held[asked].double().mean().item()
